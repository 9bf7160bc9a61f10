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
        (GROW + "{% set ns.s = [ns.s, ns.s] | join %}{% endfor %}", "joins"),
        (GROW + "{% set ns.s = ns.s.replace('x', 'xx') %}{% endfor %}", "builds"),
        (GROW + "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}", "builds"),
        (GROW + "{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}", "writes out"),
        (GROW + "{% set ns.l = {'a': ns.l, 'b': ns.l} %}{% endfor %}{{ ns.l | tojson }}", "writes out"),
        (GROW + "{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ 'a' ~ ns.l }}", "writes out"),
        (GROW + "{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l | string | length }}", "writes out"),
        (GROW + f"{'y' * 10_000}{{% for j in range(99999) %}}{'y' * 10_000}{{% endfor %}}{{% endfor %}}", "more than"),
        ("{{ messages | tojson(indent=10000000) }}", "indent"),
        ("{% set ns = namespace(x=10) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}x", "bits"),
        ("{% set ns = namespace(x=1) %}{% for i in range(9999) %}{% set ns.x = ns.x + ns.x %}{% endfor %}x", "bits"),
        ("{% set ns = namespace(x=1) %}{% for i in range(9999) %}{% set ns.x = ns.x - -ns.x %}{% endfor %}x", "bits"),
        ("{{ 'a' | center(10 ** 10) }}", "asks center"),
        ("{{ 'a' | center(10000000000) }}", "asks center"),
        ("{{ ['a'] | map('center', width=10 ** 10) | list }}", "asks center"),
        ("{{ 'a'.ljust(10 ** 10) }}", "asks ljust"),
        ("{{ (1).to_bytes(length=10 ** 10, byteorder='big') }}", "asks to_bytes"),
        ("{{ 'a' | indent(10 ** 10, true) }}", "asks indent"),
        ("{{ ('\n' * 10 ** 7) | indent(9000, true, true) }}", "builds"),
        ("{{ ('a' * 10 ** 5) | wordwrap(1, wrapstring='x' * 10 ** 5) }}", "builds"),
        ("{{ ('\t' * 10 ** 5).expandtabs(10000) }}", "builds"),
        ("{{ [1] | batch(10 ** 10, 0) | list }}", "asks batch"),
        ("{{ [1] | slice(10 ** 10) | list }}", "asks slice"),
        ("{{ 1.5 | round(10 ** 10, 'ceil') }}", "asks round"),
        ("{{ '%2000000000d' % 1 }}", "asks a format"),
        ("{{ '%.2000000000f' | format(1) }}", "asks a format"),
        ("{{ '%*d' % (2000000000, 1) }}", "asks a format"),
        ("{{ ('%9999d' * 10 ** 5) % ((1,) * 10 ** 5) }}", "formats"),
        ("{{ '{:2000000000}'.format(1) }}", "asks a format"),
        ("{{ '{:{w}}'.format(1, w=2000000000) }}", "asks a format"),
        ("{{ ('{0}' * 10 ** 5).format('a' * 10 ** 5) }}", "formats"),
        ("{{ '{a:2000000000}'.format_map({'a': 1}) }}", "asks a format"),
        ("{{ (['a' * 10 ** 5] * 10 ** 5) | join }}", "joins"),
        ("{{ ([{'t': 'a' * 10 ** 5}] * 10 ** 5) | join(attribute='t') }}", "joins"),
        ("{{ ('a' * 10 ** 5).join(['a'] * 10 ** 5) }}", "joins"),
        ("{{ ('a' * 10 ** 5) | replace('a', 'a' * 10 ** 5) }}", "builds"),
        ("{{ ('a' * 10 ** 5).replace('a', 'a' * 10 ** 5) }}", "builds"),
    ],
)
def test_a_template_without_end_ends_in_an_error(source, said):
    start = time.monotonic()
    with pytest.raises(InvalidInput) as refusal:
        render(source, messages=[[1]])
    assert said in str(refusal.value)
    assert time.monotonic() - start < 30


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in x %}" * 25 + "{% endfor %}" * 25,
        "{% if x %}" * 120 + "{% endif %}" * 120,
        "{{ " + "9" * 5000 + " }}",
        "{{ '\ud800' }}{% for %}",
        "{{ raise_exception('\ud800\x00') }}",
        "{{ raise_exception('\\ud800') }}",
        "{{ nothing['\\ud800'].x }}",
        "{{ {}['\\ud800'] + 1 }}",
    ],
)
def test_every_refusal_is_one_and_its_message_can_be_written(source):
    with pytest.raises(InvalidInput) as refusal:
        render(source)
    str(refusal.value).encode()
    assert "\x00" not in str(refusal.value)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ 'a' | center(5) }}|{{ 'a'.ljust(3) }}|{{ '7'.zfill(3) }}", "  a  |a  |007"),
        ("{{ 'a\nb' | indent(2, true) }}|{{ 'a\nb' | indent('> ') }}", "  a\n  b|a\n> b"),
        ("{{ 'a b' | wordwrap(1, wrapstring='/') }}|{{ 1.256 | round(2) }}", "a/b|1.26"),
        ("{{ [1, 2, 3] | batch(2, 0) | list }}{{ [1, 2] | slice(2) | list }}", "[[1, 2], [3, 0]][[1], [2]]"),
        ("{{ [{'a': 1}, {'a': 'x'}] | join('-', attribute='a') }}{{ ['a', 1] | map('string') | join }}", "1-xa1"),
        ("{{ 'aXa' | replace('a', 'bc', 1) }}{{ 'aa'.replace('a', 'b', 1) }}{{ '-'.join('ab') }}", "bcXabaa-b"),
        ("{{ '%5.1f%%|%-*d|%(a)s' | replace('%(a)s', '') | format(1.25, 3, 7) }}", "  1.2%|7  |"),
        ("{{ '%(a)s' | format(a=1) }}{{ '%(a)s' % {'a': 2} }}{{ '{a:>{w}}'.format(a=1, w=3) }}", "12  1"),
        ("{{ '{a}{b[0]}'.format_map({'a': 1, 'b': [2]}) }}{{ 2 ** 63 * 2 }}{{ 5 - 7 }}", "1218446744073709551616-2"),
    ],
)
def test_what_is_bounded_works_as_ever(source, text):
    assert render(source) == text


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
