"""simd.h itself: conversions over all their inputs, the exponential over its whole range, one result at every width."""

import numpy as np
import pytest
import torch

_native = pytest.importorskip("octavo.ops.cpu._native", reason="the native kernels are not built")

WIDTHS = (4, 8, 16)


@pytest.fixture(params=_native.supported_isas(), autouse=True)
def isa(request):
    before = _native.isa()
    _native.use_isa(request.param)
    yield request.param
    _native.use_isa(before)


def run(name, values, out_dtype, ratio=1):
    """The probe at every width; all must agree. values: a multiple of 16 long."""
    results = []
    for width in WIDTHS:
        size = len(values) // width if ratio != 1 else len(values)
        out = torch.full((size + 1,), 7, dtype=out_dtype)
        _native.simd_test(f"{name}/{width}", values.data_ptr(), out.data_ptr(), len(values))
        assert out[-1] == 7
        results.append(out[:-1])
    if ratio != 1:
        return results
    for other in results[1:]:
        same = (other == results[0]) | (is_nan(other) & is_nan(results[0]))
        assert same.all()
    return results[0]


def is_nan(values):
    return values.isnan() if values.dtype.is_floating_point else torch.zeros(len(values), dtype=torch.bool)


def all_16_bits(dtype):
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def assert_same(got, expected):
    """Bit for bit, but that any NaN is as good as any other."""
    nan = expected.isnan()
    assert torch.equal(got.isnan(), nan)
    integer = {2: torch.int16, 4: torch.int32}[got.element_size()]
    assert torch.equal(got.view(integer)[~nan], expected.view(integer)[~nan])


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_every_16_bit_float_widens_exactly_and_comes_back_as_it_was(name, dtype):
    values = all_16_bits(dtype)
    wide = run(f"{name}_load", values, torch.float32)
    assert_same(wide, values.float())
    assert_same(run(f"{name}_store", wide, dtype), values)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_floats_are_rounded_to_16_bits_as_torch_does(name, dtype):
    values = all_16_bits(dtype).float()
    finite = values[values.isfinite()].sort().values
    bits = torch.randint(-(2**31), 2**31, (1 << 17,), generator=torch.Generator().manual_seed(0))
    halves = ((finite[1:].double() + finite[:-1].double()) / 2).float()  # where ties go to the even one
    near = torch.cat([torch.nextafter(halves, torch.tensor(end)) for end in (torch.inf, -torch.inf)])
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 3.4e38, -3.4e38, 65504.0, 65519.9, 65520.0, 1e-45])
    everything = torch.cat([bits.to(torch.int32).view(torch.float32), halves, near, special])
    everything = torch.cat([everything, torch.zeros(-len(everything) % 16)])
    assert_same(run(f"{name}_store", everything, dtype), everything.to(dtype))


def test_every_8_bit_integer_widens_exactly():
    values = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8)
    assert torch.equal(run("int8_load", values, torch.float32), values.float())


def test_every_fp8_is_read_and_written_as_torch_does():
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0  # NaN is never stored
    values = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(run("fp8_load", codes, torch.float32), values)
    ordered = values.unique()
    halves = (ordered[1:] + ordered[:-1]) / 2  # ties go to the even one
    near = torch.cat([torch.nextafter(halves, torch.tensor(end)) for end in (torch.inf, -torch.inf)])
    spread = (torch.rand(1 << 16, generator=torch.Generator().manual_seed(0)) - 0.5) * 896
    small = spread * torch.logspace(0, -50, 1 << 16)
    everything = torch.cat([ordered, halves, near, spread, small, torch.tensor([-0.0, 448.0, -448.0])])
    everything = torch.cat([everything, torch.zeros(-len(everything) % 16)])
    got = run("fp8_store", everything, torch.uint8)
    assert torch.equal(got, everything.to(torch.float8_e4m3fn).view(torch.uint8))


def test_exp_is_within_one_unit_in_the_last_place_and_zero_where_results_would_be_subnormal():
    lowest, highest = np.float32(-87.33654), np.float32(88.72283)
    edges = torch.tensor([lowest, highest, 0.0, -0.0, 1e-30, -1e-30, 1.0, -1.0])
    spread = torch.linspace(float(lowest), float(highest), 1 << 18)
    tiny = torch.logspace(-40, 1, 1 << 12) * torch.tensor([1.0, -1.0]).repeat(1 << 11)
    values = torch.cat([spread.clamp(lowest, highest), tiny, edges, torch.zeros(8)])
    got = run("exp", values, torch.float32)
    expected = values.double().exp()
    unit = torch.from_numpy(np.spacing(expected.float().numpy()))
    assert ((got.double() - expected).abs() / unit.double()).max() < 1
    assert got[values == 0].eq(1).all()
    assert got.min() >= torch.finfo(torch.float32).tiny


def test_exp_beyond_its_range_is_zero_or_infinity_and_nan_stays():
    inf, nan = torch.inf, torch.nan
    below = float(np.nextafter(np.float32(-87.33654), np.float32(-inf)))
    above = float(np.nextafter(np.float32(88.72283), np.float32(inf)))
    values = torch.tensor(
        [below, -88.0, -104.0, -1e30, -inf, above, 89.0, 1e30, inf, nan, -nan, 0.0, 0.0, 0.0, 0.0, 0.0]
    )
    got = run("exp", values, torch.float32)
    assert got[:5].eq(0).all()
    assert got[5:9].eq(inf).all()
    assert got[9:11].isnan().all()


def test_lanes_are_added_in_halves_and_the_greatest_is_found():
    values = torch.randn(1 << 12, generator=torch.Generator().manual_seed(1)) * 1e3
    for name, combine in (("hsum", torch.add), ("hmax", torch.maximum)):
        for width, got in zip(WIDTHS, run(name, values, torch.float32, ratio=0), strict=True):
            lanes = values.view(-1, width)
            while lanes.shape[1] > 1:
                half = lanes.shape[1] // 2
                lanes = combine(lanes[:, :half], lanes[:, half:])
            assert torch.equal(got, lanes[:, 0])


def test_an_unknown_probe_is_refused():
    with pytest.raises(ValueError, match="no probe"):
        _native.simd_test("exp/5", 0, 0, 0)
