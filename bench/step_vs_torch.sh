#!/usr/bin/env bash
# The training step against PyTorch's: our twin (sparse prediction, fused AdamW) eager and compiled, fp32 and bf16, and
# cram_bench step, interleaved, medians of 3 rounds. 16x768 at micro-batches 32 and 64 and the 4x256 demo model, with an
# optimizer step for every micro-step and for every 8.
#   bench/step_vs_torch.sh [--rounds 3] [--seconds 12] [--only ROW]     ROW: 16x768-32-1, 4x256-32-8, ...
# Needs the Python of launch/bootstrap.sh and, for the compiled modes, a C++ compiler.
set -euo pipefail
rounds=3 seconds=12 only=""
while [ $# -gt 0 ]; do
  case $1 in
    --rounds) rounds=$2; shift 2 ;;
    --seconds) seconds=$2; shift 2 ;;
    --only) only=$2; shift 2 ;;
    *) echo "usage: bench/step_vs_torch.sh [--rounds N] [--seconds S] [--only ROW]" >&2; exit 2 ;;
  esac
done
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
unset OMP_NUM_THREADS  # one rank, all processors
python=${CRAM_PYTHON:-$here/.venv/bin/python}
median() { tr ' ' '\n' <<< "$*" | sort -g | awk '{ a[NR] = $1 } END { print a[int((NR + 1) / 2)] }'; }
ratio() { awk -v a="$1" -v b="$2" 'BEGIN { printf "%.3f", a / b }'; }
smaller() { awk -v a="$1" -v b="$2" 'BEGIN { print (a == "" || b < a) ? b : a }'; }

# row layers hidden heads ffn vocabulary micro-batch accumulation
rows="16x768-32-1 16 768 12 3072 32768 32 1
16x768-32-8 16 768 12 3072 32768 32 8
16x768-64-1 16 768 12 3072 32768 64 1
16x768-64-8 16 768 12 3072 32768 64 8
4x256-32-1 4 256 4 1024 4096 32 1
4x256-32-8 4 256 4 1024 4096 32 8"

echo "machine: $(lscpu | sed -n 's/^Model name: *//p' | head -n 1), $(nproc) processors, $(grep -q amx_bf16 /proc/cpuinfo && echo AMX || { grep -q avx512_bf16 /proc/cpuinfo && echo 'AVX512-BF16, no AMX' || echo 'no bf16 unit'; })"
printf '%-12s %10s %10s %10s %10s %10s | %6s %6s %6s %6s\n' row ours eager32 comp32 eager16 comp16 best eager32 bound gemm
best_ratio="" eager_ratio="" bound="" share=""
while read -r row layers hidden heads ffn vocabulary micro accumulation; do
  [ -z "$only" ] || [ "$only" = "$row" ] || continue
  torch() {
    # Not found or not compiling is an error, not a slow peer.
    local line
    line=$("$python" "$here/bench/torch_step.py" --mode "$1" --seconds "$seconds" --layers "$layers" --hidden "$hidden" \
      --heads "$heads" --ffn "$ffn" --vocab "$vocabulary" --micro-batch "$micro" --accumulation "$accumulation" \
      < /dev/null 2> "$scratch/torch.log" | grep '^RESULT') || { cat "$scratch/torch.log" >&2; exit 1; }
    figure "$line" tokens_per_s
  }
  ours=() eager16=() compiled16=() bounds=() shares=()
  for ((round = 0; round < rounds; ++round)); do
    line=$("$bin/cram_bench" step "model.layers=$layers" "model.hidden=$hidden" "model.heads=$heads" "model.ffn=$ffn" \
      "model.vocab_size=$vocabulary" model.seq_length=128 "train.micro_batch_size=$micro" \
      "train.batch_size=$((micro * accumulation))" < /dev/null | grep '^RESULT')
    ours+=("$(figure "$line" tokens_per_s)")
    bounds+=("$(figure "$line" gemm_bound_fraction)")
    shares+=("$(figure "$line" gemm_share)")
    eager16+=("$(torch eager-bf16)")
    compiled16+=("$(torch compiled-bf16)")
  done
  eager32=$(torch eager-fp32)
  compiled32=$(torch compiled-fp32)
  mine=$(median "${ours[@]}") e16=$(median "${eager16[@]}") c16=$(median "${compiled16[@]}")
  best=$(larger "$(larger "$e16" "$c16")" "$(larger "$eager32" "$compiled32")")
  of_best=$(ratio "$mine" "$best") of_eager=$(ratio "$mine" "$eager32")
  row_bound=$(median "${bounds[@]}") row_share=$(median "${shares[@]}")
  printf '%-12s %10.0f %10.0f %10.0f %10.0f %10.0f | %6s %6s %6.3f %6.3f\n' "$row" "$mine" "$eager32" "$compiled32" "$e16" \
    "$c16" "$of_best" "$of_eager" "$row_bound" "$row_share"
  best_ratio=$(smaller "$best_ratio" "$of_best") eager_ratio=$(smaller "$eager_ratio" "$of_eager")
  bound=$(smaller "$bound" "$row_bound") share=$(smaller "$share" "$row_share")
done <<< "$rows"
[ -n "$best_ratio" ] || { echo "step_vs_torch: no row is called $only" >&2; exit 2; }
# The worst row of each.
echo "RESULT best_peer_ratio=$best_ratio eager_fp32_ratio=$eager_ratio gemm_bound_fraction=$bound gemm_share=$share"
