import numpy as np
import pytest
import torch

from octavo.ops.registry import get_platform
from octavo.protocol.sampling_params import SamplingParams
from octavo.sampling.logits_processors import LogitsProcessor, ProcessorChain
from octavo.sampling.penalties import TokenEntries
from octavo.sampling.sampler import NO_LOGPROBS, Sampler, SamplingInputs

INF = float("inf")


class Add(LogitsProcessor):
    """Adds extra_args["add"] to the logits, or raises if there is none."""

    def __init__(self, params, prompt_token_ids):
        self.add = params.extra_args

    def __call__(self, output_token_ids, logits):
        return logits + torch.tensor(self.add["add"])


def chain(**extra_args) -> ProcessorChain:
    path = f"{__name__}:Add"
    built = ProcessorChain(SamplingParams(extra_args=extra_args), [])
    built._processors.append((path, Add(SamplingParams(extra_args=extra_args), [])))
    return built


def entries(*pairs: tuple[int, int]) -> TokenEntries:
    rows, token_ids = np.array(pairs, dtype=np.int64).T
    return TokenEntries(rows.copy(), token_ids.copy())


def inputs(
    rows: int, *, temperature=0.0, top_k=0, num_logprobs=NO_LOGPROBS, mode="raw_logprobs", seed=0, **sparse
) -> SamplingInputs:
    modes = [mode] * rows if isinstance(mode, str) else mode
    return SamplingInputs(
        temperature=np.full(rows, temperature),
        top_k=np.full(rows, top_k, dtype=np.int64),
        top_p=np.ones(rows),
        min_p=np.zeros(rows),
        seed=np.full(rows, seed, dtype=np.uint64),
        sample_index=np.zeros(rows, dtype=np.uint64),
        position=np.arange(rows, dtype=np.uint64),
        num_logprobs=np.full(rows, num_logprobs, dtype=np.int64),
        normalized=np.array([m.endswith("logprobs") for m in modes]),
        processed=np.array([m.startswith("processed") for m in modes]),
        **sparse,
    )


def sampler(vocab_size: int) -> Sampler:
    return Sampler(get_platform("reference"), vocab_size)


def test_tokens_beyond_the_vocabulary_are_never_drawn():
    logits = torch.zeros(64, 8)
    logits[:, 5:] = 100.0
    assert sampler(5)(logits.clone(), inputs(64, temperature=1.0)).token_ids.max() < 5
    assert (sampler(5)(logits.clone(), inputs(64)).token_ids == 0).all()


def test_banned_tokens_are_not_drawn_in_their_row_only():
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]] * 2)
    assert sampler(4)(logits, inputs(2, banned=entries((1, 1), (1, 2)))).token_ids.tolist() == [1, 3]


def test_only_allowed_tokens_are_drawn():
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]] * 2)
    assert sampler(4)(logits, inputs(2, allowed=entries((0, 3), (0, 0)))).token_ids.tolist() == [3, 1]


def test_no_bias_and_no_processor_lifts_a_mask():
    for kind in ({"bias": (entries((0, 1)), np.array([100.0]))}, {"processors": [(0, chain(add=[0, INF, 0, 0]), [])]}):
        logits = torch.tensor([[0.0, 1.0, 2.0, 1.5]])
        assert sampler(4)(logits.clone(), inputs(1, **kind)).token_ids.tolist() == [1]
        assert sampler(4)(logits.clone(), inputs(1, banned=entries((0, 1)), **kind)).token_ids.tolist() == [2]
        assert sampler(4)(logits.clone(), inputs(1, allowed=entries((0, 3)), **kind)).token_ids.tolist() == [3]


def test_a_processor_sees_what_bias_and_penalties_left():
    bias = (entries((0, 2)), np.array([7.0]))
    got = sampler(3)(
        torch.zeros(1, 3),
        inputs(
            1, bias=bias, processors=[(0, chain(add=[0.0, 6.5, 0.0]), [])], num_logprobs=-1, mode="processed_logits"
        ),
    )
    assert dict(zip(got.logprobs[0].token_ids, got.logprobs[0].logprobs, strict=True)) == {0: 0.0, 1: 6.5, 2: 7.0}


def test_a_processor_that_raises_fails_its_row_and_leaves_the_others():
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    plain = sampler(5)(logits.clone(), inputs(3, temperature=1.0))
    got = sampler(5)(logits.clone(), inputs(3, temperature=1.0, processors=[(1, chain(), [])]))
    assert list(got.failed) == [1]
    assert f"{__name__}:Add failed" in got.failed[1]
    assert got.token_ids[[0, 2]].tolist() == plain.token_ids[[0, 2]].tolist()
    assert not plain.failed


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_in_which_no_token_is_left_fails_and_leaves_the_others(temperature):
    logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    plain = sampler(4)(logits.clone(), inputs(3, temperature=temperature))
    for kind in (
        {"allowed": entries((1, 2)), "banned": entries((1, 2))},
        {"banned": entries((1, 0), (1, 1), (1, 2), (1, 3))},
        {"processors": [(1, chain(add=-INF), [])]},
    ):
        got = sampler(4)(logits.clone(), inputs(3, temperature=temperature, num_logprobs=1, **kind))
        assert list(got.failed) == [1]
        assert "no token is left" in got.failed[1]
        assert got.token_ids[[0, 2]].tolist() == plain.token_ids[[0, 2]].tolist()


def test_rows_without_logprobs_get_none():
    batch = inputs(3)
    batch.num_logprobs[1] = 0
    logprobs = sampler(4)(torch.randn(3, 4), batch).logprobs
    assert logprobs[0] is None
    assert logprobs[2] is None
    assert len(logprobs[1].token_ids) == 1


def test_each_row_has_its_own_mode():
    logits = torch.tensor([0.0, 3.0, 2.0, 9.0, 1.0])
    changes = {
        "bias": (entries(*[(row, 0) for row in range(4)]), np.full(4, 1.5)),
        "banned": entries(*[(row, 1) for row in range(4)]),
    }
    modes = ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
    batch = inputs(4, temperature=0.5, top_k=2, num_logprobs=3, mode=modes, **changes)
    got = sampler(4)(logits.repeat(4, 1), batch).logprobs
    raw = logits.double()
    # Token 3 is the last of the vocabulary, 1 is banned, and of the rest two stay.
    processed = torch.tensor([-INF, -INF, 2.0, 9.0, -INF], dtype=torch.float64) / 0.5
    for entry, values in zip(got, (raw.log_softmax(-1), processed.log_softmax(-1), raw, processed), strict=True):
        np.testing.assert_allclose(entry.logprobs, values[entry.token_ids].numpy(), atol=1e-6)
    assert got[0].token_ids[1:] == got[2].token_ids[1:] == [3, 1, 2]
    assert got[1].token_ids[1:] == got[3].token_ids[1:] == [3, 2, 0]


def test_raw_ranks_look_past_the_masks_and_processed_ones_do_not():
    logits = torch.tensor([[0.0, 3.0, 2.0, 9.0]] * 2)
    batch = inputs(2, num_logprobs=2, mode=["raw_logprobs", "processed_logprobs"], banned=entries((0, 1), (1, 1)))
    got = sampler(3)(logits, batch)
    assert got.token_ids.tolist() == [2, 2]
    assert (got.logprobs[0].token_ids, got.logprobs[0].sampled_rank) == ([2, 3, 1], 3)
    assert (got.logprobs[1].token_ids, got.logprobs[1].sampled_rank) == ([2, 2, 0], 1)


def test_greedy_rows_show_the_filters_but_no_temperature():
    got = sampler(3)(torch.tensor([[1.0, 3.0, 2.0]]), inputs(1, top_k=2, num_logprobs=-1, mode="processed_logits"))
    assert got.logprobs[0].token_ids == [1, 1, 2, 0]
    assert got.logprobs[0].logprobs == [3.0, 3.0, 2.0, -INF]
