"""What one attention layer keeps of each token. Declared by the model, used for sizing and for allocation."""

import msgspec

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1}
"""KV cache dtypes and their size in bytes."""
SCALE_BYTES = {"int8": 4, "fp8": 4}
"""Of the dtypes that keep a scale beside each token and head, its size in bytes."""


class KVCacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Full attention: K and V of every token. Layers of equal spec share one set of block tables."""

    num_kv_heads: int
    head_dim_k: int
    head_dim_v: int
    dtype: str

    @property
    def bytes_per_token(self) -> int:
        """Bytes one token takes in one layer."""
        values = (self.head_dim_k + self.head_dim_v) * DTYPE_BYTES[self.dtype]
        return self.num_kv_heads * (values + 2 * SCALE_BYTES.get(self.dtype, 0))
