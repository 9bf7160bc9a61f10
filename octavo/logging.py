"""The `octavo` logger: one line an event, to stderr, so that stdout stays free for answers."""

import logging

from octavo import envs
from octavo.errors import InvalidInput


def get_logger(name: str) -> logging.Logger:
    """A child of the `octavo` logger; `name` is the module's `__name__`."""
    return logging.getLogger(name)


def configure_logging() -> None:
    """Give the `octavo` logger a stderr handler and the level of OCTAVO_LOGGING_LEVEL.

    Called when an engine starts, not on import. Does nothing when the application has configured this logger itself.
    """
    logger = logging.getLogger("octavo")
    if logger.handlers or logger.level != logging.NOTSET:
        return
    level = logging.getLevelNamesMapping().get(envs.logging_level())
    if level is None:
        raise InvalidInput(
            f"OCTAVO_LOGGING_LEVEL={envs.logging_level()!r} is no level; use DEBUG, INFO, WARNING or ERROR"
        )
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s %(name)s: %(message)s", "%H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
