"""Attention over the paged KV cache: rotate, store this step's K and V, attend to everything the request has stored."""

from torch import Tensor

from octavo.layers.context import LayerContext
from octavo.layers.forward_context import ForwardContext


class Attention:
    """One layer's attention. `layer_index` is its place in `ForwardContext.kv_caches`.

    cos_sin and interleaved are those of `Platform.rope`.
    """

    def __init__(
        self,
        ctx: LayerContext,
        layer_index: int,
        scale: float,
        cos_sin: Tensor,
        interleaved: bool = False,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        self._platform = ctx.platform
        self._layer_index = layer_index
        self._scale = scale
        self._cos_sin = cos_sin
        self._interleaved = interleaved
        self._sliding_window = sliding_window
        self._soft_cap = soft_cap
        self._sinks = sinks

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, ctx: ForwardContext) -> Tensor:
        """q [T, H, Dk], k [T, G, Dk], v [T, G, Dv] -> [T, H, Dv]. q and k are not rotated yet and may be changed."""
        kv_cache = ctx.kv_caches[self._layer_index]
        q = self._platform.rope_and_write_kv(
            q, k, v, ctx.positions, self._cos_sin, kv_cache, ctx.attention.slot_mapping, self._interleaved
        )
        return self._platform.paged_attention(
            q, kv_cache, ctx.attention, self._scale, self._sliding_window, self._soft_cap, self._sinks
        )
