"""A copy of a GGUF file whose weights are plain floats, so that every engine computes the same numbers.

Metadata is copied as it is. Matrices get the dtype asked for; vectors (norms, biases) are float32, as every reader of
such files expects. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType
from gguf.gguf_reader import GGUFReader
from gguf.quants import dequantize, quantize
from tqdm import tqdm

TYPES = {
    "float32": GGMLQuantizationType.F32,
    "bfloat16": GGMLQuantizationType.BF16,
    "float16": GGMLQuantizationType.F16,
}


def write_plain(source: Path, target: Path, dtype: str) -> None:
    """Write `source` to `target` with weights of `dtype`, a key of TYPES. The source was checked to be whole."""
    reader = GGUFReader(source)
    kinds = [_kind(tensor, dtype) for tensor in reader.tensors]
    field = reader.fields.get("general.alignment")
    alignment = int(field.contents()) if field is not None else GGUF_DEFAULT_ALIGNMENT
    with target.open("wb") as file:
        file.write(reader.data[: reader.tensors[0].field.offset].tobytes())
        offset = 0
        for tensor, kind in zip(reader.tensors, kinds, strict=True):
            file.write(_description(tensor, kind, offset))
            offset += _padded(_num_bytes(tensor, kind), alignment)
        file.write(bytes(-file.tell() % alignment))
        pairs = list(zip(reader.tensors, kinds, strict=True))
        for tensor, kind in tqdm(pairs, desc=f"weights to {dtype}", delay=2, disable=None, leave=False):
            data = quantize(dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False), kind)
            file.write(np.ascontiguousarray(data).tobytes())
            file.write(bytes(-file.tell() % alignment))


def _kind(tensor: Any, dtype: str) -> GGMLQuantizationType:
    return TYPES[dtype] if len(tensor.shape) > 1 else GGMLQuantizationType.F32


def _description(tensor: Any, kind: GGMLQuantizationType, offset: int) -> bytes:
    name, dimensions = tensor.name.encode(), [int(size) for size in tensor.shape]
    head = struct.pack("<Q", len(name)) + name + struct.pack("<I", len(dimensions))
    return bytes(head + struct.pack(f"<{len(dimensions)}QIQ", *dimensions, int(kind), offset))


def _num_bytes(tensor: Any, kind: GGMLQuantizationType) -> int:
    elements, size = GGML_QUANT_SIZES[kind]
    return int(tensor.n_elements) // elements * size


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
