"""sample() against the rule written out in plain Python, and against the distribution it stands for."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.ops.interface import SamplingBatch
from octavo.ops.reference import ReferencePlatform

P = ReferencePlatform()
ONE_BELOW = math.nextafter(1.0, 0.0)
quick = settings(max_examples=120, deadline=None)


def batch(rows):
    """rows: (temperature, top_k, top_p, min_p, uniform)."""
    temperature, top_k, top_p, min_p, uniform = zip(*rows, strict=True)
    reals = [torch.tensor(values, dtype=torch.float64) for values in (temperature, top_p, min_p, uniform)]
    all_greedy = not any(temperature)
    return SamplingBatch(reals[0], torch.tensor(top_k), reals[1], reals[2], reals[3], all_greedy)


def sample(logits, rows):
    logits = torch.as_tensor(logits, dtype=torch.float32)
    return P.sample(logits, batch(rows)).tolist()


def one(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, uniform=0.5):
    return sample([logits], [(temperature, top_k, top_p, min_p, uniform)])[0]


def kept_probabilities(logits, temperature, top_k, top_p, min_p):
    """id -> probability of what the filters leave, by the definitions."""
    top = max(logits)
    weights = [math.exp((x - top) / temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-weights[i], i))
    order = order[:top_k] if top_k else order
    if top_p < 1:
        total, running, cut = sum(weights[i] for i in order), 0.0, []
        for i in order:
            cut.append(i)
            running += weights[i]
            if running >= top_p * total:
                break
        order = cut
    kept = {i: weights[i] for i in order if weights[i] >= min_p * weights[order[0]]}
    return {i: w / sum(kept.values()) for i, w in sorted(kept.items()) if w > 0}


def by_definition(logits, temperature, top_k, top_p, min_p, uniform):
    running = 0.0
    kept = kept_probabilities(logits, temperature, top_k, top_p, min_p)
    for i, probability in kept.items():
        running += probability
        if running > uniform:
            return i
    return max(kept)


# Coarse logits make ties frequent, and odd thresholds keep sums off the borders where rounding decides.
coarse_logits = st.lists(st.integers(-6, 6).map(lambda n: n / 2), min_size=12, max_size=12)
parameters = st.tuples(
    st.sampled_from([0.0, 0.31, 1.0, 2.7]),
    st.sampled_from([0, 1, 2, 3, 7, 12, 500]),
    st.sampled_from([0.0, 0.1234567, 0.51234567, 0.912345678, 1.0]),
    st.sampled_from([0.0, 0.0234567, 0.3456789, 1.0]),
    st.floats(0, 1, exclude_max=True),
)


@quick
@given(st.lists(st.tuples(coarse_logits, parameters), min_size=1, max_size=6))
def test_every_row_follows_the_rule_whatever_its_neighbours_ask_for(rows):
    logits = [row for row, _ in rows]
    for token, (row, (temperature, top_k, top_p, min_p, uniform)) in zip(
        sample(logits, [p for _, p in rows]), rows, strict=True
    ):
        if temperature == 0:
            assert token == row.index(max(row))
        else:
            expected = by_definition(row, temperature, top_k, top_p, min_p, uniform)
            if token != expected:
                # The draw fell on a border between two tokens, where the two sums may round differently.
                edges = kept_probabilities(row, temperature, top_k, top_p, min_p)
                sums = [sum(list(edges.values())[: n + 1]) for n in range(len(edges))]
                assert token in edges
                assert min(abs(uniform - s) for s in sums) < 1e-12


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 9))
def test_a_row_draws_the_same_token_alone_and_in_any_batch(seed, num_rows):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, 5003, generator=generator) * 4
    draws = torch.rand(num_rows, 5, generator=generator, dtype=torch.float64).tolist()
    rows = [
        (2 * a if a > 0.2 else 0.0, [0, 3, 50, 700][int(4 * b)], [1.0, 0.9, 0.5][int(3 * c)], d if d < 0.5 else 0.0, e)
        for a, b, c, d, e in draws
    ]
    together = sample(logits, rows)
    assert together == [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(num_rows)]
    order = torch.randperm(num_rows, generator=generator).tolist()
    assert [together[i] for i in order] == sample(logits[order], [rows[i] for i in order])


@pytest.mark.parametrize("width", [1, 7, 100, 49152, 151936])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_greedy_takes_the_lowest_id_among_equals(width, num_rows):
    logits = torch.zeros(num_rows, width)
    expected = []
    for row in range(num_rows):
        first = (row * 7919 + width // 3) % width
        logits[row, first:] = 1.0
        expected.append(first)
    assert sample(logits, [(0.0, 0, 1.0, 0.0, 0.9)] * num_rows) == expected
    mixed = sample(torch.cat((logits, logits[:1])), [(0.0, 0, 1.0, 0.0, 0.9)] * num_rows + [(1.0, 1, 1.0, 0.0, 0.9)])
    assert mixed == [*expected, expected[0]]


@pytest.mark.parametrize("uniform", [0.0, 0.5, ONE_BELOW])
def test_top_p_zero_and_top_k_one_mean_the_top_token(uniform):
    logits = [0.0, 2.0, 1.0, 2.0]
    assert one(logits, top_p=0.0, uniform=uniform) == 1
    assert one(logits, top_k=1, uniform=uniform) == 1
    assert one(logits, temperature=5.0, top_k=3, top_p=0.0, uniform=uniform) == 1


@pytest.mark.parametrize("k", [1, 3, 6])
def test_top_k_with_ties_keeps_exactly_k_and_the_lowest_ids(k):
    logits = [0.0, 1.0, 1.0, 5.0, 1.0, 1.0, 1.0]
    drawn = {one(logits, temperature=100.0, top_k=k, uniform=u / 500) for u in range(500)}
    assert drawn == {1: {3}, 3: {1, 2, 3}, 6: {1, 2, 3, 4, 5, 6}}[k]


def test_top_p_is_taken_of_what_top_k_leaves():
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    # Of the whole, 0.45 needs two tokens; of the top two, whose shares are 4/7 and 3/7, only one.
    assert {one(logits, top_p=0.45, uniform=u / 50) for u in range(50)} == {0, 1}
    assert {one(logits, top_k=2, top_p=0.45, uniform=u / 50) for u in range(50)} == {0}


@pytest.mark.parametrize("options", [{}, {"top_k": 40}, {"top_p": 0.999999}, {"min_p": 1e-9}])
def test_the_extremes_of_the_draw_never_pick_a_token_of_probability_zero(options):
    torch.manual_seed(0)
    logits = torch.randn(1000)
    logits[:5] = logits[-300:] = -math.inf
    low, high = (one(logits.tolist(), uniform=u, **options) for u in (0.0, ONE_BELOW))
    assert 5 <= low < high < 700


def test_the_last_allowed_token_is_reached_only_from_below():
    assert one([-math.inf, 0.0, -math.inf], uniform=0.0) == 1
    assert one([-math.inf, 0.0, -math.inf], uniform=ONE_BELOW) == 1
    assert one([0.0, 0.0], uniform=ONE_BELOW) == 1


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-5])
def test_tiny_temperatures_are_greedy_and_finite(temperature):
    assert one([-1e30, 3e10, 2.99e10, -math.inf], temperature=temperature, uniform=0.999) == 1


def test_huge_temperatures_are_uniform_over_what_is_allowed():
    assert [one([9.0, -9.0, -math.inf, 1.0], temperature=1e300, uniform=u) for u in (0.1, 0.5, 0.9)] == [0, 1, 3]


@pytest.mark.parametrize("broken", [math.nan, -math.inf])
@pytest.mark.parametrize("options", [(0, 1.0, 0.0), (2, 1.0, 0.0), (0, 0.5, 0.0), (2, 0.5, 0.1)])
def test_a_row_without_a_distribution_gives_some_id_and_leaves_its_neighbours_alone(broken, options):
    logits = [[broken] * 4, [1.0, 2.0, 3.0, 0.0], [broken] * 4]
    tokens = sample(logits, [(1.0, *options, 0.4), (1.0, *options, 0.4), (0.0, *options, 0.4)])
    assert tokens[1] == sample(logits[1:2], [(1.0, *options, 0.4)])[0]
    assert all(0 <= token < 4 for token in tokens)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.6, 0, 1.0, 0.0),
        (1.7, 20, 1.0, 0.0),
        (1.3, 0, 0.8, 0.0),
        (1.5, 0, 1.0, 0.1),
        (1.2, 30, 0.9, 0.02),
    ],
)
def test_drawn_frequencies_match_the_distribution_by_chi_square(temperature, top_k, top_p, min_p):
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(60, generator=generator) * 1.5
    n = 20000
    uniform = torch.rand(n, generator=generator, dtype=torch.float64).tolist()
    drawn = sample(logits.expand(n, -1), [(temperature, top_k, top_p, min_p, u) for u in uniform])
    expected = kept_probabilities(logits.tolist(), temperature, top_k, top_p, min_p)
    counts = torch.bincount(torch.tensor(drawn), minlength=60)
    assert set(counts.nonzero().flatten().tolist()) <= set(expected)
    common = [i for i in expected if expected[i] * n >= 5]
    statistic = sum((counts[i].item() - expected[i] * n) ** 2 / (expected[i] * n) for i in common)
    freedom = len(common) - 1
    # Wilson and Hilferty's cube-root normal approximation of the 99.9% quantile.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit


def process(logits, rows):
    return P.process_logits(torch.as_tensor(logits, dtype=torch.float32), batch(rows))


@quick
@given(
    st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    st.integers(0, 4),
    st.sampled_from([0.0, 0.4, 0.9, 1.0]),
    st.sampled_from([0.0, 0.05, 1.0]),
)
def test_the_softmax_of_processed_logits_is_the_distribution_that_is_drawn_from(row, temperature, top_k, top_p, min_p):
    processed = process([row], [(temperature, top_k, top_p, min_p, 0.5)])[0]
    finite = processed.isfinite()
    assert finite[one(row, temperature, top_k, top_p, min_p)]
    expected = kept_probabilities(row, temperature or 1.0, top_k, top_p, min_p)
    kept = finite.nonzero().squeeze(1).tolist()
    if kept == list(expected):
        assert processed.softmax(-1)[kept].tolist() == pytest.approx(list(expected.values()), abs=1e-9)
    else:
        # A token at the border of a filter, where the sums of the two sides round differently.
        assert top_p < 1 or min_p > 0
        assert len(set(kept) ^ set(expected)) == 1
    torch.testing.assert_close(processed[kept], torch.tensor(row, dtype=torch.float64)[kept] / (temperature or 1.0))


def test_what_a_greedy_row_takes_is_kept_where_probabilities_round_to_equals():
    for top_k, top_p in ((0, 0.0), (1, 1.0), (1, 0.5)):
        row = (0.0, top_k, top_p, 0.0, 0.5)
        assert process([[-1.2e-38, 0.0]], [row])[0, 1] == 0.0
        assert one([-1.2e-38, 0.0], *row[:4]) == 1


def test_processed_logits_without_filters_are_whole_and_finite_at_any_temperature():
    logits = [[3e38, -3e38, 0.0, 1e-44]]
    for temperature in (5e-324, 1e-250, 1e-30, 1.0, 1e300):
        processed = process(logits, [(temperature, 0, 1.0, 0.0, 0.5)])
        assert processed.isfinite().all()
        assert processed.log_softmax(-1)[0, 0] > -10.0


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 9))
def test_processed_rows_are_bitwise_their_own(seed, num_rows):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, 1003, generator=generator) * 4
    draws = torch.rand(num_rows, 4, generator=generator, dtype=torch.float64).tolist()
    rows = [
        (2 * a if a > 0.2 else 0.0, [0, 3, 50, 700][int(4 * b)], [1.0, 0.9, 0.5][int(3 * c)], d if d < 0.5 else 0.0, 0)
        for a, b, c, d in draws
    ]
    before = logits.clone()
    together = process(logits, rows)
    assert torch.equal(logits, before)
    for i in range(num_rows):
        assert torch.equal(process(logits[i : i + 1], rows[i : i + 1])[0], together[i])
