"""What HTTP costs: streams of many clients against the same requests offline, through `LLM.generate`.

    python benchmarks/http_throughput.py [--clients 64] [--requests 128] [--turns 4] [--json FILE]

Both sides are loaded once, with the same options, and take turns in one run; which of them begins changes every turn.
The server has a process for HTTP and one for the engine core, the clients have a third; the offline side has one for
everything. Greedy, forced lengths, detokenisation on. The ratio is that of the two sides of one turn, over the turns:
its median, least and most. "cpu" is the time that the HTTP process computed, for each streamed event.
"""

import argparse
import json
import os
import random
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import record
from http_load import running_server, stream_all

from octavo import LLM, SamplingParams

PATH = "/v1/completions"

_llm: LLM | None = None
"""In the process of the offline side."""


def make_requests(args: argparse.Namespace) -> list[tuple[list[int], int]]:
    """Prompts as token ids, each with the number of tokens to generate."""
    rng = random.Random(args.seed)
    return [
        ([rng.randrange(100, args.vocabulary) for _ in range(rng.randint(*args.input_len))],
         rng.randint(*args.output_len))
        for _ in range(args.requests)
    ]  # fmt: skip


def make_bodies(requests: list[tuple[list[int], int]]) -> list[bytes]:
    fields = {"temperature": 0, "ignore_eos": True, "stream": True}
    return [json.dumps({"prompt": ids, "max_tokens": tokens, **fields}).encode() for ids, tokens in requests]


def load_offline(model: str, options: dict[str, Any]) -> None:
    global _llm
    _llm = LLM(model, disable_log_stats=True, **options)


def run_offline(requests: list[tuple[list[int], int]]) -> float:
    """Seconds until the last one's end."""
    assert _llm is not None
    params = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens) for _, tokens in requests]
    started = time.perf_counter()
    outputs = _llm.generate([ids for ids, _ in requests], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    assert [len(output.outputs[0].token_ids) for output in outputs] == [tokens for _, tokens in requests]
    return seconds


def run(args: argparse.Namespace) -> dict[str, Any]:
    requests = make_requests(args)
    bodies = make_bodies(requests)
    num_tokens = sum(tokens for _, tokens in requests)
    options = {
        "max_num_seqs": args.clients, "num_threads": args.threads, "enable_prefix_caching": False,
        "max_model_len": args.input_len[1] + args.output_len[1],
        "num_kv_blocks": args.clients * -(-(args.input_len[1] + args.output_len[1] + 16) // 16),
    }  # fmt: skip
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if not isinstance(value, bool)]
    spawn = get_context("spawn")
    turns = []
    with (
        running_server(args.model, *flags, "--no-enable-prefix-caching") as server,
        ProcessPoolExecutor(1, spawn) as clients,
        ProcessPoolExecutor(1, spawn, load_offline, (args.model, options)) as offline,
    ):

        def http_side() -> dict[str, float]:
            cpu = server.cpu_seconds()
            job = clients.submit(stream_all, server.host, server.port, PATH, bodies, args.clients)
            seconds, num_events = job.result()
            return {
                "http_tokens_per_second": num_tokens / seconds,
                "cpu_microseconds_per_event": (server.cpu_seconds() - cpu) / num_events * 1e6,
                "events": num_events,
            }

        def offline_side() -> dict[str, float]:
            return {"offline_tokens_per_second": num_tokens / offline.submit(run_offline, requests).result()}

        sides = [http_side, offline_side]
        clients.submit(stream_all, server.host, server.port, PATH, bodies[: args.clients], args.clients).result()
        offline.submit(run_offline, requests[: args.clients]).result()
        for _ in range(args.turns):
            turn = {name: value for side in sides for name, value in side().items()}
            turn["ratio"] = turn["http_tokens_per_second"] / turn["offline_tokens_per_second"]
            turns.append(turn)
            sides.reverse()
            print(line(turn), flush=True)
    ratios = [turn["ratio"] for turn in turns]
    return {
        "benchmark": "http_throughput", "model": args.model, "clients": args.clients, "requests": args.requests,
        "output_tokens": num_tokens, "input_len": args.input_len, "output_len": args.output_len, "options": options,
        "turns": turns, "ratio": statistics.median(ratios), "ratio_least": min(ratios), "ratio_most": max(ratios),
    }  # fmt: skip


def line(turn: dict[str, float]) -> str:
    return (
        f"{turn['http_tokens_per_second']:>10.1f}{turn['offline_tokens_per_second']:>10.1f}{turn['ratio']:>8.3f}"
        f"{turn['cpu_microseconds_per_event']:>10.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a GGUF file, a folder, or an alias")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=128, help="in each turn, of all clients together")
    parser.add_argument("--input-len", type=int, nargs=2, default=[16, 128], help="tokens, least and most")
    parser.add_argument("--output-len", type=int, nargs=2, default=[64, 128], help="tokens, least and most")
    parser.add_argument("--vocabulary", type=int, default=10_000, help="prompts are made of token ids below this")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of either engine")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write the numbers here as well")
    args = parser.parse_args()
    print(f"{'http':>10}{'offline':>10}{'ratio':>8}{'cpu us':>10}   tokens/s; a turn a line")
    result = run(args)
    print(f"ratio {result['ratio']:.3f} ({result['ratio_least']:.3f} to {result['ratio_most']:.3f})")
    if args.json:
        record.write(args.json, "http_throughput", result)


if __name__ == "__main__":
    main()
