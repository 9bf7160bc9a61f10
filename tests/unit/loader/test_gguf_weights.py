"""GGUF files written from tiny models: the same config and weights as the safetensors folder they come from."""

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type
from tiny_models import LLAMA, QWEN2, random_weights, write_model

from octavo.errors import InvalidInput
from octavo.loader.checkpoint import open_checkpoint
from octavo.loader.gguf import hf_name, to_half_rotation

WITH_BIASES = {**LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 32}
CONFIGS = {"llama": LLAMA, "llama with biases and wide heads": WITH_BIASES, "qwen2": QWEN2}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_gguf_file_equals_the_folder_it_was_written_from(tmp_path, write_gguf, config):
    weights = random_weights(config)
    folder = open_checkpoint(write_model(tmp_path / "hf", config, weights=weights))
    file = open_checkpoint(write_gguf(config, weights))
    assert file.load_format == "gguf"
    assert file.config == folder.config
    assert file.num_weights() == folder.num_weights()
    tensors = dict(file.tensors())
    assert tensors.keys() == weights.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, weights[name]), name


@pytest.mark.parametrize(("kind", "dtype"), [(Type.F16, torch.float16), (Type.BF16, torch.bfloat16)])
def test_half_precision_files_keep_their_dtype(write_gguf, kind, dtype):
    weights = random_weights(LLAMA)
    checkpoint = open_checkpoint(write_gguf(LLAMA, weights, kind))
    assert checkpoint.config.dtype == str(dtype).removeprefix("torch.")
    for name, tensor in checkpoint.tensors():
        expected = weights[name].to(dtype) if tensor.ndim > 1 else weights[name]
        assert torch.equal(tensor, expected), name


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0], ids=lambda k: k.name)
def test_quantised_files_give_the_weights_within_the_quantisation(write_gguf, kind):
    # Matrices of several rows a piece, permuted after they are dequantised.
    config = {**LLAMA, "hidden_size": 64, "intermediate_size": 96}
    weights = random_weights(config)
    checkpoint = open_checkpoint(write_gguf(config, weights, kind))
    assert checkpoint.config.dtype == "quantized"
    for name, tensor in checkpoint.tensors():
        if tensor.ndim > 1:
            quantised = gguf.dequantize(gguf.quantize(weights[name].numpy(), kind), kind)
            assert torch.equal(tensor, torch.from_numpy(quantised)), name


def test_a_file_without_a_head_is_tied_and_one_with_a_head_is_not(write_gguf):
    weights = random_weights(LLAMA)
    assert not open_checkpoint(write_gguf(LLAMA, weights)).config.tie_word_embeddings
    del weights["lm_head.weight"]
    assert open_checkpoint(write_gguf(LLAMA, weights, name="tied.gguf")).config.tie_word_embeddings


def test_missing_keys_follow_from_the_others(write_gguf):
    remove = tuple(f"llama.{key}" for key in ("vocab_size", "rope.dimension_count", "rope.freq_base"))
    config = open_checkpoint(write_gguf(LLAMA, random_weights(LLAMA), remove=remove)).config
    assert (config.vocab_size, config.rope.theta, config.rope.partial_rotary_factor) == (259, 10000.0, 1.0)
    square = {**LLAMA, "num_key_value_heads": 4}
    remove = ("llama.attention.head_count_kv", "llama.attention.key_length", "llama.attention.value_length")
    config = open_checkpoint(write_gguf(square, random_weights(square), remove=remove, name="square.gguf")).config
    assert (config.num_kv_heads, config.head_dim) == (4, 16)


def test_end_of_text_and_end_of_turn_both_end_a_request(write_gguf):
    ids = {"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 3, "tokenizer.ggml.eom_token_id": 5}
    assert open_checkpoint(write_gguf(LLAMA, random_weights(LLAMA), metadata=ids)).config.eos_token_ids == (3, 5)


def test_sampling_defaults_are_read(write_gguf):
    values = {"general.sampling.temp": 0.7, "general.sampling.top_k": 20, "general.sampling.top_p": 0.9}
    config = open_checkpoint(write_gguf(LLAMA, random_weights(LLAMA), metadata=values)).config
    assert dict(config.default_sampling) == {"temperature": 0.7, "top_k": 20, "top_p": 0.9}


def test_a_sliding_window_makes_a_llama_file_a_mistral(write_gguf):
    config = open_checkpoint(
        write_gguf(LLAMA, random_weights(LLAMA), metadata={"llama.attention.sliding_window": 64})
    ).config
    assert (config.architecture, config.sliding_window) == ("MistralForCausalLM", 64)


def test_rope_divisors_of_the_file_become_part_of_the_config(write_gguf):
    divisors = np.linspace(1, 8, 8, dtype=np.float32)
    path = write_gguf(LLAMA, random_weights(LLAMA), tensors={"rope_freqs.weight": divisors})
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.rope.inv_freq_divisors == tuple(divisors.tolist())
    assert "rope_freqs.weight" not in dict(checkpoint.tensors())
    ones = {"rope_freqs.weight": np.ones(8, np.float32)}
    path = write_gguf(LLAMA, random_weights(LLAMA), tensors=ones, name="ones.gguf")
    assert open_checkpoint(path).config.rope.inv_freq_divisors is None


def test_linear_and_yarn_scaling_are_read(write_gguf):
    weights = random_weights(LLAMA)
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    config = open_checkpoint(write_gguf(LLAMA, weights, metadata=linear)).config
    assert (config.rope.rope_type, config.rope.factor, config.max_position_embeddings) == ("linear", 4.0, 2048)
    old = open_checkpoint(write_gguf(LLAMA, weights, metadata={"llama.rope.scale_linear": 4.0}, name="old.gguf"))
    assert old.config == config
    yarn = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 8.0,
        "llama.rope.scaling.original_context_length": 128,
        "llama.rope.scaling.yarn_beta_fast": 24.0,
    }
    config = open_checkpoint(write_gguf(LLAMA, weights, metadata=yarn, name="yarn.gguf")).config
    assert (config.rope.rope_type, config.rope.factor, config.max_position_embeddings) == ("yarn", 8.0, 1024)
    assert (config.rope.original_max_position_embeddings, config.rope.beta_fast) == (128, 24.0)
    assert config.rope.attention_factor is None
    none = {"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}
    config = open_checkpoint(write_gguf(LLAMA, weights, metadata=none, name="none.gguf")).config
    assert config.rope.rope_type == "default"


@pytest.mark.parametrize(
    ("metadata", "remove", "said"),
    [
        ({}, ("llama.block_count",), "llama.block_count is missing"),
        ({}, ("llama.attention.layer_norm_rms_epsilon",), "layer_norm_rms_epsilon is missing"),
        ({"llama.vocab_size": 100}, (), "vocab_size=100 and 259 tokens do not fit 259 rows"),
        ({"tokenizer.ggml.tokens": ["x"] * 300}, ("llama.vocab_size",), "300 tokens do not fit 259 rows"),
        ({"llama.attention.head_count_kv": 3}, (), "head_count_kv is 3"),
        ({"llama.attention.head_count": [4, 2]}, (), "head_count is .*the same in all layers"),
        ({"llama.attention.value_length": 8}, (), "attention.value_length"),
        ({"llama.rope.dimension_count": 64}, (), "rope.dimension_count is 64"),
        ({"llama.rope.scaling.type": "longrope"}, (), "rope.scaling.type is 'longrope'"),
        ({"llama.rope.scaling.factor": 0.5}, (), "rope.scaling.factor is 0.5"),
        ({"llama.expert_count": 8}, (), "mixture of 8 experts"),
        ({"general.type": "adapter"}, (), "general.type is 'adapter'"),
        ({"split.count": 3}, (), "one of 3 parts"),
        ({"tokenizer.ggml.eos_token_id": "x"}, (), "eos_token_id is 'x'"),
    ],
)
def test_metadata_that_is_missing_or_not_supported_is_refused_by_key(write_gguf, metadata, remove, said):
    path = write_gguf(LLAMA, random_weights(LLAMA), metadata=metadata, remove=remove)
    with pytest.raises(InvalidInput, match=said) as refusal:
        open_checkpoint(path)
    assert "model.gguf" in str(refusal.value)


def test_an_unknown_architecture_is_refused_with_those_there_are(write_gguf):
    with pytest.raises(InvalidInput, match="architecture gpt2 is not known; those there are: llama, qwen2"):
        open_checkpoint(write_gguf(LLAMA, {}, arch="gpt2"))


@pytest.mark.parametrize("kind", [Type.TQ1_0, Type.MXFP4], ids=lambda k: k.name)
def test_another_quantisation_is_refused_by_type_and_tensor(write_gguf, kind):
    config = {**LLAMA, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    with pytest.raises(InvalidInput, match=rf"\.weight is of type {kind.name}"):
        open_checkpoint(write_gguf(config, random_weights(config), kind))


def test_an_unknown_type_number_is_refused(write_gguf):
    path = write_gguf(LLAMA, random_weights(LLAMA))
    content = path.read_bytes()
    place = content.index(b"output_norm.weight") + len(b"output_norm.weight") + 4 + 8
    path.write_bytes(content[:place] + (999).to_bytes(4, "little") + content[place + 4 :])
    with pytest.raises(InvalidInput, match=r"output_norm.weight is of type number 999"):
        open_checkpoint(path)


def test_a_tensor_that_is_not_known_keeps_its_name(write_gguf):
    extra = {"blk.0.attn_strange.weight": np.ones(4, np.float32), "stray": np.ones(4, np.float32)}
    tensors = dict(open_checkpoint(write_gguf(LLAMA, random_weights(LLAMA), tensors=extra)).tensors())
    assert extra.keys() <= tensors.keys()


def test_query_rows_that_are_no_heads_are_refused_with_their_shape(write_gguf):
    weights = random_weights(LLAMA)
    del weights["model.layers.0.self_attn.q_proj.weight"]
    path = write_gguf(LLAMA, weights, tensors={"blk.0.attn_q.weight": np.ones((63, 64), np.float32)})
    with pytest.raises(InvalidInput, match=r"q_proj.weight has shape \(63, 64\), the model needs \(64, 64\)"):
        open_checkpoint(path)


def test_unknown_tensors_beside_the_queries_keep_their_rows(write_gguf):
    odd = {"blk.0.attn_q.strange": np.ones((63, 64), np.float32)}
    tensors = dict(open_checkpoint(write_gguf(LLAMA, random_weights(LLAMA), tensors=odd)).tensors())
    assert tensors["model.layers.0.self_attn.q_proj.strange"].shape == (63, 64)


def test_names():
    assert hf_name("blk.11.ffn_down.bias") == "model.layers.11.mlp.down_proj.bias"
    assert hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert hf_name("output.weight") == "lm_head.weight"
    assert hf_name("blk.x.attn_q.weight") == "blk.x.attn_q.weight"


def test_half_rotation_puts_the_partners_half_a_head_apart():
    rows = torch.tensor([0, 2, 1, 3, 10, 12, 11, 13])
    assert to_half_rotation(rows, num_heads=2).tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
