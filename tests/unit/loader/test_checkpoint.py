"""open_checkpoint: the right reader for what is there, every slot of the model filled, one sentence for the rest."""

import json
import logging
import os
import time
from pathlib import Path

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
    assert checkpoint.num_weights() == open_checkpoint(path).num_weights()


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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_key_value_heads": 4}, r"k_proj.weight has shape \(32, 64\), the model needs \(64, 64\)"),
        ({"intermediate_size": 10**9}, r"gate_proj.weight has shape \(96, 64\), the model needs \(1000000000, 64\)"),
        ({"hidden_size": 10**9}, r"embed_tokens.weight has shape \(259, 64\), the model needs \(259, 1000000000\)"),
        ({"vocab_size": 260}, r"embed_tokens.weight has shape \(259, 64\), the model needs \(260, 64\)"),
        ({"num_hidden_layers": 3}, r"the first is model.layers.2.\S+: .* 30 tensors, the weights hold 21"),
        ({"num_hidden_layers": 2**40}, r"the first is model.layers.2.\S+: .* 9895604649987 tensors"),
        ({"attention_bias": True}, r"the first is model.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_a_config_that_the_weights_contradict_is_refused_at_once_by_tensor(tmp_path, change, said):
    folder = write_model(tmp_path / "llama")
    (folder / "config.json").write_text(json.dumps({**LLAMA, **change}))
    started = time.process_time()  # a busy machine is not to blame
    with pytest.raises(InvalidInput, match=said):
        open_checkpoint(folder)
    assert time.process_time() - started < 1


def test_a_gguf_header_that_contradicts_its_tensors_is_refused_when_it_is_opened(write_gguf):
    for key, value, said in [
        ("llama.feed_forward_length", 10**9, r"gate_proj.weight has shape \(96, 64\)"),
        ("llama.block_count", 2**32 - 1, "the first is model.layers.2."),
    ]:
        path = write_gguf(LLAMA, random_weights(LLAMA), metadata={key: value})
        with pytest.raises(InvalidInput, match=said):
            open_checkpoint(path)


def test_dummy_weights_of_any_depth_are_counted_without_naming_them(tmp_path):
    shallow, deep = (
        open_checkpoint(write_model(tmp_path / str(n), num_hidden_layers=n), "dummy", seed=0) for n in (1, 2)
    )
    (tmp_path / "1" / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 2**40}))
    endless = open_checkpoint(tmp_path / "1", "dummy")
    assert deep.num_weights() == sum(tensor.numel() for _, tensor in deep.tensors())
    layer = deep.num_weights() - shallow.num_weights()
    assert endless.num_weights() - shallow.num_weights() == (2**40 - 1) * layer


@pytest.mark.parametrize("place", ["config.json", "generation_config.json", "model.safetensors", "model.gguf"])
@pytest.mark.parametrize("kind", ["a pipe", "a device", "a folder"])
def test_what_is_no_regular_file_is_refused_by_name_and_never_waited_for(tmp_path, place, kind):
    folder = write_model(tmp_path / "llama")
    path = folder / place
    path.unlink(missing_ok=True)
    {"a pipe": os.mkfifo, "a device": lambda p: p.symlink_to("/dev/zero"), "a folder": os.mkdir}[kind](path)
    opened = path if place == "model.gguf" and kind != "a folder" else folder
    if place == "model.gguf" and kind == "a folder":
        opened, said = path, "config.json is missing"
    else:
        said = rf"{place} cannot be read: it is {kind}, not a regular file"
    with pytest.raises(InvalidInput, match=said):
        open_checkpoint(opened)


def test_what_the_system_will_not_read_is_one_sentence(tmp_path):
    folder = write_model(tmp_path / "llama")
    for path in (Path("/proc/self/mem"), Path("x" * 3000), Path("a\0b")):
        with pytest.raises(InvalidInput, match="cannot be read") as refusal:
            open_checkpoint(path)
        assert len(str(refusal.value)) < 400
    for place in ("generation_config.json", "config.json"):
        (folder / place).unlink(missing_ok=True)
        (folder / place).symlink_to(place)
        with pytest.raises(InvalidInput, match=f"{place} cannot be read: Too many levels"):
            open_checkpoint(folder)


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
