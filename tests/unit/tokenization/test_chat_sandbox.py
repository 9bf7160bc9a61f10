"""One template at a time: the helpers templates rely on, what the sandbox refuses, and that everything ends."""

import json
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import InvalidInput
from octavo.tokenization import chat_template as module
from octavo.tokenization.chat_template import ChatTemplate, compile_template


def render(source: str, **variables) -> str:
    return ChatTemplate(source).render(variables)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% if true %}\na\n{% endif %}\nb", "a\nb"),  # trimmed blocks
        ("  {% if true %}\na\n  {% endif %}\nb", "a\nb"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{{ {'b': '<é>', 'a': [1, true, none]} | tojson }}", '{"b": "<é>", "a": [1, true, null]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{{ {'a': 'é'} | tojson(ensure_ascii=true, indent=2) }}", '{\n  "a": "\\u00e9"\n}'),
        ("{% generation %}{{ 'x' * 3 }}{% endgeneration %}.", "xxx."),
        ("{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}", "21"),
        ("{% filter trim | upper %} a {% endfilter %}", "A"),
        ("{% set x | trim | upper %} b {% endset %}{{ x }}", "B"),
        ("{% macro f(a, b='!') %}{{ a }}{{ b }}{% endmacro %}{{ f('x') ~ f('y', b='?') }}", "x!y?"),
        ("{% macro f() %}[{{ caller() }}]{% endmacro %}{% call f() %}in{% endcall %}", "[in]"),
        ("{{ '%s-%03d' % ('a', 7) }}{{ '{:>3}'.format(1) }}{{ 2 ** 5 }}{{ [1] * 2 + [2] }}", "a-007  132[1, 1, 2]"),
        ("{% set ns = namespace(n=0) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
        ("{{ dict(a=1).items() | list }}{{ nothing is defined }}{{ nothing }}", "[('a', 1)]False"),
    ],
)
def test_templates_have_what_they_rely_on(source, text):
    assert render(source) == text


def test_strftime_now_is_the_time_of_rendering():
    before, rendered, after = time.strftime("%F %R"), render("{{ strftime_now('%F %R') }}"), time.strftime("%F %R")
    assert before <= rendered <= after


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{{ raise_exception('Only 2 turns, <please>') }}", "refuses this conversation: Only 2 turns, <please>"),
        ("a\nb{% if %}", "syntax error in line 2: Expected an expression"),
        ("{% if x %}", "syntax error in line 1"),
        ("{% do x %}", "unknown tag 'do'"),
        ("{{ x | frobnicate }}", "No filter named 'frobnicate'"),
        ("a\n\n{{ nothing.more }}", "failed in line 3: 'nothing' is undefined"),
        ("{{ nothing + 'x' }}", "'nothing' is undefined"),
        ("{{ [] + 'x' }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
        ("{{ messages[0].update(a=1) }}", "access to attribute 'update' of 'dict' object is unsafe"),
        ("{% include 'file' %}", "no loader"),
        ("{% import 'os' as os %}", "no loader"),
        ("{{ lipsum(n=1000) }}", "'lipsum' is undefined"),
        ("{{ strftime_now(3) }}", "strftime() argument 1 must be str"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot be compiled"),
    ],
)
def test_a_template_fails_with_its_own_message(source, said):
    with pytest.raises(InvalidInput) as refusal:
        render(source, messages=[{}])
    assert said in str(refusal.value)


GROW = "{% set ns = namespace(s='x', l=[1]) %}{% for i in range(60) %}"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{% for i in range(100000000) %}x{% endfor %}", "Range too big"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "steps"),
        ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "depth"),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", "steps"),
        ("{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}", "depth"),
        ("{{ 'x' * 10 ** 10 }}", "repeats"),
        ("{{ 10 ** 10 * [0] }}", "repeats"),
        ("{{ 10 ** (10 ** 10) }}", "computes 10 **"),
        (GROW + "{% set ns.s = ns.s + ns.s %}{% endfor %}", "builds"),
        (GROW + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}", "builds"),
        (GROW + "{% set ns.l = ns.l + ns.l %}{% endfor %}", "builds"),
        (GROW + "{% set ns.s = [ns.s, ns.s] | join %}{% endfor %}", "builds"),
        (GROW + "{% set ns.s = ns.s.replace('x', 'xx') %}{% endfor %}", "builds"),
        (GROW + "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}", "builds"),
        (GROW + "{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}", "writes out"),
        (GROW + "{% set ns.l = {'a': ns.l, 'b': ns.l} %}{% endfor %}{{ ns.l | tojson }}", "writes out"),
        (GROW + "{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ 'a' ~ ns.l }}", "writes out"),
        (GROW + "{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l | string | length }}", "writes out"),
        (GROW + f"{'y' * 10_000}{{% for j in range(99999) %}}{'y' * 10_000}{{% endfor %}}{{% endfor %}}", "more than"),
        ("{{ messages | tojson(indent=10000000) }}", "indent"),
    ],
)
def test_a_template_without_end_ends_in_an_error(source, said):
    start = time.monotonic()
    with pytest.raises(InvalidInput) as refusal:
        render(source, messages=[[1]])
    assert said in str(refusal.value)
    assert time.monotonic() - start < 30


def test_the_steps_of_one_rendering_are_not_those_of_the_next(monkeypatch):
    monkeypatch.setattr(module, "MAX_STEPS", 100)
    template = ChatTemplate("{% for i in range(60) %}{% endfor %}ok")
    assert [template.render({}) for _ in range(3)] == ["ok"] * 3
    with pytest.raises(InvalidInput, match="more than 100 steps"):
        ChatTemplate("{% for i in range(101) %}{% endfor %}").render({})


def test_a_template_cannot_take_steps_back():
    with pytest.raises(InvalidInput, match="steps"):
        render("{% for i in range(99999) %}{% for j in range(99999) %}{{ -5 | count_steps }}{% endfor %}{% endfor %}")


def test_a_template_is_compiled_once():
    assert compile_template("{{ messages }} once") is compile_template("{{ messages }} once")


def test_threads_render_at_once():
    template = ChatTemplate("{% for i in range(200) %}{{ name }}{% endfor %}")
    texts: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda n=n: texts.update({n: template.render({"name": str(n)})})) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {n: str(n) * 200 for n in range(8)}


@pytest.mark.parametrize(
    ("source", "iterates"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False),
        ("{% for m in messages %}{% for part in m.content %}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% for part in m['content'] | list %}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% set c = m.content or [] %}{% for part in c %}{% endfor %}{% endfor %}", True),
        ("{% macro f(x) %}{% for p in x %}{% endfor %}{% endmacro %}{{ f(messages[0].content) }}", True),
        ("{% macro f(x) %}{% for p in x %}{% endfor %}{% endmacro %}{{ f(x=messages[0].get('content')) }}", True),
        ("{% macro f(x) %}{% for p in x %}{% endfor %}{% endmacro %}{{ f(messages) }}{{ messages[0].content }}", False),
        ("{% for m in messages %}{% for line in m.content.split('x') %}{% endfor %}{% endfor %}", False),
        ("{% for c in messages[0].tool_calls %}{% endfor %}", False),
    ],
)
def test_a_loop_over_content_shows_that_a_template_takes_parts(source, iterates):
    assert ChatTemplate(source).traits.iterates_content is iterates


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(value=JSON)
def test_tojson_writes_what_json_reads(value):
    assert json.loads(compile_template("{{ value | tojson }}").render({"value": value})) == value


@given(text=st.text())
def test_any_text_comes_through_unchanged(text):
    assert compile_template("<{{ text }}|{{ text ~ '' }}|{{ text + '' }}>").render({"text": text}) == (
        f"<{text}|{text}|{text}>"
    )
