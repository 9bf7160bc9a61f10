"""Engines for measuring: made of the options of a command line, closed whatever happens."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from octavo.config.engine_args import EngineArgs
from octavo.config.options import make_engine_args

if TYPE_CHECKING:
    from octavo.engine.llm_engine import LLMEngine


def checked(args: EngineArgs, **changes: Any) -> EngineArgs:
    """Raises InvalidInput, before anything is loaded, as far as that can be told then."""
    return make_engine_args(**{**asdict(args), **changes})


@contextmanager
def engine_of(args: EngineArgs) -> "Iterator[LLMEngine]":
    """A loaded engine."""
    from octavo.engine.llm_engine import LLMEngine  # brings torch, so only when everything is in order

    engine = LLMEngine.from_args(args)
    try:
        yield engine
    finally:
        engine.shutdown()


def longest_request(engine: "LLMEngine") -> int:
    """Tokens of prompt and output that one request may have."""
    return min(engine.config.scheduler.max_model_len, engine.config.cache.num_tokens)


def reset_prefix_cache(engine: "LLMEngine") -> None:
    """So that what was measured before does not help. Nothing runs at that moment."""
    if not engine.client.reset_prefix_cache():
        raise AssertionError("requests hold blocks between two measurements")
