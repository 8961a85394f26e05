#!/usr/bin/env bash
# Trains on N ranks of this machine: launch/run_local.sh N [cram_train arguments]
# The processors are shared among the ranks (run.threads overrides); an interrupt saves and exits 75, like one rank does.
# CRAM_TRAIN names another program than build/bin/cram_train.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/common.sh
. "$here/launch/common.sh"

usage() { echo "usage: launch/run_local.sh N [--config FILE] [section.key=value ...]"; }

if [ $# -lt 1 ] || ! [[ $1 =~ ^[1-9][0-9]*$ ]]; then
  usage >&2
  exit 2
fi
ranks=$1
shift
program=$(find_program run_local "$here")
allow_root
# Ranks that wait for each other must let the others run where there are more ranks than processors.
if [ "$ranks" -gt "$(nproc)" ]; then
  export OMPI_MCA_mpi_yield_when_idle=1
fi

# Open MPI 5 still takes --oversubscribe; its own name for it is --map-by :OVERSUBSCRIBE.
status=0
forward_signals mpirun --oversubscribe --bind-to none -n "$ranks" "$program" "$@" || status=$?
exit "$status"
