#!/usr/bin/env bash
# From a fresh checkout to a small trained encoder: install, build, prepare the demo corpus, train for some minutes on
# the CPU. Each call trains a new run; what is installed, built or prepared already is used again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  cat <<'TEXT'
usage: launch/quickstart.sh [--budget 2m] [section.key=value ...]
  --budget   training time, for example 20s, 2m, 1h, or a number of steps: 100steps (default 2m)
  section.key=value   any other option of cram_train (build/bin/cram_train --help lists them)
TEXT
}

budget=2m
overrides=()
while [ $# -gt 0 ]; do
  case "$1" in
    --budget)
      [ $# -ge 2 ] || { echo "quickstart: --budget needs a value, for example 2m" >&2; exit 2; }
      budget=$2
      shift
      ;;
    --budget=*) budget=${1#--budget=} ;;
    -h | --help) usage; exit 0 ;;
    *=*) overrides+=("$1") ;;
    *) echo "quickstart: unknown argument $1" >&2; usage >&2; exit 2 ;;
  esac
  shift
done

stage() { printf '\n== %s\n' "$*"; }

corpus=data/demo
tokenizer=data/prepared/demo-tokenizer
shards=data/prepared/demo

stage "1/4 install: Debian packages and .venv, only what is missing"
launch/bootstrap.sh

stage "2/4 build: the programs go to build/bin (the first time takes some minutes)"
cmake --preset release
cmake --build --preset release -j"$(nproc)"

stage "3/4 prepare: a vocabulary of 4,096 entries, then the corpus as rows of 128 token ids"
# The manifest is written last, so it stands for a finished folder.
if [ -f "$shards/manifest.json" ]; then
  echo "quickstart: using $shards again (delete data/prepared to prepare it anew)"
else
  mkdir -p data/prepared
  build/bin/cram_data tokenizer --input "$corpus" --output "$tokenizer" --vocab-size 4096
  build/bin/cram_data pack --input "$corpus" --tokenizer "$tokenizer" --output "$shards" --seq-length 128 \
    --validation 0.08
fi

run=runs/quickstart-$(date +%Y%m%d-%H%M%S)
number=2
while [ -e "$run" ]; do
  run=${run%.*}.$number
  number=$((number + 1))
done

stage "4/4 train: one process on this machine for $budget"
if [ "$(id -u)" -eq 0 ]; then
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
# Unbound, or the one rank would be held on one core.
command=(mpirun -n 1 --bind-to none build/bin/cram_train --config configs/demo.toml
  "train.budget=$budget" "run.output=$run" ${overrides[@]+"${overrides[@]}"})
printf '%s\n' "${command[*]}"
"${command[@]}"

stage "done"
echo "corpus as rows   $shards"
echo "vocabulary       $tokenizer"
echo "the run          $run (config.toml, metrics.jsonl, logs/, checkpoints/)"
echo "train longer     launch/quickstart.sh --budget 10m"
echo "run the tests    launch/test.sh"
