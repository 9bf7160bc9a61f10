"""Rotary position embedding tables: one function a kind of stretch, all in float32, as models are trained.

Nothing here depends on the lengths of the requests at hand: a position has one rotation, whatever the schedule.
"""

import math

import torch
from torch import Tensor

from octavo.config.model import RopeConfig
from octavo.errors import InvalidInput


def build_cos_sin(rope: RopeConfig, head_dim: int, max_positions: int) -> Tensor:
    """The table `Platform.rope` wants: [max_positions, rot] float32, rot / 2 cosines, then rot / 2 sines.

    Raises:
        InvalidInput: an unknown type, a type without the values it needs, or dynamic beyond the original length.
    """
    # A factor that was stored as rot / head_dim must give rot back.
    dim = int(head_dim * rope.partial_rotary_factor + 1e-6)
    if dim < 2 or dim % 2:
        raise InvalidInput(
            f"partial_rotary_factor={rope.partial_rotary_factor} of head_dim={head_dim} rotates {dim} dimensions; "
            "it must be an even number above 0"
        )
    inv_freq, scale = _frequencies(rope, dim, max_positions)
    angles = torch.arange(max_positions, dtype=torch.float32).unsqueeze(1) * inv_freq
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=1)


def _frequencies(rope: RopeConfig, dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Radians a position [dim / 2], and the factor of cos and sin."""
    base = 1.0 / _periods(rope, dim)
    if rope.inv_freq_divisors is not None and rope.rope_type in ("default", "llama3"):
        return _divided(base, rope.inv_freq_divisors), 1.0
    if rope.inv_freq_divisors is not None:
        raise InvalidInput(f"rope type {rope.rope_type!r} together with frequency divisors is not supported")
    if rope.rope_type == "default":
        return base, 1.0
    if rope.rope_type == "linear":
        return base / rope.factor, 1.0
    if rope.rope_type == "dynamic":
        _refuse_dynamic_stretch(max_positions, _original_length(rope))
        return base, 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, base, _original_length(rope)), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, dim, _original_length(rope)), _yarn_attention_factor(rope)
    raise InvalidInput(
        f"rope type {rope.rope_type!r} is not supported; there are default, linear, dynamic, llama3 and yarn"
    )


def _periods(rope: RopeConfig, dim: int) -> Tensor:
    return rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _original_length(rope: RopeConfig) -> int:
    if rope.original_max_position_embeddings is None:
        raise InvalidInput(
            f"rope type {rope.rope_type!r} needs original_max_position_embeddings, which the model does not give"
        )
    return rope.original_max_position_embeddings


def _divided(base: Tensor, divisors: tuple[float, ...]) -> Tensor:
    if len(divisors) != len(base):
        raise InvalidInput(f"rope frequency divisors: {len(divisors)} given, the head has {len(base)} frequencies")
    return base / torch.tensor(divisors, dtype=torch.float32)


def _refuse_dynamic_stretch(max_positions: int, original: int) -> None:
    if max_positions > original:
        raise InvalidInput(
            f"rope type 'dynamic' is not supported beyond the original {original} tokens (asked for {max_positions}): "
            "its base depends on the longest sequence of the moment, so answers would depend on the schedule; "
            f"set max_model_len to {original} or less"
        )


def _llama3(rope: RopeConfig, base: Tensor, original: int) -> Tensor:
    """Long waves are divided by `factor`, short ones kept, those between interpolated. Source: Llama 3.1 release."""
    wavelength = 2 * math.pi / base
    smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * base / rope.factor + smooth * base
    stretched = torch.where(wavelength > original / rope.low_freq_factor, base / rope.factor, between)
    return torch.where(wavelength < original / rope.high_freq_factor, base, stretched)


def _yarn(rope: RopeConfig, dim: int, original: int) -> Tensor:
    """Frequencies that turn often keep their pace, slow ones are divided by `factor`. Source: Peng et al. 2023, 3.2."""
    low, high = (_dim_of_rotations(turns, rope, dim, original) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    periods = _periods(rope, dim)
    kept = 1 - ramp
    return 1.0 / (rope.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _dim_of_rotations(turns: float, rope: RopeConfig, dim: int, original: int) -> float:
    """The (fractional) frequency index that makes `turns` rotations within the original length."""
    return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_mscale(rope.factor, rope.mscale) / _yarn_mscale(rope.factor, rope.mscale_all_dim)
    return _yarn_mscale(rope.factor, 1.0)


def _yarn_mscale(factor: float, mscale: float) -> float:
    """Source: Peng et al. 2023, 3.4; the weighted form is DeepSeek-V2's."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
