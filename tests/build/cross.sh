#!/usr/bin/env bash
# Compiles every source of the extension with clang, for arm64 and x86-64 Linux, with a toolchain from a package (ziglang).
# Nothing of it is run here. Where the toolchain cannot be had, it says so and does nothing. Wants python, cmake and ninja
# on the PATH.
set -euo pipefail
cd "$(dirname "$0")/../.."

python -m ziglang version > /dev/null 2>&1 ||
    python -m pip install -q --disable-pip-version-check -c constraints.txt ziglang ||
    { echo "cross compilation is skipped: ziglang cannot be installed" >&2; exit 0; }

export ZIG_GLOBAL_CACHE_DIR=$PWD/build/zig-cache ZIG_LOCAL_CACHE_DIR=$PWD/build/zig-cache
python=$(command -v python)
for processor in aarch64 x86_64; do
    build=build/cross-$processor
    # Python's own headers are this machine's, which define a few macros otherwise
    cmake -S . -B $build -G Ninja -DCMAKE_CXX_COMPILER="$python;-m;ziglang;c++;-target;$processor-linux-gnu" \
        -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=$processor -DCMAKE_TRY_COMPILE_TARGET_TYPE=STATIC_LIBRARY \
        -DCMAKE_CXX_FLAGS='-Wno-macro-redefined -Werror' -DPython_EXECUTABLE="$python" > /dev/null
    mapfile -t objects < <(cd $build && ninja -t targets all | sed -n 's/^\(CMakeFiles.*csrc.*\.o\):.*/\1/p')
    ninja -k 0 --quiet -C $build "${objects[@]}"
    echo "compiled for $processor, not run: ${#objects[@]} objects"
done
