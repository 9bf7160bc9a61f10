"""The native linear layer against torch's, in the shapes of a model: GFLOP/s, GB/s of weights and the ratio of both.

    python benchmarks/kernels_linear.py [--threads 2] [--isa avx2] [--dtypes float32,bfloat16] [--json FILE]

Both sides compute the same product in turns, each with its own pool of as many threads, so that what else the machine
does meets both. Every turn takes another copy of the weight, all together larger than the caches (--megabytes), as the
layers of a model do. The time is the median of the turns. torch computes in the dtype of the weight, with what the
processor has for it (on some, AMX for bfloat16); Octavo's arithmetic is float32. "read" is what torch's sum reads from
memory: about the limit of one row.
"""

import argparse
from pathlib import Path

import record
import torch
from torch import Tensor
from torch.nn import functional as F
from turns import SHAPES, in_turns

from octavo.ops.cpu import _native
from octavo.ops.cpu import linear as native

ROWS = (1, 8, 32, 128, 512)


def measure(name: str, rows: int, weights: list[Tensor], packed: list[native.NativeWeight]) -> dict[str, float | str]:
    n, k = weights[0].shape
    x = torch.randn(rows, k)
    x_torch = x.to(weights[0].dtype)
    ours, theirs = in_turns(
        [
            lambda turn: native.linear(x, packed[turn % len(packed)]),
            lambda turn: F.linear(x_torch, weights[turn % len(weights)]),
        ],
        min_turns=3,
    )
    operations, size = 2 * rows * n * k, weights[0].nbytes
    return {
        "layer": name,
        "dtype": str(weights[0].dtype).removeprefix("torch."),
        "rows": rows,
        "microseconds": ours * 1e6,
        "gflops": operations / ours / 1e9,
        "gbytes": size / ours / 1e9,
        "torch_gflops": operations / theirs / 1e9,
        "torch_gbytes": size / theirs / 1e9,
        "ratio": theirs / ours,
    }


def read_gbytes(megabytes: int) -> float:
    """GB/s at which torch's threads read memory to sum it."""
    memory = torch.ones(megabytes << 18)
    return memory.nbytes / in_turns([lambda _: memory.sum()], min_turns=3)[0] / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", default=None, help=f"one of {', '.join(_native.supported_isas())}")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--layers", default=",".join(SHAPES))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--megabytes", type=int, default=256, help="memory of all copies of one weight")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.isa:
        _native.use_isa(args.isa)
    _native.set_num_threads(args.threads)
    torch.set_num_threads(args.threads)
    read = read_gbytes(args.megabytes)
    print(f"{_native.isa()}, {args.threads} threads; read {read:.1f} GB/s")
    print("layer    dtype     rows        us  GFLOP/s   GB/s    torch   GB/s  ratio")
    results = []
    for dtype in args.dtypes.split(","):
        for layer in args.layers.split(","):
            n, k = SHAPES[layer]
            size = n * k * torch.empty(0, dtype=getattr(torch, dtype)).element_size()
            count = max(1, (args.megabytes << 20) // size)
            weights = [torch.randn(n, k).to(getattr(torch, dtype)) for _ in range(count)]
            packed = [native.pack_linear(weight, None) for weight in weights]
            for rows in map(int, args.rows.split(",")):
                r = measure(layer, rows, weights, packed)
                results.append(r)
                print(
                    f"{layer:8} {dtype:9} {rows:4} {r['microseconds']:9.1f} {r['gflops']:8.1f} {r['gbytes']:6.1f} "
                    f"{r['torch_gflops']:8.1f} {r['torch_gbytes']:6.1f} {r['ratio']:6.2f}"
                )
    if args.json:
        report = {"isa": _native.isa(), "threads": args.threads, "read_gbytes": read, "results": results}
        record.write(args.json, "kernels_linear", report)


if __name__ == "__main__":
    main()
