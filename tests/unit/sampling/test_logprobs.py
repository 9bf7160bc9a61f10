import numpy as np
import pytest
import torch

from octavo.sampling.logprobs import gather_logprobs


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
