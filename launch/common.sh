# shellcheck shell=bash
# Sourced by run_local.sh, multi_node.sh and slurm.sbatch: which program to start, and how signals reach its ranks.

# The training program: CRAM_TRAIN, or the release build of the repository at $2. $1 is the caller's name for messages.
find_program() {
  local program=${CRAM_TRAIN:-$2/build/bin/cram_train}
  if [ -x "$program" ] && [ ! -d "$program" ]; then
    echo "$program"
  elif [ -n "${CRAM_TRAIN:-}" ]; then
    echo "$1: expected a program in CRAM_TRAIN, got $program: correct it, or unset it to use build/bin/cram_train" >&2
    return 2
  else
    echo "$1: $program is not built: cmake --preset release && cmake --build --preset release" >&2
    return 2
  fi
}

# Open MPI 4 reads the first pair; PRRTE, which starts the ranks of Open MPI 5, reads the second.
allow_root() {
  if [ "$(id -u)" -eq 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    export PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1
  fi
}

# Prints the major version of mpirun. $1 is the caller's name for messages.
open_mpi_major() {
  local text=""
  if ! command -v mpirun >/dev/null; then
    echo "$1: expected mpirun in PATH, found none: install openmpi-bin, or load your cluster's Open MPI module" >&2
    return 2
  fi
  text=$(mpirun --version 2>&1) || true
  if [[ $text =~ \(Open\ MPI\)\ ([0-9]+)\. ]]; then
    echo "${BASH_REMATCH[1]}"
  else
    echo "$1: expected the mpirun of Open MPI 4 or 5, got \"${text%%$'\n'*}\": put Open MPI first in PATH" >&2
    return 2
  fi
}

# forward_signals COMMAND...: runs a launcher and returns its exit code. TERM, INT, HUP and USR1 reach it as USR1: mpirun
# forwards that to every rank and leaves them time to save, but answers TERM and INT by killing them within a second.
# With FORWARD_ONCE=true only the first signal is passed on (a second one makes cram_train leave without saving), and with
# FORWARD_UNLESS=FUNCTION none for which `FUNCTION SIGNAL` is true.
forward_signals() {
  launcher_pid=""
  signals_seen=0
  signals_sent=0
  last_signal=""
  local name
  for name in TERM INT HUP USR1; do
    # shellcheck disable=SC2064
    trap "note_signal $name" "$name"
  done
  # In a session of its own, or a terminal's interrupt would reach the launcher directly as well.
  setsid "$@" </dev/null &
  launcher_pid=$!
  pass_signals_on  # one may have come before there was a process to send it to
  local status=0 before
  while true; do
    before=$signals_seen
    wait "$launcher_pid" && status=0 || status=$?
    # A trapped signal ends wait early; waiting again also works for a process that has ended meanwhile.
    [ "$signals_seen" -eq "$before" ] && break
  done
  # Ranks that had not come as far as catching signals die of the USR1. No step was lost: the same command goes on.
  if [ "$signals_sent" -gt 0 ] && [ "$status" -eq $((128 + $(kill -l USR1))) ]; then
    echo "stopped by a signal while starting: nothing new to save, exit code 75" >&2
    status=75
  fi
  return "$status"
}

note_signal() {
  last_signal=$1
  signals_seen=$((signals_seen + 1))
  pass_signals_on
}

pass_signals_on() {
  [ -n "$launcher_pid" ] || return 0
  while [ "$signals_sent" -lt "$signals_seen" ]; do
    signals_sent=$((signals_sent + 1))
    if [ "$signals_sent" -gt 1 ] && ${FORWARD_ONCE:-false}; then continue; fi
    if [ -n "${FORWARD_UNLESS:-}" ] && "$FORWARD_UNLESS" "$last_signal"; then continue; fi
    kill -USR1 "$launcher_pid" 2>/dev/null || true
  done
}
