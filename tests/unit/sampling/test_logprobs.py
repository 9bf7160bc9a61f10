import numpy as np
import pytest
import torch

from octavo.ops.reference import ReferencePlatform
from octavo.sampling.logprobs import gather_logprobs as gather


def gather_logprobs(*args):
    return gather(ReferencePlatform().log_softmax, *args)


def test_values_and_ranks_match_a_float64_log_softmax():
    torch.manual_seed(0)
    logits = torch.randn(5, 40)
    expected = torch.log_softmax(logits.double(), -1)
    sampled = torch.tensor([3, 0, 39, 7, 7])
    for row, entry in enumerate(gather_logprobs(logits, sampled, [0, 1, 5, -1, 40])):
        order = expected[row].argsort(descending=True).tolist()
        count = [0, 1, 5, 40, 40][row]
        assert entry.token_ids == [int(sampled[row]), *order[:count]]
        assert entry.sampled_rank == order.index(int(sampled[row])) + 1
        np.testing.assert_allclose(entry.logprobs, expected[row, entry.token_ids].numpy(), atol=1e-5)


def test_equal_logits_rank_in_token_id_order():
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    entry = gather_logprobs(logits, torch.tensor([2]), [2])[0]
    assert entry.token_ids == [2, 1, 2]
    assert entry.sampled_rank == 2


@pytest.mark.parametrize("count", [0, 3, -1])
def test_a_row_is_the_same_alone_and_in_a_batch(count):
    torch.manual_seed(1)
    logits = torch.randn(9, 1000)
    sampled = torch.randint(0, 1000, (9,))
    together = gather_logprobs(logits, sampled, [count] * 9)
    for row in range(9):
        assert gather_logprobs(logits[row : row + 1], sampled[row : row + 1], [count])[0] == together[row]


def test_values_may_be_the_logits_themselves_row_by_row():
    logits = torch.tensor([[1.0, 3.0, 2.0]] * 2)
    one, other = gather_logprobs(logits, torch.tensor([0, 0]), [1, 1], torch.tensor([False, True]))
    assert (one.token_ids, one.logprobs, one.sampled_rank) == ([0, 1], [1.0, 3.0], 3)
    np.testing.assert_allclose(other.logprobs, logits[1].log_softmax(-1)[[0, 1]])


def test_tokens_whose_log_probabilities_round_to_one_value_keep_the_order_of_their_logits():
    logits = torch.tensor([[1e-9, 2e-9, 0.0, 40.0]])
    assert logits.log_softmax(-1)[0, 0] == logits.log_softmax(-1)[0, 1]
    entry = gather_logprobs(logits, torch.tensor([1]), [-1])[0]
    assert entry.token_ids == [1, 3, 1, 0, 2]
    assert entry.sampled_rank == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [5, 259, 1003, 32000])
def test_rows_are_bitwise_their_own_at_every_width_and_batch(dtype, width):
    logits = torch.randn(37, width, generator=torch.Generator().manual_seed(width)).to(dtype) * 5
    token_ids = torch.arange(37) % width
    together = gather_logprobs(logits, token_ids, [2] * 37)
    for size in (1, 3, 8, 20):
        for first in range(0, 37, size):
            part = slice(first, first + size)
            assert gather_logprobs(logits[part], token_ids[part], [2] * len(logits[part])) == together[part]


@pytest.mark.parametrize("width", [1, 63, 64, 130, 1003, 5000])
def test_the_top_ones_are_those_of_a_full_sort_whatever_their_number(width):
    generator = torch.Generator().manual_seed(width)
    rows = torch.randn(4, width, generator=generator) * 3
    rows[1].round_()
    rows[2] = 1.0
    rows[3, torch.rand(width, generator=generator) < 0.9] = -torch.inf
    for count in {1, 2, 3, 15, 16, 77, 78, 79, max(width - 1, 1), width, width + 1}:
        entries = gather_logprobs(rows, torch.zeros(4, dtype=torch.int64), [count] * 4)
        for row, entry in zip(rows, entries, strict=True):
            assert entry.token_ids[1:] == row.sort(descending=True, stable=True).indices[:count].tolist()


def test_rows_of_nan_give_some_entry():
    logits = torch.full((1, 500), torch.nan)
    assert len(gather_logprobs(logits, torch.tensor([3]), [2])) == 1
    assert len(gather_logprobs(logits, torch.tensor([3]), [-1])[0].token_ids) == 501
