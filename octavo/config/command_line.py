"""From a command's words to the dataclass of its options. tyro parses them and writes the help; what it would refuse
is refused here before, in one sentence that names the value, the limit and the way out, as the Python API does.

What holds: an option that users of such engines know is never called unknown, and no word is passed over.
"""

import ast
import dataclasses
import difflib
import re
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro

from octavo.config.engine_args import NOT_BUILT, EngineArgs
from octavo.config.options import listing, make_engine_args
from octavo.errors import InvalidInput, not_built, printable, short_repr

T = TypeVar("T")

_POSITIONAL = get_args(tyro.conf.Positional[int])[1]
_REPEATED = get_args(tyro.conf.UseAppendAction[int])[1]
_FLAG = re.compile(r"--?[A-Za-z]")
_NUMBER = re.compile(r"-(inf|nan)", re.IGNORECASE)
_TRUTHS = ("true", "false")
_LONGEST_LITERAL = 1000


def parse_arguments(
    kind: type[T], prog: str, argv: Sequence[str], *, later: Mapping[str, str] | None = None, pairs: bool = True
) -> T:
    """An instance of `kind`, a dataclass whose nested dataclasses hold options of their own.

    Args:
        prog: how the command is called, for the help and for refusals.
        later: options of the command itself that are not built yet -> what to do instead.
        pairs: a switch --x has a --no-x.

    Raises:
        InvalidInput: a word that is no option, or a value that cannot be read.
        SystemExit: help was shown.
    """
    words = list(_Reader(kind, prog, later or {}, pairs).checked(argv))
    return tyro.cli(kind, prog=prog, args=words, config=() if pairs else (tyro.conf.FlagCreatePairsOff,))


@dataclasses.dataclass(frozen=True, slots=True)
class _Option:
    """One field, as the command line sees it."""

    name: str
    owner: type
    value: type
    """bool: a switch, without a value; int, float, or str for whatever else there is."""
    choices: tuple[str, ...] = ()
    may_be_none: bool = False
    is_positional: bool = False
    is_required: bool = False
    is_list: bool = False
    is_repeated: bool = False
    """Of a list: each value has the flag before it, instead of the flag before all of them."""
    may_be_empty: bool = False
    """Of a list: it has a default, so that none at all is something to ask for."""

    @property
    def flag(self) -> str:
        return _as_flag(self.name)


def _options(kind: Any) -> Iterator[_Option]:
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        marks: tuple[object, ...] = ()
        while get_origin(hint) is Annotated:
            hint, *more = get_args(hint)
            marks = (*marks, *more)
        if dataclasses.is_dataclass(hint):
            yield from _options(hint)
        else:
            option = _option(field.name, kind, hint, marks)
            has_default = (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
            yield dataclasses.replace(
                option,
                is_required=not has_default and not option.is_list,
                may_be_empty=option.is_list and field.default not in (dataclasses.MISSING, ()),
            )


def _option(name: str, owner: type, hint: Any, marks: Sequence[object]) -> _Option:
    is_list = get_origin(hint) is tuple
    parts = _union(get_args(hint)[0] if is_list else hint)
    may_be_none = type(None) in parts
    parts = [part for part in parts if part is not type(None)]
    choices = get_args(parts[0]) if get_origin(parts[0]) is Literal else ()
    if parts == [bool] and may_be_none:
        choices = ("True", "False")
    value = parts[0] if len(parts) == 1 and parts[0] in (bool, int, float) and not choices else str
    is_positional, is_repeated = (any(mark is one for mark in marks) for one in (_POSITIONAL, _REPEATED))
    return _Option(name, owner, value, choices, may_be_none, is_positional, is_list=is_list, is_repeated=is_repeated)


def _union(hint: Any) -> list[Any]:
    return list(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else [hint]


class _Reader:
    """Walks through the words of a command."""

    def __init__(self, kind: type, prog: str, later: Mapping[str, str], pairs: bool) -> None:
        options = list(_options(kind))
        self._prog = prog
        self._later = later
        self._positionals = [option for option in options if option.is_positional]
        self._takes_many = any(option.is_list for option in self._positionals)
        self._options = {option.name: option for option in options if not option.is_positional}
        self._switches = {
            f"no_{option.name}": option for option in self._options.values() if option.value is bool and pairs
        }
        has_engine = any(option.owner is EngineArgs for option in options)
        self._not_built = NOT_BUILT if has_engine else {}
        self._last_switch: _Option | None = None

    def checked(self, argv: Sequence[str]) -> Iterator[str]:
        """The words, without those that ask for nothing, and the options first. Raises InvalidInput."""
        words = deque(argv)
        texts: list[str] = []
        while words:
            word = words.popleft()
            if word in ("-h", "--help"):
                yield "--help"
                return
            if word.startswith("--tyro-"):  # completions of the shell
                yield from (word, *words)
                return
            if word == "--":
                texts += words
                break
            if _is_flag(word):
                yield from self._take_flag(word, words)
            else:
                self._check_no_switch_value(word)
                texts.append(word)
        self._check_texts(texts)
        if texts:
            yield from ("--", *texts)

    def _check_no_switch_value(self, word: str) -> None:
        if self._last_switch is not None and word.lower() in _TRUTHS and not self._takes_many:
            raise self._no_switch_value(self._last_switch, word)
        self._last_switch = None

    def _check_texts(self, texts: Sequence[str]) -> None:
        most = len(self._positionals)
        if not most and texts:
            named = " (a model is named by --model)" if "model" in self._options else ""
            raise InvalidInput(
                f"{short_repr(texts[0])} is no option, and {self._prog} takes nothing else{named}; {self._see()}"
            )
        if len(texts) > most and not self._takes_many:
            takes = "one" if most == 1 else str(most)
            raise InvalidInput(
                f"{short_repr(texts[most])} is one too many: {self._prog} takes {takes} beside its options; "
                f"{self._see()}"
            )
        missing = [option.name for option in self._positionals[len(texts) :] if option.is_required]
        if missing:
            raise InvalidInput(f"{self._prog} needs {' and '.join(missing)}; {self._see()}")
        if not self._takes_many:
            for option, text in zip(self._positionals, texts, strict=False):
                self._check_value(option, text)

    def _take_flag(self, word: str, words: deque[str]) -> Iterator[str]:
        """Check one option, and its value, which is taken from the words."""
        flag, equals, attached = word.partition("=")
        name = flag[2:].replace("-", "_")
        switch = self._switches.get(name)
        option = self._options.get(name) if flag.startswith("--") else None
        self._last_switch = None
        if switch is not None or (option is not None and option.value is bool):
            self._last_switch = switch or option
            if equals:
                raise self._no_switch_value(self._last_switch, attached)  # type: ignore[arg-type]  # one is there
            yield word
        elif option is not None and option.may_be_empty and not equals and self._is_end(words):
            yield flag
        elif option is not None:
            value = attached if equals else self._next_value(option, words)
            self._check_value(option, value)
            yield f"{flag}={value}"
            while option.is_list and not option.is_repeated and words and not _is_flag(words[0]) and words[0] != "--":
                self._check_value(option, words[0])
                yield words.popleft()
        else:
            self._refuse(flag, name, attached if equals else None, words)

    def _is_end(self, words: deque[str]) -> bool:
        """Whether no value comes next."""
        return not words or words[0] == "--" or _is_flag(words[0])

    def _next_value(self, option: _Option, words: deque[str]) -> str:
        if self._is_end(words):
            what = listing(option.choices) if option.choices else _NAMES[option.value]
            raise InvalidInput(
                f"{option.flag} has no value; give {what}, and write {option.flag}=VALUE if it begins with a dash"
            )
        return words.popleft()

    def _check_value(self, option: _Option, text: str) -> None:
        if option.may_be_none and text == "None":
            return
        if text in option.choices if option.choices else _is_readable(option.value, text):
            return
        if option.owner is EngineArgs:
            make_engine_args(**{option.name: text})
        if option.choices:
            raise InvalidInput(f"{option.name}={short_repr(text)} is not supported; use {listing(option.choices)}")
        raise InvalidInput(f"{option.name}={short_repr(text)} must be {_NAMES[option.value]}")

    def _refuse(self, flag: str, name: str, attached: str | None, words: deque[str]) -> None:
        """Refuse what is no option, unless it is known and asks for nothing."""
        positive = name.removeprefix("no_")
        if flag.startswith("--") and positive in self._not_built:
            value: object = positive == name
            if attached is not None:
                value = _literal(attached)
            elif not isinstance(self._not_built[positive], bool) and words and not _is_flag(words[0]):
                value = _literal(words.popleft())
            make_engine_args(**{positive: value})
            return
        if flag.startswith("--") and positive in self._later:
            raise not_built(_as_flag(name), self._later[positive])
        raise InvalidInput(f"{printable(flag, 80)} is no option of {self._prog}; {self._hint(name)}")

    def _hint(self, name: str) -> str:
        known = (*self._options, *self._switches, *self._not_built, *self._later)
        near = difflib.get_close_matches(name[:80], known, n=1)
        return f"did you mean {_as_flag(near[0])}?" if near else self._see()

    def _no_switch_value(self, option: _Option, value: str) -> InvalidInput:
        off = _as_flag(f"no_{option.name}")
        ways = f"{option.flag} or {off}" if off[2:].replace("-", "_") in self._switches else f"{option.flag} or nothing"
        return InvalidInput(f"{option.flag} is a switch and takes no value such as {short_repr(value)}; write {ways}")

    def _see(self) -> str:
        return f"{self._prog} --help shows its options"


_NAMES: dict[type, str] = {int: "an integer", float: "a number", str: "one"}


def _as_flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _is_flag(word: str) -> bool:
    return _FLAG.match(word) is not None and _NUMBER.fullmatch(word) is None


def _is_readable(kind: type, text: str) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def _literal(text: str) -> object:
    """The value that a text is in Python, or the text itself."""
    if len(text) > _LONGEST_LITERAL:
        return text
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
