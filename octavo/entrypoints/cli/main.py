"""The `octavo` command. A command's module is imported only when it is called: help must be there at once."""

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from octavo import __version__
from octavo.entrypoints.cli.streams import complain, discard_unwritten, mend_streams, terminable
from octavo.errors import EngineDeadError, InvalidInput, short_repr


class Command(NamedTuple):
    """One entry of the table. The module has `run(argv: Sequence[str]) -> int | None`: the exit status, None for 0.

    It raises InvalidInput.
    """

    module: str
    help: str


COMMANDS = {
    "bench": Command("octavo.entrypoints.cli.bench", "measure speed and memory"),
    "chat": Command("octavo.entrypoints.cli.chat", "talk to a model"),
    "doctor": Command("octavo.entrypoints.cli.doctor", "look at this machine and say what is wrong"),
    "generate": Command("octavo.entrypoints.cli.generate", "complete texts"),
    "plan": Command("octavo.entrypoints.cli.plan", "say what a model would take on this machine, without loading it"),
    "pull": Command("octavo.entrypoints.cli.pull", "download a model and print where it is"),
    "serve": Command("octavo.entrypoints.server.serve", "serve a model over HTTP"),
}

EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0, 1 (failed), 2 (refused), 130 (interrupted).

    Raises:
        SystemExit: of 143 when terminated (SIGTERM); or help was shown or an option could not be read.
    """
    mend_streams()
    try:
        with terminable():
            try:
                return _run(sys.argv[1:] if argv is None else argv)
            finally:
                sys.stdout.flush()
    except OSError as error:
        if error.filename is not None:  # not of a stream that was open
            raise
        if not isinstance(error, BrokenPipeError):  # a reader that has had enough needs no telling
            complain(f"input or output failed: {error.strerror or error}")
        return EXIT_FAILURE
    finally:
        discard_unwritten()


def _run(argv: Sequence[str]) -> int:
    name, *rest = argv or ["--help"]
    if name in ("-h", "--help", "help"):
        print(_help())
        return 0
    if name in ("-V", "--version"):
        print(f"octavo {__version__}")
        return 0
    if name not in COMMANDS:
        complain(f"there is no command {short_repr(name)}; the commands are {', '.join(COMMANDS)} (see octavo --help)")
        return EXIT_USAGE
    try:
        status: int | None = import_module(COMMANDS[name].module).run(rest)
    except InvalidInput as error:
        complain(str(error))
        return EXIT_USAGE
    except EngineDeadError as error:
        complain(str(error))
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return status or 0


def _help() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:{width}}  {command.help}" for name, command in COMMANDS.items())
    return (
        f"usage: octavo COMMAND [OPTIONS]\n\nA serving engine for large language models.\n\ncommands:\n{rows}\n\n"
        "octavo COMMAND --help shows a command's options; octavo --version the version."
    )


if __name__ == "__main__":
    sys.exit(main())
