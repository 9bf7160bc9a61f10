"""open_checkpoint: the right reader for what is there, every slot of the model filled, one sentence for the rest."""

import json
import logging

import pytest
import torch
from tiny_models import LLAMA, QWEN2, random_weights, write_model
from transformers import LlamaConfig, MistralConfig, Qwen2Config
from transformers import LlamaForCausalLM as HFLlama
from transformers import MistralForCausalLM as HFMistral
from transformers import Qwen2ForCausalLM as HFQwen2

from octavo.errors import InvalidInput
from octavo.gguf_file import GGUFFile
from octavo.layers.context import LayerContext
from octavo.loader.checkpoint import open_checkpoint
from octavo.loader.dummy import parameter_shapes
from octavo.loader.gguf import hf_name
from octavo.loader.weights import load_weights
from octavo.models.registry import get_model_class
from octavo.ops.registry import get_platform

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
SAVED_BY_TRANSFORMERS = {
    "llama": lambda: HFLlama(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, head_dim=16)),
    "llama tied": lambda: HFLlama(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "mistral": lambda: HFMistral(MistralConfig(**SIZES, sliding_window=8)),
    "qwen2": lambda: HFQwen2(Qwen2Config(**SIZES)),
}


def build(config):
    context = LayerContext(platform=get_platform("reference"), dtype=torch.float32)
    return get_model_class(config.architecture)(config, context, 64)


@pytest.mark.parametrize("make", SAVED_BY_TRANSFORMERS.values(), ids=SAVED_BY_TRANSFORMERS)
@pytest.mark.parametrize("max_shard_size", ["5GB", "10KB"])
def test_what_transformers_saves_fills_every_slot_of_the_model(tmp_path, caplog, make, max_shard_size):
    make().save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 or max_shard_size == "10KB"
    checkpoint = open_checkpoint(tmp_path)
    model = build(checkpoint.config)
    with caplog.at_level(logging.WARNING, logger="octavo"):
        load_weights(model.slots(), checkpoint.tensors(), str(tmp_path))
    assert caplog.text == ""


@pytest.mark.parametrize("make", SAVED_BY_TRANSFORMERS.values(), ids=SAVED_BY_TRANSFORMERS)
def test_dummy_weights_fill_every_slot_and_nothing_else(tmp_path, caplog, make):
    make().save_pretrained(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    checkpoint = open_checkpoint(tmp_path, "dummy")
    slots = build(checkpoint.config).slots()
    assert parameter_shapes(checkpoint.config) == {n: s.shape for n, s in slots.items() if not s.optional}
    with caplog.at_level(logging.WARNING, logger="octavo"):
        load_weights(slots, checkpoint.tensors(), str(tmp_path))
    assert caplog.text == ""


def test_dummy_weights_depend_on_seed_and_name_only(tmp_path):
    folder = write_model(tmp_path / "llama")
    first, again = dict(open_checkpoint(folder, "dummy").tensors()), dict(open_checkpoint(folder, "dummy").tensors())
    other = dict(open_checkpoint(folder, "dummy", seed=1).tensors())
    deeper = dict(open_checkpoint(write_model(tmp_path / "deep", num_hidden_layers=3), "dummy").tensors())
    assert len(deeper) > len(first)
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]) and torch.equal(tensor, deeper[name])
        assert not torch.equal(tensor, other[name])
    assert not torch.equal(first["model.norm.weight"], first["model.layers.0.input_layernorm.weight"])


def test_dummy_weights_are_small_and_norms_near_one(tmp_path):
    for name, tensor in open_checkpoint(write_model(tmp_path / "llama"), "dummy").tensors():
        expected = 1.0 if name.endswith("norm.weight") else 0.0
        assert tensor.sub(expected).abs().max() < 0.12, name
        assert tensor.std() == pytest.approx(0.02, rel=0.35), name


@pytest.mark.parametrize("config", [LLAMA, QWEN2], ids=["llama", "qwen2"])
def test_dummy_takes_a_gguf_file_for_its_config(tmp_path, write_gguf, config):
    weights = random_weights(config)
    path = write_gguf(config, weights)
    checkpoint = open_checkpoint(path, "dummy")
    assert checkpoint.load_format == "dummy"
    assert {name: tuple(t.shape) for name, t in checkpoint.tensors()} == {n: tuple(t.shape) for n, t in weights.items()}
    assert checkpoint.weight_bytes("float32") == open_checkpoint(path).weight_bytes("float32")


def test_an_unknown_extra_tensor_is_reported_by_name_and_inv_freq_is_not(tmp_path, caplog):
    extra = {
        "model.layers.0.strange.weight": torch.ones(1),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    folder = write_model(tmp_path / "llama", weights={**random_weights(LLAMA), **extra})
    checkpoint = open_checkpoint(folder)
    with caplog.at_level(logging.WARNING, logger="octavo"):
        load_weights(build(checkpoint.config).slots(), checkpoint.tensors(), str(folder))
    assert "model.layers.0.strange.weight" in caplog.text
    assert "inv_freq" not in caplog.text


def test_tensors_can_be_read_again(tmp_path, write_gguf):
    for checkpoint in (
        open_checkpoint(write_model(tmp_path / "llama")),
        open_checkpoint(write_gguf(LLAMA, random_weights(LLAMA))),
        open_checkpoint(tmp_path / "llama", "dummy"),
    ):
        assert [name for name, _ in checkpoint.tensors()] == [name for name, _ in checkpoint.tensors()]


def test_the_format_follows_from_what_is_there(tmp_path, write_gguf):
    folder = write_model(tmp_path / "llama")
    file = write_gguf(LLAMA, random_weights(LLAMA), name="weights.bin")
    assert open_checkpoint(folder).load_format == open_checkpoint(folder, "safetensors").load_format == "safetensors"
    assert open_checkpoint(file).load_format == open_checkpoint(file, "gguf").load_format == "gguf"


def test_what_is_not_there_or_does_not_fit_is_refused(tmp_path, write_gguf):
    folder = write_model(tmp_path / "llama")
    file = write_gguf(LLAMA, random_weights(LLAMA))
    for path, load_format, said in [
        (tmp_path / "none", "auto", "does not exist"),
        (folder, "gguf", "llama is a folder"),
        (file, "safetensors", "model.gguf is a file"),
        (tmp_path, "auto", "config.json is missing; give the file itself: .*model.gguf"),
        (folder / "model.safetensors", "auto", "give the folder it lies in"),
        (folder / "tokenizer.json", "auto", "is no GGUF file"),
        (folder / "tokenizer.json", "dummy", "is no GGUF file"),
        (folder, "pt", "load_format='pt' is not known"),
    ]:
        with pytest.raises(InvalidInput, match=said):
            open_checkpoint(path, load_format)


def test_a_half_downloaded_gguf_is_refused_with_both_sizes(tmp_path, write_gguf):
    path = write_gguf(LLAMA, random_weights(LLAMA))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InvalidInput, match=rf"has {len(whole) // 2} bytes but its header describes \d+"):
        open_checkpoint(path)


def test_a_config_that_does_not_fit_the_weights_is_refused_when_they_load(tmp_path):
    folder = write_model(tmp_path / "llama")
    (folder / "config.json").write_text(json.dumps({**LLAMA, "num_key_value_heads": 4}))
    checkpoint = open_checkpoint(folder)
    with pytest.raises(InvalidInput, match="do not belong together"):
        load_weights(build(checkpoint.config).slots(), checkpoint.tensors(), str(folder))


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("smollm2", ("LlamaForCausalLM", 49152, 30, 9, 3, 64, True, False, (2,))),
        ("qwen05", ("Qwen2ForCausalLM", 151936, 24, 14, 2, 64, False, True, (151645,))),
    ],
)
def test_real_gguf_files_have_every_weight_of_their_model(model_path, name, numbers):
    path = model_path(name)
    checkpoint = open_checkpoint(path)
    c = checkpoint.config
    assert numbers == (
        c.architecture, c.vocab_size, c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim, c.tie_word_embeddings,
        c.qkv_bias, c.eos_token_ids,
    )  # fmt: skip
    slots = build(c).slots()
    shapes = {hf_name(tensor.name): tensor.shape for tensor in GGUFFile(path).tensors.values()}
    assert shapes == {n: slot.shape for n, slot in slots.items() if not slot.optional}
