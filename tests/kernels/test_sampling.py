"""Sampling and log-probabilities against the reference platform and against the distribution, in float64.

The kernels never sort a row; what a sort would decide (ties, borders of the filters) is what these tests look at.
"""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.ops.interface import SamplingBatch
from octavo.ops.reference import ReferencePlatform

_native = pytest.importorskip("octavo.ops.cpu._native", reason="the native kernels are not built")
from octavo.ops.cpu.sampling import log_softmax, process_logits, sample  # noqa: E402

REFERENCE = ReferencePlatform()
INF, NAN = math.inf, math.nan
ONE_BELOW = math.nextafter(1.0, 0.0)
quick = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=_native.supported_isas(), autouse=True)
def isa(request):
    before, threads = _native.isa(), _native.num_threads()
    _native.use_isa(request.param)
    yield request.param
    _native.use_isa(before)
    _native.set_num_threads(threads)


def batch_of(rows):
    """rows: (temperature, top_k, top_p, min_p, uniform)."""
    temperature, top_k, top_p, min_p, uniform = zip(*rows, strict=True)
    reals = [torch.tensor(values, dtype=torch.float64) for values in (temperature, top_p, min_p, uniform)]
    return SamplingBatch(reals[0], torch.tensor(top_k), reals[1], reals[2], reals[3], not any(temperature))


def part(batch, index):
    columns = (batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.uniform)
    return SamplingBatch(*(column[index] for column in columns), all_greedy=bool((batch.temperature[index] == 0).all()))


def random_rows(num_rows, seed):
    """Parameters of every kind, mixed."""
    generator = torch.Generator().manual_seed(seed)

    def pick(options):
        return options[int(torch.randint(len(options), (1,), generator=generator))]

    return [
        (
            pick([0.0, 0.31, 1.0, 1.0, 2.7]),
            pick([0, 0, 1, 2, 3, 40, 300, 5000, 10**9]),
            pick([1.0, 1.0, 0.0, 1e-9, 0.2345678, 0.912345678, 0.999999]),
            pick([0.0, 0.0, 0.0, 1e-9, 0.0234567, 0.345678, 1.0]),
            float(torch.rand((), generator=generator, dtype=torch.float64)),
        )
        for _ in range(num_rows)
    ]


def random_logits(num_rows, vocab_size, seed):
    """Rows of every kind: flat, peaked, full of ties, with banned tokens, with a far outlier."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator)
    for row, kind in zip(logits, torch.randint(6, (num_rows,), generator=generator).tolist(), strict=True):
        if kind == 1:
            row.mul_(6)
        elif kind == 2:
            row.mul_(2).round_()
        elif kind == 3:
            row[torch.rand(vocab_size, generator=generator) < 0.7] = -INF
            row[vocab_size // 2] = 0.5
        elif kind == 4:
            row[vocab_size // 3] = -1e30
        elif kind == 5:
            row.fill_(1.25)
    return logits


def kept_by_definition(logits, temperature, top_k, top_p, min_p):
    """What the filters leave of one row, by a sort in float64; and the least margin by which one of them decided."""
    exact = logits.double()
    weights = ((exact - exact.max()) / (temperature or 1.0)).exp()
    order = exact.sort(descending=True, stable=True).indices
    if 0 < top_k < len(order):
        order = order[:top_k]
    margin = 1.0
    if top_p < 1:
        sums = weights[order].cumsum(0)
        places = int(torch.searchsorted(sums, top_p * sums[-1]))
        margin = min(margin, float((sums / sums[-1] - top_p).abs().min()))
        order = order[: places + 1]
    if min_p > 0:
        margin = min(margin, float((weights[order] / min_p - 1).abs().min()))
        order = order[weights[order] >= min_p]
    kept = torch.zeros(len(logits), dtype=torch.bool)
    kept[order[weights[order] > 1e-300]] = True
    return kept, weights, margin


def assert_follows_the_rule(logits, row, token, processed):
    temperature, top_k, top_p, min_p, uniform = row
    kept, weights, margin = kept_by_definition(logits, temperature, top_k, top_p, min_p)
    found = processed > -INF
    # a token too improbable for float64 may show its logit or not
    kept |= found & (weights < 1e-300)
    if not torch.equal(found, kept):
        # a filter decided on a border, where the two sums round differently
        assert margin < 1e-12
        kept = found
    scaled = logits.double() / (temperature or 1.0)
    assert torch.equal(processed, torch.where(kept, scaled, torch.tensor(-INF, dtype=torch.float64)))
    assert kept[token]
    if temperature == 0:
        assert token == int(logits.argmax())
        return
    sums = torch.where(kept, weights, 0.0).cumsum(0) / weights[kept].sum()
    expected = int(torch.searchsorted(sums, torch.tensor(uniform, dtype=torch.float64), right=True))
    if token != expected:
        assert float((sums - uniform).abs().min()) < 1e-12


@quick
@given(st.integers(1, 9), st.sampled_from([1, 2, 7, 16, 17, 255, 300, 513, 1025, 2049]), st.integers(0, 2**32 - 1))
def test_every_row_follows_the_rule_whatever_its_neighbours_ask_for(num_rows, vocab_size, seed):
    logits, rows = random_logits(num_rows, vocab_size, seed), random_rows(num_rows, seed + 1)
    tokens, processed = sample(logits, batch_of(rows)), process_logits(logits, batch_of(rows))
    for index, row in enumerate(rows):
        assert_follows_the_rule(logits[index], row, int(tokens[index]), processed[index])


@pytest.mark.parametrize("vocab_size", [49152, 151936])
def test_rows_of_a_whole_vocabulary_follow_the_rule(vocab_size):
    num_rows = 24
    logits, rows = random_logits(num_rows, vocab_size, 3), random_rows(num_rows, 4)
    # the widest selections: of almost everything
    rows[:3] = [(1.0, vocab_size - 1, 1.0, 0.0, 0.7), (3.0, 0, 0.9512345, 0.0, 0.8), (3.0, 30000, 0.95123, 0.0, 0.9)]
    tokens, processed = sample(logits, batch_of(rows)), process_logits(logits, batch_of(rows))
    for index, row in enumerate(rows):
        assert_follows_the_rule(logits[index], row, int(tokens[index]), processed[index])


@quick
@given(st.integers(1, 6), st.sampled_from([1, 5, 300, 1027]), st.integers(0, 2**32 - 1))
def test_tokens_are_those_of_the_reference_platform(num_rows, vocab_size, seed):
    logits, rows = random_logits(num_rows, vocab_size, seed), random_rows(num_rows, seed + 1)
    batch = batch_of(rows)
    tokens, expected = sample(logits, batch), REFERENCE.sample(logits, batch)
    for index in (tokens != expected).nonzero().flatten().tolist():
        kept, weights, margin = kept_by_definition(logits[index], *rows[index][:4])
        sums = torch.where(kept, weights, 0.0).cumsum(0) / weights[kept].sum()
        assert min(margin, float((sums - rows[index][4]).abs().min())) < 1e-12


@pytest.mark.parametrize(
    "parameters",
    [(1.0, 0, 1.0, 0.0), (0.6, 0, 1.0, 0.0), (1.7, 20, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (1.5, 0, 1.0, 0.1),
     (1.2, 120, 0.9, 0.02)],
)  # fmt: skip
def test_the_draws_that_give_a_token_fill_its_probability(parameters):
    logits = torch.randn(300, generator=torch.Generator().manual_seed(7)) * 1.5
    n = 8000
    grid = ((torch.arange(n, dtype=torch.float64) + 0.5) / n).tolist()
    batch = batch_of([(*parameters, u) for u in grid])
    tokens = sample(logits.expand(n, -1), batch)
    assert bool((tokens.diff() >= 0).all())
    kept, weights, _ = kept_by_definition(logits, *parameters)
    probabilities = torch.where(kept, weights, 0.0) / weights[kept].sum()
    lengths = torch.bincount(tokens, minlength=300) / n
    # a grid finds the length of an interval up to its own step
    assert float((lengths - probabilities).abs().max()) <= 1.0001 / n


@pytest.mark.parametrize("vocab_size", [300, 49152])
def test_a_row_has_the_same_bits_alone_in_any_batch_and_anywhere_in_memory(vocab_size):
    num_rows = 40 if vocab_size == 300 else 12
    logits, rows = random_logits(num_rows, vocab_size, 11), random_rows(num_rows, 12)
    logits[::5, vocab_size // 7] = NAN
    batch = batch_of(rows)
    results = []
    for threads in (1, 2, 3):
        _native.set_num_threads(threads)
        results.append([f(logits, batch) for f in (sample, process_logits)] + [log_softmax(logits)])
    for other in results[1:]:
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(results[0], other, strict=True))
    tokens, processed, logprobs = results[0]
    for index in range(num_rows):
        one = slice(index, index + 1)
        # beside it lies what would be drawn at once
        sea = torch.full((vocab_size + 64,), INF)
        row = sea[index % 7 : index % 7 + vocab_size].copy_(logits[index])[None]
        assert sample(row, part(batch, one)) == tokens[index]
        assert torch.equal(process_logits(row, part(batch, one))[0].nan_to_num(), processed[index].nan_to_num())
        assert torch.equal(log_softmax(row)[0].nan_to_num(), logprobs[index].nan_to_num())
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(1))
    assert torch.equal(sample(logits[order], part(batch, order)), tokens[order])


def test_rows_may_lie_apart_and_what_is_between_them_is_not_read():
    sea = torch.full((9, 1100), INF)
    logits = sea[:, 20:1023].copy_(random_logits(9, 1003, 5))
    batch = batch_of(random_rows(9, 6))
    assert torch.equal(sample(logits, batch), sample(logits.contiguous(), batch))
    assert torch.equal(process_logits(logits, batch), process_logits(logits.contiguous(), batch))
    assert torch.equal(log_softmax(logits), log_softmax(logits.contiguous()))
    columns = logits.t().contiguous().t()
    assert torch.equal(sample(columns, batch), sample(logits, batch))
    assert bool(sea[:, :20].eq(INF).all() & sea[:, 1023:].eq(INF).all())


@pytest.mark.parametrize("vocab_size", [1, 3, 16, 63, 300, 1027])
def test_every_output_is_written_and_nothing_beside_it(vocab_size):
    num_rows = 5
    logits = random_logits(num_rows, vocab_size, 8)
    batch = batch_of(random_rows(num_rows, 9))
    columns = [c.data_ptr() for c in (batch.temperature, batch.top_k, batch.top_p, batch.min_p)]
    size = num_rows * vocab_size
    where = (logits.data_ptr(), vocab_size, num_rows, vocab_size)
    ids = torch.full((num_rows + 2,), -7)
    _native.sample(*where, *columns, batch.uniform.data_ptr(), ids[1:].data_ptr())
    assert torch.equal(ids[1:-1], sample(logits, batch))
    wide = torch.full((size + 2,), NAN, dtype=torch.float64)
    _native.process_logits(*where, *columns, wide[1:].data_ptr())
    assert torch.equal(wide[1:-1].view(num_rows, -1), process_logits(logits, batch))
    assert not wide[1:-1].isnan().any()
    for dtype in (torch.float32, torch.float64):
        values = logits.to(dtype)
        out = torch.full((size + 2,), NAN, dtype=dtype)
        _native.log_softmax(values.data_ptr(), *where[1:], out[1:].data_ptr(), dtype == torch.float64)
        assert not out[1:-1].isnan().any()
        assert out[0].isnan()
        assert out[-1].isnan()
    assert ids[0] == ids[-1] == -7
    assert wide[0].isnan()
    assert wide[-1].isnan()


def drawn(logits, *parameters, draws=400):
    """The ids that a fine grid of draws reaches, for one row."""
    logits = torch.as_tensor(logits, dtype=torch.float32)
    batch = batch_of([(*parameters, (u + 0.5) / draws) for u in range(draws)])
    return set(sample(logits.expand(draws, -1), batch).tolist())


@pytest.mark.parametrize("vocab_size", [40, 5000])
def test_equals_at_a_border_stay_in_the_order_of_their_ids(vocab_size):
    logits = torch.zeros(vocab_size)
    top = vocab_size // 2 + 3
    logits[top] = 1e-3
    for k in (1, 2, 9, 33):
        expected = sorted([top, *[i for i in range(vocab_size) if i != top][: k - 1]])
        assert sorted(drawn(logits, 100.0, k, 1.0, 0.0)) == expected
        kept = process_logits(logits[None], batch_of([(1.0, k, 1.0, 0.0, 0.0)]))[0].isfinite()
        assert kept.nonzero().flatten().tolist() == expected
    assert drawn(logits.fill_(3.0), 1.0, 0, 10.5 / vocab_size, 0.0) == set(range(11))
    assert drawn(logits, 1.0, 33, 0.5, 0.0) == set(range(17))
    assert drawn(logits, 1.0, 0, 0.0, 0.0) == {0}
    assert len(drawn(logits, 1.0, 0, 1.0, 1.0, draws=vocab_size)) == vocab_size


@pytest.mark.parametrize("k", [1, 2, 31, 32, 33, 700, 1999])
def test_top_k_finds_its_border_in_any_spread_of_values(k):
    generator = torch.Generator().manual_seed(k)
    size = 2000
    signs = torch.randint(2, (size,), generator=generator) * 2 - 1
    spreads = {
        "powers of two over the whole range": signs * 2.0 ** (torch.rand(size, generator=generator) * 252 - 126),
        "subnormal": torch.randint(-(2**20), 2**20, (size,), generator=generator) * 1e-45,
        "two heaps": torch.randn(size, generator=generator) * 1e-3 + signs * 1e30,
        "the lowest float for most": torch.where(signs > 0, torch.randn(size, generator=generator), torch.finfo().min),
        "infinity for most": torch.where(torch.arange(size) % 3 > 0, -INF, torch.randn(size, generator=generator)),
        "few values": torch.randint(4, (size,), generator=generator).float(),
    }
    for logits in spreads.values():
        values = logits.float()
        order = values.sort(descending=True, stable=True).indices[:k]
        expected = order[values[order] > -INF].sort().values
        # so hot that nothing kept has the weight 0
        kept = process_logits(values[None], batch_of([(1e38, k, 1.0, 0.0, 0.0)]))[0] > -INF
        assert torch.equal(kept.nonzero().flatten(), expected)


def test_equals_stay_when_min_p_is_what_cuts_and_not_top_p():
    logits = torch.cat([torch.tensor([0.0]), torch.full((300,), -1.0), torch.full((500,), -9.0)])
    processed = process_logits(logits[None], batch_of([(1.0, 0, 0.9999, 0.01, 0.0)]))[0]
    assert processed.isfinite().nonzero().flatten().tolist() == list(range(301))


@pytest.mark.parametrize("options", [(0, 1.0, 0.0), (40, 1.0, 0.0), (0, 0.999999, 0.0), (0, 1.0, 1e-9)])
def test_the_extremes_of_the_draw_never_pick_a_token_of_probability_zero(options):
    for size in (1000, 20000):
        logits = torch.randn(size, generator=torch.Generator().manual_seed(0))
        logits[:5] = logits[-300:] = -INF
        low, high = sample(logits.expand(2, -1), batch_of([(1.0, *options, u) for u in (0.0, ONE_BELOW)])).tolist()
        assert 5 <= low < high < size - 300


@pytest.mark.parametrize("size", [2, 33, 5000])
def test_the_last_allowed_token_is_reached_only_from_below(size):
    logits = torch.full((size,), -INF)
    logits[size // 2] = 0.0
    for options in ((0, 1.0, 0.0), (1, 1.0, 0.0), (5, 0.5, 0.5)):
        rows = [(1.0, *options, u) for u in (0.0, 0.5, ONE_BELOW)]
        assert sample(logits.expand(3, -1), batch_of(rows)).tolist() == [size // 2] * 3
    assert sample(torch.zeros(1, size), batch_of([(1.0, 0, 1.0, 0.0, ONE_BELOW)])).tolist() == [size - 1]


@pytest.mark.parametrize("options", [(0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.9, 0.0), (3, 0.9, 0.1)])
@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-30, 1e-5])
def test_tiny_temperatures_are_greedy_and_finite(temperature, options):
    for row in ([-1e30, 3e10, 2.99e10, -INF], [0.0, 2e-44, 1e-44, -1e-44], [3e38, 3.1e38, -3e38, 0.0]):
        if temperature < 1e-30 or max(row) > 1:
            batch = batch_of([(temperature, *options, 0.999)])
            logits = torch.tensor([row])
            assert sample(logits, batch).tolist() == [row.index(max(row))]
            processed = process_logits(logits, batch)[0]
            assert processed[row.index(max(row))].isfinite()
            assert not processed.eq(INF).any()
            assert not processed.isnan().any()


def test_huge_temperatures_are_uniform_over_what_is_allowed():
    logits = torch.tensor([[9.0, -9.0, -INF, 1.0]])
    for temperature in (1e30, 1e300):
        rows = [(temperature, 0, 1.0, 0.0, u) for u in (0.1, 0.5, 0.9)]
        assert sample(logits.expand(3, -1), batch_of(rows)).tolist() == [0, 1, 3]
        assert drawn(logits[0], temperature, 2, 1.0, 0.0) == {0, 3}
        assert drawn(logits[0], temperature, 0, 0.5, 0.0) == {0, 3}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("options", [(0, 1.0, 0.0), (2, 1.0, 0.0), (0, 0.5, 0.0), (0, 1.0, 0.5), (2, 0.5, 0.1)])
@pytest.mark.parametrize("size", [1, 5, 40, 1027])
def test_a_row_without_a_distribution_shows_what_is_wrong_with_it_and_leaves_its_neighbours_alone(
    size, options, temperature
):
    good = random_logits(1, size, 2)[0]
    for broken in (NAN, -NAN, INF):
        for position in {0, size // 2, size - 1}:
            bad = good.clone()
            bad[position] = broken
            bad[position + 1 :: 3] = NAN if broken != INF else 1.0
            logits = torch.stack([good, bad, good, torch.full((size,), -INF)])
            batch = batch_of([(temperature, *options, 0.4)] * 4)
            tokens = sample(logits, batch).tolist()
            assert tokens[0] == tokens[2] == sample(good[None], part(batch, slice(0, 1))).item()
            assert tokens[1] == position
            assert tokens[3] == 0
            processed = process_logits(logits, batch)
            assert torch.equal(processed[0], processed[2])
            assert processed.shape == (4, size)


@pytest.mark.parametrize("size", [1, 7, 100, 1027, 49152, 151936])
def test_greedy_takes_the_lowest_id_among_equals(size):
    logits = torch.zeros(5, size)
    expected = []
    for row in range(5):
        first = (row * 7919 + size // 3) % size
        logits[row, first :: max(1, size // 5)] = 1.0
        expected.append(first)
    greedy = [(0.0, 2, 0.5, 0.0, 0.9)] * 5
    assert sample(logits, batch_of(greedy)).tolist() == expected
    assert sample(logits, batch_of([*greedy[:4], (1.0, 1, 1.0, 0.0, 0.9)])).tolist() == expected
    negative = -torch.rand(5, size, generator=torch.Generator().manual_seed(0)) - 1e-3
    assert torch.equal(sample(negative, batch_of(greedy)), negative.argmax(-1))


@pytest.mark.parametrize("size", [1, 2, 7, 300, 49152])
def test_log_softmax_is_that_of_float64_rounded_once(size):
    logits = random_logits(8, size, size) * 3
    exact = logits.double().log_softmax(-1)
    got = log_softmax(logits)
    assert got.dtype == torch.float32
    wrong = got != exact.float()
    assert int(wrong.sum()) <= 2  # where float64 itself rounded across a border
    torch.testing.assert_close(got, exact.float(), rtol=2e-7, atol=0)
    wide = log_softmax(logits.double())
    assert wide.dtype == torch.float64
    torch.testing.assert_close(wide, exact, rtol=1e-13, atol=1e-13)  # torch's own sum is no better


def test_log_softmax_of_rows_that_are_no_distribution_is_nan_and_of_extremes_is_exact():
    for dtype in (torch.float32, torch.float64):
        rows = torch.tensor([[NAN, 0, 1], [INF, 0, 1], [-INF, -INF, -INF], [3e38, -3e38, 3e38], [-INF, 5, 5]]).to(dtype)
        got = log_softmax(rows)
        assert got[:3].isnan().all()
        half = math.log(0.5)
        torch.testing.assert_close(got[3, ::2], torch.tensor([half, half], dtype=dtype))
        assert got[3, 1] < -5e38 or got[3, 1] == -INF
        torch.testing.assert_close(got[4], torch.tensor([-INF, half, half], dtype=dtype))
    assert log_softmax(torch.zeros(0, 5)).shape == (0, 5)


def test_the_softmax_of_processed_logits_is_what_is_drawn_from():
    logits, rows = random_logits(6, 40, 21), [(0.7, 9, 0.8, 0.01, 0.0)] * 6
    processed = process_logits(logits, batch_of(rows))
    for row in range(6):
        reached = drawn(logits[row], *rows[row][:4], draws=4000)
        probabilities = processed[row].softmax(-1)
        assert reached == set((probabilities > 1 / 4000).nonzero().flatten().tolist()) | reached
        assert reached <= set(processed[row].isfinite().nonzero().flatten().tolist())


def test_threads_of_python_may_sample_at_once():
    _native.set_num_threads(2)
    work = []
    for seed, size in enumerate((300, 49152, 1027, 60000)):  # the larger ones let go of the interpreter lock
        logits, batch = random_logits(30, size, seed), batch_of(random_rows(30, seed + 50))
        work.append((logits, batch, sample(logits, batch)))
    with ThreadPoolExecutor(4) as pool:
        for (_, _, expected), got in zip(work * 4, pool.map(lambda w: sample(*w[:2]), work * 4), strict=True):
            assert torch.equal(got, expected)


def test_what_the_kernels_cannot_read_is_refused():
    logits, batch = torch.zeros(3, 8), batch_of(random_rows(3, 0))
    with pytest.raises(TypeError, match="float32"):
        sample(logits.double(), batch)
    with pytest.raises(TypeError, match="float32"):
        log_softmax(logits.half())
    with pytest.raises(ValueError, match="expected"):
        sample(logits[:2], batch_of([(1.0, 0, 1.0, 0.0, 0.5)] * 3))
    with pytest.raises(ValueError, match="expected"):
        process_logits(torch.zeros(4, 8), batch_of([(1.0, 0, 1.0, 0.0, 0.5)] * 3))
    with pytest.raises(ValueError, match="empty"):
        sample(torch.zeros(3, 0), batch)
    assert sample(logits[:0], part(batch, slice(0, 0))).shape == (0,)
