#!/usr/bin/env bash
# Builds the kernels with AddressSanitizer and UndefinedBehaviorSanitizer and runs their tests, with few examples each;
# then drives the thread pool under ThreadSanitizer. Wants python, cmake and ninja on the PATH. Linux and GCC.
set -euo pipefail
cd "$(dirname "$0")/../.."
build=build/sanitize
site=$build/site # the package beside its sanitized extension, before everything else on the path
CXX=${CXX:-g++}

cmake -S . -B $build -G Ninja -DCMAKE_CXX_COMPILER="$CXX" -DPython_EXECUTABLE="$(command -v python)" \
    -DCMAKE_BUILD_TYPE=None -DOCTAVO_SANITIZE=address,undefined > /dev/null
cmake --build $build
rm -rf $site
mkdir $site
cp -rs "$PWD/octavo" $site/
find $site -name '_native*' -delete
cmake --install $build --prefix $site > /dev/null

runtimes=
for library in libasan.so libubsan.so libstdc++.so; do
    runtimes="$runtimes $("$CXX" -print-file-name=$library)"
done
export ASAN_OPTIONS=detect_leaks=0 HYPOTHESIS_PROFILE=short PYTHONPATH=$site
LD_PRELOAD=$runtimes python -P -c '
from octavo.ops.cpu import _native
assert "sanitize" in _native.__file__, _native.__file__'
LD_PRELOAD=$runtimes python -P -m pytest --capture=sys -o pythonpath="$site tests" -q tests/kernels -m 'not slow' "$@"

"$CXX" -std=c++20 -O1 -g -fsanitize=thread -Icsrc/cpu tests/kernels/native/thread_pool_test.cpp \
    csrc/cpu/thread_pool.cpp -pthread -o $build/thread_pool_test
TSAN_OPTIONS=die_after_fork=0 $build/thread_pool_test 6
