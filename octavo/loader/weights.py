"""Where checkpoint tensors go: a model offers one `WeightSlot` a tensor name, `load_weights` fills them all."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from octavo.errors import InvalidInput
from octavo.logging import get_logger
from octavo.ops.interface import QuantizedMatrix

logger = get_logger(__name__)

LoadedTensor = Tensor | QuantizedMatrix

IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)
"""Tensors that some checkpoints carry and that are computed here."""


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """The destination of one checkpoint tensor."""

    shape: tuple[int, ...]
    """Shape of the whole tensor in the checkpoint; a parallel layer takes its shard out of it."""
    load: Callable[[LoadedTensor], None]
    """A matrix may come in few bits; everything else is a Tensor."""
    optional: bool = False


def load_weights(slots: dict[str, WeightSlot], tensors: Iterable[tuple[str, LoadedTensor]], source: str) -> None:
    """Hand every tensor to its slot.

    Raises:
        InvalidInput: a tensor of the model is missing in `source` or has another shape.
    """
    waiting = dict(slots)
    unknown = []
    for name, tensor in tensors:
        slot = waiting.pop(name, None)
        if slot is None:
            if not name.endswith(IGNORED_SUFFIXES):
                unknown.append(name)
            continue
        if tuple(tensor.shape) != slot.shape:
            raise InvalidInput(
                f"{source}: tensor {name} has shape {tuple(tensor.shape)}, the model needs {slot.shape}; "
                "config and weights do not belong together"
            )
        slot.load(tensor)
    missing = [name for name, slot in waiting.items() if not slot.optional]
    if missing:
        raise InvalidInput(
            f"{source}: {len(missing)} tensors of the model are missing, the first is {missing[0]}; get the file again"
        )
    if unknown:
        logger.warning("%s: %d unknown tensors not used: %s", source, len(unknown), ", ".join(unknown))
