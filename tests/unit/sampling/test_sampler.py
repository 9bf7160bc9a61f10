import numpy as np
import torch

from octavo.ops.registry import get_platform
from octavo.sampling.sampler import NO_LOGPROBS, Sampler, SamplingInputs


def inputs(rows: int, *, held_back=(), temperature=0.0, num_logprobs=NO_LOGPROBS, seed=0) -> SamplingInputs:
    return SamplingInputs(
        temperature=np.full(rows, temperature),
        top_k=np.zeros(rows, dtype=np.int64),
        top_p=np.ones(rows),
        min_p=np.zeros(rows),
        seed=np.full(rows, seed, dtype=np.uint64),
        sample_index=np.zeros(rows, dtype=np.uint64),
        position=np.arange(rows, dtype=np.uint64),
        num_logprobs=np.full(rows, num_logprobs, dtype=np.int64),
        held_back=list(held_back),
    )


def test_tokens_beyond_the_vocabulary_are_never_drawn():
    sampler = Sampler(get_platform("reference"), vocab_size=5)
    logits = torch.zeros(64, 8)
    logits[:, 5:] = 100.0
    token_ids, _ = sampler(logits.clone(), inputs(64, temperature=1.0))
    assert token_ids.max() < 5
    greedy, _ = sampler(logits.clone(), inputs(64))
    assert (greedy == 0).all()


def test_held_back_tokens_are_not_drawn_in_their_row_only():
    sampler = Sampler(get_platform("reference"), vocab_size=4)
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]] * 2)
    token_ids, _ = sampler(logits, inputs(2, held_back=[(1, np.array([1, 2]))]))
    assert token_ids.tolist() == [1, 3]


def test_logprobs_are_of_the_raw_logits_before_any_mask():
    sampler = Sampler(get_platform("reference"), vocab_size=3)
    logits = torch.tensor([[0.0, 3.0, 2.0, 9.0]])
    raw = logits.clone().log_softmax(-1)
    token_ids, logprobs = sampler(logits, inputs(1, held_back=[(0, np.array([1]))], num_logprobs=2))
    assert token_ids.tolist() == [2]
    assert logprobs[0].token_ids == [2, 3, 1]
    np.testing.assert_allclose(logprobs[0].logprobs, raw[0, [2, 3, 1]])
    assert logprobs[0].sampled_rank == 3


def test_rows_without_logprobs_get_none():
    sampler = Sampler(get_platform("reference"), vocab_size=4)
    batch = inputs(3)
    batch.num_logprobs[1] = 0
    _, logprobs = sampler(torch.randn(3, 4), batch)
    assert logprobs[0] is None
    assert logprobs[2] is None
    assert len(logprobs[1].token_ids) == 1
