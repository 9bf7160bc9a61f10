"""Native paged attention of one layer: decode and prefill, against memory, matrix products, and gathering + torch SDPA.

    python benchmarks/kernels_attention.py [--threads 2] [--dtypes float32 bfloat16 int8] [--isa avx2] [--json FILE]

The layer has SmolLM2-135M's shape: 9 query heads, 3 KV heads, head size 64. The sides of a ratio take turns in one run,
and the best time of each counts. "read" is the speed at which torch sums a tensor of 64 MiB, "gemm" that of a float32
torch.mm of 1024^3: what the machine gives at that moment. Decode is linear in the context when "vs 1024" (time a token
of context, relative to 1024 tokens) stays about 1.
"""

import argparse
import time
from collections.abc import Callable
from itertools import accumulate

import record
import torch
from torch import Tensor
from torch.nn import functional as F

from octavo.ops.cpu import _native, attention
from octavo.ops.interface import AttentionMetadata, KVCache
from octavo.protocol.kv_cache_spec import KVCacheSpec

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
SCALE = HEAD_DIM**-0.5
MAX_CACHE_BYTES = 1 << 30
READ_BYTES = 64 << 20


class Case:
    """Requests of (context, tokens of the step), with KV in blocks of random order; the first `shared` tokens alike."""

    def __init__(self, requests: list[tuple[int, int]], dtype: str, shared: int = 0):
        self.requests, self.dtype = requests, dtype
        counts = [-(-length // BLOCK_SIZE) for length, _ in requests]
        spec = KVCacheSpec(num_kv_heads=NUM_KV_HEADS, head_dim_k=HEAD_DIM, head_dim_v=HEAD_DIM, dtype=dtype)
        self.cache = attention.allocate_kv_cache(spec, sum(counts), BLOCK_SIZE)
        for part in self.cache:
            # (int8: the bytes of the scales become a small positive float)
            part.fill_(0x3C) if dtype == "int8" else part.normal_()
        blocks = torch.randperm(sum(counts), dtype=torch.int32).split(counts)
        self.tables = torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True)
        self.tables[:, : shared // BLOCK_SIZE] = self.tables[0, : shared // BLOCK_SIZE].clone()
        self.q = torch.randn(sum(new for _, new in requests), NUM_HEADS, HEAD_DIM)
        self.metadata = AttentionMetadata(
            block_tables=self.tables,
            query_start_loc=torch.tensor([0, *accumulate(new for _, new in requests)], dtype=torch.int32),
            seq_lens=torch.tensor([length for length, _ in requests], dtype=torch.int32),
            slot_mapping=torch.empty(0, dtype=torch.int64),
        )

    @property
    def kv_bytes(self) -> int:
        return sum(length for length, _ in self.requests) * NUM_KV_HEADS * 2 * HEAD_DIM * BYTES[self.dtype]

    @property
    def operations(self) -> int:
        """Multiplications and additions of both products, over the keys that each token sees."""
        keys = sum(length * new - new * (new - 1) // 2 for length, new in self.requests)
        return keys * 4 * HEAD_DIM * NUM_HEADS

    def run(self) -> Tensor:
        return attention.paged_attention(self.q, self.cache, self.metadata, SCALE)

    def run_torch(self, dense: KVCache) -> Tensor:
        """The blocks gathered from a [block, token, head, dim] cache, then SDPA. All requests are of one shape."""
        (length, new), num_requests = self.requests[0], len(self.requests)
        k, v = (
            part[self.tables.flatten()].view(num_requests, -1, NUM_KV_HEADS, HEAD_DIM)[:, :length].transpose(1, 2)
            for part in dense
        )
        q = self.q.view(num_requests, new, NUM_HEADS, HEAD_DIM).transpose(1, 2).to(k.dtype)
        mask = None if new == 1 else torch.ones(new, length, dtype=torch.bool).tril(length - new)
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)

    def dense_cache(self) -> KVCache:
        shape = (len(self.cache.k), BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
        dtype = getattr(torch, "float32" if self.dtype == "int8" else self.dtype)
        return KVCache(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype))


def in_turns(functions: list[Callable[[], object]], seconds: float) -> list[float]:
    """Fewest seconds of each function; they take turns, so that all of them meet the same machine."""
    times: list[list[float]] = [[] for _ in functions]
    for function in functions:
        function()
    end = time.perf_counter() + seconds * len(functions)
    while time.perf_counter() < end or len(times[0]) < 5:
        for function, taken in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            taken.append(time.perf_counter() - start)
    return [min(taken) for taken in times]


def measure_decode(args: argparse.Namespace, dtype: str) -> list[dict]:
    rows = []
    source = torch.randn(READ_BYTES // 4)
    for batch in args.batches:
        for context in args.contexts:
            case = Case([(context, 1)] * batch, dtype) if fits(batch * context, dtype) else None
            if case is None:
                continue
            dense = case.dense_cache()
            native, read, peer = in_turns([case.run, source.sum, lambda c=case, d=dense: c.run_torch(d)], args.seconds)
            rate, read_rate = case.kv_bytes / native / 1e9, source.nbytes / read / 1e9
            rows.append(
                {
                    "dtype": dtype,
                    "batch": batch,
                    "context": context,
                    "us": native * 1e6,
                    "GB/s": rate,
                    "of read": rate / read_rate,
                    "torch / native": peer / native,
                    "ns a token": native * 1e9 / (batch * context),
                }
            )
    for row in rows:
        base = [r["ns a token"] for r in rows if r["batch"] == row["batch"] and r["context"] == 1024]
        row["vs 1024"] = row["ns a token"] / base[0] if base else float("nan")
    return rows


def fits(num_tokens: int, dtype: str) -> bool:
    return num_tokens * NUM_KV_HEADS * 2 * HEAD_DIM * BYTES[dtype] <= MAX_CACHE_BYTES


def measure_prefill(args: argparse.Namespace, dtype: str) -> list[dict]:
    rows, matrix = [], torch.randn(1024, 1024)
    for before in (0, 1536, 7680):
        case = Case([(before + 512, 512)], dtype)
        dense = case.dense_cache()
        native, gemm, peer = in_turns(
            [case.run, lambda: matrix @ matrix, lambda c=case, d=dense: c.run_torch(d)], args.seconds
        )
        rate, gemm_rate = case.operations / native / 1e9, 2 * 1024**3 / gemm / 1e9
        rows.append(
            {
                "dtype": dtype,
                "chunk": 512,
                "before": before,
                "us": native * 1e6,
                "GFLOP/s": rate,
                "of gemm": rate / gemm_rate,
                "torch / native": peer / native,
            }
        )
    return rows


def measure_shared(args: argparse.Namespace, dtype: str) -> list[dict]:
    requests = [(1024 + 16, 1)] * 32
    private, shared = Case(requests, dtype), Case(requests, dtype, shared=1024)
    apart, together = in_turns([private.run, shared.run], args.seconds)
    return [
        {"dtype": dtype, "requests": 32, "prefix": 1024, "us": together * 1e6, "private / shared": apart / together}
    ]


def show(title: str, rows: list[dict]) -> None:
    print(f"\n{title}\n" + "".join(f"{name:>16}" for name in rows[0]))
    for row in rows:
        print("".join(f"{value:16.2f}" if isinstance(value, float) else f"{value!s:>16}" for value in row.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", choices=_native.supported_isas(), default=_native.isa())
    parser.add_argument("--dtypes", nargs="+", choices=list(BYTES), default=["float32", "bfloat16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--contexts", nargs="+", type=int, default=[256, 1024, 8192, 32768])
    parser.add_argument("--seconds", type=float, default=0.5, help="for each side of each row")
    parser.add_argument("--json", metavar="FILE", help="write the numbers here as well")
    args = parser.parse_args()
    _native.use_isa(args.isa)
    _native.set_num_threads(args.threads)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    results: dict[str, list[dict]] = {"decode": [], "prefill": [], "shared": []}
    for dtype in args.dtypes:
        results["decode"] += measure_decode(args, dtype)
        results["prefill"] += measure_prefill(args, dtype)
        results["shared"] += measure_shared(args, dtype)
    print(f"{args.isa}, {args.threads} threads")
    for title, rows in results.items():
        show(title, rows)
    if args.json:
        record.write(args.json, "kernels_attention", {"isa": args.isa, "threads": args.threads, **results})


if __name__ == "__main__":
    main()
