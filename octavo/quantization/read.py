"""The tensors of a checkpoint, each in the form it is kept in: read, and quantised where that is asked for."""

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor

from torch import Tensor

from octavo.errors import InvalidInput, printable
from octavo.loader.checkpoint import Checkpoint
from octavo.loader.tensor_source import TensorSource
from octavo.ops.interface import QuantizedMatrix
from octavo.quantization.blocks import keep_blocks
from octavo.quantization.forms import BITS_OF_BLOCKS, tensor_bits
from octavo.quantization.groups import quantize


def read_tensors(
    checkpoint: Checkpoint, quantization: str, num_threads: int
) -> Iterator[tuple[str, Tensor | QuantizedMatrix]]:
    """(Hugging Face name, tensor) one at a time. A Tensor may be a view of the mapped file: never write to it.

    Raises:
        InvalidInput: the weights cannot be kept so, or are no numbers.
    """
    bits = tensor_bits(checkpoint, quantization)
    with ThreadPoolExecutor(num_threads) as pool:
        for source in checkpoint.sources(num_threads):
            if source.name not in bits:
                yield source.name, source.read()
            else:
                yield source.name, _checked(source.name, _in_few_bits(source, bits[source.name], pool))


def _in_few_bits(source: TensorSource, bits: int, pool: Executor) -> QuantizedMatrix:
    blocks = source.blocks
    if blocks is not None and BITS_OF_BLOCKS[blocks.kind.name] == bits:
        return keep_blocks(blocks, pool)
    return quantize(source.read(), bits, pool)


def _checked(name: str, matrix: QuantizedMatrix) -> QuantizedMatrix:
    if not all(bool(f.isfinite().all()) for f in (matrix.scales, matrix.minima) if f is not None):
        raise InvalidInput(
            f"tensor {printable(name)} holds numbers that are not finite, or too large, for few bits; get the "
            "file again, or use quantization='none'"
        )
    return matrix
