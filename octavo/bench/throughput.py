"""`octavo bench throughput`: all requests at once, in this process, as fast as they go."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import tyro

from octavo.bench.engines import checked, engine_of, longest_request, reset_prefix_cache
from octavo.bench.offline import run_requests
from octavo.bench.report import (
    OutputArgs,
    Record,
    check_outputs,
    milliseconds,
    peak_rss,
    show_table,
    write_outputs,
)
from octavo.bench.traffic import BenchRequest, TokenizerWords, TrafficArgs, check_traffic, make_traffic
from octavo.config.command_line import parse_arguments
from octavo.config.engine_args import EngineArgs


@dataclass(frozen=True, kw_only=True)
class ThroughputArgs:
    """Give an engine all requests at once and measure how long they take together.

    Every request is computed to its full output length, past the end of sequence. The engine is loaded and warmed up
    before the clock starts. The time to the first token holds the time in the queue.
    """

    traffic: tyro.conf.OmitArgPrefixes[TrafficArgs] = field(default_factory=TrafficArgs)
    output: tyro.conf.OmitArgPrefixes[OutputArgs] = field(default_factory=OutputArgs)
    engine: tyro.conf.OmitArgPrefixes[EngineArgs] = field(default_factory=EngineArgs)


def run(argv: Sequence[str]) -> int:
    """Measure, print the table, write the files."""
    args = parse_arguments(ThroughputArgs, "octavo bench throughput", argv)
    check_traffic(args.traffic)
    check_outputs(args.output)
    engine_args = checked(args.engine)
    record = Record("throughput", argv, {**asdict(args.traffic), **asdict(engine_args)})
    with engine_of(engine_args) as engine:
        requests = make_traffic(args.traffic, TokenizerWords(engine.tokenizer), longest_request(engine))
        run_requests(engine, [BenchRequest(requests[0].prompt, requests[0].prompt_len, 1)] * 2, "warm-up")
        reset_prefix_cache(engine)
        results = run_requests(engine, requests)
    del results["latencies"], results["between_tokens"]  # many, and summarised
    document = record.finish({**results, "peak_rss": peak_rss()})
    show(document, args.traffic)
    write_outputs(document, args.output)
    return 0


def show(results: dict[str, Any], traffic: TrafficArgs) -> None:
    """The table."""
    rows: list[tuple[str, object]] = [
        ("requests", results["num_requests"]),
        ("seconds", results["elapsed_time"]),
        ("prompt tokens", results["total_prompt_tokens"]),
        ("output tokens", results["total_output_tokens"]),
        ("requests/s", results["requests_per_second"]),
        ("output tokens/s", results["output_tokens_per_second"]),
        ("all tokens/s", results["tokens_per_second"]),
    ]
    for name, key in (("first token", "ttft"), ("between tokens", "itl")):
        rows += [(f"{name} {p.upper()}, ms", milliseconds(results[key], p)) for p in ("p50", "p99")]
    rows += [
        ("prefix cache hit rate", results["prefix_cache_hit_rate"]),
        ("KV utilisation", results["kv_utilization"]),
        ("KV blocks, most in use", f"{results['kv_blocks_most_in_use']} of {results['kv_blocks_total']}"),
        ("preemptions", results["num_preemptions"]),
        ("peak RSS, MiB", results["peak_rss"] / 2**20),
    ]
    notes = []
    if results["num_requests"] < traffic.num_prompts:
        notes.append(f"Only {results['num_requests']} of {traffic.num_prompts} requests fit.")
    show_table("throughput", ("", "value"), rows, [*notes, load_line(results)])


def load_line(document: Mapping[str, Any]) -> str:
    """What else the machine was doing."""
    before, after = (document["machine_load"][when][0] for when in ("before", "after"))
    return f"Load of the machine over the last minute: {before:.1f} before, {after:.1f} after."
