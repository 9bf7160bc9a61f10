"""Architecture names, the classes behind them, and what a model declares of itself."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch

from octavo.config.engine_config import ParallelConfig
from octavo.config.model import ModelConfig
from octavo.errors import InvalidInput
from octavo.layers.context import LayerContext
from octavo.models import registry
from octavo.models.base import CausalLM
from octavo.models.registry import get_model_class, supported_architectures
from octavo.ops.reference import ReferencePlatform

CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=20,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    max_position_embeddings=64,
)


def make(config=CONFIG, size=1):
    parallel = ParallelConfig(tensor_parallel_size=size)
    return get_model_class(config.architecture)(config, LayerContext(ReferencePlatform(), torch.float32, parallel), 32)


def test_every_supported_architecture_is_a_causal_lm_of_that_name():
    assert supported_architectures() == ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"]
    for name in supported_architectures():
        model_class = get_model_class(name)
        assert issubclass(model_class, CausalLM)
        assert model_class.__name__ == name


def test_an_unknown_architecture_is_refused_and_the_known_ones_are_listed():
    with pytest.raises(InvalidInput, match=r"'GPT2LMHeadModel'.*LlamaForCausalLM, MistralForCausalLM, Qwen2"):
        get_model_class("GPT2LMHeadModel")


def test_a_model_file_is_imported_only_when_asked_for(monkeypatch):
    imported = []
    monkeypatch.setattr(registry, "import_module", lambda name: imported.append(name) or import_module(name))
    get_model_class("LlamaForCausalLM")
    assert imported == ["octavo.models.llama"]


@pytest.mark.parametrize(("size", "kv_heads"), [(1, 2), (2, 1), (4, 1)])
def test_each_layer_declares_the_kv_this_process_keeps(size, kv_heads):
    specs = make(size=size).kv_cache_specs("bfloat16")
    assert len(specs) == 2
    assert all(spec == specs[0] for spec in specs)
    assert (specs[0].num_kv_heads, specs[0].head_dim_k, specs[0].head_dim_v) == (kv_heads, 6, 6)
    assert specs[0].bytes_per_token == kv_heads * 12 * 2


def test_slots_carry_the_checkpoint_s_names_and_whole_shapes_whatever_the_shard():
    slots = [make(size=size).slots() for size in (1, 2)]
    shapes = [{name: slot.shape for name, slot in each.items()} for each in slots]
    assert shapes[0] == shapes[1]
    assert shapes[0]["model.layers.1.self_attn.q_proj.weight"] == (24, 16)
    assert shapes[0]["model.layers.0.self_attn.v_proj.weight"] == (12, 16)
    assert shapes[0]["model.layers.0.mlp.down_proj.weight"] == (16, 24)
    assert shapes[0]["lm_head.weight"] == (20, 16)
    assert not any("bias" in name for name in shapes[0])
    assert len(shapes[0]) == 2 * 9 + 3


def test_qwen2_has_query_key_and_value_biases_and_no_others():
    biases = {name for name in make(replace(CONFIG, architecture="Qwen2ForCausalLM")).slots() if "bias" in name}
    assert biases == {f"model.layers.{i}.self_attn.{p}_proj.bias" for i in range(2) for p in "qkv"}


def test_only_a_tied_model_can_do_without_a_head():
    assert not make().slots()["lm_head.weight"].optional
    assert make(replace(CONFIG, tie_word_embeddings=True)).slots()["lm_head.weight"].optional
