#!/usr/bin/env bash
# Bubbles of 1F1B and interleaved pipelines against (p-1)/m and (p-1)/(vm), with stages whose time is pinned.
#   bench/pipeline.sh [STAGES ...]      default: 2 4
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
[ $# -gt 0 ] || set -- 2 4
plain=0 interleaved=0 gain=0 simulator=0
for stages in "$@"; do
  [[ $stages =~ ^([2-9]|[1-9][0-9]+)$ ]] || { echo "usage: bench/pipeline.sh [STAGES ...]" >&2; exit 2; }
  output=$(on_ranks "$stages" cram_bench pipeline)
  grep -v '^RESULT' <<< "$output"
  line=$(grep '^RESULT' <<< "$output")
  plain=$(larger "$plain" "$(figure "$line" bubble_1f1b_err)")
  interleaved=$(larger "$interleaved" "$(figure "$line" bubble_interleaved_err)")
  simulator=$(larger "$simulator" "$(figure "$line" simulator_err)")
  gain=$(figure "$line" interleaved_gain)
done
echo "RESULT bubble_1f1b_err=$plain bubble_interleaved_err=$interleaved interleaved_gain=$gain simulator_err=$simulator"
