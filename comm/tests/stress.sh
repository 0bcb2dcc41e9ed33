#!/bin/sh
# Builds the stress program plain and with each sanitizer and runs it.
# Usage: comm/tests/stress.sh [KILLS] [BUILD_DIR]    (100 kills of each kind unless told; CI: 20)
set -eu
source_dir=$(cd "$(dirname "$0")/.." && pwd)
kills=${1:-100}
build_dir=${2:-$source_dir/build/stress}
export UBSAN_OPTIONS=halt_on_error=1
for sanitizer in "" address thread; do
  dir=$build_dir/${sanitizer:-plain}
  cmake -S "$source_dir" -B "$dir" -DAFD_PYTHON=OFF -DAFD_STRESS=ON \
    -DAFD_SANITIZE="$sanitizer" -DCMAKE_BUILD_TYPE=RelWithDebInfo >/dev/null
  cmake --build "$dir" --target stress stress_verbs fake_ibverbs -j 2 >/dev/null
  echo "== ${sanitizer:-plain}"
  "$dir/stress" "$kills"
  "$dir/stress_verbs" "$dir/libfake_ibverbs.so"
done
