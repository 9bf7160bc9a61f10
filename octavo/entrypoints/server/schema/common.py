"""What all bodies of requests have in common: fields by name, sampling parameters, and what is said about the rest.

What holds: null means absent, everywhere. No field is ignored in silence: an unknown one becomes a warning, one that is
known and whose feature is not built is refused. Ranges are checked in `SamplingParams` alone, so that a value is
refused in the same words here and offline; that is why these fields skip pydantic's own checks.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, SkipValidation, ValidationError, WithJsonSchema, model_validator

from octavo.errors import InvalidInput, not_built, printable, short_repr
from octavo.protocol.checks import is_encodable
from octavo.protocol.foreign_fields import RENAMED
from octavo.protocol.sampling_params import RequestOutputKind, SamplingParams

Number = Annotated[float | None, SkipValidation]
Integer = Annotated[int | None, SkipValidation]
Flag = Annotated[bool | None, SkipValidation]
OneOrMoreTexts = Annotated[str | list[str] | None, SkipValidation]
TokenIds = Annotated[list[int] | None, SkipValidation]
Texts = Annotated[list[str] | None, SkipValidation]
Biases = Annotated[dict[str, float] | None, SkipValidation]

MAX_NAME_CHARACTERS = 512
"""Of `user`, `request_id` and the like."""
MAX_WARNINGS = 20
"""Unknown fields that are named; the rest is counted."""
MAX_ENTRIES = 2**20
"""Characters and ids in all lists of a request that each of its prompts is checked against."""
INLINE_ENTRIES = 500
"""Up to so many checking takes less than a hand-over to a thread is worth."""
_LONGEST_FIELD = 40
RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag", "regex", "grammar")


class RequestBody(BaseModel):
    """Base of every body and of the objects inside. Subclasses are checked with `validate_body`."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=(), use_attribute_docstrings=True)

    not_built: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Fields users know and that do nothing here yet -> the values that ask for nothing, which are taken."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data

    def unknown_field_warnings(self) -> list[str]:
        """One sentence for each field that is not known, those of objects inside included."""
        extra = self.__pydantic_extra__ or {}
        unknown = [name for name in extra if name not in self.not_built]
        warnings = [_unknown(name, type(self).model_fields) for name in unknown[:MAX_WARNINGS]]
        if len(unknown) > MAX_WARNINGS:
            warnings.append(f"{len(unknown) - MAX_WARNINGS} more fields are not known and were ignored")
        for name in type(self).model_fields:
            if isinstance(inner := getattr(self, name, None), RequestBody):
                warnings += [f"{name}: {warning}" for warning in inner.unknown_field_warnings()]
        return warnings

    def field_names(self) -> frozenset[str]:
        """Names that a refusal may be about."""
        return frozenset((*type(self).model_fields, *(self.__pydantic_extra__ or ()), *self.not_built))

    def check(self) -> None:
        """Refuse what pydantic cannot. Called by `validate_body`; subclasses extend it.

        Raises:
            InvalidInput: names the field.
        """
        for name, neutral in self.not_built.items():
            value = (self.__pydantic_extra__ or {}).get(name)
            if value is not None and not any(type(value) is type(one) and value == one for one in neutral):
                raise not_built(f"{name}={short_repr(value)}")


Body = TypeVar("Body", bound=RequestBody)


class StreamOptions(RequestBody):
    """What a stream holds besides the text."""

    include_usage: bool = False
    """One more chunk before the end, without choices, that has the usage."""
    continuous_usage_stats: bool = False
    """Each chunk has the usage so far."""


class SamplingFields(RequestBody):
    """The fields of completions and chat alike. `max_tokens` and `logprobs` are the subclass's, where they differ."""

    model: str | None = None
    """A name that /v1/models lists; absent: the model that is served."""
    stream: bool = False
    """Send the answer as it comes, as server-sent events."""
    stream_options: StreamOptions | None = None
    """What a stream holds besides the text."""
    n: Integer = None
    temperature: Number = None
    top_p: Number = None
    top_k: Integer = None
    min_p: Number = None
    seed: Integer = None
    stop: OneOrMoreTexts = None
    stop_token_ids: TokenIds = None
    stop_regex: OneOrMoreTexts = None
    include_stop_str_in_output: Flag = None
    min_tokens: Integer = None
    ignore_eos: Flag = None
    presence_penalty: Number = None
    frequency_penalty: Number = None
    repetition_penalty: Number = None
    logit_bias: Biases = None
    bad_words: Texts = None
    allowed_token_ids: TokenIds = None
    skip_special_tokens: Flag = None
    spaces_between_special_tokens: Flag = None
    prompt_logprobs: Integer = None
    logprobs_mode: Annotated[str | None, SkipValidation] = None
    priority: int = 0
    """Lower is served first; needs --scheduling-policy priority."""
    cache_salt: str | None = None
    """Share cached prefixes only with requests of the same salt."""
    return_token_ids: bool = False
    """The answer has `prompt_token_ids` and `token_ids`, too."""
    return_tokens_as_token_ids: bool = False
    """Tokens in `logprobs` are written as token_id:ID."""
    timings: bool = False
    """The answer says how long it queued and computed."""
    request_id: str | None = None
    """What the answer's id ends with."""
    user: str | None = None
    """Who asks, if one key serves several; see --fair-share."""
    metadata: Annotated[dict[str, Any] | None, SkipValidation] = None
    """Taken for the sake of clients that send it; nothing is kept, so it has no effect."""
    response_format: Annotated[Any, WithJsonSchema({"type": "object", "properties": {"type": {"type": "string"}}})] = (
        None
    )
    """Only {"type": "text"} so far."""

    not_built: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "use_beam_search": (False,),
        "length_penalty": (1.0, 1),
        "truncate_prompt_tokens": (),
        "structured_outputs": (),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "guided_grammar": (),
        "guided_decoding_backend": (),
        "guided_whitespace_pattern": (),
        "structural_tag": (),
        "json_schema": (),
        "regex": (),
        "ebnf": (),
        "grammar": ("",),
        "logits_processors": ([],),
        "extra_args": ({},),
        "vllm_xargs": ({},),
        "kv_transfer_params": ({},),
        "prompt_embeds": (),
        "mm_processor_kwargs": ({},),
        "store": (False,),
    }

    sampling_names: ClassVar[tuple[str, ...]] = (
        "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "stop_regex",
        "include_stop_str_in_output", "min_tokens", "ignore_eos", "presence_penalty", "frequency_penalty",
        "repetition_penalty", "logit_bias", "bad_words", "allowed_token_ids", "skip_special_tokens",
        "spaces_between_special_tokens", "prompt_logprobs", "logprobs_mode",
    )  # fmt: skip
    """Fields that go to SamplingParams as they are."""

    def sampling_params(
        self, defaults: SamplingParams, *, output_kind: RequestOutputKind, **overrides: Any
    ) -> SamplingParams:
        """What the request asks for, over the model's own defaults.

        Args:
            defaults: `AsyncLLM.get_default_sampling_params()`.
            output_kind: DELTA for streams, FINAL_ONLY otherwise.
            overrides: fields that the subclass reads itself, such as max_tokens and logprobs.

        Raises:
            InvalidInput: names the field.
        """
        given = {name: getattr(self, name) for name in self.sampling_names if getattr(self, name) is not None}
        return msgspec.structs.replace(defaults, **{**given, **overrides, "output_kind": output_kind})

    def check(self) -> None:
        super().check()
        check_response_format(self.response_format)
        if self.num_entries() > MAX_ENTRIES:
            raise InvalidInput(
                f"stop, bad_words, logit_bias and the like have {self.num_entries()} characters and ids, counted for "
                f"each prompt, but a request may have {MAX_ENTRIES} at most"
            )
        for name in ("cache_salt", "request_id", "user", "model"):
            check_name(name, getattr(self, name))
        if self.request_id is not None and not (self.request_id.isascii() and self.request_id.isprintable()):
            raise InvalidInput(f"request_id={short_repr(self.request_id)} must be visible ASCII characters")
        if self.stream_options is not None and not self.stream:
            raise InvalidInput("stream_options is for streams; leave it out or give stream=true")
        if self.metadata is not None and not isinstance(self.metadata, dict):
            raise InvalidInput(f"metadata={short_repr(self.metadata)} must be an object")

    @property
    def num_prompts(self) -> int:
        """Prompts of the request."""
        return 1

    def num_entries(self) -> int:
        """Characters and ids in all lists, once for each prompt: what checking them costs."""
        lists = (self.stop, self.bad_words, self.stop_regex, self.stop_token_ids, self.allowed_token_ids)
        return self.num_prompts * sum(map(_size, (*lists, self.logit_bias)))

    def takes_long_to_prepare(self) -> bool:
        """Whether making parameters and streams of the request would hold up the event loop."""
        return self.stop_regex is not None or self.num_entries() > INLINE_ENTRIES

    def receipt_name(self, name: str) -> str | None:
        """What the client calls a field of SamplingParams. None: it did not give one that sets it."""
        return name if name in self.model_fields_set else None

    def no_effect_warnings(self) -> list[str]:
        """Fields that are known, and that change nothing whatever the rest of the request is."""
        return ["metadata: nothing is kept of a request, so it has no effect"] if self.metadata else []


def validate_body(kind: type[Body], data: object) -> Body:
    """A body of this kind from parsed JSON, checked. Not cheap for large prompts: meant for a thread.

    Raises:
        InvalidInput: names the field, its value and what it must be.
    """
    if not isinstance(data, dict):
        raise InvalidInput(f"the body is {_json_type(data)}; it must be a JSON object with the fields of the request")
    try:
        body = kind.model_validate(data)
    except ValidationError as error:
        raise InvalidInput(_describe(error)) from None
    body.check()
    return body


def check_name(name: str, value: str | None) -> None:
    """Refuse a short text that is empty, too long or no Unicode."""
    if value is None:
        return
    if not value or len(value) > MAX_NAME_CHARACTERS:
        raise InvalidInput(
            f"{name}={short_repr(value)} has {len(value)} characters; it must have between 1 and {MAX_NAME_CHARACTERS}"
        )
    if not is_encodable(value):
        raise InvalidInput(f"{name}={short_repr(value)} holds a lone surrogate, which is no character; remove it")


def check_response_format(value: object) -> None:
    """Only texts so far; a type that does not exist is refused as such."""
    if value is None:
        return
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in RESPONSE_FORMATS:
        raise InvalidInput(
            f"response_format={short_repr(value)} has no known type; it must be one of {', '.join(RESPONSE_FORMATS)}"
        )
    if kind != "text":
        raise not_built(f"response_format of type {kind!r}", 'leave it out or give {"type": "text"}')


def _size(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list):
        return sum(len(entry) + 1 if isinstance(entry, str) else 1 for entry in value)
    return len(value) if isinstance(value, dict) else 0


def _unknown(name: str, known: Iterable[str]) -> str:
    known = list(known)
    renamed = [RENAMED[name]] if RENAMED.get(name) in known else []
    near = renamed or difflib.get_close_matches(name[:_LONGEST_FIELD], known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{printable(name, 80)} is not a field of this request and was ignored{hint}"


def _describe(error: ValidationError) -> str:
    """The first thing that is wrong, in one sentence."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(str(part) for part in first["loc"] if not str(part).startswith("function-"))
    if first["type"] == "missing":
        return f"{place} is missing; it is required"
    reason = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return reason
    if first["type"] in _MUST_BE:
        return f"{place}={short_repr(first['input'])} must be {_MUST_BE[first['type']]}"
    return f"{place}={short_repr(first['input'])} is refused: {reason[:1].lower()}{reason[1:]}"


_MUST_BE = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "model_type": "an object",
    "float_type": "a number",
    "int_type": "an integer",
    "list_type": "a list",
    "string_type": "a text",
}
"""pydantic's types of errors, in the words of a client."""


def _json_type(data: object) -> str:
    names = {dict: "an object", list: "an array", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(data), "a number")
