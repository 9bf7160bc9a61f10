"""Reading a checkpoint in the forms it is kept in."""

import gguf
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type
from tiny_gguf import write_gguf
from tiny_models import LLAMA, QWEN2, random_weights, write_model

from octavo.errors import InvalidInput
from octavo.loader.checkpoint import open_checkpoint
from octavo.ops.interface import QuantizedMatrix, dequantized
from octavo.quantization.forms import EMBEDDING, tensor_bits
from octavo.quantization.read import read_tensors


@pytest.mark.parametrize("config", [LLAMA, QWEN2], ids=["permuted rows", "rows in order"])
@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q8_0], ids=lambda kind: kind.name)
def test_a_file_in_few_bits_is_the_dequantised_file(tmp_path, config, kind):
    weights = random_weights(config)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", config, weights, kind))
    read = dict(read_tensors(checkpoint, "gguf", 2))
    assert read.keys() == weights.keys()
    for name, tensor in checkpoint.tensors():
        assert isinstance(read[name], QuantizedMatrix) == (tensor.ndim == 2)
        assert torch.equal(dequantized(read[name]) if tensor.ndim == 2 else read[name], tensor), name


def test_none_gives_what_the_checkpoint_gives(tmp_path):
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", LLAMA, random_weights(LLAMA), Type.Q4_0))
    plain = dict(checkpoint.tensors())
    for name, tensor in read_tensors(checkpoint, "none", 1):
        assert torch.equal(tensor, plain[name])


def test_a_float_matrix_of_a_file_in_few_bits_stays_a_float_where_it_can(tmp_path):
    kinds = {"embed_tokens": Type.BF16, "v_proj": Type.F16}
    path = write_gguf(tmp_path / "m.gguf", LLAMA, random_weights(LLAMA), Type.Q4_0, kinds=kinds)
    read = dict(read_tensors(open_checkpoint(path), "gguf", 1))
    assert read[EMBEDDING].dtype == torch.bfloat16
    assert read["model.layers.0.self_attn.v_proj.weight"].bits == 8


@pytest.mark.parametrize(("quantization", "allowed"), [("int8", 4e-5), ("int4", 6e-3)])
def test_a_folder_is_quantised_while_it_is_read(tmp_path, quantization, allowed):
    weights = random_weights(LLAMA)
    checkpoint = open_checkpoint(write_model(tmp_path / "m", weights=weights))
    bits = tensor_bits(checkpoint, quantization)
    for name, tensor in read_tensors(checkpoint, quantization, 1):
        if name in bits:
            assert tensor.bits == bits[name]
            assert (dequantized(tensor) - weights[name]).square().mean() < allowed * weights[name].square().mean()
        else:
            assert torch.equal(tensor, weights[name])


def test_weights_that_are_no_numbers_are_refused_by_name(tmp_path):
    weights = random_weights(LLAMA)
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    checkpoint = open_checkpoint(write_model(tmp_path / "m", weights=weights))
    with pytest.raises(InvalidInput, match=r"model.layers.1.mlp.up_proj.weight holds numbers that are not finite"):
        list(read_tensors(checkpoint, "int4", 1))


def test_the_package_and_the_reader_agree_on_a_permuted_file(tmp_path):
    weights = random_weights(LLAMA)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", LLAMA, weights, Type.Q8_0))
    name = "model.layers.0.self_attn.q_proj.weight"
    expected = gguf.dequantize(gguf.quantize(weights[name].numpy(), Type.Q8_0), Type.Q8_0)
    assert torch.equal(dequantized(dict(read_tensors(checkpoint, "gguf", 1))[name]), torch.from_numpy(expected))
