#!/bin/sh
# Builds the stress programs, without and with sanitizers, and runs them.
# Usage: comm/tests/stress.sh [KILLS] [BUILD_DIR] [BUILDS]
#   KILLS: killed processes per case, default 100; BUILDS: default "plain address thread"
set -eu
source_dir=$(cd "$(dirname "$0")/.." && pwd)
kills=${1:-100}
build_dir=${2:-$source_dir/build/stress}
builds=${3:-plain address thread}
export UBSAN_OPTIONS=halt_on_error=1
for name in $builds; do
  sanitizer=$name
  [ "$name" != plain ] || sanitizer=
  dir=$build_dir/$name
  cmake -S "$source_dir" -B "$dir" -DAFD_PYTHON=OFF -DAFD_STRESS=ON \
    -DAFD_SANITIZE="$sanitizer" -DCMAKE_BUILD_TYPE=RelWithDebInfo >/dev/null
  cmake --build "$dir" --target stress stress_verbs stress_proxy fake_ibverbs -j 2 >/dev/null
  echo "== $name"
  "$dir/stress" "$kills"
  "$dir/stress_verbs" "$dir/libfake_ibverbs.so"
  "$dir/stress_proxy" "$dir/libfake_ibverbs.so"
done
