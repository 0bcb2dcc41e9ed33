#!/bin/sh
# Fuzzes every parser of untrusted bytes, with address and undefined-behaviour sanitizers.
# With clang: coverage-guided by libFuzzer. Without clang: random mutations of the corpus.
# Usage: comm/tests/fuzz.sh [RUNS] [BUILD_DIR]
#   RUNS: number of inputs, default 1000000 (CI: 50000)
set -eu
source_dir=$(cd "$(dirname "$0")/.." && pwd)
runs=${1:-1000000}
build_dir=${2:-$source_dir/build/stress/address}
clang=$(command -v clang++ || command -v clang++-19 || command -v clang++-14 || true)
# gcc shares the build folder of stress.sh; clang needs its own, because it instruments for libFuzzer
build_dir=$build_dir${clang:+/clang}
cmake -S "$source_dir" -B "$build_dir" ${clang:+-DCMAKE_CXX_COMPILER="$clang"} -DAFD_PYTHON=OFF \
  -DAFD_FUZZ=ON -DAFD_SANITIZE=address -DCMAKE_BUILD_TYPE=RelWithDebInfo >/dev/null
cmake --build "$build_dir" --target fuzz >/dev/null
export UBSAN_OPTIONS=halt_on_error=1
corpus=$source_dir/tests/corpus
if [ -n "$clang" ]; then
  mkdir -p "$build_dir/corpus" # libFuzzer writes new inputs here; the committed corpus is only read
  exec "$build_dir/fuzz" -runs="$runs" -max_len=2048 -timeout=5 -seed=1 -print_final_stats=1 \
    -use_value_profile=1 -verbosity=0 "$build_dir/corpus" "$corpus"
fi
echo "clang not found: fuzzing without coverage guidance"
exec "$build_dir/fuzz" "$corpus" "$runs"
