"""Rotary tables against the ones transformers computes from the same config, in both of its spellings."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from octavo.config.model import RopeConfig
from octavo.errors import InvalidInput
from octavo.layers.rotary import build_cos_sin

LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256,
}  # fmt: skip
YARN = {"factor": 4.0, "original_max_position_embeddings": 256}
KINDS = {
    "default": ("default", {}),
    "linear": ("linear", {"factor": 3.0}),
    "llama3": ("llama3", LLAMA3),
    "llama3 other borders": ("llama3", LLAMA3 | {"factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 9.0}),
    "yarn": ("yarn", YARN),
    "yarn with mscale": ("yarn", YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}),
    "yarn with one mscale only": ("yarn", YARN | {"mscale": 0.7}),
    "yarn with attention factor": ("yarn", YARN | {"attention_factor": 1.3}),
    "yarn with betas": ("yarn", YARN | {"beta_fast": 20.0, "beta_slow": 2.0}),
    "yarn not truncated": ("yarn", YARN | {"factor": 40.0, "truncate": False}),
    "yarn of factor 1": ("yarn", YARN | {"factor": 1.0}),
}


def transformers_config(spelling, kind, values, theta, head_dim):
    sizes = {"head_dim": head_dim, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 2048}
    if spelling == "new":
        return LlamaConfig(**sizes, rope_parameters={"rope_type": kind, "rope_theta": theta, **values})
    key = "rope_type" if spelling == "old" else "type"
    scaling = None if kind == "default" else {key: kind, **values}
    return LlamaConfig(**sizes, rope_theta=theta, rope_scaling=scaling)


@pytest.mark.parametrize("spelling", ["new", "old", "old with type"])
@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(("theta", "head_dim"), [(10000.0, 16), (500000.0, 64)])
def test_the_table_is_the_one_of_transformers(spelling, kind, theta, head_dim):
    rope_type, values = KINDS[kind]
    config = transformers_config(spelling, rope_type, values, theta, head_dim)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(1024)[None])
    rope = RopeConfig(rope_type=rope_type, theta=theta, **values)
    table = build_cos_sin(rope, head_dim, 1024)
    assert table.shape == (1024, head_dim)
    assert table.dtype == torch.float32
    torch.testing.assert_close(table[:, : head_dim // 2], cos[0, :, : head_dim // 2], rtol=0, atol=2e-6)
    torch.testing.assert_close(table[:, head_dim // 2 :], sin[0, :, : head_dim // 2], rtol=0, atol=2e-6)


def test_the_kinds_of_rope_differ_from_each_other():
    tables = [build_cos_sin(RopeConfig(rope_type=t, **values), 64, 300) for t, values in KINDS.values()]
    close = [(i, j) for i in range(len(tables)) for j in range(i) if torch.allclose(tables[i], tables[j], atol=1e-4)]
    # A yarn of factor 1 stretches nothing, and one mscale without the other is not looked at.
    names = list(KINDS)
    assert {frozenset((names[i], names[j])) for i, j in close} == {
        frozenset(("default", "yarn of factor 1")),
        frozenset(("yarn", "yarn with one mscale only")),
    }


def test_a_partial_rotation_is_the_rotation_of_a_smaller_head():
    part = build_cos_sin(RopeConfig(partial_rotary_factor=0.25), 64, 50)
    assert torch.equal(part, build_cos_sin(RopeConfig(), 16, 50))


@pytest.mark.parametrize("rotated", range(2, 99, 2))
def test_a_factor_stored_as_a_quotient_gives_the_dimensions_back(rotated):
    assert build_cos_sin(RopeConfig(partial_rotary_factor=rotated / 98), 98, 1).shape == (1, rotated)


@pytest.mark.parametrize("rope_type", ["default", "llama3"])
def test_divisors_of_a_file_replace_the_llama3_rule(rope_type):
    rope = RopeConfig(rope_type=rope_type, theta=10000.0, inv_freq_divisors=(1.0, 2.0, 4.0, 8.0))
    table = build_cos_sin(rope, 8, 20)
    for i, divisor in enumerate((1, 2, 4, 8)):
        angles = torch.arange(20).double() * 10000.0 ** (-i / 4) / divisor
        torch.testing.assert_close(table[:, i].double(), angles.cos(), rtol=0, atol=1e-5)
        torch.testing.assert_close(table[:, 4 + i].double(), angles.sin(), rtol=0, atol=1e-5)


def test_dynamic_is_the_default_up_to_the_original_length_and_refused_beyond():
    rope = RopeConfig(rope_type="dynamic", factor=2.0, original_max_position_embeddings=128)
    assert torch.equal(build_cos_sin(rope, 16, 128), build_cos_sin(RopeConfig(), 16, 128))
    with pytest.raises(InvalidInput, match=r"original 128 tokens \(asked for 129\).*schedule.*max_model_len"):
        build_cos_sin(rope, 16, 129)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (RopeConfig(rope_type="longrope"), "longrope"),  # type: ignore[arg-type]
        (RopeConfig(rope_type="yarn"), "original_max_position_embeddings"),
        (RopeConfig(rope_type="llama3"), "original_max_position_embeddings"),
        (RopeConfig(rope_type="dynamic"), "original_max_position_embeddings"),
        (RopeConfig(inv_freq_divisors=(1.0,)), "1 given, the head has 8"),
        (RopeConfig(rope_type="linear", inv_freq_divisors=(1.0,) * 8), "divisors"),
        (RopeConfig(partial_rotary_factor=0.2), "rotates 3 dimensions"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(rope, message):
    with pytest.raises(InvalidInput, match=message):
        build_cos_sin(rope, 16, 32)
