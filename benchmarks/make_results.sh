#!/bin/sh
# Everything under benchmarks/results, measured anew: numbers as JSON, pictures as PNG.
#
#     benchmarks/make_results.sh                # the steps there are
#     benchmarks/make_results.sh envs           # once: environments of the other engines, in $ENVS
#     benchmarks/make_results.sh compare sweep  # these steps
#     benchmarks/make_results.sh all            # all but envs and context-32k
#
# Each step takes less than six minutes on two quiet cores; context-32k takes about ten. The compare steps measure one
# round, and another one each time they are run: delete their JSON file to begin anew.
#
# PYTHON=python MODEL=smollm2 ENVS=build/rivals OUT=benchmarks/results; QUICK=1: tiny sizes, to see that everything runs.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python} MODEL=${MODEL:-smollm2} ENVS=${ENVS:-build/rivals} OUT=${OUT:-benchmarks/results} QUICK=${QUICK:-}
THREADS=${THREADS:-$("$PYTHON" -c 'from octavo.config.machine import detect; print(detect().num_cores)')}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$OUT"

bench() { "$PYTHON" -m octavo.entrypoints.cli.main bench "$@"; }

# size FULL SMALL: the small one if it is to be quick
size() { if [ -n "$QUICK" ]; then echo "$2"; else echo "$1"; fi; }

# kept NAME: where a step's numbers and picture go
kept() { echo "--output-json $OUT/$1.json --plot $OUT/$1.png"; }

# compared NAME OPTIONS: a round, added to those there are
compared() {
    name=$1
    shift
    set -- "$@" --model "$MODEL" --num-threads "$THREADS" --rounds 1
    for rival in llama-cpp openvino; do
        case " $* " in *" --rivals $rival "* | *" $rival "*)
            if [ -d "$ENVS/$rival" ]; then set -- "$@" --env "$rival=$ENVS/$rival"; fi ;;
        esac
    done
    if [ -f "$OUT/$name.json" ]; then set -- "$@" --add-to "$OUT/$name.json"; fi
    # shellcheck disable=SC2046
    bench compare "$@" $(kept "$name")
}

step() {
    echo "== $1" >&2
    engine="--model $MODEL --num-threads $THREADS --dtype float32"
    few_bits="--dtype bfloat16 --quantization gguf --kv-cache-dtype int8 --kv-cache-memory 192MiB"
    few_bits="$few_bits --rivals llama-cpp openvino"
    # shellcheck disable=SC2046,SC2086
    case $1 in
    envs)
        for rival in llama-cpp openvino; do bench rival-env "$rival" "$ENVS/$rival"; done ;;
    compare | compare-bfloat16) # metric x engine
        dtype=float32
        if [ "$1" = compare-bfloat16 ]; then dtype=bfloat16; fi
        compared "$1" --dtype $dtype --rivals transformers llama-cpp openvino --static-batches 8 32 \
            --num-prompts $(size 32 4) --output-len $(size 96 12) --prefix-len $(size 512 64) ;;
    compare-batches) # batch size x engine
        compared "$1" --dtype float32 --rivals transformers llama-cpp openvino --static-batches 32 --measure one-stream \
            --concurrency 1 8 $(size "32 128" "") --input-len 48 --output-len $(size 24 8) --prefix-len 64 ;;
    compare-shared) # requests on one prefix
        compared "$1" --dtype float32 --rivals transformers llama-cpp openvino --static-batches 8 \
            --measure shared-prefix --shared-requests $(size 32 4) --shared-prefix-len $(size 1024 64) ;;
    compare-few-bits) # the file's own few bits, KV in 8 bits
        compared "$1" $few_bits --num-prompts $(size 64 4) --input-len 136 --output-len $(size 136 12) \
            --range-ratio 0.88 --prefix-len $(size 1024 64) ;;
    compare-shared-few-bits)
        compared "$1" $few_bits --measure shared-prefix --shared-requests $(size 32 4) \
            --shared-prefix-len $(size 1024 64) ;;
    blocks) # block sizes of this engine
        compared "$1" --dtype float32 --rivals --block-sizes 8 16 32 --num-prompts $(size 64 4) \
            --output-len $(size 136 12) --prefix-len $(size 512 64) ;;
    throughput) # KV utilisation over time
        bench throughput $engine --num-prompts $(size 64 6) --input-len 136 --output-len $(size 136 12) \
            --range-ratio 0.88 --num-kv-blocks $(size 2048 256) $(kept "$1") ;;
    latency) # throughput against batch size; first token cold and cached, between tokens
        bench latency $engine --batch-size 1 8 $(size "32 128" "") --input-len 128 --output-len $(size 32 6) \
            --num-iters $(size 3 1) --num-iters-warmup $(size 1 0) --num-kv-blocks $(size 2048 256) $(kept "$1") ;;
    sweep) # throughput and latency against max_num_seqs
        bench sweep $engine --over max_num_seqs=$(size 1,8,32,128,256 1,8) --num-prompts $(size 256 8) --input-len 32 \
            --output-len $(size 16 6) --range-ratio 0.5 --num-kv-blocks $(size 2048 256) --recommend \
            --latency-limit-ms $(size 200 60000) $(kept "$1") ;;
    startup)
        bench startup --model "$MODEL" --num-threads "$THREADS" --num-iters $(size 5 1) $(kept "$1") ;;
    decode-float32 | decode-bfloat16) # against the kernels alone and against torch
        "$PYTHON" benchmarks/cpu_decode.py --model "$MODEL" --threads "$THREADS" --dtypes "${1#decode-}" \
            --streams 1 8 $(size "32 128" "") --torch-streams $(size 32 1) --steps $(size 48 8) --turns $(size 2 1) \
            --json "$OUT/$1.json" --plot "$OUT/$1.png" ;;
    scaling) # decode cost against context and streams
        "$PYTHON" benchmarks/cpu_scaling.py --model "$MODEL" --threads "$THREADS" \
            --contexts 256 $(size "1024 2048 4096 8000" "512 768") --streams 1 8 $(size "32 64 128" 16) \
            --json "$OUT/$1.json" --plot "$OUT/$1.png" ;;
    context-32k) # of a model that has as much: give MODEL
        "$PYTHON" benchmarks/cpu_scaling.py --model "$MODEL" --threads "$THREADS" \
            --contexts 1024 $(size "8192 16384 32000" 2048) --streams --json "$OUT/$1.json" --plot "$OUT/$1.png" ;;
    transformers) # mixed requests, in one process
        "$PYTHON" benchmarks/vs_transformers.py --model "$MODEL" --threads "$THREADS" --requests $(size 32 4) \
            --batch-sizes $(size 32 4) --json "$OUT/vs_transformers.json" ;;
    kernels)
        "$PYTHON" benchmarks/kernels_linear.py --threads "$THREADS" --rows $(size 1,8,32,128,512 1) \
            --json "$OUT/kernels_linear.json"
        "$PYTHON" benchmarks/kernels_attention.py --threads "$THREADS" --contexts 256 1024 $(size "8192 32768" "") \
            --seconds $(size 0.3 0.02) --json "$OUT/kernels_attention.json"
        "$PYTHON" benchmarks/kernels_sampling.py --threads "$THREADS" --rows 1 $(size 64 4) --repeats $(size 7 1) \
            --json "$OUT/kernels_sampling.json" ;;
    overhead)
        "$PYTHON" benchmarks/engine_overhead.py --steps $(size 300 20) --json "$OUT/engine_overhead.json" ;;
    http)
        "$PYTHON" benchmarks/http_throughput.py --model "$MODEL" --threads "$THREADS" --turns $(size 4 1) \
            --requests $(size 64 4) --clients $(size 64 2) --json "$OUT/http_throughput.json" ;;
    liveness)
        "$PYTHON" benchmarks/http_liveness.py --model "$MODEL" --seconds $(size 12 2) --streams $(size 200 4) \
            --json "$OUT/http_liveness.json" ;;
    *)
        echo "there is no step $1; there are: envs $STEPS context-32k" >&2
        exit 2 ;;
    esac
}

STEPS="compare compare-bfloat16 compare-batches compare-shared compare-few-bits compare-shared-few-bits blocks
throughput latency sweep startup decode-float32 decode-bfloat16 scaling transformers kernels overhead http liveness"
if [ $# -eq 0 ]; then
    echo "steps: envs" $STEPS "context-32k"
    exit 0
fi
if [ "$1" = all ]; then set -- $STEPS; fi
for name in "$@"; do step "$name"; done
