"""The tables of a comparison: values and ratios of each metric and engine, and what is shown of them."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from octavo.bench.goals import BATCH_GOALS, GOALS, OURS
from octavo.bench.report import show_table
from octavo.bench.scenarios import METRICS
from octavo.bench.throughput import load_line

Rounds = Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]]
"""{engine: {row: metrics of each round}}."""


def summarise(found: Rounds) -> dict[str, Any]:
    """Values and ratios {median, min, max}: by metric and engine, and of the throughput by requests and engine."""
    ours = found[OURS]
    metrics = {
        name: {
            engine: _cell(
                [one.get(name) for one in runs.get("all", ())],
                [one.get(name) for one in ours.get("all", ())],
                more_is_better,
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


def show(document: Mapping[str, Any]) -> None:
    """Metric x engine, requests at once x engine, block size x metric; then what is missed and who is missing."""
    names = list(document["engines"])
    rivals = [name for name in names if document["kinds"][name] != OURS]
    variants = [name for name in names if document["kinds"][name] == OURS]
    known = {name: cells for name, cells in document["metrics"].items() if cells[OURS]["value"]}
    loads = document["throughput_by_requests"]
    columns = ("", OURS, *(part for name in rivals for part in (name, "ratio (spread)")), "goal")
    notes = [one["sentence"] for one in document["limits"]]
    notes += [f"{name} takes no part: {why}." for name, why in document["left_out"].items()]
    notes.append(load_line(document))
    if len(variants) > 1:
        rows = [(METRICS[name][0], *(_value(cells[one]) for one in variants)) for name, cells in known.items()]
        rows += [(f"output tokens/s of {row} at once", *(_value(cells[one]) for one in variants))
                 for row, cells in loads.items()]  # fmt: skip
        show_table(
            "block sizes", ("", *(_block_title(document, one) for one in variants)), rows, [] if rivals else notes
        )
    if known and rivals:
        table = [(METRICS[name][0], *_cells(cells, rivals), GOALS.get(name)) for name, cells in known.items()]
        show_table("compare", columns, table, [] if loads else notes)
    if loads and rivals:
        table = [(row, *_cells(cells, rivals), BATCH_GOALS.get(row)) for row, cells in loads.items()]
        show_table("output tokens/s by requests at once", columns, table, notes)


def _block_title(document: Mapping[str, Any], name: str) -> str:
    return f"{OURS}, blocks of {document['options']['block_size']}" if name == OURS else name


def _cells(cells: Mapping[str, Any], rivals: Sequence[str]) -> Iterator[object]:
    yield _value(cells[OURS])
    for engine in rivals:
        yield _value(cells[engine])
        ratio = cells[engine]["ratio"]
        yield ratio and f"{ratio['median']:.2f} ({ratio['min']:.2f}..{ratio['max']:.2f})"


def _value(cell: Mapping[str, Any]) -> float | None:
    return cell["value"] and float(cell["value"]["median"])
