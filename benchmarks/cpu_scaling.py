"""What a decode step costs as contexts and streams grow, and whether memory stays as planned.

    python benchmarks/cpu_scaling.py [--contexts 256 1024 4096 8000] [--streams 1 8 32 128] [--json FILE] [--plot FILE]

Contexts: one engine, one request of each length, its prompt computed in chunks; milliseconds of a decode step. Streams:
a step of N requests at a context of 256. Each row is the median of its steps. "linear" compares the last row with what
the two before it lead to: 1.00 is a straight line, more is worse than linear. Peak memory is that of this process
(VmHWM), against the plan that the engine printed with what Python and the libraries held. Plots need matplotlib.
"""

import argparse
import statistics
import time
from pathlib import Path

import record
import torch

from octavo import LLM, RequestOutputKind, SamplingParams

CONTEXT = 256


def make_engine(args: argparse.Namespace, longest: int, streams: int) -> LLM:
    tokens = max(longest + args.steps + 32, streams * (CONTEXT + args.steps + streams + 32))
    longest = max(longest, CONTEXT) + args.steps + streams
    return LLM(
        args.model, dtype=args.dtype, num_threads=args.threads, max_model_len=longest,
        max_num_seqs=max(streams, 2), num_kv_blocks=-(-tokens // 16), enable_prefix_caching=False,
        max_num_batched_tokens=512, disable_log_stats=True,
    )  # fmt: skip


def decode_ms(llm: LLM, streams: int, context: int, steps: int) -> float:
    """Median milliseconds of a step in which all streams decode."""
    params = SamplingParams(
        temperature=0, max_tokens=steps + streams, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )
    engine = llm.llm_engine
    for stream in range(streams):
        prompt = [(stream * 31 + position * 7) % 150 + 100 for position in range(context)]
        engine.add_request(f"bench-{stream}", prompt, params)
    first = engine.stats().generation_tokens
    while engine.stats().num_waiting or engine.stats().generation_tokens - first < streams:
        engine.step()  # some decode while others are still prompts
    times = []
    while engine.has_unfinished_requests():
        is_full = engine.stats().num_running == streams
        started = time.perf_counter()
        engine.step()
        if is_full:
            times.append(time.perf_counter() - started)
    return 1000 * statistics.median(times)


def memory_kib(name: str) -> int:
    """A figure of /proc/self/status, in KiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1])
    return 0


def bend(sizes: list[int], milliseconds: list[float]) -> float:
    """The last value over the one on the line through the first and the one before the last."""
    (x0, x1, x2), (y0, y1, y2) = (sizes[0], *sizes[-2:]), (milliseconds[0], *milliseconds[-2:])
    return y2 / (y0 + (y1 - y0) * (x2 - x0) / (x1 - x0))


def measure(args: argparse.Namespace) -> dict[str, object]:
    llm = make_engine(args, max(args.contexts, default=CONTEXT), 1)
    by_context = {context: decode_ms(llm, 1, context, args.steps) for context in args.contexts}
    plan, peak = llm.llm_engine.config.memory, memory_kib("VmHWM")
    llm.close()
    memory = {
        "planned_mib": round(plan.total / 2**20), "libraries_mib": round(plan.libraries / 2**20),
        "peak_mib": round(peak / 1024), "peak_to_plan": peak * 1024 / (plan.total + plan.libraries),
    }  # fmt: skip
    llm = make_engine(args, CONTEXT, max(args.streams, default=1))
    by_streams = {streams: decode_ms(llm, streams, CONTEXT, args.steps) for streams in args.streams}
    llm.close()
    return {"context_ms": by_context, "streams_ms": by_streams, "memory": memory}


def show(title: str, values: dict[int, float]) -> None:
    for size, milliseconds in values.items():
        print(f"{title:<10}{size:>8}{milliseconds:>10.2f} ms a step")
    if len(values) > 2:
        print(f"{title:<10}  linear{bend(list(values), list(values.values())):>10.2f}")


def plot(result: dict, file: str) -> None:
    from matplotlib.figure import Figure

    names = [name for name in ("context", "streams") if result[f"{name}_ms"]]
    figure = Figure(figsize=(4.5 * len(names), 3.5), layout="constrained")
    for axis, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        values = result[f"{name}_ms"]
        axis.plot(list(values), list(values.values()), marker="o")
        axis.set(xlabel="tokens of context" if name == "context" else "streams", ylabel="ms a decode step")
        axis.set_ylim(0, 1.1 * max(values.values()))
        axis.grid(alpha=0.3)
    figure.savefig(file, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--contexts", type=int, nargs="*", default=[256, 1024, 2048, 4096, 8000])
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 8, 32, 64, 128])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE", help="draw both curves, as .png or .svg")
    args = parser.parse_args()
    result = measure(args)
    show("context", result["context_ms"])
    show("streams", result["streams_ms"])
    print("memory   ", ", ".join(f"{name} {value:.4g}" for name, value in result["memory"].items()))
    if args.json:
        settings = {"model": args.model, "dtype": args.dtype, "threads": args.threads}
        record.write(args.json, "cpu_scaling", {**settings, **result})
    if args.plot:
        plot(result, args.plot)


if __name__ == "__main__":
    main()
