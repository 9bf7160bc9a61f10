"""Weights of a GGUF file: tensors dequantised, or in their blocks, and renamed to what the models ask for.

Their shapes and sizes are had without torch; reading them brings it.
"""

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from gguf.constants import GGMLQuantizationType as Type

from octavo.config.model import ModelConfig
from octavo.errors import not_built, printable
from octavo.gguf_file import GGUFFile, GGUFTensor
from octavo.loader.dequantize import DEQUANTIZERS, dequantize
from octavo.loader.gguf_config import ROPE_FREQS, gguf_architecture
from octavo.loader.reading import ReadStep
from octavo.loader.tensor_source import BlockRows, TensorHeader, TensorSource

if TYPE_CHECKING:
    from torch import Tensor

STORED_FLOATS = {Type.F32: "float32", Type.F16: "float16", Type.BF16: "bfloat16"}
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Name in a GGUF file, without `blk.N.` and `.weight` or `.bias`, -> name in the layer."""
NOT_WEIGHTS = (ROPE_FREQS,)
"""Read as part of the config."""


class GGUFWeights:
    """The weights of an opened file.

    Raises:
        InvalidInput: a tensor has a type that is not read, named with the tensor.
    """

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self._file = file
        self._tensors = [tensor for name, tensor in file.tensors.items() if name not in NOT_WEIGHTS]
        permuted = gguf_architecture(file).permuted_qk
        self._heads_of = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads} if permuted else {}
        for tensor in self._tensors:
            if tensor.type not in STORED_FLOATS and tensor.type not in DEQUANTIZERS:
                name, readable = (
                    printable(tensor.name),
                    ", ".join(kind.name for kind in (*STORED_FLOATS, *DEQUANTIZERS)),
                )
                raise not_built(
                    f"{file.path}: {name} is of type {tensor.type_name}; reading other than {readable}",
                    "get the model in another quantisation",
                )

    def sources(self, num_threads: int) -> Iterator[TensorSource]:
        """One a tensor, by its Hugging Face name. Tensors that are not known keep their name in the file."""
        with ThreadPoolExecutor(num_threads) as pool:
            for tensor in self._tensors:
                read = partial(self._read, tensor, pool)
                yield TensorSource(hf_name(tensor.name), read, self._block_rows(tensor))
                self._file.release(tensor)

    def headers(self) -> list[TensorHeader]:
        """One a tensor, in the order of `sources`."""
        return [TensorHeader(hf_name(t.name), t.shape, _stored(t), t.num_bytes) for t in self._tensors]

    def num_weights(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.num_elements for tensor in self._tensors)

    def read_steps(self) -> list[ReadStep]:
        """One a tensor, in the order of `sources`: a copy in its own float dtype or in float32, two while the rows are
        brought into order. Of the file only this tensor is held."""
        steps = []
        for tensor in self._tensors:
            copies = 2 if _layer_part(tensor.name) in self._heads_of else 1
            size = tensor.num_bytes if tensor.type in STORED_FLOATS else 4 * tensor.num_elements
            steps.append(ReadStep(tensor.num_elements, copies * size, tensor.num_bytes))
        return steps

    def _block_rows(self, tensor: GGUFTensor) -> BlockRows | None:
        """The blocks of a quantised matrix."""
        if tensor.type in STORED_FLOATS or len(tensor.shape) != 2:
            return None
        assert isinstance(tensor.type, Type)  # others were refused
        return BlockRows(self._file.raw(tensor), tensor.type, (tensor.shape[0], tensor.shape[1]), self._heads(tensor))

    def _heads(self, tensor: GGUFTensor) -> int | None:
        """Heads whose rows are to be brought into order; None: they are in order."""
        num_heads = self._heads_of.get(_layer_part(tensor.name))
        # the model's own tensors have been checked; another of that name may have rows that are no heads
        if num_heads is None or not tensor.shape or tensor.shape[0] % (2 * num_heads):
            return None
        return num_heads

    def _read(self, tensor: GGUFTensor, pool: Executor) -> "Tensor":
        import torch

        raw, kind = self._file.raw(tensor), tensor.type
        assert isinstance(kind, Type)  # others were refused
        if kind in STORED_FLOATS:
            values = torch.from_numpy(raw.copy()).view(getattr(torch, STORED_FLOATS[kind]))
        else:
            values = torch.from_numpy(dequantize(raw, kind, pool))
        values = values.view(tensor.shape)
        num_heads = self._heads(tensor)
        return values if num_heads is None else to_half_rotation(values, num_heads)


def _stored(tensor: GGUFTensor) -> str:
    """What a header says of its type."""
    name = STORED_FLOATS.get(tensor.type) if isinstance(tensor.type, Type) else None
    return name or tensor.type_name


def hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; names that are not known stay as they are."""
    stem, _, kind = name.rpartition(".")
    if stem in NAMES:
        return f"{NAMES[stem]}.{kind}"
    part = _layer_part(name)
    layer = name.split(".")[1] if part in LAYER_NAMES else ""
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}" if layer.isdigit() else name


def to_half_rotation(rows: "Tensor", num_heads: int) -> "Tensor":
    """Undo the row order of llama files: a head's rows are stored as the pairs (0, d/2), (1, d/2 + 1), ... that are
    rotated together; models here rotate the first half of a head against the second.

    rows: [num_heads * head_dim, ...] of a weight or bias; returns a new tensor of the same shape.
    """
    pairs = rows.view(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _layer_part(name: str) -> str:
    """attn_q of blk.3.attn_q.weight; empty for a tensor outside the layers."""
    parts = name.split(".")
    return parts[2] if len(parts) == 4 and parts[0] == "blk" else ""
