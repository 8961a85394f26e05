#!/usr/bin/env bash
# The bundle of bench/gpu_check.sh is small enough, runs every row on the CPU after it was moved, without what this machine
# has installed, and says so when a row fails. Usage: gpu_check_test.sh SOURCE_DIR BUILD_DIR PYTHON
set -euo pipefail
source_dir=$1
export CRAM_BUILD=$2 CRAM_PYTHON=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() {
  echo "$1" >&2
  cat "$work/log" >&2
  exit 1
}

"$source_dir/bench/gpu_check.sh" --bundle "$work/made" > "$work/log" 2>&1 || fail "the bundle was not made:"
kib=$(sed -n 's/^RESULT bundle_kib=//p' "$work/log")
[ "$kib" -lt $((60 * 1024)) ] || fail "expected less than 60 MiB, got $kib KiB:"
if "$source_dir/bench/gpu_check.sh" --bundle "$work/large" --size 1 > "$work/log" 2>&1; then fail "expected --size 1 to be refused:"; fi
grep -q "expected a bundle under 1 MiB, got" "$work/log" || fail "expected the size to be named:"

mkdir "$work/some" "$work/some/where" "$work/cwd"
mv "$work/made" "$work/some/where/bundle"
bundle=$work/some/where/bundle
cd "$work/cwd"

# Where mounts may be changed: the packages' libraries are hidden, so that only what is carried can be used.
hidden=()
# shellcheck disable=SC2016
hide='for file in /usr/lib/*/lib{hdf5,mpi,open-,sentencepiece,hwloc,event,utf8proc,sz,aec,curl}*.so*; do
  [ ! -f "$file" ] || mount --bind /dev/null "$file"
done
for folder in /usr/lib/*/openmpi /usr/lib/*/hdf5; do [ ! -d "$folder" ] || mount -t tmpfs none "$folder"; done
exec "$@"'
if unshare -m bash -c "$hide" hide true 2> /dev/null; then hidden=(unshare -m bash -c "$hide" hide); fi

OUT=$work/out ${hidden[@]+"${hidden[@]}"} "$bundle/bench/gpu_check.sh" --cpu --quick > "$work/log" 2>&1 ||
  fail "the rehearsal failed:"
for name in libraries oracles parity-tests parity-fp32 parity-bf16 nccl ranks-tp2 ranks-pp2 train resume kernels step-16 \
  torch-16-eager torch-16-compiled step-8 torch-8-eager; do
  grep -Eq "^$name +ok " "$work/out/gpu_check.txt" || fail "expected row $name to be ok:"
done
grep -q '^RESULT ok=16 failed=0 skipped=0 unavailable=0 ' "$work/out/gpu_check.txt" || fail "expected 16 rows:"
tar -tzf "$work/out/gpu_check_logs.tar.gz" > "$work/log" || fail "expected the logs:"
grep -q 'gpu_check_logs/nccl.log' "$work/log" || fail "expected a log of every row:"
# Only parts of the C library come from this machine's folders.
sed -n 's/^[[:space:]]*\([^ ]*\) => \(\/usr\|\/lib\)[^ ]* .*/\1/p' "$work/out/gpu_check_logs/libraries.txt" | sort -u |
  grep -Ev '^(ld-linux.*|lib(c|m|pthread|dl|rt|util|resolv|cuda)\.so\.[0-9]+)$' > "$work/log" && fail "libraries that are not carried:"

# Controls: a program that fails, one that hangs, one that is damaged, and no time at all.
printf '#!/bin/sh\necho broken on purpose\nexit 3\n' > "$bundle/tests/nccl_test"
printf '#!/bin/sh\nsleep 100\n' > "$bundle/tests/training_layouts_test"
truncate -s 1000 "$bundle/bin/cram_bench"
if OUT=$work/out "$bundle/bench/gpu_check.sh" --cpu --quick --only nccl,kernels > "$work/log" 2>&1; then
  fail "expected the exit code to say that rows failed:"
fi
grep -Eq '^nccl +FAILED .*nccl_test: exit code 3: broken on purpose' "$work/log" || fail "expected nccl to have failed:"
grep -Eq '^kernels +FAILED ' "$work/log" || fail "expected kernels to have failed:"
grep -q '^RESULT ok=0 failed=2 ' "$work/log" || fail "expected two failures to be counted:"
OUT=$work/out "$bundle/bench/gpu_check.sh" --cpu --quick --only ranks --limit 22 > "$work/log" 2>&1 || fail "out of time is no failure:"
grep -Eq '^ranks-tp2 +skipped .*out of time' "$work/log" || fail "expected the row to be cut:"
grep -Eq '^ranks-pp2 +skipped .*out of time' "$work/log" || fail "expected the next row to be skipped:"
echo ok
