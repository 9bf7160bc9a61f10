"""config.json and generation_config.json: both spellings mean the same, what is not supported is refused by name."""

import json
import logging

import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config

from octavo.errors import InvalidInput
from octavo.loader.hf_config import read_hf_config

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}
MISTRAL = {**BASE, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
QWEN2 = {**BASE, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
CLASSES = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config}


@pytest.fixture
def read(tmp_path):
    """read(config, generation=None, **changes); a change to ... takes the field away."""

    def read_config(config, generation=None, **changes):
        values = {k: v for k, v in {**config, **changes}.items() if v is not ...}
        (tmp_path / "config.json").write_text(json.dumps(values))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return read_hf_config(tmp_path)

    return read_config


def test_reads_every_number_of_a_llama_config(read):
    config = read(BASE, rope_theta=5e5, tie_word_embeddings=True, torch_dtype="bfloat16", attention_bias=True)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers) == (1000, 64, 96, 3)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert (config.max_position_embeddings, config.rms_norm_eps, config.rope.theta) == (4096, 1e-5, 5e5)
    assert config.tie_word_embeddings and config.qkv_bias and config.attention_output_bias and not config.mlp_bias
    assert (config.dtype, config.eos_token_ids, config.hidden_act) == ("bfloat16", (2,), "silu")


ROPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 24.0, "attention_factor": 1.3},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
}


@pytest.mark.parametrize("rope_type", ROPES)
def test_old_and_new_spelling_of_rope_give_the_same_config(read, rope_type):
    values = ROPES[rope_type]
    new = read(BASE, rope_parameters={"rope_type": rope_type, "rope_theta": 1e6, **values}, dtype="float16")
    for type_key in ("rope_type", "type"):
        scaling = {type_key: rope_type, **values} if values else None
        assert read(BASE, rope_scaling=scaling, rope_theta=1e6, torch_dtype="float16") == new
    assert new.rope.rope_type == rope_type and new.rope.theta == 1e6 and new.dtype == "float16"


@pytest.mark.parametrize("rope_type", ROPES)
@pytest.mark.parametrize("base", [BASE, MISTRAL, QWEN2], ids=["llama", "mistral", "qwen2"])
def test_what_transformers_saves_is_read_back_with_its_numbers(tmp_path, base, rope_type):
    changes = {"head_dim": 32} if base is not QWEN2 else {}
    rope = {"rope_type": rope_type, "rope_theta": 7e4, **ROPES[rope_type]}
    hf = CLASSES[base["model_type"]](**{**base, **changes, "rope_parameters": rope, "dtype": "bfloat16"})
    hf.save_pretrained(tmp_path)
    config = read_hf_config(tmp_path)
    assert config.architecture == base["architectures"][0] and config.dtype == "bfloat16"
    assert (config.head_dim, config.num_kv_heads) == (changes.get("head_dim", 16), hf.num_key_value_heads)
    assert config.rope.theta == 7e4
    for key, value in ROPES[rope_type].items():
        assert getattr(config.rope, key) == value
    assert config.qkv_bias == (base is QWEN2) and not config.attention_output_bias
    # transformers' Mistral default, too small a window for 4096 positions only when they are stretched
    outgrown = base is MISTRAL and config.max_position_embeddings > 4096
    assert config.sliding_window == (4096 if outgrown else None)


def test_stretched_positions_reach_as_far_as_vllm_says(read):
    lengths = {t: read(BASE, rope_scaling={"type": t, **v}).max_position_embeddings for t, v in ROPES.items()}
    assert lengths == {"default": 4096, "linear": 16384, "dynamic": 4096, "yarn": 4096, "llama3": 4096}


def test_yarn_without_factor_stretches_from_the_original_to_the_full_length(read):
    rope = read(BASE, rope_scaling={"type": "yarn", "original_max_position_embeddings": 1024}).rope
    assert rope.factor == 4.0


def test_an_original_length_beside_the_rope_parameters_has_the_say(read):
    scaling = ROPES["llama3"]
    rope = read(BASE, rope_scaling={"type": "llama3", **scaling}, original_max_position_embeddings=256).rope
    assert rope.original_max_position_embeddings == 256


def test_dynamic_counts_from_max_position_embeddings(read):
    assert read(BASE, rope_scaling={"type": "dynamic", "factor": 2.0}).rope.original_max_position_embeddings == 4096


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "type is 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear", "type": "yarn", "factor": 2.0}}, "rope_type is 'linear' but type"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor is 0.5"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0, "low_freq_factor": 1.0}}, "high_freq_factor is missing"),
        ({"rope_scaling": {**ROPES["llama3"], "type": "llama3", "low_freq_factor": 4.0}}, "low_freq_factor=4.0"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_slow": 64}}, "beta_slow=64.0"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
        ({"rope_parameters": {"rope_theta": 1.0}, "rope_scaling": {"rope_theta": 2.0}}, "both give rope_theta"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        ({"vocab_size": ...}, "vocab_size is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers is '3'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"hidden_size": 66}, "hidden_size=66 is no multiple of num_attention_heads=4"),
        ({"head_dim": 15}, "head_dim=15 is odd"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is no multiple of num_key_value_heads=3"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"torch_dtype": "int8"}, "torch_dtype is 'int8'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"sliding_window": 128}, "sliding_window is 128"),
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not known.*LlamaForCausalLM, MistralForCausalLM"),
        ({"architectures": ..., "model_type": "gpt2"}, "gpt2 is not known"),
        ({"architectures": ["LlamaForCausalLM", "X"]}, "architectures"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 3}, "no sliding window is asked for"),
    ],
)
def test_what_is_not_supported_is_refused_with_its_name(read, changes, said):
    with pytest.raises(InvalidInput, match=said) as refusal:
        read(BASE, **changes)
    assert "config.json" in str(refusal.value)


@pytest.mark.parametrize("field", ["attention_bias", "mlp_bias"])
def test_biases_an_architecture_has_not_are_refused(read, field):
    with pytest.raises(InvalidInput, match=f"{field} is True"):
        read(MISTRAL, **{field: True})


def test_the_architecture_follows_from_model_type_where_it_is_not_named(read):
    assert read(QWEN2, architectures=...).architecture == "Qwen2ForCausalLM"


def test_mistral_window_null_is_none_and_absent_is_the_default(read):
    long = {"max_position_embeddings": 32768}
    assert read(MISTRAL, **long, sliding_window=None).sliding_window is None
    assert read(MISTRAL, **long, sliding_window=1024).sliding_window == 1024
    assert read(MISTRAL, **long).sliding_window == MistralConfig().sliding_window
    assert read(MISTRAL, **long, sliding_window=32768).sliding_window is None


def test_qwen2_window_is_off_unless_all_layers_have_it(read):
    window = {"use_sliding_window": True, "sliding_window": 128}
    assert read(QWEN2, sliding_window=128).sliding_window is None
    assert read(QWEN2, **{**window, "use_sliding_window": False}, max_window_layers=0).sliding_window is None
    assert read(QWEN2, **window, max_window_layers=3).sliding_window is None
    assert read(QWEN2, **window, max_window_layers=0).sliding_window == 128
    assert read(QWEN2, **window, layer_types=["sliding_attention"] * 3).sliding_window == 128
    with pytest.raises(InvalidInput, match="max_window_layers=1 of 3 layers"):
        read(QWEN2, **window, max_window_layers=1)
    with pytest.raises(InvalidInput, match="as no sliding window is asked for"):
        read(QWEN2, layer_types=["sliding_attention"] * 3)


def test_eos_is_the_union_of_both_files(read):
    config = read(BASE, generation={"eos_token_id": [7, 2, 5]})
    assert config.eos_token_ids == (2, 5, 7)
    assert read(BASE, generation={}, eos_token_id=None).eos_token_ids == ()


def test_generation_config_gives_the_sampling_defaults(read, caplog):
    generation = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}
    with caplog.at_level(logging.WARNING, logger="octavo"):
        config = read(BASE, generation=generation)
    assert dict(config.default_sampling) == {"temperature": 0.7, "top_p": 0.8, "top_k": 20}
    assert "repetition_penalty=1.1" in caplog.text


@pytest.mark.parametrize("generation", [{"temperature": -1}, {"top_p": 1.5}, {"top_k": 2.5}, {"min_p": "x"}])
def test_sampling_defaults_out_of_range_are_refused(read, generation):
    with pytest.raises(InvalidInput, match=f"generation_config.json: {next(iter(generation))}"):
        read(BASE, generation=generation)


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff", "[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused_by_file_name(tmp_path, text):
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(InvalidInput, match=r"config\.json"):
        read_hf_config(tmp_path)


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
         "max_position_embeddings", "num_key_value_heads", "sliding_window")  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [1e308, 10**400, 2**40 + 1, float("inf"), float("nan")])
def test_a_size_no_model_has_is_refused_by_the_fields_name_in_one_sentence(read, name, value):
    with pytest.raises(InvalidInput, match=rf"config.json: {name} is .*it must be an integer of at") as refusal:
        read(MISTRAL, **{name: value})
    assert len(str(refusal.value)) < 400


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "linear", "factor": 2},
        {"type": "yarn", "original_max_position_embeddings": 3},
        {"type": "yarn", "factor": 2},
        {"type": "dynamic", "factor": 2},
    ],
    ids=str,
)
def test_endless_positions_are_refused_with_every_stretch(read, scaling):
    with pytest.raises(InvalidInput, match="max_position_embeddings is"):
        read(BASE, rope_scaling=scaling, max_position_embeddings=10**400)


@pytest.mark.parametrize("factor", [0.5, 2.0**20 + 1, 1e299, 10**400])
def test_a_stretch_out_of_range_is_refused(read, factor):
    with pytest.raises(InvalidInput, match=r"factor is .*it must be a number of at least"):
        read(BASE, rope_scaling={"type": "linear", "factor": factor})


def test_a_window_by_layer_needs_no_list_as_long_as_the_layers(read):
    window = {"use_sliding_window": True, "sliding_window": 16, "num_hidden_layers": 2**40}
    assert read(QWEN2, **window, max_window_layers=0).sliding_window == 16
    assert read(QWEN2, **window, max_window_layers=2**40).sliding_window is None
    with pytest.raises(InvalidInput, match="some layers only"):
        read(QWEN2, **window, max_window_layers=5)


def test_values_too_long_for_a_sentence_are_cut(read):
    for changes in ({"architectures": ["a" * 100_000]}, {"hidden_size": [1] * 100_000}, {"hidden_act": "a" * 100_000}):
        with pytest.raises(InvalidInput) as refusal:
            read(BASE, **changes)
        assert len(str(refusal.value)) < 800
