"""Paged attention in plain torch, one request after the other: every KV head at once, softmax in float32.

Only slots that hold a token some query may see are read: stale values in a block's unused slots cannot matter.
"""

import torch
from torch import Tensor

from octavo.ops.interface import AttentionMetadata, KVCache
from octavo.ops.reference.traits import MAX_SCORES

_QUERY_CHUNK = 256
"""Queries of one request computed together. Keys after the chunk's last query are left out of its products."""


def paged_attention(
    q: Tensor,
    kv_cache: KVCache,
    metadata: AttentionMetadata,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """See `Platform.paged_attention`. q [T, H, Dk] -> [T, H, Dv] of q's dtype; rows of no request are 0."""
    block_size, num_kv_heads, head_dim_v = kv_cache.v.shape[1:]
    num_tokens, num_heads, _ = q.shape
    group = num_heads // num_kv_heads
    out = q.new_zeros(num_tokens, num_heads, head_dim_v)
    grouped_out = out.view(num_tokens, num_kv_heads, group, head_dim_v)
    grouped_q = (q.float() * scale).view(num_tokens, num_kv_heads, group, -1)
    grouped_sinks = None if sinks is None else sinks.float().view(num_kv_heads, 1, group, 1)
    starts = metadata.query_start_loc.tolist()
    for row, seq_len in enumerate(metadata.seq_lens.tolist()):
        start, end = starts[row], starts[row + 1]
        if start == end:
            continue
        first_position = seq_len - (end - start)
        first_block = _visible(first_position, seq_len, sliding_window)[0] // block_size
        blocks = metadata.block_tables[row, first_block : -(-seq_len // block_size)]
        base = first_block * block_size
        keys = kv_cache.k.index_select(0, blocks).flatten(0, 1).float()
        values = kv_cache.v.index_select(0, blocks).flatten(0, 1).float()
        step = max(1, min(_QUERY_CHUNK, MAX_SCORES // (num_heads * (seq_len - base))))
        for chunk in range(start, end, step):
            stop = min(chunk + step, end)
            low, high = _visible(first_position + chunk - start, first_position + stop - start, sliding_window)
            grouped_out[chunk:stop] = _attend(
                grouped_q[chunk:stop],
                keys[low - base : high - base],
                values[low - base : high - base],
                sliding_window,
                soft_cap,
                grouped_sinks,
            )
    return out


def _visible(first: int, stop: int, sliding_window: int | None) -> tuple[int, int]:
    """The range of key positions that queries at positions first .. stop - 1 may see."""
    return (0 if sliding_window is None else max(0, first - sliding_window + 1)), stop


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, sliding_window: int | None, soft_cap: float | None, sinks: Tensor | None
) -> Tensor:
    """q [n, G, H / G, Dk], already scaled, over keys [S, G, Dk] and values [S, G, Dv] -> [n, G, H / G, Dv].

    The last query and the last key have one position.
    """
    n, num_kv_heads, group, head_dim = q.shape
    num_keys = keys.shape[0]
    rows = q.transpose(0, 1).reshape(num_kv_heads, n * group, head_dim)
    scores = torch.bmm(rows, keys.permute(1, 2, 0)).view(num_kv_heads, n, group, num_keys)
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    if n > 1:
        scores.masked_fill_(_hidden(n, num_keys, sliding_window).unsqueeze(1), -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.expand(-1, n, -1, -1)), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :num_keys]
    mixed = torch.bmm(weights.reshape(num_kv_heads, n * group, num_keys), values.transpose(0, 1))
    return mixed.view(num_kv_heads, n, group, -1).transpose(0, 1)


def _hidden(n: int, num_keys: int, sliding_window: int | None) -> Tensor:
    """[n, num_keys] bool: keys each of the last n positions may not see."""
    distance = torch.arange(num_keys - n, num_keys).unsqueeze(1) - torch.arange(num_keys)
    hidden = distance < 0
    return hidden if sliding_window is None else hidden | (distance >= sliding_window)
