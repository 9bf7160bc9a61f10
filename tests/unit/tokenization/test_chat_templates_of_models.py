"""Templates of real models, against the environment they are written for (that of transformers, the oracle)."""

import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers.utils import chat_template_utils as oracle

from octavo.errors import InvalidInput
from octavo.tokenization import chat_template as chat_template_module
from octavo.tokenization.chat import encode_chat, encode_rendered, render_chat
from octavo.tokenization.chat_template import compile_template
from octavo.tokenization.tokenizer import load_tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
MODEL = SimpleNamespace(chat_templates={}, special_tokens=SPECIAL)
NUM_TEMPLATES = 70  # as many as the package had when this was written

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather <today> & 'tomorrow' in Zürich",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Its name"},
                    "unit": {"type": "string", "enum": ["c", "f"]},
                },
                "required": ["city"],
            },
        },
    }
]
CALL = {"id": "abc123def", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}
ONE_QUESTION = [{"role": "user", "content": 'Hi <b>&"\n'}]
CONVERSATIONS = {
    "user": ONE_QUESTION,
    "system": [{"role": "system", "content": "Be brief."}, *ONE_QUESTION],
    "turns": [
        {"role": "system", "content": " Be kind. "},
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "Two 👋\n"},
        {"role": "user", "content": "Three"},
    ],
    "reasoning": [
        {"role": "user", "content": "One"},
        {"role": "assistant", "reasoning_content": "Hm.", "content": "Two"},
        {"role": "user", "content": "Three"},
    ],
    "calls": [
        {"role": "user", "content": "How is the weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "get_weather", "tool_call_id": "abc123def", "content": '{"degrees": 20}'},
        {"role": "assistant", "content": "Fine."},
        {"role": "user", "content": "Thanks"},
    ],
}
MORE = {"fireworks-ai-llama-3-firefunction-v2": {"functions": "[]", "datetime": "today"}}
"""Variables that a template does not do without."""
TEXT_ARGUMENTS = {"meetkai-functionary-medium-v3.2", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B"}
"""Templates that fail with arguments as a dict, which is the only form the oracle gives them."""
FAILING = {
    "CohereForAI-c4ai-command-r-plus-tool_use": {*CONVERSATIONS},
    "Kimi-K2-Instruct": {"calls"},
    "Kimi-K2-Thinking": {"calls"},
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": {*CONVERSATIONS},
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": {*CONVERSATIONS},
    "google-gemma-2-2b-it": {"system", "turns", "calls"},
    "llama-cpp-deepseek-r1": {*CONVERSATIONS},
}
"""Conversations that a template refuses or fails at, with tools or without."""


@pytest.fixture(autouse=True)
def _same_moment(monkeypatch):
    """Some templates write the time."""

    class Fixed(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 3, 4, 5, 6, 7, tzinfo=tz)

    monkeypatch.setattr(chat_template_module, "datetime", Fixed)
    monkeypatch.setattr(oracle, "datetime", Fixed)


@pytest.fixture(scope="module")
def templates(model_path) -> dict[str, str]:
    """Source by name."""
    return {path.stem: path.read_text() for path in sorted((model_path("vocab") / "templates").glob("*.jinja"))}


def variants(name: str):
    """Every conversation with and without tools; some without what opens an answer."""
    for key, messages in CONVERSATIONS.items():
        for tools in (None, TOOLS):
            for opens in (True, False) if key in ("turns", "calls") else (True,):
                yield f"{name}/{key}/{bool(tools)}/{opens}", key, messages, tools, opens


def expected(source: str, name: str, messages, tools, opens: bool) -> str:
    rendered, _ = oracle.render_jinja_template(
        conversations=[messages],
        tools=tools,
        chat_template=source,
        add_generation_prompt=opens,
        **SPECIAL,
        **MORE.get(name, {}),
    )
    return rendered[0]


def test_there_are_as_many_templates_as_expected(templates):
    assert len(templates) >= NUM_TEMPLATES


def test_every_template_renders_as_in_its_own_environment(templates):
    num_equal = 0
    for name, source in templates.items():
        for label, key, messages, tools, opens in variants(name):
            given = {"tools": tools, "add_generation_prompt": opens, "chat_template_kwargs": MORE.get(name)}
            try:
                wanted = expected(source, name, messages, tools, opens)
            except Exception as error:
                if name in TEXT_ARGUMENTS and key == "calls":
                    assert '{"city": "Zürich"}' in render_chat(MODEL, messages, chat_template=source, **given), label
                    continue
                assert key in FAILING.get(name, ()), label
                with pytest.raises(InvalidInput, match="chat template") as refusal:
                    render_chat(MODEL, messages, chat_template=source, **given)
                assert str(error) in str(refusal.value), label
                continue
            assert render_chat(MODEL, messages, chat_template=source, **given) == wanted, label
            num_equal += 1
    assert num_equal > 0.9 * sum(1 for name in templates for _ in variants(name))


def test_a_message_is_open_exactly_where_its_content_ends(templates):
    """What is rendered begins the rendering of every longer message: the model may go on with any of them."""
    for name, source in templates.items():
        tools = TOOLS if "Hermes" in name else None
        given = {"chat_template": source, "tools": tools, "chat_template_kwargs": MORE.get(name)}
        for content in ("OK!\n", "OK!", "So: ", "\n OK"):
            messages = [*ONE_QUESTION, {"role": "assistant", "content": content}]
            longer = [*ONE_QUESTION, {"role": "assistant", "content": f"{content}it is."}]
            if name == "CohereForAI-c4ai-command-r-plus-tool_use":  # cannot do without tools of its own form
                continue
            rendered = render_chat(MODEL, messages, continue_final_message=True, **given)
            assert rendered.endswith(content.lstrip()), (name, content)
            whole = render_chat(MODEL, longer, add_generation_prompt=False, **given)
            assert whole.startswith(f"{rendered}it is."), (name, content)


def test_no_content_is_rendered_as_the_template_expects_it(templates):
    """An assistant message that only calls a tool: no template fails at it or writes None."""
    calls = CONVERSATIONS["calls"][:3]
    for name, source in templates.items():
        if "calls" in FAILING.get(name, ()):
            continue
        given = {"chat_template": source, "tools": TOOLS, "chat_template_kwargs": MORE.get(name)}
        as_none = render_chat(MODEL, [calls[0], {**calls[1], "content": None}, calls[2]], **given)
        absent = {key: value for key, value in calls[1].items() if key != "content"}
        assert as_none == render_chat(MODEL, [calls[0], absent, calls[2]], **given), name
        as_empty = render_chat(MODEL, calls, **given)  # with words such as None in descriptions of the tools
        assert as_none.count("None") == as_empty.count("None") and as_none.count("null") == as_empty.count("null"), name


def test_arguments_as_json_text_equal_arguments_as_a_dict(templates):
    text_call = {**CALL, "function": {"name": "get_weather", "arguments": '{"city": "Zürich"}'}}
    with_text = [{**m, "tool_calls": [text_call]} if "tool_calls" in m else m for m in CONVERSATIONS["calls"]]
    for name, source in templates.items():
        if "calls" in FAILING.get(name, ()):
            continue
        given = {"chat_template": source, "tools": TOOLS, "chat_template_kwargs": MORE.get(name)}
        assert render_chat(MODEL, with_text, **given) == render_chat(MODEL, CONVERSATIONS["calls"], **given), name


def test_parts_read_as_the_text_they_hold(templates):
    for name, source in templates.items():
        tools = TOOLS if "Hermes" in name else None
        if name == "CohereForAI-c4ai-command-r-plus-tool_use":
            continue
        given = {"chat_template": source, "tools": tools, "chat_template_kwargs": MORE.get(name)}
        as_parts = [{"role": "user", "content": [{"type": "text", "text": "How are you?"}]}]
        as_text = [{"role": "user", "content": "How are you?"}]
        assert render_chat(MODEL, as_parts, **given) == render_chat(MODEL, as_text, **given), name


@pytest.mark.parametrize(
    ("name", "takes_parts"),
    [
        ("Qwen-Qwen2.5-7B-Instruct", False),
        ("meta-llama-Llama-3.1-8B-Instruct", False),
        ("Qwen3.5-4B", True),  # through a macro
        ("mistralai-Ministral-3-14B-Reasoning-2512", True),
        ("Kimi-K3", True),  # message.get("content")
        ("google-gemma-4-31B-it", True),
        ("openai-gpt-oss-120b", False),
    ],
)
def test_the_form_of_content_is_seen(templates, name, takes_parts):
    assert compile_template(templates[name]).traits.iterates_content is takes_parts


@pytest.mark.parametrize("model", ["smollm2", "qwen05"])
def test_ids_of_real_models_are_those_of_the_rendered_text(model_path, model):
    tokenizer = load_tokenizer(Path(model_path(model)))
    messages = CONVERSATIONS["turns"]
    wanted, _ = oracle.render_jinja_template(
        conversations=[messages],
        chat_template=tokenizer.chat_template,
        add_generation_prompt=True,
        **tokenizer.special_tokens,
    )
    text = render_chat(tokenizer, messages)
    ids = encode_chat(tokenizer, messages)
    assert text == wanted[0]
    assert ids == encode_rendered(tokenizer, text) == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    start = tokenizer.get_vocab()["<|im_start|>"]
    assert ids[0] == start
    assert ids.count(start) == len(messages) + 1
