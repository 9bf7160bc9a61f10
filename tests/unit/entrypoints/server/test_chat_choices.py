import math

import pytest
from tiny_models import byte_tokenizer

from octavo.entrypoints.server.chat_choices import ChatWriter, format_chat_logprobs
from octavo.entrypoints.server.errors import ApiError
from octavo.entrypoints.server.schema.chat import ChatCompletionRequest
from octavo.protocol.outputs import CompletionOutput, Logprob
from octavo.tokenization.token_bytes import TokenBytes
from octavo.tokenization.tokenizer import Tokenizer

TOKENIZER = Tokenizer(byte_tokenizer())


def position(*entries: tuple[int, float, int]) -> dict[int, Logprob]:
    """(token id, logprob, rank), the chosen one first."""
    return {token: Logprob(value, rank, TOKENIZER.decode_token(token)) for token, value, rank in entries}


def written(positions: list[dict[int, Logprob]], num_top: int, **options) -> list:
    return format_chat_logprobs(positions, num_top, TokenBytes(TOKENIZER), **options)["content"]


def test_bytes_of_tokens_join_to_the_text_also_inside_a_character():
    content = written([position((token, -1.0, 1)) for token in TOKENIZER.encode("日👋")], 0)
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "日👋"
    assert all(entry["token"] == "\N{REPLACEMENT CHARACTER}" for entry in content)


def test_the_top_is_in_order_and_has_the_chosen_token_only_if_it_belongs_there():
    a, b, c = TOKENIZER.encode("abc")
    unlikely = position((c, -5.0, 9), (a, -1.0, 1), (b, -2.0, 2))
    likely = position((b, -2.0, 2), (a, -1.0, 1))
    for found in (unlikely, likely):
        (entry,) = written([found], 2)
        assert [one["token"] for one in entry["top_logprobs"]] == ["a", "b"]
    assert written([unlikely], 2)[0]["token"] == "c"


def test_without_top_logprobs_the_list_is_empty():
    (entry,) = written([position((7, -1.0, 1))], 0)
    assert entry["top_logprobs"] == []


def test_all_of_the_vocabulary_is_shown_when_asked_for():
    (entry,) = written([position((5, -3.0, 2), (7, -1.0, 1))], -1)
    assert [one["logprob"] for one in entry["top_logprobs"]] == [-1.0, -3.0]


def test_numbers_are_finite():
    (entry,) = written([position((5, -math.inf, 2))], 1)
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -9999.0


def test_ids_are_shown_instead_of_texts_when_asked_for():
    (entry,) = written([position((5, -3.0, 1))], 1, as_ids=True)
    assert entry["token"] == entry["top_logprobs"][0]["token"] == "token_id:5"


def test_the_first_piece_has_the_role_and_only_the_last_a_finish_reason():
    writer = ChatWriter(ChatCompletionRequest(messages=[]), TOKENIZER)
    outputs = [("He", None), ("llo", None), ("", "stop")]
    pieces = [
        piece
        for text, reason in outputs
        for index in (0, 1)
        for piece in writer.pieces(CompletionOutput(index, text, [1], finish_reason=reason))
    ]
    for index in (0, 1):
        own = [piece for piece in pieces if piece["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in piece["delta"] for piece in own[1:])
        assert "".join(piece["delta"].get("content", "") for piece in own) == "Hello"
        assert [piece["finish_reason"] for piece in own] == [None, None, None, "stop"]
        assert own[-1]["delta"] == {}


def test_a_sample_that_could_not_go_on_is_an_error_with_its_reason():
    failed = CompletionOutput(0, "", [], finish_reason="abort", stop_reason="took too long")
    writer = ChatWriter(ChatCompletionRequest(messages=[]), TOKENIZER)
    with pytest.raises(ApiError, match="took too long") as caught:
        writer.choice(failed)
    assert caught.value.status == 400
