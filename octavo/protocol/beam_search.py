"""Beam search: its parameters and what comes of it, with vLLM's names."""

from dataclasses import dataclass

import msgspec

from octavo.errors import InvalidInput, short_repr
from octavo.protocol.checks import as_int
from octavo.protocol.outputs import Logprob


class BeamSearchParams(msgspec.Struct, kw_only=True, frozen=True):
    """How `LLM.beam_search` searches.

    Raises:
        InvalidInput (a ValueError): a value out of range; names the field.
        TypeError: an unknown field.
    """

    beam_width: int
    """Sequences kept at every step, and returned."""
    max_tokens: int
    """Output tokens at most."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens."""
    length_penalty: float = 1.0
    """A sequence is scored by its cumulative log-probability over its length to this power."""

    def __post_init__(self) -> None:
        for name in ("beam_width", "max_tokens"):
            number = as_int(getattr(self, name))
            if number is None or number < 1:
                raise InvalidInput(f"{name}={short_repr(getattr(self, name))} must be an integer >= 1")
        if isinstance(self.length_penalty, bool) or not isinstance(self.length_penalty, (int, float)):
            raise InvalidInput(f"length_penalty={short_repr(self.length_penalty)} must be a number")
        if not isinstance(self.ignore_eos, bool):
            raise InvalidInput(f"ignore_eos={short_repr(self.ignore_eos)} must be True or False")


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence that was found."""

    tokens: list[int]
    """Prompt and output."""
    logprobs: list[dict[int, Logprob]]
    """One dict an output token."""
    cum_logprob: float
    text: str = ""
    """Of the output."""
    finish_reason: str | None = None
    """"stop", "length", or "abort": the engine could not go on, as when the logits are not finite."""


@dataclass(slots=True)
class BeamSearchOutput:
    """The best sequences of one prompt, best first."""

    sequences: list[BeamSearchSequence]
