"""Gated activations of an MLP, by their name in config.json."""

from collections.abc import Callable

from torch import Tensor

from octavo.errors import InvalidInput
from octavo.layers.context import LayerContext


def gated_activation(name: str, ctx: LayerContext) -> Callable[[Tensor], Tensor]:
    """The function [T, 2 * N] (gate, then up) -> act(gate) * up, [T, N].

    Raises:
        InvalidInput: no activation of that name.
    """
    known = {"silu": ctx.platform.silu_and_mul, "swish": ctx.platform.silu_and_mul}
    if name not in known:
        raise InvalidInput(f"hidden_act={name!r} is not supported; this model needs one of {', '.join(known)}")
    return known[name]
