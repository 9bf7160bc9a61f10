"""SamplingParams: how the next tokens of one request are chosen and when it stops. Validated here and nowhere else."""

import difflib
import enum
import math
import re
from typing import Any

import msgspec
import regex

from octavo.errors import InvalidInput, printable, short_repr
from octavo.protocol.checks import as_int, is_encodable
from octavo.protocol.foreign_fields import explain


class RequestOutputKind(enum.Enum):
    """What each `RequestOutput` of a request holds."""

    CUMULATIVE = 0
    """Everything generated so far."""
    DELTA = 1
    """Only what is new since the last output."""
    FINAL_ONLY = 2
    """Nothing until the request has finished, then everything."""


class _NamesUnknownFields(type(msgspec.Struct)):  # type: ignore[misc]  # msgspec exports it under no name in all versions
    """Of a struct made with a field it does not have, the error says which one was meant, or what to do instead."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        known = cls.__struct_fields__
        for name in [name for name in fields if name not in known]:
            if explain(name, fields[name]):
                del fields[name]
            else:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"the fields are {', '.join(known)}"
                raise TypeError(f"{short_repr(name)} is no field of {cls.__name__}; {hint}")
        return super().__call__(*args, **fields)


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True, metaclass=_NamesUnknownFields):
    """Sampling parameters of one request, with the names and defaults vLLM users know.

    Raises:
        InvalidInput (a ValueError): a value out of range, or a field of other engines whose feature is not built; the
            message names the field.
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

    n: int = 1
    """Samples of one prompt. Sample i draws from its own stream (seed, i): more samples do not change the earlier."""
    presence_penalty: float = 0.0
    """Taken off the logit of every token the output holds already. -2..2."""
    frequency_penalty: float = 0.0
    """Taken off a token's logit for each time the output holds it. -2..2."""
    repetition_penalty: float = 1.0
    """Divides positive, multiplies negative logits of tokens in prompt or output (Keskar et al. 2019). 1: off."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these token ids, -100..100 each. Keys may be given as strings."""
    bad_words: list[str] | None = None
    """Texts that are not generated, at the start of a word and inside a text. Only the tokens that the tokenizer makes
    of each are banned: the same letters out of other tokens may still come."""
    allowed_token_ids: list[int] | None = None
    """Only these token ids are generated."""
    include_stop_str_in_output: bool = False
    """Keep the stop string that ended the request, or the text of its stop token, in the text."""
    prompt_logprobs: int | None = None
    """Log-probabilities a prompt token, as `logprobs`: of the token itself and the N most probable. -1: all."""
    logprobs_mode: str | None = None
    """What `logprobs` are: raw_logprobs, processed_logprobs (after everything that changes the distribution),
    raw_logits or processed_logits. None: the engine's `logprobs_mode`."""
    spaces_between_special_tokens: bool = True
    """Keep the spaces that some tokenizers put between special tokens when these are shown."""
    stop_regex: str | list[str] | None = None
    """Regular expressions whose match ends the request, as a stop string does. Each is searched in the text so far
    after every token, so an assertion about what follows sees the end of the text. A match longer than 8,192 characters
    is not found. Syntax: Python's, see the `regex` package, without recursion; 256 characters an expression at most."""
    logits_processors: list[str] | None = None
    """Classes that change the logits, as "package.module:Class" or the class itself; see
    `octavo.sampling.logits_processors`."""
    extra_args: dict[str, Any] | None = None
    """Arguments for the logits processors."""

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check every field and bring it to its one form: plain numbers, `stop` a new list, `seed` -1 a None.

        To be called again before use: the fields are mutable. See the class for errors.
        """
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
            low, high = short_repr(self.min_tokens), short_repr(self.max_tokens)
            raise InvalidInput(f"min_tokens={low} must be at most max_tokens={high}")
        if self.logprobs is not None:
            self.logprobs = _integer("logprobs", self.logprobs, -1, None)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidInput(f"{name}={short_repr(getattr(self, name))} must be True or False")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise InvalidInput(f"output_kind={short_repr(self.output_kind)} must be a RequestOutputKind")
        self._validate_stops()
        self._validate_choice()

    def _validate_choice(self) -> None:
        """The fields that change which token is chosen."""
        self.n = _integer("n", self.n, 1, MAX_N)
        self.presence_penalty = _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self.frequency_penalty = _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self.repetition_penalty = _number("repetition_penalty", self.repetition_penalty, *_REPETITION_PENALTY_RANGE)
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = _integer("prompt_logprobs", self.prompt_logprobs, -1, None)
        modes = LOGPROBS_MODES
        if self.logprobs_mode is not None and not (isinstance(self.logprobs_mode, str) and self.logprobs_mode in modes):
            raise InvalidInput(f"logprobs_mode={short_repr(self.logprobs_mode)} must be one of {', '.join(modes)}")
        self.logit_bias = _logit_bias(self.logit_bias)
        self.bad_words = _texts("bad_words", _items("bad_words", self.bad_words, "a list of strings")) or None
        if self.allowed_token_ids is not None:
            token_ids = _items("allowed_token_ids", self.allowed_token_ids, "a list of token ids")
            if not token_ids:
                raise InvalidInput("allowed_token_ids=[] allows nothing; leave it out or name at least one id")
            self.allowed_token_ids = [_integer("allowed_token_ids", token_id, 0, None) for token_id in token_ids]
        processors = _items("logits_processors", self.logits_processors, "a list of classes")
        self.logits_processors = [_class_path(entry) for entry in processors] or None
        self.extra_args = _extra_args(self.extra_args)

    def _validate_stops(self) -> None:
        self.stop = _texts("stop", _one_or_more("stop", self.stop))
        self.stop_regex = _texts("stop_regex", _one_or_more("stop_regex", self.stop_regex))
        _check_regex_size(self.stop_regex)
        for pattern in self.stop_regex:
            _check_regex(pattern)
        for name in ("stop", "stop_regex"):
            if getattr(self, name) and not self.detokenize:
                raise InvalidInput(
                    f"{name}={short_repr(getattr(self, name))} needs text, but detokenize=False; "
                    "use stop_token_ids instead"
                )
        token_ids = _items("stop_token_ids", self.stop_token_ids, "a list of token ids")
        self.stop_token_ids = [_integer("stop_token_ids", token_id, 0, None) for token_id in token_ids]

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def clone(self) -> "SamplingParams":
        """An independent copy, validated."""
        return msgspec.structs.replace(self)


MAX_N = 16384
"""Samples of one request at most."""
MAX_REGEX_CHARACTERS = 256
"""Of one expression of `stop_regex`: the time of a search for a text that is cut off grows with the cube of it."""
MAX_REGEX_SIZE = 4000
"""Of all expressions of `stop_regex`: the library writes out what is repeated when it compiles."""
_REGEX_RECURSION = re.compile(r"(?<!\\)(?:\\\\)*(\(\?(?:R|[+-]?\d+|&\w*|P>\w*)\)?)")
"""(?R), (?1), (?&name), (?P>name): they can recurse until the memory is full."""
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
_REPETITION_PENALTY_RANGE = (1e-6, 1e6)
"""Beyond it logits are no longer finite in 32 bits."""
_FLAGS = (
    "ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output", "spaces_between_special_tokens",
)  # fmt: skip


def _texts(name: str, values: list[Any]) -> list[str]:
    """Non-empty strings of real characters."""
    for value in values:
        if not isinstance(value, str) or not value:
            raise InvalidInput(f"{name}={short_repr(values)} must be non-empty strings")
        if not is_encodable(value):
            raise InvalidInput(f"{name}={short_repr(values)} holds a lone surrogate, which is no character; remove it")
    return values


def _check_regex(pattern: str) -> None:
    shown = short_repr(pattern)
    try:
        compiled = regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        raise InvalidInput(f"stop_regex={shown} is no regular expression: {printable(str(error))}") from None
    if compiled.flags & regex.REVERSE:
        raise InvalidInput(f"stop_regex={shown} searches backwards; leave out the flag (?r)")
    if compiled.search("") is not None:
        raise InvalidInput(f"stop_regex={shown} matches the empty text, so it would end every request at once")


def _check_regex_size(patterns: list[str]) -> None:
    """Refuse what the library would compile or search without end: its time limit holds for neither, and meanwhile no
    other thread of the process runs. Written so that it rather refuses too much than too little."""
    for pattern in patterns:
        if len(pattern) > MAX_REGEX_CHARACTERS:
            raise InvalidInput(
                f"stop_regex={short_repr(pattern)} has {len(pattern)} characters, but an expression may have "
                f"{MAX_REGEX_CHARACTERS} at most; give a text as a stop string, or shorten it"
            )
        if (recursion := _REGEX_RECURSION.search(pattern)) is not None:
            raise InvalidInput(f"stop_regex={short_repr(pattern)} holds the recursion {recursion[1]!r}; do without it")
    size = sum(map(_regex_size, patterns))
    if size > MAX_REGEX_SIZE:
        raise InvalidInput(
            f"stop_regex={short_repr(patterns)} has a size of {short_repr(size)} with its repetitions written out, but "
            f"{MAX_REGEX_SIZE} is the most; use smaller counts in braces, or + and *"
        )


def _regex_size(pattern: str) -> int:
    """An upper limit of the parts of an expression once all that it repeats is written out."""
    packed = re.sub(r"\s", "", pattern)
    may_hold_comments = re.search(r"\(\?\w*x", packed) is not None  # a count may then stand far from what it repeats
    size, copies = len(pattern), 1
    for before, written in re.findall(r"(.?)\{(\d+)", packed):
        count = max(1, int(written))
        if may_hold_comments or before in ")}?*+":
            copies *= count
        else:
            size += count
    return size * copies


def _logit_bias(value: object) -> dict[int, float] | None:
    """Token id -> bias, with keys as ints."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise InvalidInput(f"logit_bias={short_repr(value)} must be a dict of token ids and numbers")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        written = isinstance(key, str) and re.fullmatch(r"\s*-?[0-9]{1,20}\s*", key)
        token_id = _integer("logit_bias", int(key) if written else key, 0, None)
        if token_id in biases:
            raise InvalidInput(f"logit_bias={short_repr(value)} names token {short_repr(token_id)} twice; name it once")
        biases[token_id] = _number(f"logit_bias[{short_repr(key)}]", bias, -100.0, 100.0)
    return biases or None


def _extra_args(value: object) -> dict[str, Any] | None:
    """A copy in the form in which it reaches the logits processors: plain data, as msgpack carries it."""
    if value is None:
        return None
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise InvalidInput(f"extra_args={short_repr(value)} must be a dict with strings as keys")
    try:
        copy: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        reason = printable(str(error))
        raise InvalidInput(
            f"extra_args={short_repr(value)} must be plain data (numbers, texts, lists, dicts): {reason}"
        ) from None
    return copy or None


def _class_path(entry: object) -> str:
    """ "package.module:Class" of a class, or the text as it is."""
    if isinstance(entry, type):
        return f"{entry.__module__}:{entry.__qualname__}"
    if not isinstance(entry, str) or entry.count(":") != 1:
        raise InvalidInput(f'logits_processors={short_repr(entry)} must be a class or "package.module:Class"')
    return entry


def _number(name: str, value: object, low: float, high: float) -> float:
    try:
        number = math.nan if isinstance(value, (bool, str, bytes)) else float(value)  # type: ignore[arg-type]
    except Exception:  # whatever the methods of a user's object raise: a number it is not
        number = math.nan
    if not low <= number <= high or number == math.inf:
        limit = f"between {low:g} and {high:g}" if high < math.inf else f"a finite number >= {low:g}"
        raise InvalidInput(f"{name}={short_repr(value)} must be {limit}")
    return number


def _integer(name: str, value: object, low: int, high: int | None) -> int:
    number = as_int(value)
    if number is None or number < low or (high is not None and number > high):
        limit = f"an integer >= {low}" if high is None else f"an integer between {low} and {high}"
        raise InvalidInput(f"{name}={short_repr(value)} must be {limit}")
    return number


def _one_or_more(name: str, value: object) -> list[Any]:
    return [value] if isinstance(value, str) else _items(name, value, "a string or a list of strings")


def _items(name: str, value: object, form: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise InvalidInput(f"{name}={short_repr(value)} must be {form}")
    return list(value)
