"""SamplingParams: how the next tokens of one request are chosen and when it stops. Validated here and nowhere else."""

import enum
import math
from typing import Any

import msgspec

from octavo.errors import InvalidInput, not_built
from octavo.protocol.checks import as_int, is_encodable


class RequestOutputKind(enum.Enum):
    """What each `RequestOutput` of a request holds."""

    CUMULATIVE = 0
    """Everything generated so far."""
    DELTA = 1
    """Only what is new since the last output."""
    FINAL_ONLY = 2
    """Nothing until the request has finished, then everything."""


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Sampling parameters of one request, with the names and defaults vLLM users know.

    Raises:
        InvalidInput (a ValueError): a value out of range, or a field whose feature is not built yet; names the field.
        TypeError: an unknown field.
    """

    temperature: float = 1.0
    """Divides the logits. 0: greedy."""
    top_p: float = 1.0
    """Sample from the smallest set of most probable tokens whose probability sums to at least this. 0: the top one."""
    top_k: int = 0
    """Sample from the k most probable tokens. 0 or -1: off."""
    min_p: float = 0.0
    """Drop tokens less probable than this fraction of the most probable one. 0: off."""
    seed: int | None = None
    """Key of this request's random stream. None or -1: derived from the engine's seed and the arrival number."""
    max_tokens: int | None = 16
    """Output tokens at most; clamped to the room left. None: up to the room left."""
    min_tokens: int = 0
    """Output tokens before an end-of-sequence token, stop token or stop string may end the request."""
    stop: str | list[str] | None = None
    """Strings that end the request; they are not part of the text."""
    stop_token_ids: list[int] | None = None
    """Token ids that end the request."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens. `stop_token_ids` still stop."""
    logprobs: int | None = None
    """Log-probabilities an output token: of the sampled token and the N most probable. 0: the sampled token only.
    -1: the whole vocabulary. None: none."""
    detokenize: bool = True
    """Produce text. Off: `text` stays empty, and stop strings are refused."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What each output of a stream holds."""

    # Known fields whose features are not built yet: only the neutral value is taken.
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int | str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    prompt_logprobs: int | None = None
    spaces_between_special_tokens: bool = True
    stop_regex: str | None = None

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check every field and bring it to its one form: plain numbers, `stop` a new list, `seed` -1 a None.

        To be called again before use: the fields are mutable. See the class for errors.
        """
        for name in _NOT_BUILT:
            if not _is_neutral(getattr(self, name), _DEFAULTS[name]):
                raise not_built(f"SamplingParams.{name}={getattr(self, name)!r}")
            setattr(self, name, _DEFAULTS[name])
        self.temperature = _number("temperature", self.temperature, 0.0, math.inf)
        self.top_p = _number("top_p", self.top_p, 0.0, 1.0)
        self.min_p = _number("min_p", self.min_p, 0.0, 1.0)
        self.top_k = _integer("top_k", self.top_k, -1, None)
        if self.seed is not None:
            self.seed = _integer("seed", self.seed, -(2**63), 2**64 - 1)
            self.seed = None if self.seed == -1 else self.seed
        if self.max_tokens is not None:
            self.max_tokens = _integer("max_tokens", self.max_tokens, 1, None)
        self.min_tokens = _integer("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidInput(f"min_tokens={self.min_tokens} must be at most max_tokens={self.max_tokens}")
        if self.logprobs is not None:
            self.logprobs = _integer("logprobs", self.logprobs, -1, None)
        for name in ("ignore_eos", "detokenize", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidInput(f"{name}={getattr(self, name)!r} must be True or False")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise InvalidInput(f"output_kind={self.output_kind!r} must be a RequestOutputKind")
        self._validate_stops()

    def _validate_stops(self) -> None:
        stop = [self.stop] if isinstance(self.stop, str) else _items("stop", self.stop, "a string or a list of strings")
        if not all(isinstance(s, str) and s for s in stop):
            raise InvalidInput(f"stop={self.stop!r} must be non-empty strings")
        for text in stop:
            if not is_encodable(text):
                raise InvalidInput(f"stop={self.stop!r} holds a lone surrogate, which is no character; remove it")
        if stop and not self.detokenize:
            raise InvalidInput(f"stop={self.stop!r} needs text, but detokenize=False; use stop_token_ids instead")
        self.stop = stop
        token_ids = _items("stop_token_ids", self.stop_token_ids, "a list of token ids")
        self.stop_token_ids = [_integer("stop_token_ids", token_id, 0, None) for token_id in token_ids]

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def clone(self) -> "SamplingParams":
        """An independent copy, validated."""
        return msgspec.structs.replace(self)


_NOT_BUILT = (
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words",
    "allowed_token_ids", "include_stop_str_in_output", "prompt_logprobs", "spaces_between_special_tokens",
    "stop_regex",
)  # fmt: skip
_DEFAULTS: dict[str, Any] = {f.name: f.default for f in msgspec.structs.fields(SamplingParams)}


def _is_neutral(value: object, default: object) -> bool:
    if default is None:
        return value is None or (isinstance(value, (list, dict)) and not value)
    return isinstance(value, (int, float)) and isinstance(value, bool) == isinstance(default, bool) and value == default


def _number(name: str, value: object, low: float, high: float) -> float:
    try:
        number = math.nan if isinstance(value, (bool, str, bytes)) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not low <= number <= high or number == math.inf:
        limit = f"between {low:g} and {high:g}" if high < math.inf else f"a finite number >= {low:g}"
        raise InvalidInput(f"{name}={value!r} must be {limit}")
    return number


def _integer(name: str, value: object, low: int, high: int | None) -> int:
    number = as_int(value)
    if number is None or number < low or (high is not None and number > high):
        limit = f"an integer >= {low}" if high is None else f"an integer between {low} and {high}"
        raise InvalidInput(f"{name}={value!r} must be {limit}")
    return number


def _items(name: str, value: object, form: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise InvalidInput(f"{name}={value!r} must be {form}")
    return list(value)
