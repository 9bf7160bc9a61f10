"""Reading recorded conversations: pairs of a prompt and the answer that was given to it."""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from octavo.errors import InvalidInput
from octavo.files import open_regular, read_bounded

_CHUNK = 1 << 20
_LARGEST_RECORD = 64 << 20
"""Characters: what has not become a whole record by then never will."""
_LARGEST_FILE = 1 << 30


def sharegpt_turns(path: Path) -> Iterator[tuple[str, str]]:
    """(first question, its answer) of each conversation of a ShareGPT file.

    The file is an array that is read record by record, and it may be cut off anywhere: what is whole is used.
    """
    found = False
    for record in _records(path):
        found = True
        turns = record.get("conversations") if isinstance(record, dict) else None
        if not isinstance(turns, list) or len(turns) < 2 or not all(isinstance(turn, dict) for turn in turns[:2]):
            continue
        question, answer = (turn.get("value") for turn in turns[:2])
        roles = tuple(turn.get("from") for turn in turns[:2])
        usable = roles in (("human", "gpt"), ("user", "chatgpt"), ("user", "assistant"))
        if usable and isinstance(question, str) and isinstance(answer, str) and question.strip() and answer.strip():
            yield question, answer
    if not found:
        raise InvalidInput(f"{path} has no record of a ShareGPT file, an array of objects with conversations")


def agent_turns(path: Path) -> Iterator[tuple[str, str]]:
    """(all that was said before, what the agent said then) for every turn of every recorded conversation.

    The file is an object with cases [{messages [{role, content}], reference_response}]. Prompts of one conversation
    grow: each begins with the one before.
    """
    try:
        document: Any = json.loads(read_bounded(path, _LARGEST_FILE))
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} is not JSON: {error}") from error
    cases = document.get("cases") if isinstance(document, dict) else None
    if not isinstance(cases, list):
        raise InvalidInput(f"{path} has no list of cases; give a file of recorded agent conversations")
    found = False
    for case in cases:
        messages = case.get("messages") if isinstance(case, dict) else None
        if isinstance(messages, list):
            for turn in _turns(messages, case.get("reference_response")):
                found = True
                yield turn
    if not found:
        raise InvalidInput(f"{path} has no case with messages and an answer; give one of several turns")


def _turns(messages: list[Any], last: object) -> Iterator[tuple[str, str]]:
    said = ""
    for message in (*messages, {"role": "assistant", "content": last}):
        if not isinstance(message, dict):
            continue
        role, text = message.get("role"), _text(message.get("content"))
        if role == "assistant" and said and text:
            yield f"{said}assistant: ", text
        if text:
            said += f"{role}: {text}\n\n"


def _text(content: object) -> str:
    """Of a message: its text, or the texts of its parts."""
    if isinstance(content, list):
        parts = (part.get("text") for part in content if isinstance(part, dict))
        return "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


def _records(path: Path) -> Iterator[Any]:
    """The whole entries of a JSON array that may be cut off."""
    decoder = json.JSONDecoder()
    text, begun, wanted = "", False, 0
    for piece in _pieces(path):
        text += piece
        if not begun:
            text = text.lstrip("\ufeff \t\r\n")
            if text and not text.startswith("["):
                return
            text, begun = text[1:], bool(text)
        if piece and len(text) < wanted:
            continue
        position = 0
        while (start := _skip(text, position)) < len(text):
            try:
                record, position = decoder.raw_decode(text, start)
            except (ValueError, RecursionError):
                break
            yield record
        text = text[position:]
        if len(text) > _LARGEST_RECORD:
            return
        wanted = 2 * len(text)  # so that a long record is not tried again at every piece


def _pieces(path: Path) -> Iterator[str]:
    """The text of a file in pieces; the last one is empty."""
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK):
            yield decode(chunk)
    yield ""


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position] in ", \t\r\n":
        position += 1
    return position
