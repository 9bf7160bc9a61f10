"""`octavo bench sweep`: throughput and latency over values of options, each setting in a process of its own."""

import dataclasses
import itertools
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import tyro
from tqdm import tqdm

from octavo.bench.children import ChildFailed, flags, run_module
from octavo.bench.engines import checked
from octavo.bench.report import OutputArgs, Record, check_outputs, show_table, write_outputs
from octavo.bench.throughput import load_line
from octavo.bench.traffic import TrafficArgs, check_traffic
from octavo.config.command_line import parse_arguments
from octavo.config.engine_args import EngineArgs
from octavo.errors import InvalidInput, short_repr

Metric = Literal["p50_itl_ms", "p99_itl_ms", "p50_ttft_ms", "p99_ttft_ms"]
METRICS: tuple[Metric, ...] = ("p50_itl_ms", "p99_itl_ms", "p50_ttft_ms", "p99_ttft_ms")
_KEYS = ("output_tokens_per_second", "tokens_per_second", *METRICS, "kv_utilization", "peak_rss")
_MOST_SETTINGS = 1000


@dataclass(frozen=True, kw_only=True)
class SweepArgs:
    """Measure the throughput of the same requests, all at once, with every combination of some options' values.

    Settings take turns in each round, and each runs in a process of its own. --recommend prints the setting that has
    the highest throughput of those that keep a latency limit.

    The exit status is 1 if a setting failed, or none keeps the limit.
    """

    over: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """An option of the engine or of the traffic and its values, such as max_num_seqs=1,8,32. May be repeated."""
    repeats: int = 1
    """Rounds; of each number the median counts."""
    recommend: bool = False
    """Print the best setting within --latency-limit-ms."""
    latency_limit_ms: float | None = None
    """Milliseconds that --latency-metric may be."""
    latency_metric: Metric = "p99_itl_ms"
    """What the limit is about: time between tokens (itl) or to the first one (ttft), the latter with the queue."""
    traffic: tyro.conf.OmitArgPrefixes[TrafficArgs] = field(default_factory=TrafficArgs)
    output: tyro.conf.OmitArgPrefixes[OutputArgs] = field(default_factory=OutputArgs)
    engine: tyro.conf.OmitArgPrefixes[EngineArgs] = field(default_factory=EngineArgs)


@dataclass(frozen=True)
class Setting:
    """One combination."""

    values: dict[str, Any]
    traffic: TrafficArgs
    engine: EngineArgs


def run(argv: Sequence[str]) -> int:
    """Measure, print the table, write the files.

    Returns:
        The exit status: 1 if a setting failed, or none keeps the limit.
    """
    args = parse_arguments(SweepArgs, "octavo bench sweep", argv)
    check_outputs(args.output)
    _check(args)
    settings = make_settings(args)
    own = {"over": args.over, "repeats": args.repeats, "latency_limit_ms": args.latency_limit_ms}
    record = Record("sweep", argv, {**own, **asdict(args.traffic), **asdict(args.engine)})
    rows, failed = summarise(settings, _measure(settings, args.repeats))
    limit = args.latency_limit_ms
    best = None if limit is None else recommend(rows, args.latency_metric, limit)
    document = record.finish({"settings": rows, "failed": failed, "recommended": best and best["setting"]})
    _show(document, args, best)
    write_outputs(document, args.output if rows else replace(args.output, plot=None))
    return 1 if failed or (args.recommend and best is None) else 0


def _check(args: SweepArgs) -> None:
    if not 1 <= args.repeats <= _MOST_SETTINGS:
        raise InvalidInput(f"repeats={args.repeats} must be from 1 to {_MOST_SETTINGS}")
    limit = args.latency_limit_ms
    if args.recommend != (limit is not None):
        raise InvalidInput("recommend and latency_limit_ms belong together; give both or neither")
    if limit is not None and not 0 < limit < math.inf:
        raise InvalidInput(f"latency_limit_ms={limit:g} must be greater than 0 and finite")


def make_settings(args: SweepArgs) -> list[Setting]:
    """Every combination, checked as far as that can be done before anything is loaded.

    Raises:
        InvalidInput: a value is refused, an option is unknown or named twice, or there is none.
    """
    axes: dict[str, list[Any]] = {}
    for text in args.over:
        name, values = _axis(text)
        if name in axes:
            raise InvalidInput(f"over={name} is given twice; put all its values into one")
        axes[name] = values
    if not axes:
        raise InvalidInput("there is nothing to sweep; give --over with an option and values: max_num_seqs=1,8,32")
    if math.prod(map(len, axes.values())) > _MOST_SETTINGS:
        raise InvalidInput(f"these are more than {_MOST_SETTINGS} settings; give fewer values")
    return [_setting(args, dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]


def _setting(args: SweepArgs, values: dict[str, Any]) -> Setting:
    of_traffic = {name: value for name, value in values.items() if name in _names(TrafficArgs)}
    of_engine = {name: value for name, value in values.items() if name not in of_traffic}
    traffic = replace(args.traffic, **of_traffic)
    check_traffic(traffic)
    return Setting(values, traffic, checked(args.engine, **of_engine))


def _axis(text: str) -> tuple[str, list[Any]]:
    name, equals, listed = text.partition("=")
    name = name.strip().replace("-", "_")
    values = [_value(part.strip()) for part in listed.split(",")]
    if not equals or "" in values or len(set(map(str, values))) < len(values):
        raise InvalidInput(f"over={short_repr(text)} must be an option and different values: max_num_seqs=1,8,32")
    for options in (TrafficArgs, EngineArgs):
        if name in _names(options):
            kind = str(options.__annotations__[name])
            for value in values:
                _check_kind(name, kind, value)
            return name, values
    raise InvalidInput(f"over={short_repr(name)} is no option of the engine or of the traffic; see --help for these")


def _check_kind(name: str, kind: str, value: Any) -> None:
    """The checks of the traffic take numbers and texts for granted; the engine's do not."""
    if name in _names(TrafficArgs):
        number = type(value) is int or (type(value) is float and "float" in kind)
        choices = getattr(TrafficArgs.__annotations__[name], "__args__", ())
        if ("int" in kind or "float" in kind) and not number:
            raise InvalidInput(f"{name}={short_repr(value)} must be a number")
        if name == "dataset_name" and value not in choices:
            raise InvalidInput(f"{name}={short_repr(value)} must be one of {', '.join(choices)}")


def _names(options: type) -> set[str]:
    return {option.name for option in dataclasses.fields(options)}


def _value(text: str) -> Any:
    """As Python's value: switches and numbers, else the text."""
    if text in ("true", "True", "false", "False"):
        return text in ("true", "True")
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _measure(settings: Sequence[Setting], repeats: int) -> list[list[dict[str, Any] | str]]:
    """For each setting the documents of its rounds, or why there is none."""
    found: list[list[dict[str, Any] | str]] = [[] for _ in settings]
    with (
        tempfile.TemporaryDirectory() as folder,
        tqdm(total=repeats * len(settings), desc="settings", delay=2, disable=None, leave=False) as bar,
    ):
        for _ in range(repeats):
            for setting, runs in zip(settings, found, strict=True):
                path = Path(folder) / "result.json"
                path.unlink(missing_ok=True)
                argv = [*flags(setting.traffic), *flags(setting.engine), f"--output-json={path}"]
                try:
                    runs.append(run_module("octavo.entrypoints.cli.main", ["bench", "throughput", *argv], path))
                except ChildFailed as error:
                    runs.append(str(error))
                bar.update()
    return found


def summarise(
    settings: Sequence[Setting], found: Sequence[Sequence[dict[str, Any] | str]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(a row a setting that ran: of each number the median, least and largest of its rounds; those that failed)."""
    rows, failed = [], []
    for setting, runs in zip(settings, found, strict=True):
        errors = [run for run in runs if isinstance(run, str)]
        if errors:
            failed.append({"setting": setting.values, "error": errors[0]})
            continue
        numbers = [_numbers(run) for run in runs if not isinstance(run, str)]
        rows.append({"setting": setting.values, **{key: _spread([one[key] for one in numbers]) for key in _KEYS}})
    return rows, failed


def _numbers(run: Mapping[str, Any]) -> dict[str, float | None]:
    found = {key: run.get(key) for key in _KEYS}
    for key in METRICS:
        percent, name, _ = key.split("_")
        found[key] = None if run[name] is None else 1000 * run[name][percent]
    return found


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"median": statistics.median(known), "min": min(known), "max": max(known)}


def recommend(rows: Sequence[dict[str, Any]], metric: str, limit: float) -> dict[str, Any] | None:
    """Of the rows whose median of `metric` is within the limit the one with the most output tokens a second."""
    within = [row for row in rows if row[metric] is not None and row[metric]["median"] <= limit]
    return max(within, key=lambda row: row["output_tokens_per_second"]["median"], default=None)


def _show(document: dict[str, Any], args: SweepArgs, best: dict[str, Any] | None) -> None:
    keys = ("output_tokens_per_second", *METRICS, "kv_utilization")
    titles = ("output tokens/s", "itl P50, ms", "itl P99", "ttft P50", "ttft P99", "KV utilisation", "peak RSS, MiB")
    rows = [
        (
            _named(row["setting"]),
            *(row[key] and row[key]["median"] for key in keys),
            row["peak_rss"] and row["peak_rss"]["median"] / 2**20,
        )
        for row in document["settings"]
    ]
    notes = [f"{_named(one['setting'])} failed: {one['error']}" for one in document["failed"]]
    if args.recommend:
        rule = f"{args.latency_metric} <= {args.latency_limit_ms:g}"
        notes.append(
            f"No setting keeps {rule}." if best is None else f"Recommended for {rule}: {_named(best['setting'])}"
        )
    show_table("sweep", ("setting", *titles), rows, [*notes, load_line(document)])


def _named(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())
