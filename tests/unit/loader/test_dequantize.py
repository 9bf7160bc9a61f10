"""Every block type against the gguf package, bit by bit."""

from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES

from octavo.loader.dequantize import DEQUANTIZERS, PIECE_ELEMENTS, dequantize

HALF_PLACES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
"""Where the float16 numbers of a block lie; every other byte may have any value."""


def random_blocks(kind: gguf.GGMLQuantizationType, num_blocks: int) -> np.ndarray:
    rng = np.random.default_rng(kind.value)
    blocks = rng.integers(0, 256, (num_blocks, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    for place in HALF_PLACES[kind.name]:
        scales = rng.normal(0, 0.1, num_blocks).astype(np.float16)
        blocks[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks


def assert_equal_to_the_package(raw: np.ndarray, kind: gguf.GGMLQuantizationType, threads: int = 2) -> None:
    with ThreadPoolExecutor(threads) as pool:
        values = dequantize(raw.reshape(-1), kind, pool)
    expected = gguf.dequantize(raw.reshape(1, -1), kind).reshape(-1)
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values.view(np.uint32), expected.view(np.uint32))


def test_the_ten_types_are_read():
    assert {kind.name for kind in DEQUANTIZERS} == set(HALF_PLACES)


@pytest.mark.parametrize("kind", DEQUANTIZERS, ids=lambda kind: kind.name)
def test_random_blocks_equal_the_gguf_package(kind):
    assert_equal_to_the_package(random_blocks(kind, 333), kind)


@pytest.mark.parametrize("kind", [k for k in DEQUANTIZERS if not k.name.endswith("K")], ids=lambda kind: kind.name)
def test_what_the_gguf_package_quantised_comes_back(kind):
    rows = np.random.default_rng(0).normal(size=(7, 96)).astype(np.float32)
    raw = gguf.quantize(rows, kind)
    assert_equal_to_the_package(raw, kind)
    with ThreadPoolExecutor(1) as pool:
        values = dequantize(raw.reshape(-1), kind, pool).reshape(rows.shape)
    assert np.abs(values - rows).max() < 0.35


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q6_K])
def test_pieces_join_without_a_seam(kind):
    block_elements = GGML_QUANT_SIZES[kind][0]
    assert_equal_to_the_package(random_blocks(kind, 2 * PIECE_ELEMENTS // block_elements + 1), kind, threads=3)
