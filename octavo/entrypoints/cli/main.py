"""The `octavo` command. A command's module is imported only when it is called: help must be there at once."""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from octavo import __version__
from octavo.errors import EngineDeadError, InvalidInput


class Command(NamedTuple):
    """One entry of the table. The module has `run(argv: Sequence[str]) -> None`, which raises InvalidInput."""

    module: str
    help: str


COMMANDS = {
    "chat": Command("octavo.entrypoints.cli.chat", "talk to a model"),
    "generate": Command("octavo.entrypoints.cli.generate", "complete texts"),
    "pull": Command("octavo.entrypoints.cli.pull", "download a model and print where it is"),
}

EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0, 1 (failed), 2 (refused), 130 (interrupted)."""
    name, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    if name in ("-h", "--help", "help"):
        print(_help())
        return 0
    if name in ("-V", "--version"):
        print(f"octavo {__version__}")
        return 0
    if name not in COMMANDS:
        return _complain(f"there is no command {name!r}; the commands are {', '.join(COMMANDS)} (see octavo --help)")
    try:
        import_module(COMMANDS[name].module).run(rest)
        sys.stdout.flush()
    except InvalidInput as error:
        return _complain(str(error))
    except EngineDeadError as error:
        _complain(str(error))
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has had enough; the interpreter must not try to flush again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    return 0


def _help() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:{width}}  {command.help}" for name, command in COMMANDS.items())
    return (
        f"usage: octavo COMMAND [OPTIONS]\n\nA serving engine for large language models.\n\ncommands:\n{rows}\n\n"
        "octavo COMMAND --help shows a command's options; octavo --version the version."
    )


def _complain(message: str) -> int:
    """One paragraph on stderr."""
    print(f"octavo: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
