#!/usr/bin/env bash
# Trains on N ranks of this machine: launch/run_local.sh N [cram_train arguments]
# The processors are shared among the ranks (run.threads overrides); an interrupt saves and exits 75, like one rank does.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

usage() { echo "usage: launch/run_local.sh N [--config FILE] [section.key=value ...]"; }

if [ $# -lt 1 ] || ! [[ $1 =~ ^[1-9][0-9]*$ ]]; then
  usage >&2
  exit 2
fi
ranks=$1
shift
program=$here/build/bin/cram_train
[ -x "$program" ] || { echo "run_local: $program is not built: cmake --preset release && cmake --build --preset release" >&2; exit 2; }
if [ "$(id -u)" -eq 0 ]; then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
# Ranks that wait for each other must let the others run where there are more ranks than processors.
if [ "$ranks" -gt "$(nproc)" ]; then
  export OMPI_MCA_mpi_yield_when_idle=1
fi

mpirun --oversubscribe --bind-to none -n "$ranks" "$program" "$@" &
pid=$!
# mpirun answers TERM and INT by killing the ranks within a second; USR1 is forwarded and leaves them time to save.
trap 'kill -USR1 "$pid" 2>/dev/null || true' TERM INT USR1
status=0
while true; do
  wait "$pid" && status=0 || status=$?
  kill -0 "$pid" 2>/dev/null || break  # a trapped signal ends wait early
done
exit "$status"
