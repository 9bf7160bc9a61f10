"""`octavo pull`: download a model and print its path, last on stdout."""

from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from octavo.config.command_line import parse_arguments
from octavo.config.memory import format_bytes
from octavo.errors import InvalidInput


@dataclass(frozen=True, kw_only=True)
class PullArgs:
    """Download a model into the cache, check it, and print where it is."""

    name: tyro.conf.Positional[str] = ""
    """An alias of the catalogue or a hub id (org/name)."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    list: bool = False
    """Show the catalogue instead."""


def run(argv: Sequence[str]) -> None:
    """Print the path, or the catalogue."""
    args = parse_arguments(PullArgs, "octavo pull", argv, pairs=False)
    if args.list:
        if args.name:
            raise InvalidInput(f"--list shows the whole catalogue; leave {args.name!r} out")
        _print_catalogue()
        return
    if not args.name:
        raise InvalidInput("there is nothing to pull; give a name (octavo pull --list shows those of the catalogue)")

    from octavo.loader.pull import pull

    print(pull(args.name, args.revision))


def _print_catalogue() -> None:
    from octavo.loader.catalogue import catalogue

    for name, entry in catalogue().items():
        print(f"{name}  {entry.title}, {entry.licence}, {format_bytes(entry.bytes)}")
