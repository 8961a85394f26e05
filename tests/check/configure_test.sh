#!/usr/bin/env bash
# A missing package stops the configuration with one line that names it. Usage: configure_test.sh SOURCE_DIR
set -euo pipefail
source_dir=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# expect_missing <name that find_package or our own search uses> <Debian or pip package the message must name>
expect_missing() {
  local log="$work/log"
  if cmake -S "$source_dir" -B "$work/build-$1" -G Ninja -DCRAM_CUDA=OFF "-DCMAKE_DISABLE_FIND_PACKAGE_$1=ON" >"$log" 2>&1; then
    echo "configured without $1" >&2
    exit 1
  fi
  local lines
  lines=$(grep -c 'cram: .* not found: install the package' "$log" || true)
  if [ "$lines" != 1 ] || ! grep -q "$2" "$log"; then
    echo "hiding $1: expected one line naming $2, got:" >&2
    cat "$log" >&2
    exit 1
  fi
}

expect_missing cram_deps_utf8proc libutf8proc-dev
expect_missing HDF5 libhdf5-dev
expect_missing MPI libopenmpi-dev
expect_missing Torch torch==
expect_missing GTest libgtest-dev

# Nothing hidden, no CUDA toolkit asked for: it configures.
cmake -S "$source_dir" -B "$work/build-cpu" -G Ninja -DCRAM_CUDA=OFF >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
echo ok
