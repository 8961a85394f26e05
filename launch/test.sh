#!/usr/bin/env bash
# Configures, builds and runs the tests. Arguments go to ctest: launch/test.sh -L unit, launch/test.sh -R tokenizer
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Ranks share a small machine and, in containers, run as root.
if [ "$(id -u)" -eq 0 ]; then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi

cmake --preset release
cmake --build --preset release -j"$(nproc)"
exec ctest --preset release --output-on-failure --no-tests=error -j2 "$@"
