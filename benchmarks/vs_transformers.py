"""Continuous batching over a paged KV cache against transformers' static batches: same weights, same requests, one run.

    python benchmarks/vs_transformers.py [--requests 64] [--model smollm2] [--json FILE]

The requests have prompt and output lengths uniform in 16..256 (seed 0), all there at once, greedy, with forced
lengths. transformers gets its best static batches: sorted by output length so that a batch wastes little, left-padded,
KV cache on, batch 8 and 32. Only tokens somebody asked for count. KV utilisation is used tokens over allocated slots:
for a static batch over its padded rectangle at its end, for Octavo over the blocks held, averaged over the steps.
"""

import argparse
import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import record
import torch

from octavo import LLM, SamplingParams
from octavo.loader.pull import find_model


@dataclass(frozen=True)
class Work:
    """One request: its prompt's token ids and how many tokens it must generate."""

    prompt: list[int]
    output_tokens: int


@dataclass(frozen=True)
class Result:
    engine: str
    seconds: float
    output_tokens: int
    kv_utilization: float

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds


def make_requests(count: int, vocab_size: int) -> list[Work]:
    draw = random.Random(0)
    return [
        Work([draw.randrange(100, vocab_size) for _ in range(draw.randint(16, 256))], draw.randint(16, 256))
        for _ in range(count)
    ]


def run_octavo(path: Path, work: list[Work], threads: int) -> Result:
    with LLM(str(path), dtype="float32", num_threads=threads, max_model_len=1024, kv_cache_memory="2GiB") as llm:
        engine = llm.llm_engine
        llm.generate(work[0].prompt, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        utilization = []
        started = time.perf_counter()
        for number, request in enumerate(work):
            params = SamplingParams(temperature=0, max_tokens=request.output_tokens, ignore_eos=True)
            engine.add_request(f"bench-{number}", request.prompt, params)
        while engine.has_unfinished_requests():
            engine.step()
            utilization.append(engine.stats().kv_utilization)
        seconds = time.perf_counter() - started
    used = statistics.fmean(value for value in utilization if value > 0)
    return Result("octavo", seconds, sum(request.output_tokens for request in work), used)


def run_transformers(oracle: torch.nn.Module, work: list[Work], batch_size: int) -> Result:
    ordered = sorted(work, key=lambda request: (request.output_tokens, len(request.prompt)))
    seconds = used = allocated = 0.0
    for first in range(0, len(ordered), batch_size):
        batch = ordered[first : first + batch_size]
        longest_prompt = max(len(request.prompt) for request in batch)
        longest_output = max(request.output_tokens for request in batch)
        ids = torch.zeros(len(batch), longest_prompt, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(batch):
            ids[row, longest_prompt - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, longest_prompt - len(request.prompt) :] = 1
        started = time.perf_counter()
        with torch.inference_mode():
            oracle.generate(
                input_ids=ids, attention_mask=mask, do_sample=False, use_cache=True, pad_token_id=0,
                max_new_tokens=longest_output, min_new_tokens=longest_output,
            )  # fmt: skip
        seconds += time.perf_counter() - started
        used += sum(len(request.prompt) + request.output_tokens for request in batch)
        allocated += len(batch) * (longest_prompt + longest_output)
    tokens = sum(request.output_tokens for request in work)
    return Result(f"transformers, batches of {batch_size}", seconds, tokens, used / allocated)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a GGUF file or an alias of one")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[8, 32], help="of transformers")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="for both")
    parser.add_argument("--json", metavar="FILE", help="write the numbers here as well")
    args = parser.parse_args()

    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    path = find_model(args.model)
    oracle = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    work = make_requests(args.requests, 10_000)
    results = [run_octavo(path, work, args.threads)]
    torch.set_num_threads(args.threads)  # the cpu platform leaves torch one
    results += [run_transformers(oracle, work, batch_size) for batch_size in args.batch_sizes]
    best = max(result.tokens_per_second for result in results[1:])
    print(f"{args.requests} requests, {args.threads} threads, float32, {args.model}")
    print(f"{'engine':<28}{'seconds':>10}{'tokens/s':>10}{'ratio':>8}{'KV used':>9}")
    for result in results:
        ratio = result.tokens_per_second / best
        print(
            f"{result.engine:<28}{result.seconds:>10.1f}{result.tokens_per_second:>10.1f}{ratio:>8.2f}"
            f"{result.kv_utilization:>9.0%}"
        )
    if args.json:
        rows = [{**asdict(r), "tokens_per_second": r.tokens_per_second} for r in results]
        ratio = results[0].tokens_per_second / best
        settings = {"requests": args.requests, "threads": args.threads, "model": args.model, "dtype": "float32"}
        record.write(args.json, "vs_transformers", {**settings, "ratio_to_best": ratio, "results": rows})


if __name__ == "__main__":
    main()
