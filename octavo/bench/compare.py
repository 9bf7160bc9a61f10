"""`octavo bench compare`: this engine, static batches of transformers, and servers, on the same requests in turns."""

import math
import os
import random
import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import tyro
from tqdm import tqdm

from octavo.bench.contenders import Contender, Rival, RivalFailed, ServerRunner, Work
from octavo.bench.engines import checked
from octavo.bench.http_client import first_model, make_target
from octavo.bench.report import OutputArgs, Record, check_outputs, percentile, show_table, write_outputs
from octavo.bench.throughput import load_line
from octavo.bench.traffic import TokenizerWords, TrafficArgs, check_traffic, make_traffic
from octavo.config.engine_args import EngineArgs
from octavo.errors import InvalidInput

OURS = "octavo"
METRICS = {
    "throughput": ("output tokens/s", True),
    "ttft": ("first token, ms", False),
    "ttft_cached": ("first token, prefix seen before, ms", False),
    "p99_latency": ("whole answer P99, s", False),
    "p99_itl": ("between tokens P99, ms", False),
    "kv_utilization": ("KV utilisation", True),
    "peak_rss": ("peak RSS, MiB", False),
}
"""What is shown of each metric, and whether more is better."""
_SERVER_SECONDS = 600.0
_QUESTION = 16
"""Tokens after the prefix whose time to the first token is measured."""


@dataclass(frozen=True, kw_only=True)
class CompareArgs:
    """Run this engine, transformers and servers on the same requests, and give the ratios with their spread.

    This engine and transformers compute the same weights; what a server has is its own affair. Each engine has a
    process of its own; they take turns in each round, so that a change of the machine meets all. transformers gets
    its best static batches: sorted by output length, KV cache on. Prompts differ from round to round. Ratios are this
    engine's advantage: above 1 it is better. Their spread is over the rounds.
    """

    static_batches: tuple[int, ...] = (8, 32)
    """Batch sizes of transformers."""
    concurrency: tuple[int, ...] = ()
    """Also compare the throughput of so many requests at once, such as 1 8 32 128."""
    rounds: int = 3
    """Rounds."""
    prefix_len: int = 256
    """Tokens of the prompt whose time to the first token is measured, new and seen before."""
    transformers_python: str = sys.executable
    """The Python of the environment that has transformers."""
    url: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A server to compare with, of any engine that takes token ids and ignore_eos. May be repeated. Its key is taken
    from the environment variable OPENAI_API_KEY."""
    traffic: tyro.conf.OmitArgPrefixes["Lengths"] = field(default_factory=lambda: Lengths())
    output: tyro.conf.OmitArgPrefixes[OutputArgs] = field(default_factory=OutputArgs)
    engine: tyro.conf.OmitArgPrefixes[EngineArgs] = field(default_factory=lambda: EngineArgs(dtype="float32"))


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Random requests."""

    num_prompts: int = 64
    """Requests, all there at once."""
    input_len: int = 136
    """Tokens of a prompt."""
    output_len: int = 136
    """Output tokens of a request."""
    range_ratio: float = 0.88
    """Lengths are spread evenly from (1 - this) to (1 + this) times the lengths given."""
    traffic_seed: int = 0
    """Seed of everything random about the requests."""


def run(argv: Sequence[str]) -> int:
    """Measure, print the tables, write the files."""
    args = tyro.cli(CompareArgs, prog="octavo bench compare", args=argv)
    check_outputs(args.output)
    _check(args)
    engine = checked(args.engine)
    own = {name: value for name, value in asdict(args).items() if name not in ("traffic", "output", "engine")}
    record = Record("compare", argv, {**own, **asdict(args.traffic), **asdict(engine)})

    from octavo.loader.pull import find_model
    from octavo.tokenization.tokenizer import load_tokenizer

    path = Path(find_model(engine.model, engine.revision))
    words = TokenizerWords(load_tokenizer(Path(engine.tokenizer or path)))
    engine = replace(engine, model=str(path), revision=None)
    try:
        with ExitStack() as stack:
            contenders = list(_start(stack, args, engine))
            found = measure(contenders, args, words)
            engines = {one.name: one.runner.hello() for one in contenders}
    except RivalFailed as error:
        raise InvalidInput(str(error)) from error
    document = record.finish({"engines": engines, **summarise(found)})
    _show(document)
    write_outputs(document, args.output)
    return 0


def _check(args: CompareArgs) -> None:
    lows = {"rounds": args.rounds, "prefix_len": args.prefix_len}
    lows |= {"static_batches": min(args.static_batches, default=0), "concurrency": min(args.concurrency, default=1)}
    for name, value in lows.items():
        if value < 1:
            raise InvalidInput(f"{name}={value} must be at least 1")
    for name, values in (("static_batches", args.static_batches), ("concurrency", args.concurrency)):
        if len(set(values)) < len(values):
            raise InvalidInput(f"{name}={values} has a number twice; give each once")
    if args.engine.dtype not in ("float32", "bfloat16", "float16"):
        raise InvalidInput(f"dtype={args.engine.dtype!r} may differ between engines; give float32, bfloat16 or float16")
    if shutil.which(args.transformers_python) is None:
        raise InvalidInput(f"transformers_python={args.transformers_python!r} is no program; give a Python")
    if len(set(args.url)) < len(args.url):
        raise InvalidInput(f"url={args.url} has one twice; give each once")
    for url in args.url:
        make_target(url, None, _SERVER_SECONDS)
    check_traffic(TrafficArgs(**asdict(args.traffic)))


def _start(stack: ExitStack, args: CompareArgs, engine: EngineArgs) -> Iterator[Contender]:
    """One after the other: two that load at once would disturb each other."""
    ours = stack.enter_context(Rival(sys.executable, "this_engine", asdict(engine)))
    ours.hello()
    options = {"model": engine.model, "dtype": engine.dtype, "num_threads": engine.num_threads}
    theirs = stack.enter_context(Rival(args.transformers_python, "static_batches", options))
    theirs.hello()
    yield Contender(OURS, ours, 0)
    for size in args.static_batches:
        yield Contender(f"transformers, batches of {size}", theirs, size)
    for url in args.url:
        target = make_target(url, os.environ.get("OPENAI_API_KEY"), _SERVER_SECONDS)
        yield Contender(url, ServerRunner(target, first_model(target)), 0)


def measure(
    contenders: Sequence[Contender], args: CompareArgs, words: TokenizerWords
) -> dict[str, dict[str, list[dict[str, float]]]]:
    """{engine: {"all" or number of requests: a dict of metrics a round}}."""
    found: dict[str, dict[str, list[dict[str, float]]]] = {one.name: {} for one in contenders}
    total = (args.rounds + 1) * len(contenders)
    with tqdm(total=total, desc="turns", delay=2, disable=None, leave=False) as bar:
        for number in range(-1, args.rounds):
            turn = _Turn(args, words, number)
            for one in contenders:
                for load, metrics in turn.take(one):
                    if number >= 0:  # the one before the first warms up
                        found[one.name].setdefault(load, []).append(metrics)
                bar.update()
    return found


class _Turn:
    """The requests of one round, the same for all engines."""

    def __init__(self, args: CompareArgs, words: TokenizerWords, number: int) -> None:
        rng = random.Random(f"{args.traffic.traffic_seed} {number}")
        counts = {"all": args.traffic.num_prompts, **{str(count): count for count in args.concurrency}}
        if number < 0:
            counts = {"all": 1}
        self._loads = {name: _work(args, words, count, rng.getrandbits(32)) for name, count in counts.items()}
        prefix = words.make(rng, args.prefix_len)
        self._cold, self._cached = ([(prefix + words.make(rng, _QUESTION), 1)] for _ in range(2))

    def take(self, one: Contender) -> Iterator[tuple[str, dict[str, float]]]:
        """Let an engine compute them."""
        for name, work in self._loads.items():
            size = min(one.batch_size, len(work))
            answer = one.runner.run(work, size)
            metrics = {"throughput": answer["output_tokens"] / answer["seconds"]}
            if name == "all":
                metrics["ttft"] = 1000 * one.runner.run(self._cold, 1)["seconds"]
                metrics["ttft_cached"] = 1000 * one.runner.run(self._cached, 1)["seconds"]
                metrics["p99_latency"] = percentile(answer["latencies"], 99)
                if answer["between_tokens"]:
                    metrics["p99_itl"] = 1000 * percentile(answer["between_tokens"], 99)
                if answer["kv_utilization"] is not None:
                    metrics["kv_utilization"] = answer["kv_utilization"]
                if answer["peak_rss"] is not None:
                    metrics["peak_rss"] = answer["peak_rss"] / 2**20
            yield name, metrics


def _work(args: CompareArgs, words: TokenizerWords, count: int, seed: int) -> Work:
    traffic = TrafficArgs(**{**asdict(args.traffic), "num_prompts": count, "traffic_seed": seed})
    return [(list(request.prompt), request.output_len) for request in make_traffic(traffic, words)]  # type: ignore[arg-type]  # ids


def summarise(found: dict[str, dict[str, list[dict[str, float]]]]) -> dict[str, Any]:
    """Values and ratios {median, min, max}: by metric and engine, and of the throughput by load and engine."""
    ours = found[OURS]
    metrics = {
        name: {
            engine: _cell(
                [one.get(name) for one in runs["all"]], [one.get(name) for one in ours["all"]], more_is_better
            )
            for engine, runs in found.items()
        }
        for name, (_, more_is_better) in METRICS.items()
    }
    loads = {
        load: {
            engine: _cell([one["throughput"] for one in runs[load]], [one["throughput"] for one in ours[load]], True)
            for engine, runs in found.items()
        }
        for load in ours
        if load != "all"
    }
    return {"metrics": metrics, "throughput_by_requests": loads}


def _cell(theirs: Sequence[float | None], ours: Sequence[float | None], more_is_better: bool) -> dict[str, Any]:
    pairs = [(one, other) for one, other in zip(theirs, ours, strict=True) if one is not None and other is not None]
    ratios = [(mine / other if more_is_better else other / mine) for other, mine in pairs if mine and other]
    return {"value": _spread([other for other, _ in pairs]), "ratio": _spread(ratios)}


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    known = [value for value in values if math.isfinite(value)]
    return {"median": statistics.median(known), "min": min(known), "max": max(known)} if known else None


def _show(document: dict[str, Any]) -> None:
    engines = list(document["engines"])
    columns = ("", *(part for name in engines for part in ((name,) if name == OURS else (name, "ratio (spread)"))))
    rows = [(METRICS[name][0], *_cells(cells)) for name, cells in document["metrics"].items()]
    loads = document["throughput_by_requests"]
    show_table("compare", columns, rows, [] if loads else [load_line(document)])
    if loads:
        rows = [(name, *_cells(cells)) for name, cells in loads.items()]
        show_table("output tokens/s by requests at once", columns, rows, [load_line(document)])


def _cells(cells: dict[str, dict[str, Any]]) -> Iterator[object]:
    for engine, cell in cells.items():
        yield cell["value"] and cell["value"]["median"]
        if engine != OURS:
            ratio = cell["ratio"]
            yield ratio and f"{ratio['median']:.2f} ({ratio['min']:.2f}..{ratio['max']:.2f})"
