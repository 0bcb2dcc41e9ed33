#!/bin/sh
# Builds the stress program plain and with each sanitizer and runs it.
# Usage: comm/tests/stress.sh [BUILD_DIR]
set -eu
source_dir=$(cd "$(dirname "$0")/.." && pwd)
build_dir=${1:-$source_dir/build/stress}
for sanitizer in "" address thread; do
  dir=$build_dir/${sanitizer:-plain}
  cmake -S "$source_dir" -B "$dir" -G Ninja -DAFD_PYTHON=OFF -DAFD_STRESS=ON \
    -DAFD_SANITIZE="$sanitizer" -DCMAKE_BUILD_TYPE=RelWithDebInfo >/dev/null
  cmake --build "$dir" >/dev/null
  echo "== ${sanitizer:-plain}"
  "$dir/stress"
done
