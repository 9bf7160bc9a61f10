import numpy as np
import pytest
import torch

from octavo.sampling.penalties import PenaltyInputs, TokenEntries, add_bias, apply_penalties


def entries(held: list[list[int]]) -> TokenEntries:
    pairs = [(row, token_id) for row, token_ids in enumerate(held) for token_id in token_ids]
    rows, token_ids = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return TokenEntries(rows.copy(), token_ids.copy())


def penalise(logits: torch.Tensor, seen, output, repetition=1.0, frequency=0.0, presence=0.0) -> torch.Tensor:
    full = [np.broadcast_to(np.float64(value), len(logits)).copy() for value in (repetition, frequency, presence)]
    logits = logits.clone()
    apply_penalties(logits, PenaltyInputs(*full, seen=entries(seen), output=entries(output)))
    return logits


def test_repetition_divides_positive_and_multiplies_other_logits_of_seen_tokens_once():
    logits = torch.tensor([[2.0, -2.0, 0.0, 4.0, -4.0]])
    got = penalise(logits, [[0, 1, 1, 2, 0, 0]], [[]], repetition=2.0)
    assert got.tolist() == [[1.0, -4.0, 0.0, 4.0, -4.0]]


def test_frequency_counts_and_presence_does_not():
    logits = torch.zeros(2, 4)
    output = [[3, 3, 3, 1], [0]]
    assert penalise(logits, [[], []], output, frequency=0.5).tolist() == [[0, -0.5, 0, -1.5], [-0.5, 0, 0, 0]]
    assert penalise(logits, [[], []], output, presence=0.5).tolist() == [[0, -0.5, 0, -0.5], [-0.5, 0, 0, 0]]
    assert penalise(logits, [[], []], output, frequency=-1.0).tolist() == [[0, 1, 0, 3], [1, 0, 0, 0]]


def test_repetition_comes_before_frequency_and_presence():
    got = penalise(torch.tensor([[4.0]]), [[0, 0]], [[0, 0]], repetition=2.0, frequency=1.0, presence=0.25)
    assert got.tolist() == [[4.0 / 2.0 - 2 * 1.0 - 0.25]]


@pytest.mark.parametrize("repetition", [1e-300, 1e300])
def test_extreme_penalties_leave_finite_logits(repetition):
    got = penalise(torch.tensor([[1.0, -1.0, 0.0]]), [[0, 1, 2]], [[]], repetition=repetition)
    assert got.isfinite().all()


def test_a_broken_row_stays_its_own():
    logits = torch.tensor([[torch.nan, 1.0], [2.0, 1.0]])
    assert penalise(logits, [[0], [0]], [[], []], repetition=2.0)[1].tolist() == [1.0, 1.0]


def test_bias_is_added_where_it_belongs_and_nowhere_else():
    logits = torch.ones(3, 4)
    add_bias(logits, entries([[1], [], [0, 3]]), np.array([5.0, -100.0, 0.5]))
    assert logits.tolist() == [[1, 6, 1, 1], [1, 1, 1, 1], [-99, 1, 1, 1.5]]
