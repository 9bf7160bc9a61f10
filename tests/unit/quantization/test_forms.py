"""Which tensors are kept in which bits, and the arithmetic of it: from headers alone."""

import subprocess
import sys

import pytest
from gguf.constants import GGMLQuantizationType as Type
from tiny_gguf import write_gguf
from tiny_models import LLAMA, QWEN2, random_weights, write_model

from octavo.config.weights import WeightChoice
from octavo.errors import InvalidInput
from octavo.loader.checkpoint import Checkpoint, open_checkpoint
from octavo.quantization.forms import EMBEDDING, HEAD, CheckpointSizes, tensor_bits

LAYER = "model.layers.0."
GROUP_BYTES = {8: 34, 4: 20}


@pytest.fixture
def gguf(tmp_path):
    """gguf(quant, kinds=...) -> a checkpoint of a tiny llama."""

    def make(quant: Type, config: dict = LLAMA, **options: object) -> Checkpoint:
        return open_checkpoint(write_gguf(tmp_path / "m.gguf", config, random_weights(config), quant, **options))

    return make


@pytest.fixture
def folder(tmp_path):
    def make(**overrides: object) -> Checkpoint:
        return open_checkpoint(write_model(tmp_path / "m", **overrides))

    return make


def test_none_keeps_everything_in_floats(gguf):
    checkpoint = gguf(Type.Q4_0)
    assert tensor_bits(checkpoint, "none") == {}
    assert CheckpointSizes(checkpoint).elements("none").keys() == {"float", "vector"}


def test_a_gguf_file_is_kept_in_the_bits_of_its_blocks(gguf):
    kinds = {"down_proj": Type.Q8_0, "lm_head": Type.Q5_1, "embed_tokens": Type.F16}
    bits = tensor_bits(gguf(Type.Q4_1, kinds=kinds), "gguf")
    assert bits[f"{LAYER}self_attn.q_proj.weight"] == 4
    assert bits[f"{LAYER}mlp.down_proj.weight"] == bits[HEAD] == 8
    assert EMBEDDING not in bits
    assert not [name for name in bits if "norm" in name]


def test_a_float_matrix_beside_few_bit_ones_of_the_same_product_gets_8_bits(gguf):
    bits = tensor_bits(gguf(Type.Q4_0, kinds={"v_proj": Type.F16, "down_proj": Type.F16, "up_proj": Type.F32}), "gguf")
    assert bits[f"{LAYER}self_attn.v_proj.weight"] == bits[f"{LAYER}mlp.up_proj.weight"] == 8
    assert bits[f"{LAYER}self_attn.q_proj.weight"] == bits[f"{LAYER}mlp.gate_proj.weight"] == 4
    assert f"{LAYER}mlp.down_proj.weight" not in bits


def test_a_float_gguf_file_as_it_is_has_no_few_bits(gguf):
    assert tensor_bits(gguf(Type.F16), "gguf") == {}


@pytest.mark.parametrize(("quantization", "inner"), [("int8", 8), ("int4", 4)])
def test_floats_are_quantised_but_the_two_ends_get_8_bits(folder, quantization, inner):
    checkpoint = folder()
    bits = tensor_bits(checkpoint, quantization)
    assert bits[EMBEDDING] == bits[HEAD] == 8
    assert {b for name, b in bits.items() if name.startswith("model.layers")} == {inner}
    assert bits.keys() == {header.name for header in checkpoint.headers() if len(header.shape) == 2}


def test_float_gguf_files_and_random_weights_can_be_quantised_too(gguf, tmp_path):
    for checkpoint in (gguf(Type.BF16), open_checkpoint(tmp_path / "m.gguf", "dummy")):
        assert 4 in tensor_bits(checkpoint, "int4").values()


def test_what_cannot_be_is_refused_in_one_sentence(gguf, folder):
    with pytest.raises(InvalidInput, match=r"'int8' quantises float weights, but .* is Q4_0 already; use .*'gguf'"):
        tensor_bits(gguf(Type.Q4_0), "int8")
    with pytest.raises(InvalidInput, match=r"'gguf' keeps .* load_format='safetensors'; use int8, int4 or none"):
        tensor_bits(folder(), "gguf")
    narrow = folder(intermediate_size=80)
    with pytest.raises(InvalidInput, match=r"'int4' keeps groups of 32 columns, but .*down_proj.weight has 80"):
        tensor_bits(narrow, "int4")


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_every_weight_is_counted_once(folder, quantization):
    checkpoint = folder()
    assert sum(CheckpointSizes(checkpoint).elements(quantization).values()) == checkpoint.num_weights()


def test_loading_few_bits_never_holds_the_floats(gguf):
    config = {**QWEN2, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8}
    checkpoint = gguf(Type.Q4_0, config)
    sizes = CheckpointSizes(checkpoint)
    kept = sum(20 * h.num_elements // 32 for h in checkpoint.headers() if len(h.shape) == 2)
    _, needed = sizes.loading_peak(WeightChoice(dtype="bfloat16", quantization="gguf", group_bytes=GROUP_BYTES))
    assert kept < needed < 1.3 * kept
    _, floats = sizes.loading_peak(WeightChoice(dtype="float32"))
    assert floats > 6 * kept


def test_a_platform_that_dequantises_needs_room_for_the_floats(gguf):
    sizes = CheckpointSizes(gguf(Type.Q4_0))
    _, few = sizes.loading_peak(WeightChoice(dtype="float32", quantization="gguf", group_bytes=GROUP_BYTES))
    _, dequantised = sizes.loading_peak(WeightChoice(dtype="float32", quantization="gguf"))
    assert dequantised > 4 * few


def test_the_arithmetic_needs_no_torch():
    code = "import sys, octavo.quantization.forms; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
