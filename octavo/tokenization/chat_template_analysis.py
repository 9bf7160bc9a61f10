"""What a chat template expects of messages, read off its syntax tree. Pure; nothing is rendered.

A template gets a message's content as one text or as a list of parts ({"type": "text", "text": ...}), no content as
None or as '', the arguments of a tool call as a dict or as JSON text. Nothing in a model's files says which; the
template's own code does.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from jinja2 import nodes


@dataclass(frozen=True, slots=True)
class Traits:
    """What the code of a template shows."""

    iterates_content: bool
    """It loops over a message's content: it takes lists of parts."""
    tests_string: bool
    """It asks whether something is a string: content may be a text even if it also loops over content."""
    takes_none: bool
    """It asks whether a content is none, and does not treat '' the same."""
    joins_arguments: bool
    """It adds the arguments of tool calls to texts as they are, so they must be JSON text."""


def find_traits(tree: nodes.Template) -> Traits:
    """Traits of a parsed template."""
    content, arguments = _Flow(tree, "content"), _Flow(tree, "arguments")
    tests = list(tree.find_all(nodes.Test))
    none_is_tested = any(test.name == "none" and content.reaches(test.node) for test in tests)
    takes_both = any(test.name in ("string", "mapping") and arguments.reaches(test.node) for test in tests)
    takes_dict = any(node.name == "tojson" and arguments.reaches(node.node) for node in tree.find_all(nodes.Filter))
    sums = tree.find_all(nodes.Add)
    return Traits(
        iterates_content=any(content.reaches(loop.iter) for loop in tree.find_all(nodes.For)),
        tests_string=any(test.name == "string" for test in tests),
        takes_none=none_is_tested
        and not any(_compares_to_empty(node, content) for node in tree.find_all(nodes.Compare)),
        joins_arguments=not (takes_both or takes_dict)
        and any(arguments.is_value(node.left) or arguments.is_value(node.right) for node in sums),
    )


class _Flow:
    """Where in a template the value of one key of a message may turn up.

    That is `x.key`, `x['key']` and `x.get('key')` of anything, and every variable and macro parameter that such an
    expression is assigned or passed to anywhere in the template, directly or on from another such name, also through
    filters and conditions, but not through other calls: `content.split(...)` is no content.
    """

    def __init__(self, tree: nodes.Template, key: str) -> None:
        self._key = key
        self._names: set[str] = set()
        moves = list(chain(_assignments(tree), _arguments(tree)))
        while found := {name for name, value in moves if name not in self._names and self.reaches(value)}:
            self._names |= found

    def is_value(self, node: nodes.Node | None) -> bool:
        """Whether this expression is the value itself."""
        match node:
            case nodes.Name(name=name):
                return name in self._names
            case nodes.Getattr(attr=key) | nodes.Getitem(arg=nodes.Const(value=key)):
                return bool(key == self._key)
            case nodes.Call(node=nodes.Getattr(attr="get"), args=[nodes.Const(value=key), *_]):
                return bool(key == self._key)
        return False

    def reaches(self, node: nodes.Node | None) -> bool:
        """Whether this expression is the value, or the value through filters and conditions."""
        match node:
            case nodes.Filter(node=inner):
                return self.reaches(inner)
            case nodes.CondExpr(expr1=first, expr2=second) | nodes.Or(left=first, right=second):
                return self.reaches(first) or self.reaches(second)
        return self.is_value(node)


def _assignments(tree: nodes.Template) -> Iterator[tuple[str, nodes.Node]]:
    for assignment in tree.find_all(nodes.Assign):
        if isinstance(assignment.target, nodes.Name):
            yield assignment.target.name, assignment.node


def _arguments(tree: nodes.Template) -> Iterator[tuple[str, nodes.Node]]:
    """(parameter, argument) of every call of a macro."""
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    for call in tree.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name not in macros:
            continue
        parameters = [parameter.name for parameter in macros[call.node.name].args]
        yield from zip(parameters, call.args, strict=False)
        yield from ((keyword.key, keyword.value) for keyword in call.kwargs if keyword.key in parameters)


def _compares_to_empty(node: nodes.Compare, flow: _Flow) -> bool:
    return flow.reaches(node.expr) and any(
        isinstance(operand.expr, nodes.Const) and operand.expr.value == "" for operand in node.ops
    )
