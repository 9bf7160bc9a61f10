"""What keeps blocks apart besides their token ids: salts and prompt embeddings."""

import struct

import pytest
from fake_requests import Request, compute, make

from octavo.kvcache.extra_keys import extra_keys_of
from octavo.protocol.messages import PromptEmbeds


def embeds(*rows: float, dtype: str = "float32", hidden: int = 2) -> PromptEmbeds:
    return PromptEmbeds(struct.pack(f"<{len(rows)}f", *rows), dtype, (len(rows) // hidden, hidden))


def request(name: str, prompt: PromptEmbeds, output=()) -> Request:
    return Request(name, [0] * prompt.shape[0] + list(output), prompt_embeds=prompt)


ROWS = [float(i) for i in range(18)]


def test_equal_embeddings_share_blocks_and_others_only_those_before_the_first_difference():
    manager = make(num_blocks=30)
    assert compute(manager, request("a", embeds(*ROWS))) == 0
    assert compute(manager, request("b", embeds(*ROWS))) == 8
    assert compute(manager, request("c", embeds(*ROWS[:12], 99.0, *ROWS[13:]))) == 4
    assert compute(manager, request("d", embeds(99.0, *ROWS[1:]))) == 0


def test_embeddings_never_share_blocks_with_the_placeholder_tokens():
    manager = make(num_blocks=30)
    compute(manager, Request("zeros", [0] * 9))
    assert compute(manager, request("embeds", embeds(*[0.0] * 18))) == 0
    assert compute(manager, Request("again", [0] * 9)) == 8


def test_the_same_bytes_read_otherwise_are_another_prompt():
    manager = make(num_blocks=40)
    data = embeds(*ROWS).data
    readings = [PromptEmbeds(data, "float32", (9, 2)), PromptEmbeds(data, "bfloat16", (9, 4)),
                PromptEmbeds(data, "float16", (9, 4))]  # fmt: skip
    assert [compute(manager, request(str(i), reading)) for i, reading in enumerate(readings)] == [0, 0, 0]


@pytest.mark.parametrize("num_rows", [5, 6, 7])
def test_a_block_of_embeddings_and_output_tokens_is_known_by_both(num_rows):
    manager, prompt = make(num_blocks=40), embeds(*ROWS[: 2 * num_rows])
    output = [7] * (9 - num_rows)
    compute(manager, request("a", prompt, output))
    assert compute(manager, request("same", prompt, output)) == 8
    assert compute(manager, request("other output", prompt, [8] * len(output))) == 4
    other = embeds(*ROWS[: 2 * num_rows - 1], 99.0)
    assert compute(manager, request("other embeddings", other, output)) == 4
    assert compute(manager, Request("tokens", [0] * num_rows + output)) == 0


def test_blocks_after_the_embeddings_are_kept_apart_by_the_chain_alone():
    prompt = embeds(*ROWS[:8])
    assert extra_keys_of(None, prompt, 4, 8) == ()
    manager = make(num_blocks=40)
    compute(manager, request("a", prompt, [5] * 5))
    assert compute(manager, request("b", embeds(*ROWS[1:9]), [5] * 5)) == 0


def test_salts_keep_equal_embeddings_apart():
    prompt = embeds(*ROWS)
    keys = {extra_keys_of(salt, prompt, 0, 4) for salt in (None, "a", "b")}
    assert len(keys) == 3
