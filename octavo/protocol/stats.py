"""Statistics of the engine core as plain data. `metrics/` and `get_metrics()` only export them."""

import msgspec


class EngineStats(msgspec.Struct, kw_only=True, frozen=True):
    """One consistent picture of the core, taken between two steps. `kv_blocks_total == free + cached + in_use`."""

    num_running: int = 0
    num_waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_free: int = 0
    """Blocks that hold nothing."""
    kv_blocks_cached: int = 0
    """Blocks findable by hash and held by nobody."""
    kv_blocks_in_use: int = 0
    """Blocks held by at least one request; a shared block counts once."""
    kv_blocks_peak_in_use: int = 0
    kv_utilization: float = 0.0
    """Used tokens over allocated slots of the blocks in use, 0..1; 0 when none is in use."""
    prefix_cache_queries: int = 0
    """Prompt tokens looked up at admissions."""
    prefix_cache_hits: int = 0
    """Tokens of those that were found."""
    num_preemptions: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of requests admitted for the first time."""
    generation_tokens: int = 0
    num_steps: int = 0
