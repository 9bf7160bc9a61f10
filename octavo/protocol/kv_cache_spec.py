"""What one attention layer keeps of each token. Declared by the model, used for sizing and for allocation."""

import msgspec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""KV cache dtypes and their size in bytes."""


class KVCacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Full attention: K and V of every token. Layers of equal spec share one set of block tables."""

    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes in one layer."""
        return self.num_kv_heads * (self.head_dim_k + self.head_dim_v) * DTYPE_BYTES[self.dtype]
