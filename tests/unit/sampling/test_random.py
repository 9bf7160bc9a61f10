import numpy as np
import pytest

from octavo.sampling.random import philox4x32, uniform


def words(*values: int) -> list[np.ndarray]:
    return [np.array([value], dtype=np.uint64) for value in values]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_known_answers(counter, key, expected):
    assert [int(word[0]) for word in philox4x32(words(*counter), words(*key))] == expected


def u64(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.uint64)


def test_draw_depends_on_its_own_key_only():
    seeds, index, positions = u64(1, 2, 3, 2**64 - 1), u64(0, 0, 1, 7), u64(5, 6, 7, 2**40)
    together = uniform(seeds, index, positions)
    alone = [uniform(seeds[i : i + 1], index[i : i + 1], positions[i : i + 1])[0] for i in range(4)]
    assert together.tolist() == alone


def test_draws_differ_by_seed_sample_and_position_and_lie_in_the_unit_interval():
    seed, index, position = np.meshgrid(*[np.arange(12, dtype=np.uint64)] * 3)
    draws = uniform(seed.ravel(), index.ravel(), position.ravel())
    assert len(np.unique(draws)) == 12**3
    assert draws.min() >= 0.0
    assert draws.max() < 1.0


def test_draws_are_uniform():
    draws = uniform(u64(*[42] * 20000), u64(*[0] * 20000), np.arange(20000, dtype=np.uint64))
    counts, _ = np.histogram(draws, bins=50, range=(0, 1))
    chi_square = ((counts - 400.0) ** 2 / 400.0).sum()
    assert chi_square < 86  # 49 degrees of freedom, p = 0.001
