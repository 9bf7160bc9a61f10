"""The native linear layer over 8 and 4 bits beside the one over float32, in the shapes of a model: GB/s, GOP/s, ratios.

    python benchmarks/kernels_quantized.py [--threads 2] [--kernels avx2] [--bits 8,4] [--json FILE]

All sides compute the same product in turns, so that what else the machine does meets them all. Every turn takes another
copy of the weight, all together larger than the caches (--megabytes a side), as the layers of a model do. The time is
the median of the turns. An operation is a multiplication or an addition. "read" is what torch's sum reads from memory:
about the limit of one row.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from turns import SHAPES, in_turns

from octavo.ops.cpu import _native, quantized
from octavo.ops.cpu import linear as full
from octavo.ops.interface import QUANTIZATION_GROUP, QuantizedMatrix

ROWS = (1, 8, 32, 512)


def random_matrix(n: int, k: int, bits: int) -> QuantizedMatrix:
    groups = (n, k // QUANTIZATION_GROUP)
    scales = (torch.rand(groups) * 0.01).half()
    if bits == 8:
        return QuantizedMatrix(8, torch.randint(-127, 128, (n, k), dtype=torch.int8), scales, None)
    values = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    return QuantizedMatrix(4, values, scales, (torch.randn(groups) * 0.05).half())


def packed_bytes(weight: quantized.QuantizedWeight) -> int:
    return sum(segment.panels.nbytes for segment in weight.segments)


def measure_layer(layer: str, bits: list[int], rows: list[int], megabytes: int) -> list[dict[str, float | str]]:
    n, k = SHAPES[layer]
    plain = torch.randn(n, k)
    weights: dict[int, list] = {32: [full.pack_linear(plain, None) for _ in range(copies(megabytes, plain.nbytes))]}
    for b in bits:
        matrix = random_matrix(n, k, b)
        size = packed_bytes(quantized.pack_quantized([matrix], None))
        weights[b] = [quantized.pack_quantized([matrix], None) for _ in range(copies(megabytes, size))]
    results: list[dict[str, float | str]] = []
    for count in rows:
        x = torch.randn(count, k)

        def side(b: int, x: torch.Tensor = x) -> Callable[[int], object]:
            linear = full.linear if b == 32 else quantized.linear
            return lambda turn: linear(x, weights[b][turn % len(weights[b])])

        seconds = dict(zip(weights, in_turns([side(b) for b in weights], min_turns=3), strict=True))
        for b in weights:
            size = plain.nbytes if b == 32 else packed_bytes(weights[b][0])
            results.append(
                {
                    "layer": layer,
                    "bits": b,
                    "rows": count,
                    "microseconds": seconds[b] * 1e6,
                    "gops": 2 * count * n * k / seconds[b] / 1e9,
                    "gbytes": size / seconds[b] / 1e9,
                    "ratio_to_float32": seconds[32] / seconds[b],
                }
            )
    return results


def copies(megabytes: int, size: int) -> int:
    return max(1, (megabytes << 20) // size)


def read_gbytes(megabytes: int) -> float:
    """GB/s at which torch's threads read memory to sum it."""
    memory = torch.ones(megabytes << 18)
    return memory.nbytes / in_turns([lambda _: memory.sum()], min_turns=3)[0] / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kernels", default="", help=f"one of {', '.join(_native.quantized_kernels())}")
    parser.add_argument("--isa", default=None, help=f"of the side in float32: {', '.join(_native.supported_isas())}")
    parser.add_argument("--bits", default="8,4")
    parser.add_argument("--layers", default=",".join(SHAPES))
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--megabytes", type=int, default=256, help="memory of all copies of one weight")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.isa:
        _native.use_isa(args.isa)
    _native.use_quantized_kernels(args.kernels)
    _native.set_num_threads(args.threads)
    torch.set_num_threads(args.threads)
    report = {
        "kernels": _native.quantized_kernels_in_use(),
        "isa_of_float32": _native.isa(),
        "threads": args.threads,
        "read_gbytes": read_gbytes(args.megabytes),
    }
    print(f"{report['kernels']}, {args.threads} threads; read {report['read_gbytes']:.1f} GB/s")
    print("layer    bits  rows        us    GOP/s   GB/s  times float32")
    results = []
    for layer in args.layers.split(","):
        rows, bits = list(map(int, args.rows.split(","))), list(map(int, args.bits.split(",")))
        for r in measure_layer(layer, bits, rows, args.megabytes):
            results.append(r)
            print(
                f"{r['layer']:8} {r['bits']:4} {r['rows']:5} {r['microseconds']:9.1f} {r['gops']:8.1f} "
                f"{r['gbytes']:6.1f} {r['ratio_to_float32']:6.2f}"
            )
    if args.json:
        args.json.write_text(json.dumps({**report, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
