"""`octavo bench startup`: how long until a new process has its first token."""

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import tyro
from tqdm import tqdm

from octavo.bench.children import ChildFailed, run_module
from octavo.bench.engines import checked
from octavo.bench.report import OutputArgs, Record, check_outputs, show_table, summary, write_outputs
from octavo.bench.throughput import load_line
from octavo.config.command_line import parse_arguments
from octavo.config.engine_args import EngineArgs
from octavo.errors import InvalidInput

PHASES = ("python", "import", "load", "first_token", "total")
_MOST_STARTS = 1000


@dataclass(frozen=True, kw_only=True)
class StartupArgs:
    """Start a process that loads the model and computes one token, several times, and measure each phase.

    The model is downloaded before. The first start finds the files as the machine has them, later ones in memory as
    far as there is room: nothing is thrown out of the machine's cache.
    """

    num_iters: int = 3
    """Starts, one after the other."""
    output: tyro.conf.OmitArgPrefixes[OutputArgs] = field(default_factory=OutputArgs)
    engine: tyro.conf.OmitArgPrefixes[EngineArgs] = field(default_factory=EngineArgs)


def run(argv: Sequence[str]) -> int:
    """Measure, print the table, write the files."""
    args = parse_arguments(StartupArgs, "octavo bench startup", argv)
    check_outputs(args.output)
    if not 1 <= args.num_iters <= _MOST_STARTS:
        raise InvalidInput(f"num_iters={args.num_iters} must be from 1 to {_MOST_STARTS}")
    engine = checked(args.engine)
    record = Record("startup", argv, {"num_iters": args.num_iters, **asdict(engine)})

    from octavo.loader.pull import find_model

    engine = replace(engine, model=str(find_model(engine.model, engine.revision)), revision=None)
    try:
        runs = _measure(engine, args.num_iters)
    except ChildFailed as error:
        raise InvalidInput(f"model {engine.model} does not start: {error}") from error
    document = record.finish({"runs": runs, **{name: summary([one[name] for one in runs]) for name in PHASES}})
    _show(document)
    write_outputs(document, args.output)
    return 0


def _measure(engine: EngineArgs, num_iters: int) -> list[dict[str, Any]]:
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "phases.json"
        for _ in tqdm(range(num_iters), desc="starts", delay=2, disable=None, leave=False):
            argv = [str(path), repr(time.time()), json.dumps(asdict(engine))]
            runs.append(run_module("octavo.bench.startup_probe", argv, path))
    return runs


def _show(document: dict[str, Any]) -> None:
    rows = [
        (name.replace("_", " "), document["runs"][0][name], document[name]["p50"], document[name]["max"])
        for name in PHASES
    ]
    peak = max(one["peak_rss"] for one in document["runs"]) / 2**20
    columns = ("seconds", "first start", "P50", "longest")
    show_table("startup", columns, rows, [f"Peak RSS: {peak:.0f} MiB.", load_line(document)])
