"""What a measurement leaves behind: a table for people, and a JSON file with what it was measured on.

Times are seconds and sizes are bytes unless a key says otherwise.
"""

import json
import math
import os
import platform
import resource
import shlex
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from octavo import __version__
from octavo.config.machine import detect
from octavo.errors import InvalidInput

PACKAGES = ("torch", "numpy", "tokenizers", "transformers", "openvino-genai", "llama-cpp-python", "vllm")
_CPUINFO_KEYS = ("model name", "Model", "cpu model")


@dataclass(frozen=True, kw_only=True)
class OutputArgs:
    """Where the results go, besides stdout."""

    output_json: str | None = None
    """A file for everything that was measured, and on what."""
    plot: str | None = None
    """A file for a picture of it: .png, .svg or .pdf. Needs matplotlib: pip install "octavo[bench]"."""


def check_outputs(args: OutputArgs) -> None:
    """Refuse now what could not be written at the end."""
    for name, path in (("output_json", args.output_json), ("plot", args.plot)):
        if path is None:
            continue
        folder = Path(path).absolute().parent
        if not path or Path(path).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
            raise InvalidInput(f"{name}={path!r} cannot be written; give a file in a folder that is there")
    if args.plot is not None:
        from octavo.bench.plots import check_plot

        check_plot(args.plot)


@dataclass
class Record:
    """Begun before a measurement: machine, versions, options and load."""

    benchmark: str
    argv: Sequence[str]
    options: Mapping[str, Any]
    begun: float = field(default_factory=time.time)
    load_before: tuple[float, float, float] = field(default_factory=os.getloadavg)

    def given(self) -> dict[str, Any]:
        """The options that have a value."""
        return {name: value for name, value in self.options.items() if value is not None}

    def finish(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """The whole document; results are beside the rest."""
        return {
            "benchmark": self.benchmark,
            "command": shlex.join(["octavo", "bench", self.benchmark, *self.argv]),
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.begun)),
            **results,
            "options": self.given(),
            "machine_load": {"before": self.load_before, "after": os.getloadavg()},
            "machine": machine(),
            "versions": versions(),
        }


def machine() -> dict[str, Any]:
    """What this process may use."""
    found = detect()
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": found.num_cores,
        "cores_source": found.num_cores_source,
        "cpu_quota": found.cpu_quota,
        "memory": found.memory_limit,
        "memory_source": found.memory_source,
        "environment": {name: value for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY") if (value := os.getenv(name))},
    }


def versions() -> dict[str, str]:
    """Of this engine, and of what computes or is compared with it, as far as it is installed."""
    found = {"octavo": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def write_outputs(document: Mapping[str, Any], args: OutputArgs) -> None:
    """The files that were asked for, and where they are, on stderr."""
    if args.output_json is not None:
        Path(args.output_json).write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        print(f"written: {args.output_json}", file=sys.stderr)
    if args.plot is not None:
        from octavo.bench.plots import draw

        draw(document, args.plot)
        print(f"drawn: {args.plot}", file=sys.stderr)


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], notes: Sequence[str] = ()) -> None:
    """A table on stdout, with remarks below it."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(show(value) for value in row))
    # a file or a pipe has no width: nothing is cut off there
    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 1000)
    console.print(table)
    for note in notes:
        console.print(note, soft_wrap=True)


def show(value: object) -> str:
    """A cell: four digits of a number, a dash for what there is not."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value)


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, P50, P90, P99 and the largest; None of nothing."""
    if not values:
        return None
    return {
        "mean": statistics.fmean(values),
        **{f"p{percent}": percentile(values, percent) for percent in (50, 90, 99)},
        "max": max(values),
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """Interpolated between the two nearest ranks."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def milliseconds(times: Mapping[str, float] | None, key: str) -> float | None:
    """One entry of a summary of seconds."""
    return None if times is None else 1000 * times[key]


def peak_rss() -> int:
    """Bytes of RAM this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in _CPUINFO_KEYS and value.strip():
            return value.strip()
    return platform.processor() or platform.machine()
