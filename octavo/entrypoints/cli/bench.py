"""`octavo bench`: the measuring tools. Each is imported only when it is called."""

from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from octavo.errors import InvalidInput, short_repr


class Tool(NamedTuple):
    """The module has `run(argv: Sequence[str]) -> int | None`, as a command's."""

    module: str
    help: str


TOOLS = {
    "compare": Tool("octavo.bench.compare", "this engine, others and servers on the same requests, in turns"),
    "latency": Tool("octavo.bench.latency", "one batch at a time: first token cold and cached, time between tokens"),
    "rival-env": Tool("octavo.bench.rival_env", "make an environment with another engine, for compare"),
    "serve": Tool("octavo.bench.serve", "requests to a server at a rate, or from so many clients"),
    "startup": Tool("octavo.bench.startup", "how long until a new process has its first token"),
    "sweep": Tool("octavo.bench.sweep", "throughput and latency over values of engine options"),
    "throughput": Tool("octavo.bench.throughput", "all requests at once, as fast as they go"),
}
_HELP = ("-h", "--help", "help")


def run(argv: Sequence[str]) -> int:
    """Run one tool.

    Returns:
        Its exit status.

    Raises:
        SystemExit: help was shown.
    """
    name, *rest = argv or ["--help"]
    if name in _HELP:
        print(_help())
        raise SystemExit(0)  # as every command's parser does
    if name not in TOOLS:
        raise InvalidInput(
            f"octavo bench has no {short_repr(name)}; it has {', '.join(TOOLS)} (see octavo bench --help)"
        )
    status: int | None = import_module(TOOLS[name].module).run(rest)
    return status or 0


def _help() -> str:
    width = max(map(len, TOOLS))
    rows = "\n".join(f"  {name:{width}}  {tool.help}" for name, tool in TOOLS.items())
    return (
        f"usage: octavo bench TOOL [OPTIONS]\n\nMeasure speed and memory.\n\ntools:\n{rows}\n\n"
        "octavo bench TOOL --help shows a tool's options."
    )
