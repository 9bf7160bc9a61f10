"""Conversations to text and ids: what is checked, which template is used, and where a rendering ends."""

import copy
import enum
import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import BOS, EOS, byte_tokenizer

from octavo.errors import InvalidInput
from octavo.tokenization import chat as module
from octavo.tokenization.chat import encode_chat, find_chat_template, render_chat
from octavo.tokenization.tokenizer import Tokenizer, load_tokenizer

PLAIN = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
STRIPPING = PLAIN.replace("m.content", "m.content | trim")
PARTS = "{% for m in messages %}{% for p in m.content %}({{ p.text }}){% endfor %}{% endfor %}"
EITHER = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}({{ p.text }}){% endfor %}{% endif %}{% endfor %}"
)
USER = {"role": "user", "content": "Hi"}


def make_tokenizer(**templates: str) -> Tokenizer:
    return Tokenizer(byte_tokenizer(), bos_token_id=BOS, eos_token_ids=[EOS], chat_templates=templates)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_tokenizer(default=PLAIN)


def test_a_conversation_reads_as_its_template_writes_it(tokenizer):
    messages = [{"role": "system", "content": "S"}, USER]
    assert render_chat(tokenizer, messages) == "<s>[system]S</s>[user]Hi</s>[assistant]"
    assert render_chat(tokenizer, messages, add_generation_prompt=False) == "<s>[system]S</s>[user]Hi</s>"


def test_ids_are_those_of_the_text_with_one_begin_of_sequence(tmp_path):
    """Also where the tokenizer itself puts a begin-of-sequence token before every text."""
    file = json.loads(byte_tokenizer().to_str())
    file["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS], "tokens": ["<s>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": PLAIN}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("x")[0] == BOS
    ids = encode_chat(tokenizer, [USER])
    assert (ids[0], ids.count(BOS), ids.count(EOS)) == (BOS, 1, 1)
    assert ids == tokenizer.encode(render_chat(tokenizer, [USER]), add_special_tokens=False)
    assert BOS not in encode_chat(tokenizer, [USER], chat_template="{{ messages[0].content }}")


def test_named_special_tokens_are_variables(tmp_path):
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>", "pad_token": {"content": "<pad>"}, "unk_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ pad_token }}{{ unk_token is defined }}")
    assert render_chat(load_tokenizer(tmp_path), [USER]) == "<s><pad>False"


def test_the_order_of_arguments_of_the_caller_is_left_alone(tokenizer):
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    before = copy.deepcopy((messages, tools))
    render_chat(tokenizer, messages, tools=tools, chat_template="{{ messages }}{{ tools }}")
    assert (messages, tools) == before


class TestEnding:
    def test_a_final_message_stays_open_with_its_white_space(self, tokenizer):
        messages = [USER, {"role": "assistant", "content": "OK!\n"}]
        assert render_chat(tokenizer, messages, continue_final_message=True).endswith("[assistant]OK!\n")

    def test_a_template_that_strips_keeps_what_will_stand_inside(self):
        tokenizer = make_tokenizer(default=STRIPPING)
        rendered = render_chat(tokenizer, [{"role": "assistant", "content": " OK!\n"}], continue_final_message=True)
        assert rendered == "<s>[assistant]OK!\n"

    @given(
        content=st.text(min_size=1),
        rest=st.text(alphabet="abc", min_size=1),
        source=st.sampled_from([PLAIN, STRIPPING]),
    )
    def test_an_open_rendering_begins_every_longer_one(self, content, rest, source):
        tokenizer = make_tokenizer(default=source)
        longer = [{"role": "assistant", "content": content + rest}]
        rendered = render_chat(tokenizer, [{"role": "assistant", "content": content}], continue_final_message=True)
        assert render_chat(tokenizer, longer, add_generation_prompt=False).startswith(rendered + rest)

    def test_the_mark_may_stand_in_texts_and_template(self):
        tokenizer = make_tokenizer(default=PLAIN + "OpenEnd OpenEndX")
        messages = [{"role": "user", "content": "OpenEnd"}, {"role": "assistant", "content": "OpenEndXX"}]
        assert render_chat(tokenizer, messages, continue_final_message=True).endswith("[assistant]OpenEndXX")

    def test_the_last_text_part_stays_open(self):
        content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]
        messages = [{"role": "assistant", "content": content}]
        assert render_chat(make_tokenizer(default=PARTS), messages, continue_final_message=True) == "(a)(b "
        assert render_chat(make_tokenizer(default=PLAIN), messages, continue_final_message=True).endswith("a\nb ")

    @pytest.mark.parametrize("content", [None, [], "", [{"type": "text", "text": ""}]])
    def test_a_message_without_text_cannot_go_on(self, content):
        for source in (PARTS, PLAIN.replace("m.content", "(m.content if m.content is not none else '')")):
            with pytest.raises(InvalidInput, match="no text to go on with"):
                messages = [{"role": "assistant", "content": content}]
                render_chat(make_tokenizer(default=source), messages, continue_final_message=True)

    def test_a_message_with_tool_calls_cannot_go_on(self, tokenizer):
        message = {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
        with pytest.raises(InvalidInput, match="tool_calls"):
            render_chat(tokenizer, [message], continue_final_message=True)

    def test_a_template_that_cuts_the_message_off_is_refused(self):
        tokenizer = make_tokenizer(default="{{ messages[-1].content[:3] }}")
        with pytest.raises(InvalidInput, match="leaves out the end"):
            render_chat(tokenizer, [{"role": "assistant", "content": "long text"}], continue_final_message=True)

    def test_going_on_and_beginning_anew_exclude_each_other(self, tokenizer):
        with pytest.raises(InvalidInput, match="exclude each other"):
            render_chat(tokenizer, [USER], continue_final_message=True, add_generation_prompt=True)
        assert render_chat(tokenizer, [USER], continue_final_message=True, add_generation_prompt=False) == "<s>[user]Hi"

    @pytest.mark.parametrize(
        ("after", "options"),
        [
            ("OpenEndX", {}),
            ("{{ suffix }}", {"chat_template_kwargs": {"suffix": "OpenEnd OpenEndXX"}}),
            ("{{ messages[0].content }}", {}),
            ("{% for key in deep[0] %}{{ key }}{% endfor %}", {"chat_template_kwargs": {"deep": [{"OpenEndX": 1}]}}),
        ],
    )
    def test_a_text_like_the_mark_after_the_end_is_no_end(self, after, options):
        tokenizer = make_tokenizer(default="{% for m in messages %}<{{ m.content }}>{% endfor %}" + after)
        messages = [{"role": "user", "content": "OpenEndXXX"}, {"role": "assistant", "content": "a OpenEnd"}]
        rendered = render_chat(tokenizer, messages, continue_final_message=True, **options)
        assert rendered == "<OpenEndXXX><a OpenEnd"

    def test_a_last_message_that_is_written_twice_is_refused(self):
        tokenizer = make_tokenizer(default="{{ messages[-1].content }}|{{ messages[-1].content }}")
        with pytest.raises(InvalidInput, match="2 times"):
            render_chat(tokenizer, [USER], continue_final_message=True)

    def test_a_huge_number_in_a_message_does_not_hinder_going_on(self):
        message = {"role": "user", "content": "Hi", "n": 10**5000}
        assert render_chat(make_tokenizer(default=PLAIN), [message], continue_final_message=True).endswith("Hi")

    @pytest.mark.parametrize("path", ["~nouser/x", "\ud800", "a\0b"])
    def test_a_path_that_is_none_is_refused_in_writable_words(self, path):
        with pytest.raises(InvalidInput, match="is no Jinja text") as refusal:
            render_chat(make_tokenizer(default=PLAIN), [USER], chat_template=path)
        str(refusal.value).encode()

    @pytest.mark.parametrize("options", [{"continue_final_message": "content"}, {"add_generation_prompt": 1}])
    def test_flags_are_true_or_false(self, tokenizer, options):
        with pytest.raises(InvalidInput, match="must be True or False"):
            render_chat(tokenizer, [USER], **options)


class TestMessages:
    @pytest.mark.parametrize(
        ("messages", "said"),
        [
            ([], "messages=[] is empty"),
            ("Hi", "is a str"),
            (USER, "is a dict"),
            (None, "is a NoneType"),
            ([["user", "Hi"]], "messages[0]"),
            ([USER, "Hi"], "messages[1]='Hi' is a str"),
            ([{"content": "Hi"}], "messages[0] has role=None"),
            ([{"role": 3, "content": "Hi"}], "role=3"),
            ([{"role": "", "content": "Hi"}], "role=''"),
            ([{"role": "user", "content": 3}], "messages[0].content=3"),
            ([{"role": "user", "content": {"type": "text", "text": "x"}}], "messages[0].content"),
            ([{"role": "user", "content": ["x"]}], "messages[0].content[0]='x'"),
            ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0]"),
            ([{"role": "user", "content": [{"type": "text"}]}], "text=None"),
            ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}],
             "messages[0].content[1] is of type 'image_url', which is not built yet"),
            ([{"role": "user", "content": [{"type": "input_audio"}]}], "'input_audio'"),
            ([{"role": "user", "content": "a\ud800"}], "messages[0].content holds a lone surrogate"),
            ([{"role": "user", "content": "a", "name": object()}], "messages[0].name"),
            ([{"role": "user", "content": "a", "b\udc00": 1}], "lone surrogate"),
            ([{"role": "user", "content": "a", 3: 1}], "the key 3"),
            ([{"role": "assistant", "tool_calls": "f"}], "messages[0].tool_calls='f'"),
            ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "must name its function"),
            ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], "no JSON"),
            ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}], "JSON object"),
        ],
    )  # fmt: skip
    def test_what_is_no_conversation_is_refused(self, tokenizer, messages, said):
        with pytest.raises(InvalidInput) as refusal:
            render_chat(tokenizer, messages)
        assert said in str(refusal.value)

    def test_depth_is_limited(self, tokenizer):
        deep = "x"
        for _ in range(5000):
            deep = [deep]
        with pytest.raises(InvalidInput, match="levels deep"):
            render_chat(tokenizer, [{**USER, "extra": deep}])
        with pytest.raises(InvalidInput, match=r"levels deep|no JSON"):
            arguments = '{"a":' * 5000 + "1" + "}" * 5000
            call = {"function": {"name": "f", "arguments": arguments}}
            render_chat(tokenizer, [{"role": "assistant", "tool_calls": [call]}])

    def test_parts_are_joined_or_passed_as_the_template_takes_them(self):
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        messages = [{"role": "user", "content": parts}]
        assert "[user]a\nb</s>" in render_chat(make_tokenizer(default=PLAIN), messages)
        assert render_chat(make_tokenizer(default=PARTS), messages) == "(a)(b)"
        assert render_chat(make_tokenizer(default=EITHER), messages) == "(a)(b)"

    def test_a_text_is_one_part_only_where_the_template_takes_nothing_else(self):
        assert render_chat(make_tokenizer(default=PARTS), [USER]) == "(Hi)"
        assert render_chat(make_tokenizer(default=EITHER), [USER]) == "Hi"

    def test_no_content_is_empty_or_none_as_the_template_asks(self):
        calls = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}
        asks = "{% if messages[0].content is none %}calls{% else %}{{ messages[0].content }}{% endif %}"
        for message in (calls, {key: value for key, value in calls.items() if key != "content"}):
            assert render_chat(make_tokenizer(default=asks), [message]) == "calls"
            assert render_chat(make_tokenizer(default="[{{ messages[0].content }}]"), [message]) == "[]"

    def test_arguments_of_calls_are_dicts_or_text_as_the_template_takes_them(self):
        as_dict = "{{ messages[0].tool_calls[0].function.arguments | tojson }}"
        as_text = "{{ '<' + messages[0].tool_calls[0].function.arguments + '>' }}"
        for arguments, text in (('{"a":  1}', '{"a":  1}'), ({"a": 1}, '{"a": 1}'), ("", "{}"), (None, "{}")):
            messages = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]
            wanted = json.dumps(json.loads(text))
            assert render_chat(make_tokenizer(default=as_dict), messages) == wanted
            assert render_chat(make_tokenizer(default=as_text), messages) == f"<{text}>"

    def test_other_keys_without_a_value_are_left_out(self):
        source = "{{ messages[0].name is defined }}{{ messages[0].x.y is none }}"
        message = {**USER, "name": None, "x": {"y": None}}
        assert render_chat(make_tokenizer(default=source), [message]) == "FalseTrue"

    @pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
    def test_reasoning_is_found_under_every_name(self, name):
        source = "{{ messages[0].reasoning_content }}{{ messages[0].thinking }}"
        message = {"role": "assistant", "content": "x", name: "Hm."}
        assert render_chat(make_tokenizer(default=source), [message]) == "Hm.Hm."

    def test_subclasses_of_plain_types_lose_their_methods(self):
        class Role(enum.StrEnum):
            USER = "user"

        message = {"role": Role.USER, "content": "x"}
        assert render_chat(make_tokenizer(default="{{ messages[0].role.name is defined }}"), [message]) == "False"


class TestTemplates:
    def test_a_model_without_a_template_says_how_to_give_one(self):
        with pytest.raises(InvalidInput, match="no chat template; give one with chat_template="):
            render_chat(make_tokenizer(), [USER])
        assert render_chat(make_tokenizer(), [USER], chat_template="{{ messages[0].content }}!") == "Hi!"

    def test_tool_use_is_the_template_for_tools(self):
        tokenizer = make_tokenizer(default="default", tool_use="{{ tools | length }}", rag="{{ documents | length }}")
        tools = [{"type": "function", "function": {"name": "f"}}]
        assert render_chat(tokenizer, [USER]) == "default"
        assert render_chat(tokenizer, [USER], tools=tools) == "1"
        assert render_chat(tokenizer, [USER], tools=[]) == "default"
        assert render_chat(tokenizer, [USER], tools=tools, chat_template="default") == "default"
        assert render_chat(tokenizer, [USER], documents=[{"text": "x"}], chat_template="rag") == "1"

    def test_without_a_default_one_must_be_named(self):
        tokenizer = make_tokenizer(rag="rag", tool_use="tools")
        with pytest.raises(InvalidInput, match="rag, tool_use"):
            render_chat(tokenizer, [USER])
        assert render_chat(tokenizer, [USER], chat_template="rag") == "rag"

    def test_a_file_holds_a_template(self, tokenizer, tmp_path):
        file = tmp_path / "mine.jinja"
        file.write_text("{{ messages[0].content }}?", encoding="utf-8")
        assert render_chat(tokenizer, [USER], chat_template=file) == "Hi?"
        assert render_chat(tokenizer, [USER], chat_template=str(file)) == "Hi?"

    @pytest.mark.parametrize("template", ["", "no-such-name", "/nowhere/x.jinja", "x" * 5000, "a\0b", 3, ["{{ x }}"]])
    def test_what_is_no_template_is_refused(self, tokenizer, template):
        with pytest.raises(InvalidInput, match="chat_template="):
            find_chat_template(tokenizer, template)

    def test_templates_of_a_folder_are_found(self, tmp_path):
        byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "chat_template.jinja").write_text("{{ 'main' }}")
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ 'tools' }}")
        tokenizer = load_tokenizer(tmp_path)
        assert render_chat(tokenizer, [USER]) == "main"
        assert render_chat(tokenizer, [USER], tools=[{"name": "f"}]) == "tools"

    def test_an_empty_rendering_has_no_ids(self, tokenizer):
        with pytest.raises(InvalidInput, match="writes nothing"):
            encode_chat(tokenizer, [USER], chat_template="{% if false %}x{% endif %}")


class TestVariables:
    def test_further_variables_reach_the_template(self, tokenizer):
        options = {"chat_template": "{{ think }}{{ bos_token }}", "chat_template_kwargs": {"think": [1, {"a": None}]}}
        assert render_chat(tokenizer, [USER], **options) == "[1, {'a': None}]<s>"
        options["chat_template_kwargs"] = {"think": 1, "bos_token": "mine"}
        assert render_chat(tokenizer, [USER], **options) == "1mine"

    @pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "continue_final_message"])
    def test_a_variable_with_an_argument_of_its_own_is_refused(self, tokenizer, name):
        with pytest.raises(InvalidInput, match=f"'{name}'"):
            render_chat(tokenizer, [USER], chat_template_kwargs={name: True})

    @pytest.mark.parametrize("kwargs", ["x", [1], {3: 4}, {"x": object()}, {"x": "\ud800"}])
    def test_variables_are_plain_data(self, tokenizer, kwargs):
        with pytest.raises(InvalidInput, match="chat_template_kwargs"):
            render_chat(tokenizer, [USER], chat_template_kwargs=kwargs)

    @pytest.mark.parametrize("tools", ["f", {"name": "f"}, [print], [{}], ["f"], [{"f": object()}], 3])
    def test_tools_are_a_list_of_dicts(self, tokenizer, tools):
        with pytest.raises(InvalidInput, match="tools"):
            render_chat(tokenizer, [USER], tools=tools)

    def test_what_the_template_does_not_use_is_said_once(self, tokenizer, caplog):
        module._warn_once.cache_clear()
        options = {"tools": [{"name": "f"}], "chat_template_kwargs": {"enable_thinking": True}}
        with caplog.at_level(logging.WARNING, logger="octavo"):
            for _ in range(3):
                render_chat(tokenizer, [USER], **options)
            render_chat(tokenizer, [USER], **options, chat_template="{{ tools }}{{ enable_thinking }}")
        assert [record.message for record in caplog.records] == [
            "the chat template does not use enable_thinking, tools: given and without effect"
        ]
