#!/usr/bin/env bash
# One rank against every layout: 30 steps of a 4-layer model on real text, ZeRO off and on, fp64 and fp32.
#   bench/layouts.sh --text DIR [--steps N]
# Columns: loss of step 1, largest relative difference of losses and gradient norms, ||w - w1||/||w1|| of the final weights,
# bytes that all ranks sent, and whether they are those of the formulas.
set -euo pipefail
text="" steps=30
while [ $# -gt 0 ]; do
  case $1 in
    --text) text=${2-}; shift $(($# > 1 ? 2 : 1)) ;;
    --steps) steps=${2-}; shift $(($# > 1 ? 2 : 1)) ;;
    *) steps=""; break ;;
  esac
done
[[ $steps =~ ^[1-9][0-9]*$ ]] || { echo "usage: bench/layouts.sh --text DIR [--steps N]" >&2; exit 2; }
[ -e "$text" ] || { echo "layouts: name a folder of .txt files with --text" >&2; exit 2; }
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"

shards_from "$text" "$scratch/shards" 2048 64
model=(model.layers=4 model.hidden=128 model.heads=4 model.ffn=256 "data.shards=$scratch/shards")
train=(train.budget="${steps}steps" train.batch_size=64 train.batch_quantum=64 train.batch_ramp=0 train.micro_batch_size=8
       train.lr=1e-3 eval.rows=8 run.threads=1 checkpoint.every=0steps log.every=1000steps)
# name ranks tensor pipeline virtual_stages
layouts="dp2 2 1 1 1
tp2 2 2 1 1
pp2 2 1 2 1
dp2tp2 4 2 1 1
dp2pp2 4 1 2 1
tp2pp2 4 2 2 1
tp4 4 4 1 1
pp4 4 1 4 1
dp4 4 1 1 1
dp2tp2pp2 8 2 2 1
pp2v2 2 1 2 2
dp2pp2v2 4 1 2 2"

run() {  # run OUTPUT RANKS OPTIONS...
  local output=$1 ranks=$2
  shift 2
  on_ranks "$ranks" cram_train "${model[@]}" "${train[@]}" "run.output=$output" "$@" < /dev/null > "$output.log" 2>&1 ||
    { echo "layouts: $output failed:" >&2; tail -n 20 "$output.log" >&2; exit 1; }
}

worst_fp32=0 worst_fp64=0 bytes_ok=1
printf '%-5s %-10s %-4s %-22s %9s %9s %9s %14s %s\n' format layout zero step1_loss loss gnorm weights sent_bytes formula
for precision in fp64 fp32; do
  run "$scratch/$precision-1" 1 train.precision=$precision
  while read -r name ranks tensor pipeline virtual; do
    for zero in 0 1; do
      folder=$scratch/$precision-$name-$zero
      run "$folder" "$ranks" train.precision=$precision parallel.tensor="$tensor" parallel.pipeline="$pipeline" \
        parallel.virtual_stages="$virtual" parallel.zero=$zero
      line=$("$bin/cram_bench" compare "$scratch/$precision-1" "$folder" | grep '^RESULT')
      ok=$(figure "$line" bytes_ok)
      printf '%-5s %-10s %-4s %-22s %9.1e %9.1e %9.1e %14.0f %s\n' $precision "$name" $zero \
        "$(figure "$line" step1_loss)" "$(figure "$line" loss_err)" "$(figure "$line" grad_norm_err)" \
        "$(figure "$line" weights_err)" "$(figure "$line" sent_bytes)" "$([ "$ok" = 1 ] && echo equal || echo DIFFERS)"
      [ "$ok" = 1 ] || bytes_ok=0
      worst=$(larger "$(figure "$line" loss_err)" "$(larger "$(figure "$line" grad_norm_err)" "$(figure "$line" weights_err)")")
      if [ $precision = fp32 ]; then worst_fp32=$(larger "$worst_fp32" "$worst"); else worst_fp64=$(larger "$worst_fp64" "$worst"); fi
      rm -rf "$folder"
    done
  done <<< "$layouts"
done
# The worst of losses, gradient norms and weights.
echo "RESULT worst_fp32=$worst_fp32 worst_fp64=$worst_fp64 bytes_ok=$bytes_ok"
