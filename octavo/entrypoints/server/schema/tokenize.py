"""Bodies and answers of /tokenize, /detokenize and /apply-template."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NotRequired

from pydantic import ConfigDict, JsonValue, SkipValidation, WithJsonSchema
from typing_extensions import TypedDict

from octavo.entrypoints.server.schema.chat import Messages, TemplateFields
from octavo.entrypoints.server.schema.common import Flag, RequestBody, check_name
from octavo.errors import InvalidInput, short_repr
from octavo.protocol.checks import as_int, is_encodable

_HELLO: list[JsonValue] = [{"role": "user", "content": "Name a river in France."}]
_NOT_BUILT: Mapping[str, tuple[object, ...]] = {"tools": ([],), "mm_processor_kwargs": ({},)}


class TokenizeRequest(TemplateFields):
    """What /tokenize takes: exactly one of `prompt` and `messages`."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"prompt": "Hello there"}, {"messages": _HELLO}],
            "oneOf": [{"required": ["prompt"]}, {"required": ["messages"]}],
        }
    )

    model: str | None = None
    """A name that /v1/models lists; absent: the model that is served."""
    prompt: Annotated[str | None, SkipValidation] = None
    """A text."""
    messages: Annotated[Messages, SkipValidation] = None
    """A conversation, as for chat."""
    add_special_tokens: Flag = None
    """Put begin- and end-of-sequence tokens around a prompt where the model wants them. Absent: yes. Around a
    conversation the chat template does so."""
    return_token_strs: bool = False
    """The answer has `token_strs`, too."""

    not_built: ClassVar[Mapping[str, tuple[object, ...]]] = _NOT_BUILT

    def check(self) -> None:
        super().check()
        check_name("model", self.model)
        if (self.prompt is None) == (self.messages is None):
            raise InvalidInput("the body must have exactly one of prompt and messages")
        if self.prompt is not None and not isinstance(self.prompt, str):
            raise InvalidInput(f"prompt={short_repr(self.prompt)} is a {type(self.prompt).__name__}; it must be a text")
        if self.prompt is not None and not is_encodable(self.prompt):
            raise InvalidInput("prompt holds a lone surrogate, which is no character; decode the text properly first")
        if not isinstance(self.add_special_tokens, bool | None):
            raise InvalidInput(f"add_special_tokens={short_repr(self.add_special_tokens)} must be true or false")
        if self.messages is not None and self.add_special_tokens:
            raise InvalidInput(
                "add_special_tokens=true is for a prompt: a chat template writes special tokens itself; leave it out"
            )


class ApplyTemplateRequest(TemplateFields):
    """What /apply-template takes."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"messages": _HELLO}]})

    model: str | None = None
    """A name that /v1/models lists; absent: the model that is served."""
    messages: Messages
    """A conversation, as for chat."""

    not_built: ClassVar[Mapping[str, tuple[object, ...]]] = _NOT_BUILT

    def check(self) -> None:
        super().check()
        check_name("model", self.model)


class DetokenizeRequest(RequestBody):
    """What /detokenize takes."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tokens": [0, 1, 2]}]})

    model: str | None = None
    """A name that /v1/models lists; absent: the model that is served."""
    tokens: Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1})]
    """Token ids."""

    def check(self) -> None:
        super().check()
        check_name("model", self.model)

    def token_ids(self, vocab_size: int) -> list[int]:
        """The ids as plain integers. Raises InvalidInput for what is no token."""
        if not isinstance(self.tokens, list) or not self.tokens:
            raise InvalidInput(f"tokens={short_repr(self.tokens)} must be a list of at least one token id")
        token_ids: list[int] = []
        for place, token in enumerate(self.tokens):
            token_id = as_int(token)
            if token_id is None or not 0 <= token_id < vocab_size:
                raise InvalidInput(
                    f"tokens[{place}]={short_repr(token)} is no token; ids are integers between 0 and {vocab_size - 1}"
                )
            token_ids.append(token_id)
        return token_ids


class Tokens(TypedDict):
    """The tokens of a text or a conversation."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None
    warnings: NotRequired[list[str]]


class Text(TypedDict):
    """A text: what tokens stand for, or a conversation as the model reads it."""

    prompt: str
    warnings: NotRequired[list[str]]
