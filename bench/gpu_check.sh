#!/usr/bin/env bash
# One table about this program on a machine with one NVIDIA GPU: is it right there (kernels, parity with the CPU, NCCL,
# ranks that share the GPU, a real run and its resume), and how fast (training steps beside PyTorch's, kernels).
#
# Two parts. --bundle DIR, where the program was built, makes a folder that can be carried away. DIR/bench/gpu_check.sh then
# runs on a machine that has a driver and a Python with the same PyTorch, and needs nothing else: no network, MPI, HDF5,
# sentencepiece or compiler (PyTorch's compiled mode needs a C compiler; without one its rows say so).
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: bench/gpu_check.sh --bundle DIR [--size MIB]   make the bundle from build/ (CRAM_BUILD: another build folder);
                                               more than MIB (default 60) is an error
       DIR/bench/gpu_check.sh [options]         run it, from any working directory
  --cpu            rehearse on the CPU, with a small model
  --quick          with --cpu: tiny models and seconds; shows that every row runs, not how fast
  --only ROW,...   only the rows whose names begin so (rows: see the table)
  --limit SECONDS  time for all rows together (default 480); rows that no longer fit say "skipped"
  --peak TFLOPS    dense bf16 peak for MFU (default: by the GPU's name)
Writes gpu_check.txt and gpu_check_logs.tar.gz (the output of every row) to the folder $OUT, else to the working directory.
CRAM_PYTHON is the Python to use (default: the checkout's .venv, else python3). Exit code: 0 no row failed, 1 some did, 2 it could not start.
TEXT
}
die() { echo "gpu_check: $*" >&2; exit 2; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${CRAM_PYTHON:-$([ -x "$root/.venv/bin/python" ] && echo "$root/.venv/bin/python" || echo python3)}

bundle="" size=60 device=cuda quick=false only="" limit=480 peak=""
while [ $# -gt 0 ]; do
  case $1 in
    --cpu) device=cpu; shift; continue ;;
    --quick) quick=true; shift; continue ;;
    -h | --help) usage; exit 0 ;;
    --bundle | --size | --only | --limit | --peak) [ $# -ge 2 ] || { usage >&2; die "$1 needs a value"; } ;;
    *) usage >&2; die "unknown argument $1" ;;
  esac
  case $1 in
    --bundle) bundle=$2 ;;
    --size) size=$2 ;;
    --only) only=$2 ;;
    --limit) limit=$2 ;;
    --peak) peak=$2 ;;
  esac
  shift 2
done
[[ $size =~ ^[1-9][0-9]*$ ]] || die "--size $size: expected MiB"
[[ $limit =~ ^[1-9][0-9]*$ ]] || die "--limit $limit: expected seconds"
[[ $peak =~ ^[0-9.]*$ ]] || die "--peak $peak: expected TFLOP/s"
if $quick && [ $device != cpu ]; then die "--quick measures nothing: it goes with --cpu"; fi

# What LibTorch needs, and what this PyTorch says about itself. Sets torch_path and the variables below.
ask_python() {
  local answer
  answer=$("$python" - 2>&1 <<'PY'
import os, shutil, sys, sysconfig
import torch
lib = os.path.join(os.path.dirname(torch.__file__), "lib")
folders = [lib]
try:
    import nvidia
    for base in nvidia.__path__:
        folders += sorted(os.path.join(base, name, "lib") for name in os.listdir(base))
except ImportError:
    folders += ["/usr/local/cuda/lib64"]
compiler = next((name for name in (os.environ.get("CC"), "gcc", "cc", "clang") if name and shutil.which(name)), "")
cxx = next((name for name in (os.environ.get("CXX"), "g++", "c++", "clang++") if name and shutil.which(name)), "")
header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
gpu = torch.cuda.is_available()
print("ANSWER", torch.__version__, torch.version.cuda or "none", "%d.%d" % sys.version_info[:2], compiler or "none",
      cxx or "none", "yes" if os.path.exists(header) else "no", "yes" if gpu else "no", sep="|")
print("PATH|" + ":".join(f for f in folders if os.path.isdir(f)))
print("GPU|" + (torch.cuda.get_device_name(0) if gpu else "none"))
PY
  ) || { echo "$answer" >&2; die "expected a Python with PyTorch, got the error above from $python: name another with CRAM_PYTHON"; }
  IFS='|' read -r _ torch_version torch_cuda python_version c_compiler cxx_compiler python_header has_gpu \
    <<< "$(grep '^ANSWER|' <<< "$answer")"
  torch_path=$(sed -n 's/^PATH|//p' <<< "$answer")
  gpu_name=$(sed -n 's/^GPU|//p' <<< "$answer")
}

# ---- the bundle ----

make_bundle() {
  local build=${CRAM_BUILD:-$root/build} before
  [ -f "$build/cmake_install.cmake" ] || die "$build is not built: cmake --preset release && cmake --build --preset release"
  if [ -e "$bundle" ]; then
    [ -f "$bundle/bundle.txt" ] || [ -z "$(ls -A "$bundle")" ] || die "$bundle exists and is no bundle: name another folder"
    rm -rf "$bundle"
  fi
  mkdir -p "$bundle"
  bundle=$(cd "$bundle" && pwd)
  : > "$bundle/bundle.txt"  # so that a bundle that was left unfinished may be made again
  local log=$bundle/install.log
  cmake --install "$build" --component gpu_check --prefix "$bundle" --strip > "$log" 2>&1 ||
    { tail -n 5 "$log" >&2; die "installing the component gpu_check failed: are all programs and tests built?"; }
  rm "$log"
  ask_python
  export LD_LIBRARY_PATH=$bundle/lib:$torch_path
  # The demo corpus as the quickstart prepares it.
  log=$(mktemp)
  {
    "$bundle/bin/cram_data" tokenizer --input "$root/data/demo" --output "$bundle/tokenizer" --vocab-size 4096 &&
      "$bundle/bin/cram_data" pack --input "$root/data/demo" --tokenizer "$bundle/tokenizer" --output "$bundle/shards" \
        --seq-length 128 --validation 0.08
  } < /dev/null > "$log" 2>&1 || { tail -n 5 "$log" >&2; die "preparing the corpus failed"; }
  rm "$log"
  # glibc: the newest version of a symbol that anything here asks for. A loader of an older one refuses.
  local glibc
  glibc=$(find "$bundle/bin" "$bundle/tests" "$bundle/lib" -type f -print0 | { xargs -0 -n 1 objdump -T 2> /dev/null || true; } |
    grep -o 'GLIBC_2\.[0-9]*' | sort -uV | tail -n 1)
  {
    "$bundle/bin/cram_train" --version | head -n 1
    echo "torch ${torch_version%%+*}"
    echo "cuda $(ldd "$bundle/bin/cram_train" | grep -q libtorch_cuda && echo "$torch_cuda" || echo none)"
    echo "glibc ${glibc#GLIBC_}"
  } > "$bundle/bundle.txt"
  before=$(du -sk --apparent-size "$bundle" | cut -f1)
  printf 'bundle %s: %d files, %d KiB (programs %d, tests %d, libraries %d, corpus %d)\n' "$bundle" \
    "$(find "$bundle" -type f | wc -l)" "$before" "$(kib bin)" "$(kib tests)" "$(kib lib)" "$(kib shards)"
  cat "$bundle/bundle.txt"
  [ "$before" -lt $((size * 1024)) ] ||
    die "expected a bundle under $size MiB, got $((before / 1024)) MiB: leave out a test, or check that programs are stripped"
  echo "RESULT bundle_kib=$before"
}
kib() { du -sk --apparent-size "$bundle/$1" | cut -f1; }

if [ -n "$bundle" ]; then
  make_bundle
  exit 0
fi

# ---- the check ----

grep -qs '^glibc ' "$root/bundle.txt" || die "$root is no finished bundle: bench/gpu_check.sh --bundle DIR makes one, then run DIR/bench/gpu_check.sh"
started=$SECONDS
ask_python
of_bundle() { sed -n "s/^$1 //p" "$root/bundle.txt"; }
[ "${torch_version%%+*}" = "$(of_bundle torch)" ] ||
  die "expected PyTorch $(of_bundle torch), which the programs were built with, got $torch_version: name another Python with CRAM_PYTHON"
glibc=$(getconf GNU_LIBC_VERSION 2> /dev/null | sed 's/^glibc //') || glibc=""
[ -z "$glibc" ] || [ "$(printf '%s\n%s\n' "$(of_bundle glibc)" "$glibc" | sort -V | head -n 1)" = "$(of_bundle glibc)" ] ||
  die "expected glibc $(of_bundle glibc) or newer, got $glibc: make the bundle on an older system"
if [ $device = cuda ]; then
  [ "$has_gpu" = yes ] || die "PyTorch sees no GPU: check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES, or rehearse with --cpu"
  [ "$(of_bundle cuda)" != none ] || die "the bundle was built without CUDA: configure with -DCRAM_CUDA=ON"
  [ "${torch_cuda%%.*}" = "$(of_bundle cuda | cut -d. -f1)" ] ||
    die "expected a PyTorch for CUDA $(of_bundle cuda), got one for CUDA $torch_cuda: name another Python with CRAM_PYTHON"
fi

out=${OUT:-$PWD}
mkdir -p "$out"
out=$(cd "$out" && pwd)
logs=$out/gpu_check_logs
report=$out/gpu_check.txt
rm -rf "$logs"
mkdir "$logs"
: > "$report"
work=$(mktemp -d)
background=""
clean_up() {
  [ -z "$background" ] || kill -KILL "$background" 2> /dev/null || true
  rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

# Ours come first: see cmake/cram_gpu_check.cmake. What was set already comes last (a driver's folder in a container). Only
# for our programs: Python must not get our libz or libstdc++.
library_path=$root/lib:$torch_path${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
export CRAM_TEST_DEVICE=$device
# A rehearsal shares its machine, where threads that spin while they wait take many times as long.
if [ $device = cpu ]; then export OMP_WAIT_POLICY=passive; fi
# A launcher's variables would make the programs start MPI.
for name in ${!OMPI_*} ${!SLURM_*} ${!PMI_*}; do unset "$name"; done

deadline=$((started + limit - 10))  # the rest is for stopping the last row and for packing
row_end=$deadline
ok=0 failed=0 skipped=0 unavailable=0
detail=""

say() { printf '%s\n' "$*" | tee -a "$report"; }
print_row() { say "$(printf '%-22s %-13s %4ds  %s' "$1" "$2" "$3" "$4")"; }

chosen() {
  [ -n "$only" ] || return 0
  local name
  for name in ${only//,/ }; do
    case $1 in "$name"*) return 0 ;; esac
  done
  return 1
}

# row NAME LIMIT LEAST FUNCTION ARGS...: runs a row for at most LIMIT seconds, unless fewer than LEAST are left. The function
# sets `detail`; it returns 0 (ok), 3 (not available), anything else (failed).
row() {
  local name=$1 row_limit=$2 least=$3 from=$SECONDS status=0
  shift 3
  chosen "$name" || return 0
  detail=""
  if [ $((deadline - SECONDS)) -lt "$least" ]; then
    skipped=$((skipped + 1))
    print_row "$name" skipped 0 "out of time"
    return 0
  fi
  row_end=$((SECONDS + row_limit < deadline ? SECONDS + row_limit : deadline))
  current=$name
  "$@" || status=$?
  local took=$((SECONDS - from))
  if [ "$status" -eq 0 ]; then
    ok=$((ok + 1))
    print_row "$name" ok "$took" "$detail"
  elif [ $SECONDS -ge "$deadline" ]; then
    skipped=$((skipped + 1))
    print_row "$name" skipped "$took" "out of time"
  elif [ "$status" -eq 3 ]; then
    unavailable=$((unavailable + 1))
    print_row "$name" "not available" "$took" "$detail"
  else
    failed=$((failed + 1))
    print_row "$name" FAILED "$took" "$detail"
  fi
}

# limited LOG COMMAND...: within the row's time. What went wrong is left in `detail`.
limited() {
  local log=$logs/$current${1:+.$1}.log left=$((row_end - SECONDS)) status=0 program
  shift
  last_log=$log
  program=$(basename "$1")
  if [ "$1" = env ]; then program=$(basename "$3"); fi
  [ $left -gt 0 ] || { detail="out of time before $program"; return 124; }
  timeout -k 5 $left "$@" < /dev/null > "$log" 2>&1 || status=$?
  [ $status -eq 0 ] || explain "$program" $status "$log"
  return $status
}
explain() {
  local line
  line=$(grep -v '^[[:space:]]*$' "$3" | tail -n 1 | cut -c 1-160) || line=""
  case $2 in
    124 | 137) detail="$1: not done within the row's time: $line" ;;
    *) detail="$1: exit code $2: $line" ;;
  esac
}
# ours LOG PROGRAM ARGS...
ours() {
  local log=$1 program=$2
  shift 2
  limited "$log" env "LD_LIBRARY_PATH=$library_path" "$root/$program" "$@"
}
figure() { sed -n "s/^RESULT.*[ ]$1=\([^ ]*\).*/\1/p" "$last_log" | tail -n 1; }
holds() { awk "BEGIN { exit !($1) }"; }
calculate() { awk "BEGIN { printf \"$1\", $2 }"; }

# Every library is found, and those that are carried are the ones that are used.
libraries_row() {
  local program name where bad="" seen=$logs/libraries.txt
  : > "$seen"
  for program in "$root"/bin/* "$root"/tests/*; do
    [ -f "$program" ] || continue
    LD_LIBRARY_PATH=$library_path ldd "$program" >> "$seen" 2>&1 || { detail="ldd cannot read $program"; return 1; }
  done
  while read -r name where; do
    case $where in
      "not found"*) bad+=" $name is not found" ;;
      "$root"/lib/*) ;;
      *) [ ! -e "$root/lib/$name" ] || bad+=" $name comes from ${where%% *}" ;;
    esac
  done < <(sed -n 's/^[[:space:]]*\([^ ]*\) => \(.*\)/\1 \2/p' "$seen" | sed 's/ (0x[0-9a-f]*)$//' | sort -u)
  [ -z "$bad" ] || { detail="expected every library in the bundle or in PyTorch, got:$bad"; return 1; }
  detail="$(find "$root/lib" -type f | wc -l) carried, PyTorch's from ${torch_path%%:*}"
}

# gtest LOG PROGRAM ARGS...: a skipped test is a failed one where there is a GPU.
gtest() {
  local status=0 passed left_out first
  ours "$@" || status=$?
  if [ $status -ne 0 ]; then
    first=$(sed -n 's/^\[  FAILED  \] \([^ ,]*\).*/\1/p' "$last_log" | head -n 1)
    [ -z "$first" ] || detail="$(basename "$2"): $first"
    return 1
  fi
  passed=$(sed -n 's/^\[  PASSED  \] \([0-9]*\) test.*/\1/p' "$last_log")
  left_out=$(sed -n 's/^\[  SKIPPED \] \([0-9]*\) test.*/\1/p' "$last_log")
  detail="$(basename "$2"): ${passed:-0} passed${left_out:+, $left_out skipped}"
  [ "${passed:-0}" -gt 0 ] || { detail+=": expected at least one test to run"; return 1; }
  [ -z "$left_out" ] || [ $device = cpu ] || [ "$2" = tests/fused_kernels_test ] || { detail+=": expected none to be skipped on a GPU"; return 1; }
}

oracles_row() {
  local program all="" of_gpu=""
  if [ $device = cuda ]; then of_gpu="cuda_kernels_test cuda_step_test"; fi
  for program in $of_gpu fused_kernels_test kernels_test; do
    # Fused kernels of the CPU skip what its instruction set does not have, on any machine.
    gtest "$program" "tests/$program" || return 1
    all+="${all:+; }$detail"
  done
  detail=$all
}

parity_tests_row() {
  local filter="*"
  if $quick; then filter="-*Widths*"; fi
  gtest "" tests/device_parity_test "--gtest_filter=$filter" || return 1
  detail+="; $(sed -n '/^fp32\|^bf16/ { s/ ([^)]*)//; p }' "$last_log" | paste -sd';' | sed 's/;/; /g')"
}

# The same steps of the demo model on the CPU and on the device. On a CPU, the second run has smaller micro-batches, so that
# it does not compare a run with itself.
parity_run_row() {
  local precision=$1 loss=$2 norm=$3 weights=$4 micro=32 side steps=20 smaller=() loss_err norm_err weights_err
  if [ $device = cpu ]; then steps=8; fi
  if $quick; then steps=4 smaller=(model.layers=2 model.hidden=128 model.ffn=512 model.heads=2 run.threads=1); fi
  for side in cpu device; do
    if [ $side = device ] && [ $device = cpu ]; then micro=8; fi
    ours "$side" bin/cram_train --config "$root/configs/demo.toml" "data.shards=$root/shards" "run.output=$work/parity-$precision-$side" \
      "run.device=$([ $side = cpu ] && echo cpu || echo $device)" "train.precision=$precision" "train.budget=${steps}steps" \
      "train.micro_batch_size=$micro" eval.rows=32 eval.every=0steps checkpoint.every=0steps \
      ${smaller[@]+"${smaller[@]}"} || return 1
  done
  ours compare bin/cram_bench compare "$work/parity-$precision-cpu" "$work/parity-$precision-device" || return 1
  loss_err=$(figure loss_err) norm_err=$(figure grad_norm_err) weights_err=$(figure weights_err)
  detail="$steps steps: loss $loss_err (<= $loss), gradient norm $norm_err (<= $norm), parameters $weights_err (<= $weights)"
  holds "$loss_err <= $loss && $norm_err <= $norm && $weights_err <= $weights"
}

nccl_row() { gtest "" tests/nccl_test; }

# Two ranks as threads, fp64 and fp32, against one rank: losses, raw gradients, parameters.
layouts_row() {
  local fp64="*TrainsLikeOneRankInFp64" fp32="*TrainsLikeOneRankInFp32" filter="" layout precision
  for layout in "$@"; do
    for precision in "$fp64" "$fp32"; do filter+="${filter:+:}$precision/?_$layout"; done
  done
  gtest "" tests/training_layouts_test "--gtest_filter=$filter"
}

# A run that is told to stop before its end, and the same command again.
train_options() {
  train_command=("data.shards=$root/shards" "run.output=$work/run" "run.device=$device" eval.every=0steps)
  if [ $device = cuda ]; then
    train_command+=(train.budget=60s eval.rows=256 log.every=5s)
    train_s=45
  elif $quick; then
    train_command+=(--config "$root/configs/demo.toml" train.budget=5s model.layers=2 model.hidden=64 model.ffn=256 run.threads=1
      train.micro_batch_size=16 eval.rows=16 log.every=1s)
    train_s=2
  else
    train_command+=(--config "$root/configs/demo.toml" train.budget=20s train.micro_batch_size=16 eval.rows=64 log.every=5s)
    train_s=12
  fi
}
# run_figures: step, first and last loss, median tokens/s, attempts, held-out loss of the run so far.
run_figures() {
  "$python" - "$work/run/metrics.jsonl" <<'PY'
import json, statistics, sys
lines = [json.loads(line) for line in open(sys.argv[1])]
train = [line for line in lines if line["kind"] == "train"]
summary = [line for line in lines if line["kind"] == "summary"]
later = [line["tokens_per_s"] for line in train[len(train) // 2:]]
steps = [line["step"] for line in train]
print(steps[-1], "%.4f" % train[0]["loss"], "%.4f" % train[-1]["loss"], "%.0f" % statistics.median(later),
      train[-1]["attempt"], "yes" if steps == list(range(1, steps[-1] + 1)) else "no",
      "%.4f" % summary[-1]["eval_loss"] if summary and summary[-1].get("eval_loss") is not None else "none")
PY
}
train_row() {
  local status=0 log=$logs/$current.log started_at=$SECONDS
  train_options
  timeout -k 10 $((row_end - SECONDS)) env "LD_LIBRARY_PATH=$library_path" "$root/bin/cram_train" "${train_command[@]}" \
    < /dev/null > "$log" 2>&1 &
  background=$!
  # Its clock starts with the first step.
  until grep -q '"kind":"train"' "$work/run/metrics.jsonl" 2> /dev/null || ! kill -0 $background 2> /dev/null; do sleep 0.2; done
  started_at=$SECONDS
  while [ $((SECONDS - started_at)) -lt $train_s ] && kill -0 $background 2> /dev/null; do sleep 0.2; done
  kill -TERM $background 2> /dev/null || true
  wait $background || status=$?
  background=""
  cp "$work/run/metrics.jsonl" "$logs/$current.metrics.jsonl" 2> /dev/null || true
  if [ $status -ne 75 ]; then
    explain cram_train $status "$log"
    detail="expected exit code 75 after SIGTERM: $detail"
    return 1
  fi
  read -r steps first last rate _ complete _ <<< "$(run_figures)"
  [ -n "$(ls -A "$work/run/checkpoints")" ] || { detail="no checkpoint was saved"; return 1; }
  detail="stopped by SIGTERM at step $steps, loss $first -> $last, $rate tokens/s, checkpoint $(basename "$(find "$work/run/checkpoints" -mindepth 1 -maxdepth 1 | sort | tail -n 1)")"
  stopped_at=$steps
  holds "$last < $first" && [ "$complete" = yes ]
}
resume_row() {
  local steps first last rate attempt complete held_out
  [ -n "${stopped_at:-}" ] || { detail="the run to resume failed"; return 1; }
  ours "" bin/cram_train "${train_command[@]}" || return 1
  cp "$work/run/metrics.jsonl" "$logs/$current.metrics.jsonl"
  read -r steps first last rate attempt complete held_out <<< "$(run_figures)"
  detail="from step $stopped_at to $steps, loss $last, held-out loss $held_out, attempt $attempt"
  [ "$steps" -gt "$stopped_at" ] || { detail+=": expected more steps"; return 1; }
  # Each step once: the save on SIGTERM lost none.
  [ "$complete" = yes ] || { detail+=": expected every step once"; return 1; }
  holds "$last < $first"
}

# ---- speed ----

vocabulary=32768 layers=16 hidden=768 heads=12 ffn=3072 seconds=2 accumulation=4
batches="256 1024 512 128 64" compiled_first=256
if [ $device = cpu ]; then
  vocabulary=4096 layers=4 hidden=256 heads=4 ffn=1024 seconds=2 accumulation=1 batches="16 8" compiled_first=16
fi
if $quick; then
  vocabulary=512 layers=1 hidden=64 heads=2 ffn=128 seconds=0.2
  export OMP_NUM_THREADS=1
fi
model=("model.layers=$layers" "model.hidden=$hidden" "model.heads=$heads" "model.ffn=$ffn" "model.vocab_size=$vocabulary"
  model.seq_length=128 "run.device=$device" train.precision=bf16)
if $quick; then model+=(run.threads=1); fi
if [ -z "$peak" ]; then
  case $gpu_name in
    *H200* | *"H100 80GB HBM3"*) peak=989.4 ;;
    *"H100 PCIe"*) peak=756.5 ;;
    *B200*) peak=2250 ;;
    *A100*) peak=311.9 ;;
  esac
fi
graphs=none
if [ $device = cuda ] && LD_LIBRARY_PATH=$library_path "$root/bin/cram_train" --print-config 2> /dev/null | grep -q '^cuda_graph *='; then
  graphs="off on"
fi
declare -A best_ours best_peer
worst_ratio="" top_rate=0 top_mfu="-" flops_per_token=""

kernels_row() {
  ours "" bin/cram_bench kernels "${model[@]}" "train.micro_batch_size=$([ $device = cuda ] && echo 128 || echo 8)" || return 1
  detail="copy $(figure copy_GBps) GB/s; own against composed: $(sed -n 's/^RESULT //p' "$last_log" | tr ' ' '\n' |
    sed -n 's/^\(.*\)_ratio=\(.*\)/\1 \2/p' | paste -sd, | sed 's/,/, /g')"
}

# mfu_of RATE [MEASURED]: by --peak or the GPU's name, else what cram_bench says.
mfu_of() {
  if [ -n "${2:-}" ] && [ -z "$peak" ]; then
    calculate "%.3f" "$2"
  elif [ -n "$peak" ] && [ -n "$flops_per_token" ]; then calculate "%.3f" "$1 * $flops_per_token / ($peak * 1e12)"; else echo -; fi
}
ratio_of() {  # ratio_of MICRO: ours / PyTorch's, the best of each so far
  if [ -n "${best_ours[$1]:-}" ] && [ -n "${best_peer[$1]:-}" ]; then calculate "%.3f" "${best_ours[$1]} / ${best_peer[$1]}"; fi
}
step_row() {
  local micro=$1 graph=$2 options=() rate mfu
  [ "$graph" = none ] || options=("run.cuda_graph=$graph")
  ours "" bin/cram_bench step --seconds $seconds "${model[@]}" ${options[@]+"${options[@]}"} "train.micro_batch_size=$micro" \
    "train.batch_size=$((micro * accumulation))" || return 1
  rate=$(figure tokens_per_s)
  flops_per_token=$(calculate "%.8g" "$(figure model_gflops) * 1e9 / $rate")
  if holds "${best_ours[$micro]:-0} < $rate"; then best_ours[$micro]=$rate; fi
  mfu=$(mfu_of "$rate" "$(figure mfu)")
  if holds "$top_rate < $rate"; then top_rate=$rate top_mfu=$mfu; fi
  detail="$(calculate "%.0f" "$rate") tokens/s, MFU $mfu, step $(figure step_ms) ms, of the speed of its products $(figure gemm_bound_fraction)"
}
torch_row() {
  local micro=$1 kind=$2 status=0 rate
  if [ "$kind" = compiled ]; then
    # Triton compiles its launchers with a C compiler and Python.h; the CPU's code is C++.
    if [ $device = cuda ] && [ "$c_compiler" = none ]; then detail="no C compiler"; return 3; fi
    if [ $device = cpu ] && [ "$cxx_compiler" = none ]; then detail="no C++ compiler"; return 3; fi
    if [ "$python_header" = no ]; then detail="Python.h is missing"; return 3; fi
  fi
  limited "" env "TORCHINDUCTOR_CACHE_DIR=$work/inductor" "$python" -B "$root/bench/torch_step.py" --device $device \
    --mode "$kind-bf16" --seconds $seconds --layers $layers --hidden $hidden --heads $heads --ffn $ffn --vocab $vocabulary \
    --micro-batch "$micro" --accumulation $accumulation || status=$?
  if [ $status -eq 33 ]; then detail="out of GPU memory"; return 3; fi
  if [ $status -ne 0 ] && [ "$kind" = compiled ]; then return 3; fi
  [ $status -eq 0 ] || return 1
  rate=$(figure tokens_per_s)
  if holds "${best_peer[$micro]:-0} < $rate"; then best_peer[$micro]=$rate; fi
  detail="$(calculate "%.0f" "$rate") tokens/s, MFU $(mfu_of "$rate"), warm-up $(figure warm_up_s) s; ours / PyTorch $(ratio_of "$micro")"
}
steps_of() {  # steps_of MICRO: ours and PyTorch's, interleaved
  local micro=$1 graph
  for graph in $graphs; do
    row "step-$micro$([ "$graph" = none ] || echo "-graph-$graph")" 60 12 step_row "$micro" "$graph"
    if [ "$graph" != on ]; then
      row "torch-$micro-eager" 60 12 torch_row "$micro" eager
      if [ "$micro" = $compiled_first ]; then row "torch-$micro-compiled" 120 20 torch_row "$micro" compiled; fi
    fi
  done
}

# ---- the table ----

{
  echo "host $(uname -srm), $(nproc) processors, $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)"
  echo "glibc ${glibc:-unknown}, Python $python_version, PyTorch $torch_version (CUDA $torch_cuda), C compiler $c_compiler"
  cat "$root/bundle.txt"
  if command -v nvidia-smi > /dev/null; then nvidia-smi || true; fi
} > "$logs/machine.log" 2>&1
say "gpu_check: $([ $device = cuda ] && echo "$gpu_name" || echo "CPU rehearsal") | $(head -n 1 "$root/bundle.txt") | PyTorch $torch_version, Python $python_version | $(nproc) processors"
say "$(printf '%-22s %-13s %5s  %s' row result time detail)"

row libraries 60 5 libraries_row
row oracles 60 10 oracles_row
row parity-tests 90 10 parity_tests_row
row parity-fp32 60 10 parity_run_row fp32 1e-5 1e-4 1e-3
row parity-bf16 60 10 parity_run_row bf16 1e-2 3.6e-2 3e-2
row nccl 60 5 nccl_row
row ranks-tp2 60 10 layouts_row tp2 tp2_sp
row ranks-pp2 60 10 layouts_row pp2
row train 110 20 train_row
row resume 60 10 resume_row
row kernels 60 10 kernels_row
for micro in $batches; do steps_of "$micro"; done
for micro in $batches; do
  # Compiling takes most of the time that is left, so these come last; --quick has seen it once already.
  if [ "$micro" != $compiled_first ] && ! $quick; then row "torch-$micro-compiled" 120 30 torch_row "$micro" compiled; fi
done

ratios=""
for micro in $batches; do
  ratio=$(ratio_of "$micro")
  [ -n "$ratio" ] || continue
  ratios+="${ratios:+, }$ratio at $micro"
  if [ -z "$worst_ratio" ] || holds "$ratio < $worst_ratio"; then worst_ratio=$ratio; fi
done
[ -z "$ratios" ] || say "ours / PyTorch, the best of each, by micro-batch: $ratios"
[ $((ok + failed + skipped + unavailable)) -gt 0 ] || die "--only $only: no row begins so"
say "RESULT ok=$ok failed=$failed skipped=$skipped unavailable=$unavailable seconds=$((SECONDS - started)) best_tokens_per_s=$(calculate "%.0f" "$top_rate") best_mfu=$top_mfu worst_ratio_to_pytorch=${worst_ratio:--}"

cp "$report" "$logs/"
# Long logs keep their ends: what went wrong stands there.
find "$logs" -type f -size +2M -print0 | while IFS= read -r -d '' file; do
  tail -c 1000000 "$file" > "$file.end"
  mv "$file.end" "$file"
done
tar -C "$out" -czf "$out/gpu_check_logs.tar.gz" gpu_check_logs
[ "$(stat -c %s "$out/gpu_check_logs.tar.gz")" -lt 10000000 ] || die "expected logs under 10 MB, got $(du -h "$out/gpu_check_logs.tar.gz" | cut -f1)"
[ $failed -eq 0 ]
