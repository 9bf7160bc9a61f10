"""Chat templates: Jinja source, compiled once and rendered in a sandbox with the helpers that templates rely on.

The environment is the one templates are written for (that of the transformers library): blocks are trimmed, loops have
`break` and `continue`, `tojson` does not escape HTML, and there are `raise_exception`, `strftime_now` and the block
`{% generation %}`. What holds: a template reads what it is given and nothing else, it changes nothing, and it ends:
loops and recursion are counted, texts and numbers are bounded. One operation may still be slow or large;
a template is no place for code of somebody who means harm. Every failure of a template is an InvalidInput.
"""

import json
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2.ext
import jinja2.meta
from jinja2 import nodes, pass_context
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from octavo.errors import InvalidInput, printable, short_repr
from octavo.tokenization.chat_template_analysis import Traits, find_traits
from octavo.tokenization.chat_template_limits import (
    MAX_TEXT,
    TooMuch,
    bounded_filters,
    check_binop,
    check_format,
    check_method,
    check_shown,
    check_size,
)

MAX_STEPS = 3_000_000
"""Steps of one rendering at most, about a second. A round of a loop is one; honest templates take a few thousand."""
_STEPS_PER_CALL = 10
"""Steps that a call of a macro counts for."""
_TEXT_PER_STEP = 64
"""Literal text in the body of a loop counts as one more step for each so many characters."""

_steps_left: ContextVar[list[int]] = ContextVar("steps_left")


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks what the model wrote; rendering needs its content only."""

    tags = {"generation"}  # noqa: RUF012  # the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Guard(NodeTransformer):
    """Writes a count of steps into every loop and macro, and a check of its size around every new text.

    As filters, because calls go through the sandbox and take ten times as long.
    """

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._counted(node, 1)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._counted(node, _STEPS_PER_CALL)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._counted(node, _STEPS_PER_CALL)

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        return node if node.node is None else _filter("check_size", node)  # the text of a {% filter %} is no node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_filter("check_shown", part) for part in node.nodes]
        return _filter("check_size", node)

    def _counted(self, node: nodes.For | nodes.Macro | nodes.CallBlock, steps: int) -> nodes.Node:
        literal = sum(len(data.data) for child in node.body for data in _literals(child))
        self.generic_visit(node)
        cost = nodes.Const(steps + literal // _TEXT_PER_STEP, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(_filter("count_steps", cost), lineno=node.lineno))
        return node


def _filter(name: str, node: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _literals(node: nodes.Node) -> Iterator[nodes.TemplateData]:
    if isinstance(node, nodes.TemplateData):
        yield node
    yield from node.find_all(nodes.TemplateData)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment of every chat template."""

    intercepted_binops = frozenset(("+", "-", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols, _GenerationBlock],
            finalize=check_shown,
            cache_size=0,
        )
        self.filters.update(bounded_filters())
        self.filters["tojson"] = _to_json
        self.filters["count_steps"] = _count_steps
        self.filters["check_size"] = check_size
        self.filters["check_shown"] = check_shown
        self.filters["string"] = lambda value: str(check_shown(value))
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        del self.globals["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Guard().visit(super()._parse(source, name, filename))  # type: ignore[no-any-return]

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Any call in a template. The names avoid those of keyword arguments in it."""
        check_method(__obj, args, kwargs)
        return check_size(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`format` and `format_map` of a text, bounded; None for anything else."""
        formats = super().wrap_str_format(value)
        if formats is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            mapped = args[0].values() if value.__name__ == "format_map" and args else args
            check_format(value.__self__, [*mapped, *kwargs.values()])
            return formats(*args, **kwargs)

        return bounded

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_binop(operator, left, right)
        return check_size(super().call_binop(context, operator, left, right))


@pass_context  # so that it is not taken for a constant
def _count_steps(context: Context, cost: int) -> None:
    left = _steps_left.get()
    left[0] -= abs(cost)
    if left[0] < 0:
        raise TooMuch(f"it takes more than {MAX_STEPS} steps; it loops without end or over far too much")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which a model was never shown."""
    if (len(indent) if isinstance(indent, str) else indent or 0) > 1000:
        raise TooMuch(f"it writes JSON with indent={short_repr(indent)}")
    return json.dumps(
        check_shown(value), ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> None:
    raise _Refusal(str(message))


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _Refusal(TemplateError):
    """The template itself refuses the conversation, through raise_exception."""


class ChatTemplate:
    """A compiled template. Immutable; rendering is thread-safe.

    Args:
        source: Jinja source.

    Raises:
        InvalidInput: a syntax error, an unknown filter or tag; names the line.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        environment = _environment()
        try:
            # Parsed by the plain parser: what the guard adds is none of the template's own traits.
            tree = Parser(environment, source).parse()
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
            self.traits: Traits = find_traits(tree)
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise InvalidInput(
                f"the chat template has a syntax error in line {error.lineno}: {_shown(error).rstrip('.')}; "
                "correct the template or give another with chat_template="
            ) from error
        except (TemplateError, RecursionError, MemoryError, SyntaxError, ValueError) as error:
            # Python compiles what Jinja makes of the template, and has limits of its own to blocks and indentation.
            raise InvalidInput(f"the chat template cannot be compiled: {_shown(error)}; give another") from error

    variables: frozenset[str]
    """Names the template reads and does not set itself."""

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text for these variables, which the template cannot change.

        Raises:
            InvalidInput: the template raised an exception, used something undefined or did not come to an end.
        """
        token = _steps_left.set([MAX_STEPS])
        try:
            return "".join(_bounded(self._template.generate(variables)))
        except _Refusal as error:
            raise InvalidInput(f"the chat template refuses this conversation: {_shown(error)}") from error
        except (MemoryError, RecursionError) as error:
            raise InvalidInput(f"the chat template failed{_place(error)}: it needs too much memory or depth") from error
        except Exception as error:  # whatever the template's code raises is a fault of template or conversation
            reason = _shown(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {_shown(error)}"
            raise InvalidInput(f"the chat template failed{_place(error)}: {reason}") from error
        finally:
            _steps_left.reset(token)


def _bounded(pieces: Iterator[str]) -> Iterator[str]:
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > MAX_TEXT:
            raise TooMuch(f"it writes a text of more than {MAX_TEXT} characters")
        yield piece


def _shown(error: Exception) -> str:
    """The error's own message; a template can put anything into it."""
    return printable((error.message or "") if isinstance(error, TemplateError) else str(error), 1000)


def _place(error: BaseException) -> str:
    """In which line of the template, if Jinja's traceback tells."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return f" in line {lines[-1]}" if lines else ""


@lru_cache(maxsize=1)
def _environment() -> _Sandbox:
    return _Sandbox()


compile_template: Callable[[str], ChatTemplate] = lru_cache(maxsize=128)(ChatTemplate)
"""ChatTemplate of a source, compiled only once."""
