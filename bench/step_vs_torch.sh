#!/usr/bin/env bash
# The training step against PyTorch's: our twin (sparse prediction, fused AdamW) eager and compiled, fp32 and bf16, and
# cram_bench step, interleaved, medians of 3 rounds. 16x768 at micro-batches 32 and 64 and the 4x256 demo model; two rows
# each: an optimizer step for every micro-step, as it is measured, and for every 8 of them, from the measured times of a
# micro-step and of an optimizer step (eight of the one and one of the other; --check measures them instead).
#   bench/step_vs_torch.sh [--rounds 3] [--seconds 12] [--only MODEL] [--check]     MODEL: 16x768-32, 4x256-32, ...
# Needs the Python of launch/bootstrap.sh and, for the compiled modes, a C++ compiler.
set -euo pipefail
rounds=3 seconds=12 only="" check=false
while [ $# -gt 0 ]; do
  case $1 in
    --rounds) rounds=${2-}; shift $(($# > 1 ? 2 : 1)) ;;
    --seconds) seconds=${2-}; shift $(($# > 1 ? 2 : 1)) ;;
    --only) only=${2:--}; shift $(($# > 1 ? 2 : 1)) ;;
    --check) check=true; shift ;;
    *) rounds=""; break ;;
  esac
done
[[ $rounds =~ ^[1-9][0-9]*$ && $seconds =~ ^[1-9][0-9]*$ ]] ||
  { echo "usage: bench/step_vs_torch.sh [--rounds N] [--seconds S] [--only MODEL] [--check]" >&2; exit 2; }
# model layers hidden heads ffn vocabulary micro-batch
models="16x768-32 16 768 12 3072 32768 32
16x768-64 16 768 12 3072 32768 64
4x256-32 4 256 4 1024 4096 32"

[ -z "$only" ] || grep -q "^$only " <<< "$models" ||
  { echo "step_vs_torch: no model is called $only, but: $(cut -d ' ' -f 1 <<< "$models" | xargs)" >&2; exit 2; }
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
unset OMP_NUM_THREADS  # one rank, all processors
need_python
smaller() { awk -v a="$1" -v b="$2" 'BEGIN { print (a == "" || b < a) ? b : a }'; }
calculate() { awk "BEGIN { printf \"%.6g\", $1 }"; }

echo "machine: $(lscpu | sed -n 's/^Model name: *//p' | head -n 1), $(nproc) processors, $(grep -q amx_bf16 /proc/cpuinfo && echo AMX || { grep -q avx512_bf16 /proc/cpuinfo && echo 'AVX512-BF16, no AMX' || echo 'no bf16 unit'; })"
printf '%-12s %8s %8s %8s %8s %8s | %6s %6s %6s %6s\n' row ours eager32 comp32 eager16 comp16 best eager32 bound gemm
best_ratio="" eager_ratio="" bound="" share=""
while read -r model layers hidden heads ffn vocabulary micro; do
  [ -z "$only" ] || [ "$only" = "$model" ] || continue
  # torch MODE ACCUMULATION: "micro_ms update_ms step_ms". Not found or not compiling is an error, not a slow peer.
  torch() {
    local line
    line=$("$python" "$here/bench/torch_step.py" --mode "$1" --seconds "$seconds" --layers "$layers" --hidden "$hidden" \
      --heads "$heads" --ffn "$ffn" --vocab "$vocabulary" --micro-batch "$micro" --accumulation "$2" \
      < /dev/null 2> "$scratch/torch.log" | grep '^RESULT') || { cat "$scratch/torch.log" >&2; exit 1; }
    echo "$(figure "$line" micro_ms) $(figure "$line" update_ms) $(figure "$line" step_ms)"
  }
  # ours ACCUMULATION: "micro_ms update_ms step_ms gemm_ms bound_ms", the last two of a micro-step.
  ours() {
    local line step share
    line=$("$bin/cram_bench" step "model.layers=$layers" "model.hidden=$hidden" "model.heads=$heads" "model.ffn=$ffn" \
      "model.vocab_size=$vocabulary" model.seq_length=128 "train.micro_batch_size=$micro" \
      "train.batch_size=$((micro * $1))" --seconds "$seconds" < /dev/null | grep '^RESULT')
    step=$(figure "$line" step_ms) share=$(figure "$line" optimizer_share)
    echo "$(calculate "$step * (1 - $share) / $1") $(calculate "$step * $share") $step" \
      "$(calculate "$step * $(figure "$line" gemm_share) / $1") $(calculate "$step * $(figure "$line" gemm_bound_fraction) / $1")"
  }
  column() { awk -v c="$1" '{ print $c }' "$2" | sort -g | awk '{ a[NR] = $1 } END { print a[int((NR + 1) / 2)] }'; }
  # step_ms FILE ACCUMULATION: median, or eight medians of a micro-step and one of an update.
  step_ms() {
    if [ "$2" = 1 ]; then column 3 "$1"; else calculate "$2 * $(column 1 "$1") + $(column 2 "$1")"; fi
  }
  measure() {  # measure ACCUMULATION: files of one line a round
    local round
    for file in ours eager-bf16 compiled-bf16 eager-fp32 compiled-fp32; do : > "$scratch/$file"; done
    for ((round = 0; round < rounds; ++round)); do
      ours "$1" >> "$scratch/ours"
      torch eager-bf16 "$1" >> "$scratch/eager-bf16"
      torch compiled-bf16 "$1" >> "$scratch/compiled-bf16"
    done
    torch eager-fp32 "$1" >> "$scratch/eager-fp32"
    torch compiled-fp32 "$1" >> "$scratch/compiled-fp32"
  }
  report() {  # report ACCUMULATION HOW: a row, from what was measured
    local tokens=$((micro * 128 * $1)) mode best=0 speeds=() mine of_best of_eager row_bound row_share ours_ms
    if [ "$2" = parts ]; then ours_ms=$(step_ms "$scratch/ours" "$1"); else ours_ms=$(column 3 "$scratch/ours"); fi
    mine=$(calculate "1000 * $tokens / $ours_ms")
    for mode in eager-fp32 compiled-fp32 eager-bf16 compiled-bf16; do
      if [ "$2" = parts ]; then speeds+=("$(calculate "1000 * $tokens / $(step_ms "$scratch/$mode" "$1")")")
      else speeds+=("$(calculate "1000 * $tokens / $(column 3 "$scratch/$mode")")"); fi
      best=$(larger "$best" "${speeds[-1]}")
    done
    of_best=$(calculate "$mine / $best") of_eager=$(calculate "$mine / ${speeds[0]}")
    row_share=$(calculate "$1 * $(column 4 "$scratch/ours") / $ours_ms")
    row_bound=$(calculate "$1 * $(column 5 "$scratch/ours") / $ours_ms")
    printf '%-12s %8.0f %8.0f %8.0f %8.0f %8.0f | %6.3f %6.3f %6.3f %6.3f\n' "$model-$1" "$mine" "${speeds[@]}" "$of_best" \
      "$of_eager" "$row_bound" "$row_share"
    best_ratio=$(smaller "$best_ratio" "$of_best") eager_ratio=$(smaller "$eager_ratio" "$of_eager")
    bound=$(smaller "$bound" "$row_bound") share=$(smaller "$share" "$row_share")
  }
  measure 1
  report 1 parts
  report 8 parts
  if $check; then
    measure 8
    report 8 measured
  fi
done <<< "$models"
# The worst row of each.
echo "RESULT best_peer_ratio=$best_ratio eager_fp32_ratio=$eager_ratio gemm_bound_fraction=$bound gemm_share=$share"
