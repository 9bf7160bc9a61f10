"""Messages, tools and documents of a chat as a user gives them, checked and copied into plain data for a template.

What holds: what comes out shares nothing with what went in, and consists of dicts, lists, texts, numbers, booleans and
None only, so a template can neither change nor reach anything of the caller's.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import InvalidInput, short_repr
from octavo.protocol.checks import is_encodable
from octavo.tokenization.chat_template_analysis import Traits

Message = dict[str, Any]

MAX_DEPTH = 100
"""Levels of lists and dicts inside one another."""
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
"""Names for what a model thought before it answered; templates read the first, some the second."""

_SAYS_SOMETHING = frozenset({"content", "tool_calls", "function_call", "tool_responses", *_REASONING_NAMES})
"""A message has at least one of these keys."""


def check_messages(messages: object, traits: Traits) -> list[Message]:
    """The messages as the template takes them.

    Content parts are joined by newlines where the template takes content as one text. Arguments of tool calls given as
    JSON text become dicts, or stay text where the template wants that. No content is '', or None where the template
    asks for that; other keys whose value is None are left out.

    Raises:
        InvalidInput: no messages, or one that is not of the form; names its place.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidInput(
            f"messages={short_repr(messages)} is a {type(messages).__name__}; it must be a list of dicts with "
            "'role' and 'content'"
        )
    if not messages:
        raise InvalidInput("messages=[] is empty; a chat needs at least one message")
    return [_check_message(message, f"messages[{index}]", traits) for index, message in enumerate(messages)]


def check_dicts(name: str, entries: object) -> list[dict[str, Any]] | None:
    """A list of dicts (tools, documents) as plain data; None if there are none. Raises InvalidInput."""
    if entries is None:
        return None
    if isinstance(entries, str | bytes | Mapping) or not isinstance(entries, Sequence):
        raise InvalidInput(f"{name}={short_repr(entries)} is a {type(entries).__name__}; it must be a list of dicts")
    for index, entry in enumerate(entries):
        if not isinstance(entry, Mapping) or not entry:
            raise InvalidInput(f"{name}[{index}]={short_repr(entry)} must be a dict that is not empty")
    return [plain(entry, f"{name}[{index}]") for index, entry in enumerate(entries)] or None


def plain(value: object, where: str, depth: int = 0) -> Any:
    """A copy of plain types only. Raises InvalidInput, naming the place, for anything that has no such form."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        if not is_encodable(value):
            raise InvalidInput(f"{where} holds a lone surrogate, which is no character; decode the text properly first")
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if depth == MAX_DEPTH:
        raise InvalidInput(f"{where} lies more than {MAX_DEPTH} levels deep; flatten it")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InvalidInput(f"{where} has the key {short_repr(key)}; keys must be texts")
        return {plain(key, where): plain(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    raise InvalidInput(
        f"{where}={short_repr(value)} is a {type(value).__name__}; a template takes texts, numbers, booleans, None, "
        "lists and dicts"
    )


def _check_message(message: object, where: str, traits: Traits) -> Message:
    if not isinstance(message, Mapping):
        raise InvalidInput(
            f"{where}={short_repr(message)} is a {type(message).__name__}; it must be a dict with 'role' and 'content'"
        )
    checked: Message = plain(message, where)
    role = checked.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidInput(f"{where} has role={role!r}; it must be a text such as 'system', 'user' or 'assistant'")
    if not checked.keys() & _SAYS_SOMETHING:
        raise InvalidInput(
            f"{where} has no 'content', its keys are {short_repr(sorted(checked))}; give content, '' if none"
        )
    content = _check_content(checked.get("content"), f"{where}.content", traits)
    checked = {key: value for key, value in checked.items() if value is not None}
    checked["content"] = content
    if "tool_calls" in checked:
        _check_tool_calls(checked["tool_calls"], f"{where}.tool_calls", traits)
    return _with_reasoning_names(checked)


def _check_content(content: Any, where: str, traits: Traits) -> str | list[dict[str, str]] | None:
    only_parts = traits.iterates_content and not traits.tests_string
    if content is None:
        return None if traits.takes_none else [] if only_parts else ""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if only_parts else content
    if not isinstance(content, list):
        raise InvalidInput(f"{where}={short_repr(content)} must be a text, a list of parts or None")
    parts = [_check_part(part, f"{where}[{index}]") for index, part in enumerate(content)]
    return parts if traits.iterates_content else "\n".join(part["text"] for part in parts)


def _check_part(part: Any, where: str) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise InvalidInput(f'{where}={short_repr(part)} must be a dict like {{"type": "text", "text": "..."}}')
    if kind != "text":
        raise InvalidInput(f'{where} is of type {kind!r}, which is not built yet; only parts of type "text" are')
    if not isinstance(part.get("text"), str):
        raise InvalidInput(f"{where} has text={short_repr(part.get('text'))}; it must be a text")
    return part  # type: ignore[no-any-return]


def _check_tool_calls(calls: Any, where: str, traits: Traits) -> None:
    """Check the calls, and bring their arguments to the form the template wants."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise InvalidInput(f"{where}={short_repr(calls)} must be a list of dicts")
    for index, call in enumerate(calls):
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidInput(f"{where}[{index}]={short_repr(call)} must name its function")
        if "arguments" in function:
            given = function["arguments"]
            parsed = _parse_arguments(given, f"{where}[{index}]")
            as_text = given if isinstance(given, str) and given else json.dumps(parsed, ensure_ascii=False)
            function["arguments"] = as_text if traits.joins_arguments else parsed


def _parse_arguments(arguments: Any, where: str) -> dict[str, Any]:
    """Most templates write arguments themselves and want the dict, where the OpenAI form has its JSON text."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, str):
        arguments = _parse_json(arguments, where)
    if not isinstance(arguments, dict):
        raise InvalidInput(f"{where} has arguments={short_repr(arguments)}; they must be a JSON object")
    return arguments


def _parse_json(text: str, where: str) -> Any:
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{where} has arguments={short_repr(text)}, which are no JSON: {error}") from error
    return plain(parsed, f"{where}.arguments")


def _with_reasoning_names(message: Message) -> Message:
    """Whichever name the reasoning came under, `reasoning_content` and `thinking` hold it."""
    reasoning = next((message[name] for name in _REASONING_NAMES if name in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}
