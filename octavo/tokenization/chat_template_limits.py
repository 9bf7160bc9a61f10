"""How large a value a chat template may build. Each check comes before the operation that would build it.

What holds: whatever is refused is refused with `TooMuch`, and no honest conversation comes near a limit. May touch
nothing but the values.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from string import Formatter
from typing import Any

from jinja2 import pass_eval_context
from jinja2.exceptions import TemplateError
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.nodes import EvalContext

from octavo.errors import short_repr

MAX_TEXT = 64_000_000
"""Characters of one text, or items of one list, that a template may build."""
MAX_ITEMS = 1_000_000
"""Items of a list or dict that is written out, with those of the lists and dicts in it."""
MAX_INT_BITS = 4096
"""Size of an integer: one that is multiplied by itself in a loop doubles it in every round."""
MAX_WIDTH = 10_000
"""Width, precision or count of columns that a filter, method or format may ask for."""

_SEQUENCES, _CONTAINERS = (str, bytes, list, tuple), (list, tuple, dict)
_WIDTH_FILTERS = ("batch", "center", "indent", "round", "slice", "wordwrap")
_WIDTH_METHODS = frozenset({"center", "expandtabs", "ljust", "rjust", "to_bytes", "zfill"})
_PERCENT_SPEC = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\d+|\*)?(?:\.(\d+|\*))?")


class TooMuch(TemplateError):
    """The template does more than any conversation needs."""


def check_size(value: Any) -> Any:
    """The value; raises TooMuch if it is too long a text or list, or too large an integer."""
    if isinstance(value, _SEQUENCES):
        _check_length("builds", len(value))
    elif isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        raise TooMuch(f"it computes an integer of {value.bit_length()} bits, more than {MAX_INT_BITS}")
    return value


def check_shown(value: Any) -> Any:
    """Before a value is written out: a list that holds another twice, and so on, is small until then."""
    if not isinstance(value, _CONTAINERS):
        return check_size(value)
    waiting, count = [value], 0
    while waiting:
        container = waiting.pop()
        items = container.values() if isinstance(container, dict) else container
        count += len(items)
        if count > MAX_ITEMS:
            raise TooMuch(f"it writes out a list or dict of more than {MAX_ITEMS} items")
        waiting += [item for item in items if isinstance(item, _CONTAINERS)]
    return value


def check_binop(operator: str, left: Any, right: Any) -> None:
    """Before `left operator right`, where the result could be far larger than both."""
    if operator == "*":
        _check_product(left, right)
    elif operator == "**" and not (abs(left) < 2**64 and abs(right) < 64):
        raise TooMuch(f"it computes {short_repr(left)} ** {short_repr(right)}")
    elif operator == "%" and isinstance(left, str):
        _check_percent(left, right)


def check_method(method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Before a call of a method of a text or number, where the result could be far larger than what it gets."""
    owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if not isinstance(owner, str | bytes | int):
        return
    if name in _WIDTH_METHODS:
        _check_widths(name, [*args, *kwargs.values()])
        if name == "expandtabs" and isinstance(owner, str):
            _check_length("builds", owner.count("\t") * next(iter([*args, *kwargs.values()]), 8))
    elif name == "replace":
        _check_replace(owner, *args[:2])
    elif name == "join" and args and isinstance(args[0], list | tuple):
        _check_join(args[0], owner)


def check_format(text: str, values: Iterable[Any]) -> None:
    """Before `text.format(values)`."""
    specs = [spec for _, field, spec, _ in Formatter().parse(text) if field is not None]
    widths = [number for spec in specs for number in re.findall(r"\d+|\{", spec or "")]
    _check_specs(len(specs), [("*" if width == "{" else width) for width in widths], list(values))


def bounded_filters() -> dict[str, Callable[..., Any]]:
    """Jinja's own filters that build something as large as they are told, with a check before."""
    widths = {name: _with_widths(name, FILTERS[name]) for name in _WIDTH_FILTERS}
    return {**widths, "format": _format, "join": _join, "replace": _replace}


def _with_widths(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def bounded(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        _check_widths(name, given[_first(function) + 1 :])
        text = args[_first(function)]
        if name in ("indent", "wordwrap") and isinstance(text, str):
            places = text.count("\n") + 1 if name == "indent" else len(text)
            inserted = max((len(value) for value in given if isinstance(value, str) and value is not text), default=1)
            width = max((value for value in given if isinstance(value, int)), default=4) if name == "indent" else 1
            _check_length("builds", places * max(inserted, width))
        return function(*args, **kwargs)

    bounded.__dict__.update(function.__dict__)  # Jinja's note of what it passes first
    return bounded


def _first(function: Callable[..., Any]) -> int:
    """The place of the value among the arguments: Jinja passes some filters their environment before it."""
    return int(hasattr(function, "jinja_pass_arg"))


def _format(value: Any, *args: Any, **kwargs: Any) -> Any:
    _check_percent(str(value), kwargs or args)
    return FILTERS["format"](value, *args, **kwargs)


@pass_eval_context
def _join(context: EvalContext, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> Any:
    items = list(value)
    if attribute is not None:
        items = [make_attrgetter(context.environment, attribute)(item) for item in items]
    _check_join(check_shown(items), d)
    return FILTERS["join"](context, items, d)


@pass_eval_context
def _replace(context: EvalContext, s: Any, old: Any, new: Any, count: int | None = None) -> Any:
    _check_replace(s, old, new)
    return FILTERS["replace"](context, s, old, new, count)


def _check_length(does: str, length: int) -> None:
    if length > MAX_TEXT:
        raise TooMuch(f"it {does} a text or list of {short_repr(length)}, more than {MAX_TEXT}")


def _check_product(left: Any, right: Any) -> None:
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, _SEQUENCES) and isinstance(count, int) and len(sequence) * count > MAX_TEXT:
            length = short_repr(len(sequence) * count)
            raise TooMuch(f"it repeats a text or list to {length}, more than {MAX_TEXT}")


def _check_widths(name: str, values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_WIDTH:
            raise TooMuch(f"it asks {name} for a width of {short_repr(value)}, more than {MAX_WIDTH}")


def _check_percent(text: str, right: Any) -> None:
    specs = _PERCENT_SPEC.findall(text)
    values = right if isinstance(right, tuple) else right.values() if isinstance(right, Mapping) else [right]
    _check_specs(len(specs), [width for spec in specs for width in spec if width], list(values))


def _check_specs(count: int, widths: list[str], values: list[Any]) -> None:
    """`count` places in a format, the widths they ask for (`*`: one of the values), and what they show."""
    asked: list[Any] = [int(width) for width in widths if width != "*"]
    if "*" in widths:
        asked += [int(value) for value in values if isinstance(value, int | str) and str(value).isdecimal()]
    _check_widths("a format", asked)
    longest = max((len(value) for value in check_shown(values) if isinstance(value, str)), default=0)
    _check_length("formats", count * max([longest, *asked]))


def _check_join(items: Iterable[Any], separator: Any) -> None:
    lengths = [len(item) for item in items if isinstance(item, _SEQUENCES)]
    _check_length("joins", sum(lengths) + len(lengths) * (len(separator) if isinstance(separator, str) else 0))


def _check_replace(text: Any, old: Any = None, new: Any = None, *_: Any) -> None:
    if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
        _check_length("builds", text.count(old) * len(new))
