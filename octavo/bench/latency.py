"""`octavo bench latency`: one batch at a time, nobody else there."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import tyro
from tqdm import tqdm

from octavo.bench.engines import checked, engine_of, longest_request, reset_prefix_cache
from octavo.bench.offline import run_requests
from octavo.bench.report import OutputArgs, Record, check_outputs, milliseconds, show_table, summary, write_outputs
from octavo.bench.throughput import load_line
from octavo.bench.traffic import BenchRequest, TokenizerWords, TrafficArgs, make_traffic
from octavo.config.command_line import parse_arguments
from octavo.config.engine_args import EngineArgs
from octavo.errors import InvalidInput

if TYPE_CHECKING:
    from octavo.engine.llm_engine import LLMEngine


@dataclass(frozen=True, kw_only=True)
class LatencyArgs:
    """Give an engine one batch at a time and measure how long it takes: the first token of prompts that are new and of
    prompts that are cached, and the time between tokens.

    Every batch is computed once with an empty prefix cache and once more with what the first time left in it. Without
    prefix caching both times are those of new prompts.
    """

    input_len: int = 32
    """Tokens of a prompt; all are random and differ."""
    output_len: int = 128
    """Output tokens of a request."""
    batch_size: tuple[int, ...] = (8,)
    """Requests of a batch; several numbers are measured one after the other in each round."""
    num_iters: int = 10
    """Measured rounds."""
    num_iters_warmup: int = 2
    """Rounds before them that do not count."""
    traffic_seed: int = 0
    """Seed of the prompts."""
    output: tyro.conf.OmitArgPrefixes[OutputArgs] = field(default_factory=OutputArgs)
    engine: tyro.conf.OmitArgPrefixes[EngineArgs] = field(default_factory=EngineArgs)


def run(argv: Sequence[str]) -> int:
    """Measure, print the table, write the files."""
    args = parse_arguments(LatencyArgs, "octavo bench latency", argv)
    _check(args)
    check_outputs(args.output)
    engine_args = checked(args.engine)
    own = {name: value for name, value in asdict(args).items() if name not in ("engine", "output")}
    record = Record("latency", argv, {**own, **asdict(engine_args)})
    with engine_of(engine_args) as engine:
        rows = measure(engine, args)
    document = record.finish({**_of_one_batch(rows), "batches": rows})
    _show(document)
    write_outputs(document, args.output)
    return 0


def _check(args: LatencyArgs) -> None:
    sizes = args.batch_size
    if not sizes or len(set(sizes)) < len(sizes) or min(sizes) < 1:
        raise InvalidInput(f"batch_size={sizes} must be different numbers from 1")
    for name, low in (("input_len", 1), ("output_len", 1), ("num_iters", 1), ("num_iters_warmup", 0)):
        if getattr(args, name) < low:
            raise InvalidInput(f"{name}={getattr(args, name)} must be at least {low}")


def measure(engine: "LLMEngine", args: LatencyArgs) -> list[dict[str, Any]]:
    """One row a batch size; the sizes take turns, so that a change of the machine meets all of them."""
    words, limit = TokenizerWords(engine.tokenizer), longest_request(engine)
    runs: dict[int, list[tuple[dict[str, Any], dict[str, Any]]]] = {size: [] for size in args.batch_size}
    rounds = args.num_iters_warmup + args.num_iters
    with tqdm(total=rounds * len(runs), desc="batches", delay=2, disable=None, leave=False) as bar:
        for number in range(rounds):
            for size, done in runs.items():
                traffic = TrafficArgs(
                    num_prompts=size,
                    input_len=args.input_len,
                    output_len=args.output_len,
                    traffic_seed=args.traffic_seed + number,
                )
                pair = _cold_and_cached(engine, make_traffic(traffic, words, limit))
                if number >= args.num_iters_warmup:
                    done.append(pair)
                bar.update()
    return [_row(size, done) for size, done in runs.items()]


def _cold_and_cached(engine: "LLMEngine", requests: Sequence[BenchRequest]) -> tuple[dict[str, Any], dict[str, Any]]:
    reset_prefix_cache(engine)
    return run_requests(engine, requests), run_requests(engine, requests)


def _row(size: int, runs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, Any]:
    cold = [first for first, _ in runs]
    latencies = [run["elapsed_time"] for run in cold]
    return {
        "batch_size": size,
        "latencies": latencies,
        "latency": summary(latencies),
        "output_tokens_per_second": sum(run["total_output_tokens"] for run in cold) / sum(latencies),
        "ttft_cold": summary([run["ttft"]["mean"] for run in cold]),
        "ttft_cached": summary([second["ttft"]["mean"] for _, second in runs]),
        "cached_hit_rate": summary([second["prefix_cache_hit_rate"] or 0.0 for _, second in runs]),
        "itl": _mean_summary([run["itl"] for run in cold if run["itl"]]),
        "kv_utilization": summary([run["kv_utilization"] for run in cold if run["kv_utilization"] is not None]),
    }


def _mean_summary(summaries: Sequence[dict[str, float]]) -> dict[str, float] | None:
    """Of each entry the mean over the runs; the largest of the largest."""
    if not summaries:
        return None
    means = {key: sum(one[key] for one in summaries) / len(summaries) for key in summaries[0]}
    return {**means, "max": max(one["max"] for one in summaries)}


def _of_one_batch(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of a single batch size, the numbers under vLLM's names."""
    if len(rows) > 1:
        return {}
    latency = rows[0]["latency"]
    return {
        "avg_latency": latency["mean"],
        "latencies": rows[0]["latencies"],
        "percentiles": {str(percent): latency[f"p{percent}"] for percent in (50, 90, 99)},
    }


def _show(document: dict[str, Any]) -> None:
    columns = (
        "batch", "seconds P50", "output tokens/s", "first token, ms", "first token cached, ms",
        "between tokens P50, ms", "P99, ms",
    )  # fmt: skip
    rows = [
        (
            str(row["batch_size"]),
            row["latency"]["p50"],
            row["output_tokens_per_second"],
            milliseconds(row["ttft_cold"], "p50"),
            milliseconds(row["ttft_cached"], "p50"),
            milliseconds(row["itl"], "p50"),
            milliseconds(row["itl"], "p99"),
        )
        for row in document["batches"]
    ]
    show_table("latency", columns, rows, [load_line(document)])
