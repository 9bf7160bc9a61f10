"""Pictures of results. matplotlib is an extra: it is asked for only when a picture is."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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
    figure.savefig(path, dpi=120)


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
    for key in ("p50_itl_ms", "p99_itl_ms", "p99_ttft_ms"):
        if all(row[key] for row in rows):
            right.plot(places, [row[key]["median"] for row in rows], "o-", label=key.replace("_", " "))
    right.set(ylabel="ms", yscale="log")
    right.legend()
    for axes in (left, right):
        axes.set_xticks(list(places), labels, rotation=30)
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
    names = list(document["engines"])[1:]
    charts = ((left, document["metrics"], "ratio"), (right, document["throughput_by_requests"], "throughput ratio"))
    for axes, rows, title in charts:
        for number, name in enumerate(names):
            found = [(row, cells[name]["ratio"]) for row, cells in rows.items() if cells[name]["ratio"]]
            middle = [ratio["median"] for _, ratio in found]
            spread = [
                [ratio["median"] - ratio["min"] for _, ratio in found],
                [ratio["max"] - ratio["median"] for _, ratio in found],
            ]
            places = [place + 0.8 * (number + 0.5) / len(names) - 0.4 for place in range(len(found))]
            axes.bar(places, middle, 0.8 / len(names), yerr=spread, label=name)
        axes.set_xticks(range(len(rows)), list(rows), rotation=30)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set(ylabel=f"{title}, above 1 this engine is better")
    left.legend()
    right.set(xlabel="requests at once")


_DRAWINGS: dict[str, Callable[[Mapping[str, Any], Any, Any], None]] = {
    "throughput": _throughput,
    "compare": _compare,
    "latency": _latency,
    "serve": _serve,
    "sweep": _sweep,
    "startup": _startup,
}
