"""Milliseconds of a decode step, recorded and operator by operator, in turns in one run.

python benchmarks/replay.py --model MODEL [--dtype bfloat16] [--streams 1 8 32] [--output FILE]
"""

import argparse
import json
import statistics
import time

from octavo import LLM, SamplingParams

TOKENS = 48
TURNS = 5


def measure(llm: LLM, streams: int) -> dict[str, float]:
    runner = llm.llm_engine.client.core.executor.worker.runner
    forms = {"replayed": runner._forward, "by operator": runner._run_model}
    if forms["replayed"] == forms["by operator"]:
        raise SystemExit("this forward is not replayed: the log at OCTAVO_LOGGING_LEVEL=INFO says why")
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    prompts = [f"{i}. The capital of France is" for i in range(streams)]
    llm.generate(prompts, params, use_tqdm=False)
    times: dict[str, list[float]] = {name: [] for name in forms}
    tokens: dict[str, list[list[int]]] = {}
    for _ in range(TURNS):
        for name, forward in forms.items():
            runner._forward = forward
            started = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            times[name].append((time.perf_counter() - started) / TOKENS * 1000)
            tokens[name] = [output.outputs[0].token_ids for output in outputs]
    runner._forward = forms["replayed"]
    if tokens["replayed"] != tokens["by operator"]:
        raise SystemExit("the two forms gave different tokens")
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {"streams": streams, **{f"{name}, ms a step": round(value, 2) for name, value in medians.items()},
            "ratio": round(medians["by operator"] / medians["replayed"], 3)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--output")
    args = parser.parse_args()
    with LLM(args.model, dtype=args.dtype, max_model_len=1024, kv_cache_memory="512MiB") as llm:
        results = [measure(llm, streams) for streams in args.streams]
    for result in results:
        print(json.dumps(result))
    if args.output:
        with open(args.output, "w") as file:
            json.dump({"model": args.model, "dtype": args.dtype, "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
