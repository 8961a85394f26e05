#!/usr/bin/env bash
# Installs what the build and the tests need: Debian packages, and the pinned Python packages in .venv.
# Only what is missing is installed; when nothing is missing, nothing is downloaded.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  cat <<'TEXT'
usage: launch/bootstrap.sh [--check]
  --check   only report what is missing: exit 0 when everything is there, 1 when not
TEXT
}

check_only=false
for argument in "$@"; do
  case "$argument" in
    --check) check_only=true ;;
    -h | --help) usage; exit 0 ;;
    *) echo "bootstrap: unknown argument $argument" >&2; usage >&2; exit 2 ;;
  esac
done

build_packages=(
  g++ cmake ninja-build ccache mold
  libopenmpi-dev openmpi-bin libhdf5-dev libsentencepiece-dev libcxxopts-dev nlohmann-json3-dev libtomlplusplus-dev
  libxxhash-dev libutf8proc-dev libzstd-dev zlib1g-dev
  python3 python3-venv
)
test_packages=(libgtest-dev libbenchmark-dev sentencepiece clang clang-format clang-tidy python3-dev iproute2 procps)

missing_debian() {
  local known package
  # One call for all: a line for each package that is installed.
  known=$(dpkg-query --show --showformat='${binary:Package} ${db:Status-Status}\n' \
    "${build_packages[@]}" "${test_packages[@]}" 2>/dev/null | sed -n 's/^\([^: ]*\).* installed$/\1/p' || true)
  for package in "${build_packages[@]}" "${test_packages[@]}"; do
    grep -qxF -- "$package" <<<"$known" || echo "$package"
  done
}

# Reads versions from the installed metadata: importing the packages would take seconds.
missing_python() {
  if ! .venv/bin/python -c '' 2>/dev/null; then
    sed -n 's/^\([a-z0-9]*==.*\)$/\1/p' launch/requirements.txt
    return
  fi
  .venv/bin/python - launch/requirements.txt <<'PYTHON'
import importlib.metadata as metadata
import sys

for line in open(sys.argv[1], encoding="utf-8"):
    line = line.split("#")[0].strip()
    if not line:
        continue
    name, _, wanted = line.partition("==")
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        found = None
    if found is None or found.split("+")[0] != wanted:
        print(line)
PYTHON
}

as_root() {
  if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo "$@"; fi
}

list() { printf '  %s\n' "$@"; }

# Sets the arrays debian and python. Not through <(...), whose failures would read as "nothing is missing".
find_missing() {
  local text=""
  debian=()
  python=()
  if command -v dpkg-query >/dev/null; then text=$(missing_debian); fi
  if [ -n "$text" ]; then mapfile -t debian <<<"$text"; fi
  text=$(missing_python)
  if [ -n "$text" ]; then mapfile -t python <<<"$text"; fi
}

if ! command -v dpkg-query >/dev/null; then
  echo "bootstrap: not a Debian-like system (no dpkg-query): system packages are not checked."
  echo "bootstrap: needed are the equivalents of: ${build_packages[*]}"
fi
find_missing

if [ "${#debian[@]}" -eq 0 ] && [ "${#python[@]}" -eq 0 ]; then
  echo "bootstrap: everything is installed"
  exit 0
fi
if [ "${#debian[@]}" -gt 0 ]; then
  echo "bootstrap: missing Debian packages:"
  list "${debian[@]}"
fi
if [ "${#python[@]}" -gt 0 ]; then
  echo "bootstrap: missing Python packages in .venv:"
  list "${python[@]}"
fi
if $check_only; then
  exit 1
fi

if [ "${#debian[@]}" -gt 0 ]; then
  if [ "$(id -u)" -ne 0 ] && ! command -v sudo >/dev/null; then
    echo "bootstrap: neither root nor sudo: ask an administrator to install the Debian packages above" >&2
    exit 1
  fi
  echo "bootstrap: installing ${#debian[@]} Debian packages"
  as_root env DEBIAN_FRONTEND=noninteractive apt-get update -qq
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${debian[@]}"
fi

if [ "${#python[@]}" -gt 0 ]; then
  if ! .venv/bin/python -c '' 2>/dev/null; then
    echo "bootstrap: creating .venv"
    python3 -m venv .venv
  fi
  echo "bootstrap: installing ${#python[@]} Python packages into .venv"
  case " ${python[*]}" in
    *" torch=="*) echo "bootstrap: torch brings several gigabytes of CUDA libraries with it: this takes some minutes" ;;
  esac
  .venv/bin/python -m pip install --disable-pip-version-check --no-input -r launch/requirements.txt
fi

# Trust what is there now, not that the installers ended well.
find_missing
if [ $((${#debian[@]} + ${#python[@]})) -gt 0 ]; then
  echo "bootstrap: still missing after installing:" >&2
  list "${debian[@]}" "${python[@]}" >&2
  exit 1
fi
echo "bootstrap: everything is installed"
