"""The rotary embedding fields of config.json -> RopeConfig, in transformers 5's and the older spelling."""

from typing import Any

from octavo.config.model import RopeConfig
from octavo.errors import InvalidInput
from octavo.loader.fields import Fields

DEFAULT_THETA = 10000.0
ROPE_TYPES = ("default", "linear", "yarn", "llama3", "dynamic")
MAX_FACTOR = 2.0**20
"""Positions are stretched no further: hundreds at most are in use."""
LAYER_TYPES = ("full_attention", "sliding_attention")


def read_rope(fields: Fields) -> RopeConfig:
    """RopeConfig of a config.json.

    Raises:
        InvalidInput: an unknown type, a parameter the type needs is missing, or both spellings are there and differ.
    """
    section = _section(fields)
    rope_type = _rope_type(section)
    theta = section.number("rope_theta", fields.number("rope_theta", DEFAULT_THETA))
    if theta <= 0:
        raise section.refusal("rope_theta", "above 0")
    partial = section.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    if not 0 < partial <= 1:
        raise InvalidInput(f"{section.source}: partial_rotary_factor is {partial}, it must be above 0 and at most 1")
    if rope_type == "default":
        return RopeConfig(theta=theta, partial_rotary_factor=partial)
    original = _original_length(fields, section, rope_type)
    return RopeConfig(
        rope_type=rope_type,  # type: ignore[arg-type]  # checked against ROPE_TYPES
        theta=theta,
        partial_rotary_factor=partial,
        factor=_factor(fields, section, rope_type, original),
        original_max_position_embeddings=original,
        **(_yarn(section) if rope_type == "yarn" else {}),
        **(_llama3(section) if rope_type == "llama3" else {}),
    )


def supported_length(rope: RopeConfig, max_position_embeddings: int) -> int:
    """Tokens the stretched positions reach, as vLLM derives it: linear and yarn name the length before stretching.

    llama3 names the length after it; dynamic is not stretched here (see RopeConfig).
    """
    if rope.rope_type == "linear":
        return int(max_position_embeddings * rope.factor)
    if rope.rope_type == "yarn" and rope.original_max_position_embeddings is not None:
        return int(rope.original_max_position_embeddings * rope.factor)
    return max_position_embeddings


def _section(fields: Fields) -> Fields:
    """The parameters, wherever they are spelled."""
    new, old = fields.section("rope_parameters"), fields.section("rope_scaling")
    if new.keys() and old.keys():
        for key in set(new.keys()) & set(old.keys()):
            if new.get(key) != old.get(key):
                raise InvalidInput(
                    f"{fields.source}: rope_parameters and rope_scaling both give {key} and differ "
                    f"({new.get(key)!r}, {old.get(key)!r}); remove one of them"
                )
    section = new if new.keys() else old
    nested = [key for key in LAYER_TYPES if key in section]
    if not nested:
        return section
    first = section.get(nested[0])
    if any(section.get(key) != first for key in nested):
        raise InvalidInput(f"{section.source}: other rotary parameters by kind of layer are not built yet")
    return section.section(nested[0])


def _rope_type(section: Fields) -> str:
    new, old = section.get("rope_type"), section.get("type")
    if new is not None and old is not None and new != old:
        raise InvalidInput(f"{section.source}: rope_type is {new!r} but type is {old!r}; remove one of them")
    key = "rope_type" if new is not None else "type"
    rope_type = section.string(key, "default")
    if rope_type not in ROPE_TYPES:
        raise section.refusal(key, f"one of {', '.join(ROPE_TYPES)}")
    return rope_type


def _original_length(fields: Fields, section: Fields, rope_type: str) -> int:
    max_positions = fields.integer("max_position_embeddings")
    key = "original_max_position_embeddings"
    if rope_type == "dynamic":
        # its base starts to move beyond max_position_embeddings, whatever else is written
        return max_positions
    return fields.integer(key) if key in fields else section.integer(key, max_positions)


def _factor(fields: Fields, section: Fields, rope_type: str, original: int) -> float:
    if rope_type == "yarn" and "factor" not in section:
        return fields.integer("max_position_embeddings") / original
    factor = section.number("factor")
    if not 1 <= factor <= MAX_FACTOR:
        raise section.refusal("factor", f"a number of at least 1 and at most {MAX_FACTOR:.0f}")
    return factor


def _yarn(section: Fields) -> dict[str, Any]:
    values = {key: section.optional_number(key) for key in ("attention_factor", "mscale", "mscale_all_dim")}
    # transformers takes 0 for "not given" here
    beta_fast, beta_slow = section.number("beta_fast", 32.0) or 32.0, section.number("beta_slow", 1.0) or 1.0
    if beta_fast < beta_slow:
        raise InvalidInput(f"{section.source}: beta_fast={beta_fast} must not be below beta_slow={beta_slow}")
    return {**values, "beta_fast": beta_fast, "beta_slow": beta_slow, "truncate": section.boolean("truncate", True)}


def _llama3(section: Fields) -> dict[str, Any]:
    low, high = section.number("low_freq_factor"), section.number("high_freq_factor")
    if not 0 < low < high:
        raise InvalidInput(f"{section.source}: low_freq_factor={low} must be above 0 and below high_freq_factor={high}")
    return {"low_freq_factor": low, "high_freq_factor": high}
