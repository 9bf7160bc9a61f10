"""Conversations to text and to token ids, through the model's chat template. Every entry point comes through here.

What holds: the ids of a conversation are those of its rendered text with nothing put around it. A template writes the
begin-of-sequence token itself where the model wants one, so it is there once.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import InvalidInput, printable, short_repr
from octavo.logging import get_logger
from octavo.tokenization.chat_messages import Message, check_dicts, check_messages, plain
from octavo.tokenization.chat_template import ChatTemplate, compile_template

if TYPE_CHECKING:
    from octavo.tokenization.tokenizer import Tokenizer

logger = get_logger(__name__)

_OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
"""Variables of a template that have an argument of their own."""
_OWN_ARGUMENTS = (*_OWN_VARIABLES, "continue_final_message", "chat_template", "tokenize")
_JINJA_SIGNS = ("{{", "{%", "{#")


def render_chat(
    tokenizer: "Tokenizer",
    messages: Sequence[Mapping[str, Any]],
    *,
    chat_template: str | Path | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    documents: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The text of a conversation as the model was trained to read it.

    Args:
        messages: dicts with `role` and `content`: a text, a list of parts {"type": "text", "text": ...}, or None. Other
            keys (name, tool_calls, tool_call_id, reasoning_content, ...) are the template's.
        chat_template: Jinja text, a file with it, or the name of one of the model's templates. None: `tool_use` if
            there are tools and the model has it, else the model's default.
        tools: descriptions of functions the model may call.
        add_generation_prompt: end with what opens an answer. None: yes, unless `continue_final_message`.
        continue_final_message: end exactly where the text of the last message ends, white space included, so that the
            model goes on with it.
        documents: dicts for models that answer from documents.
        chat_template_kwargs: further variables of the template, such as enable_thinking.

    Raises:
        InvalidInput: an argument is refused, there is no template, or the template fails or refuses; its own message.
    """
    add_generation_prompt = _check_ending(add_generation_prompt, continue_final_message)
    checked_tools, checked_documents = check_dicts("tools", tools), check_dicts("documents", documents)
    template = compile_template(find_chat_template(tokenizer, chat_template, has_tools=checked_tools is not None))
    checked_messages = check_messages(messages, template.traits)
    variables = {
        **tokenizer.special_tokens,
        **_check_kwargs(chat_template_kwargs),
        "tools": checked_tools,
        "documents": checked_documents,
        "add_generation_prompt": add_generation_prompt,
    }
    given = {"tools": tools, "documents": documents, **(chat_template_kwargs or {})}
    _warn_of_unused(template, frozenset(name for name, value in given.items() if value))
    if continue_final_message:
        return _render_open(template, checked_messages, variables)
    return template.render({"messages": checked_messages, **variables})


def _check_ending(add_generation_prompt: object, continue_final_message: object) -> bool:
    """Whether what opens an answer is to be added."""
    if not isinstance(continue_final_message, bool):
        raise InvalidInput(f"continue_final_message={continue_final_message!r} must be True or False")
    if add_generation_prompt is None:
        return not continue_final_message
    if not isinstance(add_generation_prompt, bool):
        raise InvalidInput(f"add_generation_prompt={add_generation_prompt!r} must be True or False")
    if continue_final_message and add_generation_prompt:
        raise InvalidInput(
            "continue_final_message=True and add_generation_prompt=True exclude each other: the first goes on with "
            "the last message, the second begins a new one; give one of them"
        )
    return add_generation_prompt


def encode_chat(tokenizer: "Tokenizer", messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
    """Token ids of `render_chat(tokenizer, messages, **options)`.

    Raises:
        InvalidInput: as `render_chat`, or the template writes nothing.
    """
    return encode_rendered(tokenizer, render_chat(tokenizer, messages, **options))


def encode_rendered(tokenizer: "Tokenizer", text: str) -> list[int]:
    """Token ids of a rendered conversation. Raises InvalidInput if there are none."""
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    if not token_ids:
        raise InvalidInput("the chat template writes nothing for this conversation; there is nothing to go on from")
    return token_ids


def find_chat_template(
    tokenizer: "Tokenizer", chat_template: str | Path | None = None, *, has_tools: bool = False
) -> str:
    """The Jinja source that `render_chat` uses. Raises InvalidInput if there is none."""
    templates = tokenizer.chat_templates
    if chat_template is not None:
        return templates.get(str(chat_template)) or _read_template(chat_template, templates)
    for name in ("tool_use", "default") if has_tools else ("default",):
        if name in templates:
            return templates[name]
    if templates:
        raise InvalidInput(
            f"the model has chat templates for {', '.join(sorted(templates))} and no default; name one of them with "
            "chat_template="
        )
    raise InvalidInput(
        "the model has no chat template; give one with chat_template= (a Jinja text or a file), or complete texts"
    )


def _read_template(chat_template: str | Path, templates: Mapping[str, str]) -> str:
    if isinstance(chat_template, str) and any(sign in chat_template for sign in _JINJA_SIGNS):
        return chat_template
    if not isinstance(chat_template, str | Path) or not str(chat_template):
        raise InvalidInput(f"chat_template={chat_template!r} must be a Jinja text, a file, or a template's name")
    try:
        return Path(chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:
        named = f"the model's templates ({', '.join(sorted(templates))})" if templates else "the model's templates"
        raise InvalidInput(
            f"chat_template={short_repr(str(chat_template), 200)} is no Jinja text, none of {named}, and no file that "
            f"can be read: {printable(str(error))}"
        ) from error


def _check_kwargs(kwargs: object) -> dict[str, Any]:
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping):
        raise InvalidInput(f"chat_template_kwargs={kwargs!r} is a {type(kwargs).__name__}; it must be a dict")
    own = [name for name in kwargs if name in _OWN_ARGUMENTS]
    if own:
        raise InvalidInput(f"chat_template_kwargs holds {own[0]!r}, which has an argument of its own; give it there")
    return plain(kwargs, "chat_template_kwargs")  # type: ignore[no-any-return]


def _warn_of_unused(template: ChatTemplate, names: frozenset[str]) -> None:
    unused = names - template.variables
    if unused:
        _warn_once(template.source, tuple(sorted(unused)))


@lru_cache(maxsize=64)
def _warn_once(source: str, names: tuple[str, ...]) -> None:
    logger.warning("the chat template does not use %s: given and without effect", printable(", ".join(names)))


def _render_open(template: ChatTemplate, messages: list[Message], variables: Mapping[str, Any]) -> str:
    """The text up to the end of the last message's content.

    Where that is, a mark at the end of the content shows. It is no white space, so a template that strips contents
    keeps the white space before it: in the whole message, too, that will stand inside.
    """
    mark = _absent_mark(template.source, messages, variables)
    rendered = template.render({"messages": [*messages[:-1], _with_mark(messages[-1], mark)], **variables})
    count = rendered.count(mark)
    if count == 0:
        raise InvalidInput(
            "continue_final_message=True, but the chat template leaves out the end of the last message "
            f"(role {messages[-1]['role']!r}); ask for a new answer instead"
        )
    if count > 1:
        raise InvalidInput(
            "continue_final_message=True, but the chat template writes the end of the last message "
            f"(role {messages[-1]['role']!r}) {count} times; ask for a new answer instead"
        )
    return rendered.partition(mark)[0]


def _absent_mark(source: str, messages: list[Message], variables: Mapping[str, Any]) -> str:
    """A text that occurs nowhere in what the rendering is made of, and cannot overlap itself."""
    texts = [source, *_texts([messages, variables])]
    longest = max((len(run) for text in texts for run in re.findall("OpenEnd(X*)", text)), default=0)
    return "OpenEnd" + "X" * (longest + 1)


def _texts(value: object) -> Iterator[str]:
    """Every text in plain data, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _with_mark(message: Message, mark: str) -> Message:
    if message.get("tool_calls"):
        raise InvalidInput(
            "continue_final_message=True, but the last message has tool_calls, which stand after its content; leave "
            "them out or ask for a new answer instead"
        )
    content = message.get("content")
    if isinstance(content, str) and content:
        return {**message, "content": content + mark}
    if isinstance(content, list) and any(part["text"] for part in content):
        last = {**content[-1], "text": content[-1]["text"] + mark}
        return {**message, "content": [*content[:-1], last]}
    raise InvalidInput(
        "continue_final_message=True, but the last message has no text to go on with; give it a content or ask for a "
        "new answer instead"
    )
