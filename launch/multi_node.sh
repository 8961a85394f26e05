#!/usr/bin/env bash
# Trains on N ranks of several hosts: launch/multi_node.sh HOSTFILE N [cram_train arguments]
#
#   HOSTFILE        one host a line, Open MPI's format: node1 slots=2
#   CRAM_NETWORK    interfaces for all traffic between the hosts: a name or a subnet, eth0 or 10.0.0.0/24 (default: Open
#                   MPI tries every one; set it where hosts have interfaces that do not reach each other)
#   CRAM_RSH_AGENT  what starts a command on a host, called as AGENT HOST COMMAND (default: ssh)
#   CRAM_TRAIN      another program than build/bin/cram_train
#
# Program, corpus and working folder must be at the same paths on every host, and run.output on a file system they share.
# TERM, INT, HUP and USR1 save and end with 75, like one rank does.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=launch/common.sh
. "$here/launch/common.sh"

refuse() {
  echo "multi_node: $1" >&2
  echo "usage: launch/multi_node.sh HOSTFILE N [--config FILE] [section.key=value ...]" >&2
  exit 2
}

[ $# -ge 2 ] || refuse "expected a hostfile and a number of ranks, got $# arguments: name both"
hostfile=$1
ranks=$2
shift 2
if [ ! -f "$hostfile" ] || [ ! -r "$hostfile" ]; then
  refuse "expected a hostfile, got $hostfile, which cannot be read: write lines like \"node1 slots=2\" into it"
fi
[[ $ranks =~ ^[1-9][0-9]*$ ]] ||
  refuse "expected a number of ranks from 1, got \"$ranks\": give the ranks of all hosts together"

# Slots as far as they are written down: a host without slots= has as many as it has cores, which only it knows.
hosts=0
slots=0
while read -r line || [ -n "$line" ]; do
  line=${line%%#*}
  [[ $line =~ [^[:space:]] ]] || continue
  hosts=$((hosts + 1))
  if [[ $line =~ [[:space:]]slots[[:space:]]*=[[:space:]]*([0-9]+) ]]; then
    if [ -n "$slots" ]; then slots=$((slots + 10#${BASH_REMATCH[1]})); fi
  else
    slots=""
  fi
done <"$hostfile"
[ "$hosts" -gt 0 ] || refuse "expected at least one host in $hostfile, got none: write lines like \"node1 slots=2\" into it"
if [ -n "$slots" ] && [ "$ranks" -gt "$slots" ]; then
  refuse "expected at most $slots ranks (the slots of the $hosts hosts in $hostfile), got $ranks: lower N or raise slots="
fi

program=$(find_program multi_node "$here")
major=$(open_mpi_major multi_node)
allow_root

# Open MPI 5 starts its daemons through PRRTE, which has parameters of its own: --prtemca, and other names.
if [ "$major" -ge 5 ]; then
  agent_parameter=(--prtemca plm_ssh_agent)
  network_parameter=(--prtemca prte_if_include)
else
  agent_parameter=(--mca plm_rsh_agent)
  network_parameter=(--mca oob_tcp_if_include)
fi

# Ranks are placed host by host in the order of the file, filling slots, and left unbound: cram_train shares the processors of
# a host among its ranks. (Open MPI 4 and 5 understand both options.)
options=(--hostfile "$hostfile" --map-by slot --bind-to none)
# A host without the working folder must say so: by default Open MPI falls back to the home folder there.
options+=(--wdir "$PWD")
# The one place where interfaces are chosen: btl is the traffic of the ranks, the other that of the daemons.
if [ -n "${CRAM_NETWORK:-}" ]; then
  options+=(--mca btl_tcp_if_include "$CRAM_NETWORK" "${network_parameter[@]}" "$CRAM_NETWORK")
fi
if [ -n "${CRAM_RSH_AGENT:-}" ]; then
  options+=("${agent_parameter[@]}" "$CRAM_RSH_AGENT")
fi
# Other hosts start from a fresh login's environment; OMPI_MCA_* and PRTE_MCA_* travel by themselves.
mapfile -t names < <(compgen -e | grep -E '^(OMP_NUM_THREADS|PATH|LD_LIBRARY_PATH|CRAM_.*)$')
for name in "${names[@]}"; do
  options+=(-x "$name")
done

status=0
forward_signals mpirun "${options[@]}" -n "$ranks" "$program" "$@" || status=$?
exit "$status"
