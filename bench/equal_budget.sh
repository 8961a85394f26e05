#!/usr/bin/env bash
# The same wall-clock budget for our PyTorch twin in its fastest mode (compiling outside the budget) and for cram_train:
# the same shards, model, batch, schedule and learning rate, several seeds, one after the other on an otherwise idle
# machine. What faster steps are worth in held-out loss.
#   bench/equal_budget.sh --text DIR [--minutes 10] [--seeds 3]
# The final weights of both are judged by the twin's code in fp32 on the same masks of the same held-out rows; the curves
# are each program's own evaluations (different masks of the same rows).
set -euo pipefail
text="" minutes=10 seeds=3
while [ $# -gt 0 ]; do
  case $1 in
    --text) text=${2-}; shift $(($# > 1 ? 2 : 1)) ;;
    --minutes) minutes=${2-}; shift $(($# > 1 ? 2 : 1)) ;;
    --seeds) seeds=${2-}; shift $(($# > 1 ? 2 : 1)) ;;
    *) seeds=""; break ;;
  esac
done
[[ $seeds =~ ^[1-9][0-9]*$ && $minutes =~ ^[0-9]*[.]?[0-9]+$ && $minutes =~ [1-9] ]] ||
  { echo "usage: bench/equal_budget.sh --text DIR [--minutes M] [--seeds N]" >&2; exit 2; }
[ -e "$text" ] || { echo "equal_budget: name a folder of .txt files with --text" >&2; exit 2; }
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
unset OMP_NUM_THREADS  # one rank, all processors
need_python
seconds=$(awk -v m="$minutes" 'BEGIN { print 60 * m }')
every=$(awk -v s="$seconds" 'BEGIN { print s / 5 }')

echo "preparing rows of 128 tokens, a vocabulary of 4,096"
shards_from "$text" "$scratch/shards" 4096 128
peer() { "$python" "$here/bench/torch_train.py" "$@" < /dev/null 2> "$scratch/torch.log" || { cat "$scratch/torch.log" >&2; exit 1; }; }
judge() { figure "$(peer judge --shards "$scratch/shards" --weights "$1" | grep '^RESULT')" loss; }
mean() { tr ' ' '\n' <<< "$*" | awk '{ s += $1 } END { printf "%.4f", s / NR }'; }

ours=() twins=()
for ((seed = 0; seed < seeds; ++seed)); do
  peer train --shards "$scratch/shards" --seconds "$seconds" --eval-every "$every" --seed "$seed" --save "$scratch/twin.pt" \
    > "$scratch/twin.txt"
  run=$scratch/run-$seed
  "$bin/cram_train" model.layers=4 model.hidden=256 model.heads=4 model.ffn=1024 "data.shards=$scratch/shards" \
    train.batch_size=32 train.micro_batch_size=32 train.batch_quantum=32 train.batch_ramp=0 train.lr=2e-3 \
    "train.budget=${seconds}s" "eval.every=${every}s" eval.rows=2048 checkpoint.every=0s log.every=60s "run.seed=$seed" \
    "run.output=$run" < /dev/null > "$scratch/ours.txt" 2>&1 || { tail -n 20 "$scratch/ours.txt" >&2; exit 1; }
  twins+=("$(judge "$scratch/twin.pt")")
  ours+=("$(judge "$run")")
  echo "seed $seed, seconds: held-out loss on the way"
  sed -n 's/^MODE /  the twin runs /p' "$scratch/twin.txt"
  sed -n 's/^EVAL seconds=\([^ ]*\) step=\([^ ]*\) loss=\(.*\)/  twin  \1 s, step \2: \3/p' "$scratch/twin.txt"
  "$python" - "$run/metrics.jsonl" <<'PYTHON'
import json
import sys

for line in map(json.loads, open(sys.argv[1])):
    if line["kind"] == "eval":
        print(f"  ours  {line['elapsed_s']:.1f} s, step {line['step']}: {line['eval_loss']:.6f}")
PYTHON
  echo "  judged alike: twin ${twins[-1]}, ours ${ours[-1]}"
  rm -rf "$run"
done
of_ours=$(mean "${ours[@]}") of_twin=$(mean "${twins[@]}")
echo "RESULT loss_ours=$of_ours loss_twin=$of_twin nats_gained=$(awk -v a="$of_twin" -v b="$of_ours" 'BEGIN { printf "%.4f", a - b }')"
