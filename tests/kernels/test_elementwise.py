"""Norms and gated activations against float64, at odd sizes, in poisoned memory, on every instruction set."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

_native = pytest.importorskip("octavo.ops.cpu._native", reason="the native kernels are not built")
from octavo.ops.cpu import elementwise  # noqa: E402

EPS = 1e-5
NAN = float("nan")
quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
widths = st.one_of(st.integers(1, 70), st.sampled_from([127, 128, 129, 576, 577, 1000, 1537]))
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(params=_native.supported_isas(), autouse=True)
def isa(request):
    before, threads = _native.isa(), _native.num_threads()
    _native.use_isa(request.param)
    yield request.param
    _native.use_isa(before)
    _native.set_num_threads(threads)


def rms_norm(x, weight):
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def gelu(x):
    return x * torch.special.erfc(-x * 0.5**0.5) / 2  # torch's own cancels in the lower tail


def gelu_tanh(x):
    return x * torch.sigmoid((x + 0.044715 * x**3) * (8 / torch.pi) ** 0.5)


# name -> (its result for inputs [x, residual, weight, bias], the same in float64, inputs it needs)
OPERATORS = {
    "rms_norm": (
        lambda x, _, w, __: elementwise.rms_norm(x, w, EPS),
        lambda x, _, w, __: rms_norm(x, w),
    ),
    "fused_add_rms_norm": (
        lambda x, r, w, _: torch.cat(elementwise.fused_add_rms_norm(x, r, w, EPS)),
        lambda x, r, w, _: torch.cat([rms_norm((x + r).float().double(), w), x + r]),
    ),
    "layer_norm": (
        lambda x, _, w, b: elementwise.layer_norm(x, w, b, EPS),
        lambda x, _, w, b: F.layer_norm(x, w.shape, w, b, EPS),
    ),
    "layer_norm_without_bias": (
        lambda x, _, w, __: elementwise.layer_norm(x, w, None, EPS),
        lambda x, _, w, __: F.layer_norm(x, w.shape, w, None, EPS),
    ),
    "silu_and_mul": (
        lambda x, r, _, __: elementwise.silu_and_mul(torch.cat([x, r], dim=-1)),
        lambda x, r, _, __: F.silu(x) * r,
    ),
    "gelu_and_mul": (
        lambda x, r, _, __: elementwise.gelu_and_mul(torch.cat([x, r], dim=-1), "none"),
        lambda x, r, _, __: gelu(x) * r,
    ),
    "gelu_tanh_and_mul": (
        lambda x, r, _, __: elementwise.gelu_and_mul(torch.cat([x, r], dim=-1), "tanh"),
        lambda x, r, _, __: gelu_tanh(x) * r,
    ),
}
operators = pytest.mark.parametrize("name", OPERATORS)


def inputs(rows, width, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(rows, width, generator=generator) * scale for _ in range(2)]
    return [*tensors, torch.randn(width, generator=generator), torch.randn(width, generator=generator)]


def poisoned(rows, width, gap, offset):
    """A tensor of rows that lie `gap` apart from each other in a sea of NaN, at an odd address."""
    sea = torch.full((rows * (width + gap) + offset + 64,), NAN)
    return sea, sea[offset:].as_strided((rows, width), (width + gap, 1))


@operators
@quick
@given(st.integers(1, 5), widths, seeds, st.sampled_from([1e-3, 1.0, 20.0]), st.integers(0, 19))
def test_results_match_float64_and_rows_may_lie_apart_in_poisoned_memory(name, rows, width, seed, scale, gap):
    run, exact = OPERATORS[name]
    values = inputs(rows, width, seed, scale)
    apart = []
    for tensor in values[:2]:
        _, view = poisoned(rows, width, gap, gap % 5)
        apart.append(view.copy_(tensor))
    got = run(*apart, *values[2:])
    expected = exact(*(value.double() for value in values))
    if "layer" in name:  # x - mean cancels
        deviation = values[0].double().var(-1, correction=0).add(EPS).sqrt().min().item()
        tolerance = {"rtol": 3e-6, "atol": 1e-6 * max(scale / deviation, 1.0)}
    else:  # the lower tail of an activation has the precision of e^(-x^2 / 2)
        tolerance = {"rtol": 2e-5 if "gelu" in name else 3e-6, "atol": 1e-33}
    torch.testing.assert_close(got.double(), expected, **tolerance)


@operators
@quick
@given(st.integers(1, 40), widths, seeds)
def test_a_row_has_the_same_bits_alone_and_among_others(name, rows, width, seed):
    run, _ = OPERATORS[name]
    values = inputs(rows, width, seed)
    together = run(*values)
    parts = len(together) // rows  # the fused norm gives two results
    row = seed % rows
    alone = run(values[0][row : row + 1], values[1][row : row + 1], *values[2:])
    assert torch.equal(alone, together.view(parts, rows, width)[:, row])


@operators
@pytest.mark.parametrize(("rows", "width"), [(700, 100), (61, 1003), (3, 20011)])
def test_results_are_bitwise_the_same_at_any_number_of_threads(name, rows, width):
    run, _ = OPERATORS[name]
    values = inputs(rows, width, 5)
    results = []
    for threads in (1, 2, 3):
        _native.set_num_threads(threads)
        results.append(run(*values))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def native_calls(x, other, weight, bias, gates):
    """The kernels with outputs of our own: name -> function of (address of out, address of a second one)."""
    rows, width = x.shape
    at = [tensor.data_ptr() for tensor in (x, other, weight, bias)]
    step = x.stride(0)
    return {
        "rms_norm": lambda out, _: _native.rms_norm(at[0], step, at[2], EPS, out, rows, width),
        "add_rms_norm": lambda out, total: _native.add_rms_norm(
            at[0], step, at[1], other.stride(0), at[2], EPS, out, total, rows, width
        ),
        "layer_norm": lambda out, _: _native.layer_norm(at[0], step, at[2], at[3], EPS, out, rows, width),
        "silu": lambda out, _: _native.silu_and_mul(gates.data_ptr(), gates.stride(0), out, rows, width),
        "gelu": lambda out, _: _native.gelu_and_mul(gates.data_ptr(), gates.stride(0), out, rows, width, False),
        "gelu_tanh": lambda out, _: _native.gelu_and_mul(gates.data_ptr(), gates.stride(0), out, rows, width, True),
    }


@pytest.mark.parametrize("width", [1, 3, 4, 15, 16, 17, 31, 63, 64, 65, 577])
@pytest.mark.parametrize("rows", [1, 4, 300])
def test_every_output_is_written_and_nothing_beside_it(rows, width):
    values = inputs(rows, width, 3)
    for call in native_calls(*values, torch.cat(values[:2], dim=-1)).values():
        results = []
        for offset in (3, 8):
            out_sea, out = poisoned(rows, width, 0, offset)
            sum_sea, total = poisoned(rows, width, 0, offset)
            call(out.data_ptr(), total.data_ptr())
            assert not out.isnan().any()
            results.append(out.clone())
            out.fill_(NAN)
            total.fill_(NAN)
            assert out_sea.isnan().all()
            assert sum_sea.isnan().all()
        assert torch.equal(*results)


def test_the_sum_is_exactly_the_addition():
    x, residual, weight, _ = inputs(9, 577, 1, 1e3)
    assert torch.equal(elementwise.fused_add_rms_norm(x, residual, weight, EPS)[1], x + residual)


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"])
def test_activations_hold_over_the_whole_range_of_float32(name):
    run, exact = OPERATORS[name]
    x = torch.cat([torch.linspace(-12, 12, 20001), torch.tensor([0.0, -0.0, 1e-40, 80.0, -80.0, 1e4, -1e4, 3e38])])
    got, expected = (
        f(x.to(t)[None], torch.ones(1, len(x), dtype=t), None, None)
        for f, t in ((run, torch.float32), (exact, torch.float64))
    )
    # relative, the lower tail included; what float32 cannot hold as a normal number counts as 0
    torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=1e-36)
    near = x.abs() < 3
    torch.testing.assert_close(got[:, near].double(), expected[:, near], rtol=1.5e-6, atol=1e-37)
    assert run(torch.tensor([[NAN]]), torch.ones(1, 1), None, None).isnan().all()


@operators
def test_leading_dims_are_rows(name):
    run, _ = OPERATORS[name]
    x, residual, weight, bias = inputs(12, 24, 2)
    shaped = run(x.view(2, 6, 24), residual.view(2, 6, 24), weight, bias)
    flat = run(x, residual, weight, bias)
    assert torch.equal(shaped.flatten(0, -2), flat)
    transposed = x.t().contiguous().t()
    assert torch.equal(run(transposed, residual, weight, bias), flat)
    assert run(x[:0], residual[:0], weight, bias).shape == (0, 24)


def test_the_default_dtype_of_torch_does_not_matter():
    x, residual, weight, _ = inputs(2, 24, 2)
    expected = elementwise.fused_add_rms_norm(x, residual, weight, EPS)
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = elementwise.fused_add_rms_norm(x, residual, weight, EPS)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.cat(got), torch.cat(expected))


def test_what_the_kernels_cannot_read_is_refused():
    x, residual, weight, bias = inputs(3, 8, 0)
    for call in (
        lambda: elementwise.rms_norm(x, weight[:7], EPS),
        lambda: elementwise.rms_norm(x, weight.repeat_interleave(2)[::2], EPS),
        lambda: elementwise.rms_norm(x, weight.double(), EPS),
        lambda: elementwise.fused_add_rms_norm(x, residual[:2], weight, EPS),
        lambda: elementwise.fused_add_rms_norm(x, residual[:, :7], weight, EPS),
        lambda: elementwise.layer_norm(x, weight, bias[:7], EPS),
        lambda: elementwise.silu_and_mul(x[:, :7]),
        lambda: elementwise.gelu_and_mul(x, "sigmoid"),
    ):
        with pytest.raises(ValueError, match=r"expected|shape|even width|neither"):
            call()
    for call in (
        lambda: elementwise.rms_norm(x.bfloat16(), weight, EPS),
        lambda: elementwise.fused_add_rms_norm(x, residual.double(), weight, EPS),
        lambda: elementwise.silu_and_mul(x.to("meta")),
    ):
        with pytest.raises(TypeError, match="float32 on the CPU"):
            call()
