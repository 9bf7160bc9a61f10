import numpy as np
import pytest

from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.scheduler_output import NewRequest, SchedulerOutput
from octavo.worker.input_batch import gather_inputs
from octavo.worker.request_rows import RequestRows
from octavo.worker.sampling_inputs import gather_sampling


def new(request_id, token_ids, block_ids, num_prompt=None, held_back=(), **params) -> NewRequest:
    return NewRequest(
        request_id=request_id,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids) if num_prompt is None else num_prompt,
        block_ids=block_ids,
        sampling_params=SamplingParams(**params),
        held_back_token_ids=list(held_back),
    )


def step(work: dict[str, tuple[int, int]], **kwargs) -> SchedulerOutput:
    """work: request id -> (tokens already computed, tokens scheduled)."""
    return SchedulerOutput(
        request_ids=list(work),
        num_computed_tokens=[computed for computed, _ in work.values()],
        num_scheduled_tokens=[count for _, count in work.values()],
        **kwargs,
    )


@pytest.fixture
def rows() -> RequestRows:
    return RequestRows(max_num_seqs=3, max_model_len=32, block_size=4)


def test_gather_follows_block_tables_and_positions(rows):
    a, b = new("a", list(range(100, 110)), [7, 2, 5]), new("b", [1, 2, 3], [4])
    work = step({"a": (4, 6), "b": (0, 3)}, new_requests=[a, b])
    rows.apply(work)
    batch = gather_inputs(rows, work)
    assert batch.input_ids.tolist() == [104, 105, 106, 107, 108, 109, 1, 2, 3]
    assert batch.positions.tolist() == [4, 5, 6, 7, 8, 9, 0, 1, 2]
    assert batch.attention.slot_mapping.tolist() == [8, 9, 10, 11, 20, 21, 16, 17, 18]
    assert batch.attention.query_start_loc.tolist() == [0, 6, 9]
    assert batch.attention.seq_lens.tolist() == [10, 3]
    assert batch.attention.block_tables[0].tolist() == [7, 2, 5]
    assert batch.logits_indices.tolist() == [5, 8]


def test_only_requests_whose_known_tokens_are_all_computed_sample(rows):
    work = step({"a": (0, 4), "b": (0, 3)}, new_requests=[new("a", list(range(10)), [0]), new("b", [1, 2, 3], [4])])
    rows.apply(work)
    batch = gather_inputs(rows, work)
    assert batch.sampling.tolist() == [1]
    assert batch.logits_indices.tolist() == [6]


def test_appended_tokens_and_blocks_are_read_in_the_next_step(rows):
    rows.apply(step({"a": (0, 4)}, new_requests=[new("a", [1, 2, 3, 4], [3])]))
    rows.append_tokens(rows.rows_of(["a"]), np.array([42]))
    work = step({"a": (4, 1)}, new_block_ids={"a": [9]})
    rows.apply(work)
    batch = gather_inputs(rows, work)
    assert batch.input_ids.tolist() == [42]
    assert batch.attention.slot_mapping.tolist() == [36]


def test_a_released_row_is_reused_and_an_id_can_come_back_in_the_same_step(rows):
    rows.apply(step({}, new_requests=[new(name, [1], [0]) for name in "abc"]))
    rows.apply(step({}, released_request_ids=["a", "unknown"], new_requests=[new("a", [5, 6], [8])]))
    assert len(rows) == 3
    assert rows.num_tokens[rows.rows_of(["a"])].tolist() == [2]


def pairs(entries) -> list[tuple[int, int]]:
    return [] if entries is None else list(zip(entries.rows.tolist(), entries.token_ids.tolist(), strict=True))


def test_ends_of_sequence_are_held_back_until_min_tokens(rows):
    rows.apply(step({}, new_requests=[new("a", [1, 2], [0], held_back=[9, 8], min_tokens=2), new("b", [1], [1])]))
    sampled = rows.rows_of(["b", "a"])
    for _ in range(2):
        assert pairs(gather_sampling(rows, sampled).banned) == [(1, 9), (1, 8)]
        rows.append_tokens(sampled, np.array([3, 3]))
    assert gather_sampling(rows, sampled).banned is None


def test_plain_requests_gather_nothing_special_even_in_the_row_of_one_that_did(rows):
    special = new(
        "a", [1, 2], [0], held_back=[9], min_tokens=5, logit_bias={1: 1.0}, allowed_token_ids=[1],
        repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=1.0, prompt_logprobs=1,
        logprobs=1, logprobs_mode="processed_logits",
    )  # fmt: skip
    special.bad_words_token_ids = [[5]]
    rows.apply(step({}, new_requests=[special]))
    gathered = gather_sampling(rows, rows.rows_of(["a"]))
    assert None not in (gathered.penalties, gathered.bias, gathered.allowed, gathered.banned)
    rows.apply(step({}, released_request_ids=["a"], new_requests=[new("b", [1, 2], [0])]))
    gathered = gather_sampling(rows, rows.rows_of(["b"]))
    assert (gathered.penalties, gathered.bias, gathered.allowed, gathered.banned) == (None,) * 4
    assert gathered.processors == []
    assert (gathered.num_logprobs < -1).all()
    assert gathered.normalized.all()
    assert not gathered.processed.any()


def test_bad_words_look_at_the_output_only(rows):
    request = new("a", [7, 8], [0], num_prompt=2)
    request.bad_words_token_ids = [[8, 5], [3, 4], [6]]
    rows.apply(step({}, new_requests=[request]))
    sampled = rows.rows_of(["a"])
    assert pairs(gather_sampling(rows, sampled).banned) == [(0, 6)]
    rows.append_tokens(sampled, np.array([3]))
    assert pairs(gather_sampling(rows, sampled).banned) == [(0, 4), (0, 6)]


def test_each_sample_draws_from_its_own_stream(rows):
    for index, name in enumerate("abc"):
        request = new(name, [1], [0])
        request.sample_index = index
        rows.apply(step({}, new_requests=[request]))
    assert gather_sampling(rows, rows.rows_of(["c", "a", "b"])).sample_index.tolist() == [2, 0, 1]


def test_a_resumed_request_draws_at_the_position_where_it_was_preempted(rows):
    rows.apply(step({}, new_requests=[new("a", [1, 2, 7, 7], [0], num_prompt=2, seed=11, temperature=0.5)]))
    gathered = gather_sampling(rows, rows.rows_of(["a"]))
    assert gathered.position.tolist() == [4]
    assert gathered.seed.tolist() == [11]


def test_negative_seeds_are_valid_keys(rows):
    rows.apply(step({}, new_requests=[new("a", [1], [0], seed=-5)]))
    assert gather_sampling(rows, rows.rows_of(["a"])).seed.tolist() == [2**64 - 5]
