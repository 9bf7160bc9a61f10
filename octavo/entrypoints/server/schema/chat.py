"""The body of /v1/chat/completions, and what all bodies with messages have in common.

Messages and options of the template are checked where they are rendered, in the tokenizer's thread, so that they are
refused in the same words here and offline.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, JsonValue, SkipValidation, WithJsonSchema

from octavo.entrypoints.server.schema.common import MAX_WARNINGS, Flag, Integer, RequestBody, SamplingFields
from octavo.errors import InvalidInput, printable, short_repr
from octavo.protocol.checks import as_int
from octavo.protocol.sampling_params import RequestOutputKind, SamplingParams
from octavo.tokenization.chat import find_chat_template
from octavo.tokenization.chat_template import compile_template
from octavo.tokenization.tokenizer import Tokenizer

_PART_SCHEMA = {
    "type": "object",
    "properties": {"type": {"type": "string", "enum": ["text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_MESSAGE_SCHEMA = {
    "type": "object",
    "description": "Other keys (name, tool_calls, tool_call_id, reasoning_content, ...) are the chat template's.",
    "properties": {
        "role": {"type": "string", "minLength": 1, "description": "Such as system, user or assistant."},
        "content": {
            "description": "A text, or parts of one.",
            "anyOf": [{"type": "string"}, {"type": "array", "items": _PART_SCHEMA}, {"type": "null"}],
        },
    },
    "required": ["role", "content"],
}
Messages = Annotated[Any, WithJsonSchema({"type": "array", "items": _MESSAGE_SCHEMA, "minItems": 1})]
Documents = Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "object", "minProperties": 1}})]
Variables = Annotated[Any, WithJsonSchema({"type": "object"})]

_HELLO: list[JsonValue] = [{"role": "user", "content": "Name a river in France."}]


class TemplateFields(RequestBody):
    """How a conversation becomes a text."""

    add_generation_prompt: Flag = None
    """End with what opens an answer. Absent: yes, unless `continue_final_message`."""
    continue_final_message: bool = False
    """Go on exactly where the text of the last message ends."""
    documents: Documents = None
    """For models that answer from documents."""
    chat_template_kwargs: Variables = None
    """Further variables of the chat template, such as enable_thinking."""
    chat_template: Annotated[str | None, SkipValidation] = None
    """Name of one of the model's own templates; a template's text is the server's option only."""

    def check(self) -> None:
        super().check()
        if not isinstance(self.chat_template, str | None):
            raise InvalidInput(f"chat_template={short_repr(self.chat_template)} must be the name of a template, a text")

    def template_options(self, tokenizer: Tokenizer, server_template: str | None) -> dict[str, Any]:
        """Keywords for `render_chat`.

        Args:
            server_template: what --chat-template says.

        Raises:
            InvalidInput: a template is asked for that is none of the model's, or there is none at all.
        """
        if self.chat_template is not None and self.chat_template not in tokenizer.chat_templates:
            names = ", ".join(sorted(tokenizer.chat_templates)) or "it has none"
            raise InvalidInput(
                f"chat_template={short_repr(self.chat_template)} is none of the model's templates ({names}), and a "
                "template's text is not taken from requests; start the server with --chat-template"
            )
        return {
            "chat_template": _template_source(tokenizer, self.chat_template or server_template),
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "documents": self.documents,
            "chat_template_kwargs": self.chat_template_kwargs,
        }


def unused_template_options(options: Mapping[str, Any]) -> Iterator[str]:
    """A warning for each option that the template does not use. To be called once it has been rendered."""
    variables = compile_template(options["chat_template"]).variables
    given = {"documents": options["documents"]}
    given |= {f"chat_template_kwargs.{name}": value for name, value in (options["chat_template_kwargs"] or {}).items()}
    unused = [
        name for name, value in given.items() if value and name.removeprefix("chat_template_kwargs.") not in variables
    ]
    for name in unused[:MAX_WARNINGS]:
        yield f"{printable(name, 80)}: the chat template does not use it, so it has no effect"
    if len(unused) > MAX_WARNINGS:
        yield f"chat_template_kwargs: {len(unused) - MAX_WARNINGS} more have no effect"


class ChatCompletionRequest(TemplateFields, SamplingFields):
    """What /v1/chat/completions takes.

    Known, and refused until they are built: tools, functions, audio, images, predictions and constrained answers.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"messages": _HELLO, "max_completion_tokens": 32, "temperature": 0},
                {"messages": _HELLO, "stream": True, "stream_options": {"include_usage": True}},
            ]
        }
    )

    messages: Messages
    """The conversation so far."""
    max_completion_tokens: Integer = None
    """Tokens of the answer at most. Absent: up to the room left."""
    max_tokens: Integer = None
    """The older name of `max_completion_tokens`, which wins."""
    logprobs: bool = False
    """The answer has the log-probability of each of its tokens."""
    top_logprobs: Integer = None
    """With `logprobs`: also of so many most probable tokens at each position. -1: of the whole vocabulary."""
    parallel_tool_calls: Flag = None
    """Without tools it has no effect."""
    service_tier: Annotated[str | None, SkipValidation] = None
    """Every request is served alike."""
    reasoning_effort: Annotated[str | None, SkipValidation] = None
    """No effect; give `chat_template_kwargs` what the model's template knows."""
    verbosity: Annotated[str | None, SkipValidation] = None
    """No effect."""
    prompt_cache_key: Annotated[str | None, SkipValidation] = None
    """No effect: equal beginnings are found without it; `cache_salt` keeps them apart."""
    prompt_cache_retention: Annotated[str | None, SkipValidation] = None
    """No effect: cached prefixes are kept until their room is needed."""
    safety_identifier: Annotated[str | None, SkipValidation] = None
    """No effect: nothing is kept of a request."""

    not_built: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **SamplingFields.not_built,
        "tools": ([],),
        "tool_choice": ("none",),
        "functions": ([],),
        "function_call": ("none",),
        "audio": (),
        "modalities": (["text"],),
        "prediction": (),
        "web_search_options": (),
        "echo": (False,),
        "add_special_tokens": (False,),
        "thinking_token_budget": (),
    }
    no_effect: ClassVar[Mapping[str, tuple[tuple[object, ...], str]]] = {
        "parallel_tool_calls": ((), "no tools were given"),
        "service_tier": (("auto", "default"), "every request is served alike"),
        "reasoning_effort": ((), "give chat_template_kwargs what the model's template knows"),
        "verbosity": ((), "the model does not know it"),
        "prompt_cache_key": ((), "equal beginnings are found without it; cache_salt keeps them apart"),
        "prompt_cache_retention": ((), "cached prefixes are kept until their room is needed"),
        "safety_identifier": ((), "nothing is kept of a request"),
    }
    """Known fields that change nothing: the values that ask for nothing, and why the others have no effect."""

    def check(self) -> None:
        super().check()
        tokens = as_int(self.max_completion_tokens)
        if self.max_completion_tokens is not None and (tokens is None or tokens < 1):
            raise InvalidInput(
                f"max_completion_tokens={short_repr(self.max_completion_tokens)} must be an integer >= 1"
            )
        self._check_top_logprobs()

    def _check_top_logprobs(self) -> None:
        if self.top_logprobs is None:
            return
        number = as_int(self.top_logprobs)
        if number is None or number < -1:
            raise InvalidInput(f"top_logprobs={short_repr(self.top_logprobs)} must be an integer >= -1")
        if number != 0 and not self.logprobs:
            raise InvalidInput(f"top_logprobs={number} needs logprobs=true; give both or leave it out")

    @property
    def num_top_logprobs(self) -> int:
        """Most probable tokens to show at each position; -1: all."""
        return as_int(self.top_logprobs) or 0

    def to_sampling_params(self, defaults: SamplingParams, vocab_size: int) -> SamplingParams:
        """What the engine is to do. Raises InvalidInput that names the field."""
        if self.num_top_logprobs > vocab_size:
            raise InvalidInput(
                f"top_logprobs={short_repr(self.top_logprobs)} is more than the vocabulary of {vocab_size} tokens; "
                "use -1 for the whole vocabulary"
            )
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.sampling_params(
            defaults,
            output_kind=RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY,
            max_tokens=max_tokens,
            logprobs=self.num_top_logprobs if self.logprobs else None,
        )

    def receipt_name(self, name: str) -> str | None:
        if name == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return super().receipt_name(name)

    def no_effect_warnings(self) -> list[str]:
        warnings = super().no_effect_warnings()
        for name, (neutral, reason) in self.no_effect.items():
            value = getattr(self, name)
            if value is not None and value not in neutral:
                warnings.append(f"{name}: {reason}, so it has no effect")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            warnings.append("max_tokens: max_completion_tokens is given and wins, so it has no effect")
        return warnings


def check_server_template(chat_template: str, tokenizer: Callable[[], Tokenizer]) -> None:
    """Read and compile the template that --chat-template names.

    Args:
        tokenizer: reads the model's tokenizer; called only where the template may be one of the model's.

    Raises:
        InvalidInput: the template cannot be had, or is none.
    """
    if "/" in chat_template or chat_template.endswith(_TEMPLATE_ENDINGS):  # no model calls one of its own so
        source = find_chat_template(_NoTemplates, chat_template)  # type: ignore[arg-type]  # it is asked for no more
    else:
        source = find_chat_template(tokenizer(), chat_template)
    if not source.strip():
        raise InvalidInput(
            f"chat_template={short_repr(chat_template, 200)} is empty; give a file with a Jinja template"
        )
    compile_template(source)


_TEMPLATE_ENDINGS = (".jinja", ".jinja2", ".j2", ".txt", ".tmpl")


class _NoTemplates:
    """A model of which nothing is known yet."""

    chat_templates: ClassVar[Mapping[str, str]] = {}


@lru_cache(maxsize=16)
def _template_source(tokenizer: Tokenizer, chat_template: str | None) -> str:
    """The template's Jinja text; a file is read once."""
    return find_chat_template(tokenizer, chat_template)
