"""Sampling and log-probabilities: the native kernels beside the reference platform, in milliseconds a call.

    python benchmarks/kernels_sampling.py [--rows 1 64] [--vocab 49152 151936] [--threads 2] [--json FILE]

Both run in turn in one process and are reported by their medians: a machine that slows down slows both. "peaked" logits
are normal with a deviation of 4, about what a language model gives; "flat" ones, of 1, are the filters' worst case.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import record
import torch

from octavo.ops.cpu import CpuPlatform, _native
from octavo.ops.interface import Platform, SamplingBatch
from octavo.ops.reference import ReferencePlatform

SPREADS = {"peaked": 4.0, "flat": 1.0}
# temperature, top_k, top_p, min_p
PARAMETERS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (0.8, 0, 1.0, 0.0),
    "top-k 50": (0.8, 50, 1.0, 0.0),
    "top-k 50, top-p 0.9": (0.8, 50, 0.9, 0.0),
    "top-p 0.9": (0.8, 0, 0.9, 0.0),
    "min-p 0.05": (0.8, 0, 1.0, 0.05),
}


def make_batch(rows: int, temperature: float, top_k: int, top_p: float, min_p: float) -> SamplingBatch:
    def column(value: float) -> torch.Tensor:
        return torch.full((rows,), value, dtype=torch.float64)

    uniform = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    all_greedy = temperature == 0.0
    top_ks = torch.full((rows,), top_k)
    return SamplingBatch(column(temperature), top_ks, column(top_p), column(min_p), uniform, all_greedy)


def milliseconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def compare(platforms: dict[str, Platform], call: Callable[[Platform], object], repeats: int) -> dict[str, float]:
    """Median milliseconds of each platform; a first call of each is not counted."""
    times: dict[str, list[float]] = {name: [] for name in platforms}
    for _ in range(repeats + 1):
        for name, platform in platforms.items():
            times[name].append(milliseconds(lambda platform=platform: call(platform)))
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def cases(rows: int, vocab_size: int) -> list[tuple[str, str, Callable[[Platform], object]]]:
    """(logits, what is asked of them, the call)."""
    result = []
    for spread, deviation in SPREADS.items():
        logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(0)) * deviation
        for name, parameters in PARAMETERS.items():
            batch = make_batch(rows, *parameters)
            result.append((spread, name, lambda p, x=logits, b=batch: p.sample(x, b)))
        result.append((spread, "log-softmax", lambda p, x=logits: p.log_softmax(x)))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--vocab", type=int, nargs="+", default=[49152, 151936])
    parser.add_argument("--threads", type=int, default=2, help="of both platforms")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", metavar="FILE", help="write the numbers here as well")
    args = parser.parse_args()
    platforms = {"cpu": CpuPlatform(), "reference": ReferencePlatform()}
    for platform in platforms.values():
        platform.set_num_threads(args.threads)
    results = []
    print(f"{'rows':>5}{'vocab':>8}  {'logits':<8}{'':<22}{'native ms':>11}{'torch ms':>11}{'ratio':>8}")
    for rows in args.rows:
        for vocab_size in args.vocab:
            for spread, name, call in cases(rows, vocab_size):
                medians = compare(platforms, call, args.repeats)
                ratio = medians["reference"] / medians["cpu"]
                results.append({"rows": rows, "vocab": vocab_size, "logits": spread, "case": name, **medians})
                print(
                    f"{rows:>5}{vocab_size:>8}  {spread:<8}{name:<22}"
                    f"{medians['cpu']:>11.3f}{medians['reference']:>11.3f}{ratio:>8.1f}",
                    flush=True,
                )
    if args.json:
        record.write(args.json, "kernels_sampling", {"isa": _native.isa(), "threads": args.threads, "results": results})


if __name__ == "__main__":
    main()
