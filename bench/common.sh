# Sourced by the scripts here: where programs are, how ranks are started, a scratch folder that goes with the script.
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bin=${CRAM_BUILD:-$here/build}/bin
for program in cram_data cram_train cram_bench; do
  [ -x "$bin/$program" ] || { echo "bench: $bin/$program is not built: cmake --preset release && cmake --build --preset release" >&2; exit 2; }
done
# need_python: sets `python` to one with PyTorch, launch/bootstrap.sh's unless CRAM_PYTHON names another.
need_python() {
  python=${CRAM_PYTHON:-$here/.venv/bin/python}
  "$python" -c 'import torch' 2> /dev/null ||
    { echo "bench: $python has no PyTorch: run launch/bootstrap.sh, or name one that has in CRAM_PYTHON" >&2; exit 2; }
}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

if [ "$(id -u)" -eq 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
# More ranks than processors: who waits must let the others run.
export OMPI_MCA_mpi_yield_when_idle=1 OMP_NUM_THREADS=1

# on_ranks N PROGRAM ARGS...
on_ranks() {
  local ranks=$1 program=$2
  shift 2
  if [ "$ranks" -eq 1 ]; then "$bin/$program" "$@"; else mpirun --oversubscribe --bind-to none -n "$ranks" "$bin/$program" "$@"; fi
}

# shards_from TEXT FOLDER VOCABULARY LENGTH: real text as rows.
shards_from() {
  "$bin/cram_data" tokenizer --input "$1" --output "$2-tokenizer" --vocab-size "$3" > "$scratch/tokenizer.log" ||
    { cat "$scratch/tokenizer.log" >&2; exit 1; }
  "$bin/cram_data" pack --input "$1" --tokenizer "$2-tokenizer" --output "$2" --seq-length "$4" > "$scratch/pack.log" ||
    { cat "$scratch/pack.log" >&2; exit 1; }
}

# figure LINE KEY: the value of KEY=... in a RESULT line.
figure() { sed -n "s/.*[ ]$2=\([^ ]*\).*/\1/p" <<< "$1"; }
larger() { awk -v a="$1" -v b="$2" 'BEGIN { print (b > a) ? b : a }'; }
