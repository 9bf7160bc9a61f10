"""Which tensors of a checkpoint are kept in which bits, and what that takes: from the headers alone. No torch."""

from collections.abc import Mapping
from functools import cache, partial

from octavo.config.platform_traits import PACKED_GROUP_BYTES
from octavo.config.weights import GROUP, WeightChoice
from octavo.errors import InvalidInput, printable
from octavo.loader.checkpoint import Checkpoint
from octavo.loader.dummy import iterate_parameter_shapes
from octavo.loader.reading import loading_peak
from octavo.loader.tensor_source import TensorHeader

BITS_OF_BLOCKS = {
    "Q2_K": 4, "Q3_K": 8, "Q4_0": 4, "Q4_1": 4, "Q4_K": 4, "Q5_0": 8, "Q5_1": 8, "Q5_K": 8, "Q6_K": 8, "Q8_0": 8,
}  # fmt: skip
"""GGUF block type -> the bits it is kept in; `blocks` says what is lost."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Projections that layers compute in one product."""


def tensor_bits(checkpoint: Checkpoint, quantization: str) -> dict[str, int]:
    """Name -> 8 or 4 for the tensors that are kept in few bits; the others are kept in floats.

    int4 leaves embedding and head in 8 bits: errors there go straight into the logits. A float matrix that is computed
    in one product with few-bit ones (q, k, v; gate, up) gets 8 bits, which lose less than its neighbours have lost: as
    a float it would force them to floats, too.

    Raises:
        InvalidInput: the weights of the checkpoint cannot be kept so.
    """
    if quantization == "none":
        return {}
    matrices = _matrices(checkpoint)
    if quantization == "gguf":
        return _as_stored(checkpoint, matrices)
    bits = 8 if quantization == "int8" else 4
    for name, header in matrices.items():
        if header.stored in BITS_OF_BLOCKS:
            raise InvalidInput(
                f"quantization={quantization!r} quantises float weights, but {printable(name)} of this file is "
                f"{header.stored} already; use quantization='gguf'"
            )
        if header.shape[1] % GROUP:
            raise InvalidInput(
                f"quantization={quantization!r} keeps groups of {GROUP} columns, but {printable(name)} has "
                f"{header.shape[1]}, no multiple of that; use quantization='none'"
            )
    return {name: 8 if name in (EMBEDDING, HEAD) else bits for name in matrices}


def _matrices(checkpoint: Checkpoint) -> dict[str, TensorHeader]:
    """The model's own: what else a file holds is not used, and no matter."""
    own = {name for name, shape in iterate_parameter_shapes(checkpoint.config) if len(shape) == 2} | {HEAD}
    return {header.name: header for header in checkpoint.headers() if header.name in own and len(header.shape) == 2}


def _as_stored(checkpoint: Checkpoint, matrices: Mapping[str, TensorHeader]) -> dict[str, int]:
    if checkpoint.load_format != "gguf":
        raise InvalidInput(
            "quantization='gguf' keeps the weights of a GGUF file as they are, and this is "
            f"load_format={checkpoint.load_format!r}; use int8, int4 or none"
        )
    bits = {name: BITS_OF_BLOCKS[h.stored] for name, h in matrices.items() if h.stored in BITS_OF_BLOCKS}
    for name in matrices:
        if name not in bits and any(neighbour in bits for neighbour in _neighbours(name)):
            bits[name] = 8
    return bits


def _neighbours(name: str) -> list[str]:
    """Tensors that are computed in one product with this one."""
    prefix, _, rest = name.rpartition(".")[0].rpartition(".")
    return [f"{prefix}.{part}.weight" for parts in FUSED if rest in parts for part in parts]


class CheckpointSizes:
    """`config.weights.WeightSizes` of an opened checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._headers = checkpoint.headers()
        self._bits = cache(partial(tensor_bits, checkpoint))

    def elements(self, quantization: str) -> dict[str, int]:
        bits = self._bits(quantization)
        counts: dict[str, int] = {}
        for header in self._headers:
            form = _form(bits, header)
            counts[form] = counts.get(form, 0) + header.num_elements
        return counts

    def loading_peak(self, choice: WeightChoice) -> tuple[int, int]:
        bits = self._bits(choice.quantization)
        read = WeightChoice(dtype=choice.dtype, group_bytes=PACKED_GROUP_BYTES)
        steps, kept, packed = [], [], []
        for header, step in zip(self._headers, self._checkpoint.read_steps(), strict=True):
            form = _form(bits, header)
            kept.append(read.bytes_of(form, header.num_elements))
            packed.append(choice.bytes_of(form, header.num_elements))
            from_blocks = header.name in bits and header.stored in BITS_OF_BLOCKS
            # not dequantised; there twice while rows are brought into order
            steps.append(step._replace(in_hand=kept[-1]) if from_blocks else step)
        return loading_peak(steps, kept, packed)


def _form(bits: Mapping[str, int], header: TensorHeader) -> str:
    if header.name in bits:
        return f"int{bits[header.name]}"
    return "float" if len(header.shape) > 1 else "vector"
