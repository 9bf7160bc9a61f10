"""Pictures of results. matplotlib is an extra: it is asked for only when a picture is."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.bench.goals import GOALS, OURS
from octavo.errors import InvalidInput

SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: str) -> None:
    """Refuse a picture that could not be drawn."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise InvalidInput(f"plot={path!r} must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    try:
        import matplotlib  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    except ImportError as error:
        raise InvalidInput(
            f'plot={path!r} needs matplotlib, which is not installed; pip install "octavo[bench]" or leave plot out'
        ) from error


def draw(document: Mapping[str, Any], path: str) -> None:
    """The picture of one document of `octavo.bench.report.Record.finish`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    _DRAWINGS[document["benchmark"]](document, left, right)
    figure.suptitle(f"octavo bench {document['benchmark']}: {document['machine']['cpu']}", fontsize=10)
    extra: dict[str, Any] = {"pil_kwargs": {"optimize": True}} if path.lower().endswith(".png") else {}
    figure.savefig(path, dpi=100, **extra)


def _throughput(document: Mapping[str, Any], left: Any, right: Any) -> None:
    times = [sample["time"] for sample in document["samples"]]
    left.plot(times, [100 * sample["kv_utilization"] for sample in document["samples"]])
    left.set(xlabel="seconds", ylabel="KV utilisation, %", ylim=(0, 101))
    right.plot(times, [sample["running"] for sample in document["samples"]], label="running")
    right.plot(times, [sample["waiting"] for sample in document["samples"]], label="waiting")
    right.set(xlabel="seconds", ylabel="requests")
    right.legend()


def _latency(document: Mapping[str, Any], left: Any, right: Any) -> None:
    rows = document["batches"]
    sizes = [row["batch_size"] for row in rows]
    left.plot(sizes, [row["output_tokens_per_second"] for row in rows], "o-")
    left.set(xlabel="batch size", ylabel="output tokens/s", xscale="log", ylim=(0, None))
    right.plot(sizes, [1000 * row["ttft_cold"]["p50"] for row in rows], "o-", label="first token, cold")
    right.plot(sizes, [1000 * row["ttft_cached"]["p50"] for row in rows], "o-", label="first token, cached")
    for key in ("p50", "p99"):
        if all(row["itl"] for row in rows):
            right.plot(sizes, [1000 * row["itl"][key] for row in rows], "s--", label=f"between tokens {key.upper()}")
    right.set(xlabel="batch size", ylabel="ms", xscale="log", yscale="log")
    for axes in (left, right):
        _plain_ticks(axes, sizes)
    right.legend()


def _serve(document: Mapping[str, Any], left: Any, right: Any) -> None:
    for axes, key, label in ((left, "ttfts", "to first token"), (right, "itls", "between tokens")):
        values = sorted(1000 * value for value in document[key])
        axes.plot(values, [100 * (place + 1) / len(values) for place in range(len(values))])
        axes.set(xlabel=f"ms {label}", ylabel="% of all", ylim=(0, 101))


def _sweep(document: Mapping[str, Any], left: Any, right: Any) -> None:
    rows = document["settings"]
    labels = [", ".join(str(value) for value in row["setting"].values()) for row in rows]
    places = range(len(rows))
    left.plot(places, [row["output_tokens_per_second"]["median"] for row in rows], "o-")
    left.set(ylabel="output tokens/s", ylim=(0, None))
    titles = {"p50_itl_ms": "between tokens P50", "p99_itl_ms": "between tokens P99",
              "p50_ttft_ms": "first token P50", "p99_ttft_ms": "first token P99"}  # fmt: skip
    for key, title in titles.items():
        if all(row[key] for row in rows):
            right.plot(places, [row[key]["median"] for row in rows], "o-", label=title)
    right.set(ylabel="ms", yscale="log")
    right.legend()
    _plain_ticks(right)
    for axes in (left, right):
        axes.set_xticks(list(places), labels, rotation=0 if max(map(len, labels)) < 6 else 30)
        axes.set_xlabel(", ".join(rows[0]["setting"]))


def _startup(document: Mapping[str, Any], left: Any, right: Any) -> None:
    names = ("import", "load", "first_token")
    for axes, runs in ((left, document["runs"]), (right, document["runs"][:1])):
        bottom = [0.0] * len(runs)
        for name in names:
            heights = [run[name] for run in runs]
            axes.bar(range(1, len(runs) + 1), heights, bottom=bottom, label=name.replace("_", " "))
            bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
        axes.set(xlabel="start", ylabel="seconds")
    right.set_title("the first start")
    left.legend()


def _compare(document: Mapping[str, Any], left: Any, right: Any) -> None:
    kinds, loads = document["kinds"], document["throughput_by_requests"]
    rivals = [name for name in document["engines"] if kinds[name] != OURS]
    _ratios(document["metrics"], rivals or list(document["engines"])[1:], left)
    if not rivals:
        left.set(ylabel=f"blocks of {document['options']['block_size']} are better, times")
    if not loads:
        _speeds(document, right)
        return
    for name in document["engines"]:
        cells = [row[name]["value"] for row in loads.values()]
        middle = [cell["median"] for cell in cells]
        spread = [[abs(cell["median"] - cell[end]) for cell in cells] for end in ("min", "max")]
        right.errorbar([int(row) for row in loads], middle, spread, fmt="o-", capsize=3, label=name)
    right.set(xlabel="requests at once", ylabel="output tokens/s", xscale="log", yscale="log")
    _plain_ticks(right, [int(row) for row in loads])
    right.legend(fontsize=8)


def _plain_ticks(axes: Any, places: Sequence[float] = ()) -> None:
    """Numbers as people write them on logarithmic axes, and of x only these places."""
    if places:
        axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.xaxis.set_minor_formatter("")
    if axes.get_yscale() == "log":
        from matplotlib.ticker import LogLocator  # type: ignore[import-not-found,unused-ignore]

        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(_number)
        axes.yaxis.set_minor_formatter("")


def _number(value: float, _: int) -> str:
    return f"{value:g}"


def _ratios(metrics: Mapping[str, Any], names: Sequence[str], axes: Any) -> None:
    """How many times better this engine is, by metric, with the goals."""
    rows = [row for row, cells in metrics.items() if any(cells[name]["ratio"] for name in names)]
    for number, name in enumerate(names):
        found = [(place, metrics[row][name]["ratio"]) for place, row in enumerate(rows) if metrics[row][name]["ratio"]]
        middle = [ratio["median"] for _, ratio in found]
        spread = [[abs(ratio["median"] - ratio[end]) for _, ratio in found] for end in ("min", "max")]
        places = [place + 0.8 * (number + 0.5) / len(names) - 0.4 for place, _ in found]
        axes.bar(places, middle, 0.8 / len(names), yerr=spread, label=name)
    goals = [(place, GOALS[row]) for place, row in enumerate(rows) if row in GOALS]
    if goals and not all(name.startswith(f"{OURS},") for name in names):
        axes.hlines([goal for _, goal in goals], [place - 0.4 for place, _ in goals],
                    [place + 0.4 for place, _ in goals], "black", "dashed", label="goal")  # fmt: skip
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(rows)), [row.replace("_", " ") for row in rows], rotation=35, ha="right")
    axes.set(ylabel="this engine is better, times", yscale="log")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * 3)  # the legend hides nothing
    _plain_ticks(axes)
    axes.legend(fontsize=8, ncols=2, loc="upper right")


def _speeds(document: Mapping[str, Any], axes: Any) -> None:
    """Tokens/s of each engine, where no row says how they change with the requests."""
    names = list(document["engines"])
    rows = [row for row in ("throughput", "one_stream") if document["metrics"][row][OURS]["value"]]
    for number, row in enumerate(rows):
        cells = [document["metrics"][row][name]["value"] for name in names]
        places = [place + 0.8 * (number + 0.5) / len(rows) - 0.4 for place in range(len(names))]
        heights = [cell["median"] if cell else 0.0 for cell in cells]
        axes.bar(places, heights, 0.8 / len(rows), label={"throughput": "all requests"}.get(row, row.replace("_", " ")))
    axes.set_xticks(range(len(names)), names, rotation=20, ha="right")
    axes.set(ylabel="output tokens/s", ylim=(0, 1.2 * axes.get_ylim()[1]))  # the legend hides nothing
    if rows:
        axes.legend(fontsize=8, ncols=2, loc="upper right")


_DRAWINGS: dict[str, Callable[[Mapping[str, Any], Any, Any], None]] = {
    "throughput": _throughput,
    "compare": _compare,
    "latency": _latency,
    "serve": _serve,
    "sweep": _sweep,
    "startup": _startup,
}
