"""/tokenize, /detokenize, /apply-template: the model's own tokens, and every way to ask for them wrongly."""

import asyncio
import time

import httpx
import pytest
from tiny_models import BOS, EOS, byte_tokenizer

from octavo.tokenization.tokenizer import Tokenizer

HELLO = [{"role": "user", "content": "Hello there"}]
TEXT = "ďábelské 👋 日本"
IDS = Tokenizer(byte_tokenizer()).encode(TEXT)


def post(server, path: str, body: dict, status: int = 200) -> dict:
    response = server.post(path, body)
    assert response.status_code == status, response.text
    return response.json()


def test_a_text_becomes_the_tokens_of_the_model(server):
    assert post(server, "/tokenize", {"prompt": TEXT}) == {
        "count": len(IDS),
        "max_model_len": 512,
        "tokens": IDS,
        "token_strs": None,
    }


def test_tokens_have_their_names_when_asked_for(server):
    got = post(server, "/tokenize", {"prompt": " é</s>", "return_token_strs": True})
    assert got["token_strs"] == ["Ġ", "Ã", "©", "</s>"]
    assert got["tokens"][-1] == EOS


def test_special_tokens_can_be_left_out(server):
    with_them = post(server, "/tokenize", {"prompt": TEXT, "add_special_tokens": True})
    without = post(server, "/tokenize", {"prompt": TEXT, "add_special_tokens": False})
    assert with_them["tokens"] == without["tokens"] == IDS  # the tiny tokenizer adds none


def test_tokens_become_the_text_again(server):
    assert post(server, "/detokenize", {"tokens": IDS}) == {"prompt": TEXT}
    assert post(server, "/detokenize", {"tokens": [BOS, *IDS, EOS]}) == {"prompt": f"<s>{TEXT}</s>"}


def test_a_conversation_becomes_the_tokens_of_its_text(server):
    text = post(server, "/apply-template", {"messages": HELLO})["prompt"]
    assert text == "<s>[user]Hello there\n[assistant]"
    got = post(server, "/tokenize", {"messages": HELLO})
    assert got["tokens"].count(BOS) == 1
    assert post(server, "/detokenize", {"tokens": got["tokens"]})["prompt"] == text
    assert got["count"] == len(got["tokens"])


def test_options_of_the_template_reach_it(server):
    open_end = [*HELLO, {"role": "assistant", "content": "OK!\n"}]
    for body, wanted in (
        ({"add_generation_prompt": False}, "<s>[user]Hello there\n"),
        ({"messages": open_end, "continue_final_message": True}, "<s>[user]Hello there\n[assistant]OK!\n"),
        ({"chat_template": "default"}, "<s>[user]Hello there\n[assistant]"),
    ):
        body = {"messages": HELLO, **body}
        assert post(server, "/apply-template", body)["prompt"] == wanted
        ids = post(server, "/tokenize", body)["tokens"]
        assert post(server, "/detokenize", {"tokens": ids})["prompt"] == wanted


def test_variables_reach_the_template_and_unused_ones_are_named(server, start_server, tmp_path):
    template = tmp_path / "thinking.jinja"
    template.write_text("{{ messages[0].content }}{% if think %}?{% endif %}")
    own = start_server("--chat-template", str(template))
    body = {"messages": HELLO, "chat_template_kwargs": {"think": True}}
    assert post(own, "/apply-template", body) == {"prompt": "Hello there?"}
    for path in ("/tokenize", "/apply-template"):
        (warning,) = post(server, path, body)["warnings"]
        assert warning.startswith("chat_template_kwargs.think: ")


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": HELLO}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/tokenize", {"prompt": ["x"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{}]}, "messages"),
        ("/tokenize", {"messages": HELLO, "tools": [{"type": "function"}]}, "tools"),
        ("/tokenize", {"messages": HELLO, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"prompt": "x", "return_token_strs": "yes"}, "return_token_strs"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": []}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [259]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", {"tokens": [[1]]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/apply-template", {}, "messages"),
        ("/apply-template", {"messages": "x"}, "messages"),
        ("/apply-template", {"messages": HELLO, "chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ("/apply-template", {"messages": HELLO, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
def test_what_cannot_be_read_is_a_400_that_names_the_field(server, path, body, named):
    error = post(server, path, body, 400)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == named
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "x"}),
        ("/tokenize", {"messages": HELLO}),
        ("/detokenize", {"tokens": [1]}),
        ("/apply-template", {"messages": HELLO}),
    ],
)
def test_unknown_fields_are_named_and_unknown_models_are_404(server, path, body):
    (warning,) = post(server, path, {**body, "temperatur": 1})["warnings"]
    assert warning.startswith("temperatur ")
    assert "warnings" not in post(server, path, {**body, "model": "tiny", "tools": None})
    assert post(server, path, {**body, "model": "gpt-4o"}, 404)["error"]["code"] == "model_not_found"


@pytest.mark.slow
def test_the_server_answers_while_it_tokenises_megabytes(server):
    async def run() -> tuple[float, float]:
        """The slowest answer, and the time the megabytes take."""
        async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
            begun = time.monotonic()
            slow = asyncio.ensure_future(client.post("/tokenize", json={"prompt": "word " * 800_000}))
            await asyncio.sleep(0.1)
            worst = 0.0
            while not slow.done():
                start = time.monotonic()
                assert (await client.get("/health/live")).status_code == 200
                worst = max(worst, time.monotonic() - start)
                await asyncio.sleep(0.01)
            assert (await slow).status_code == 200
            return worst, time.monotonic() - begun

    worst, total = asyncio.run(run())
    assert worst < max(1.0, total / 3)
