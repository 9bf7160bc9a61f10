"""open_checkpoint: one door to every kind of checkpoint, which then gives a config, sizes and named tensors.

Opening needs no torch; reading tensors brings it.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.config.model import ModelConfig
from octavo.errors import InvalidInput, short_repr
from octavo.files import exists, open_regular, unreadable
from octavo.gguf_file import MAGIC, GGUFFile
from octavo.loader.dummy import count_parameters, iterate_parameter_shapes, random_sources
from octavo.loader.gguf import GGUFWeights
from octavo.loader.gguf_config import read_gguf_config
from octavo.loader.hf_config import CONFIG_FILE, read_hf_config
from octavo.loader.reading import ReadStep
from octavo.loader.safetensors import SafetensorsFiles
from octavo.loader.tensor_source import TensorHeader, TensorSource

if TYPE_CHECKING:
    from torch import Tensor

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
FLOAT32_BYTES = 4


class Checkpoint(ABC):
    """A model on disk. Opening reads and checks headers only."""

    config: ModelConfig
    load_format: str
    """"safetensors", "gguf" or "dummy"."""

    @abstractmethod
    def sources(self, num_threads: int = 1) -> Iterator[TensorSource]:
        """The tensors one at a time, each to be read before the next is asked for, with so many threads.

        Read, they have the stored float dtype (quantised GGUF tensors: float32) and may be views of the mapped file:
        copy from them, never write to them. Can be called again."""

    @abstractmethod
    def headers(self) -> list[TensorHeader]:
        """What is known of the tensors unread, in the order of `sources`."""

    def tensors(self) -> "Iterator[tuple[str, Tensor]]":
        """(Hugging Face name, tensor) one at a time, read."""
        return ((source.name, source.read()) for source in self.sources())

    @abstractmethod
    def num_weights(self) -> int:
        """Elements of all tensors, from the headers."""

    @abstractmethod
    def read_steps(self) -> list[ReadStep]:
        """What reading floats takes, tensor by tensor in the order of `sources`, from the headers."""


class SafetensorsCheckpoint(Checkpoint):
    """A folder in Hugging Face format."""

    load_format = "safetensors"

    def __init__(self, folder: Path) -> None:
        config = read_hf_config(folder)
        self._files = SafetensorsFiles(folder)
        # what config.json says is the dtype of training; files are sometimes saved in another
        self.config = replace(config, dtype=self._files.stored_dtype())
        check_tensors(self.config, {name: info.shape for name, info in self._files.infos.items()}, folder)

    def sources(self, num_threads: int = 1) -> Iterator[TensorSource]:
        return self._files.sources()

    def headers(self) -> list[TensorHeader]:
        return self._files.headers()

    def num_weights(self) -> int:
        return sum(info.num_elements for info in self._files.infos.values())

    def read_steps(self) -> list[ReadStep]:
        return self._files.read_steps()


class GGUFCheckpoint(Checkpoint):
    """A GGUF file."""

    load_format = "gguf"

    def __init__(self, path: Path) -> None:
        file = GGUFFile(path)
        self.config = read_gguf_config(file)
        self._weights = GGUFWeights(file, self.config)
        check_tensors(self.config, {header.name: header.shape for header in self._weights.headers()}, path)

    def sources(self, num_threads: int = 1) -> Iterator[TensorSource]:
        return self._weights.sources(num_threads)

    def headers(self) -> list[TensorHeader]:
        return self._weights.headers()

    def num_weights(self) -> int:
        return self._weights.num_weights()

    def read_steps(self) -> list[ReadStep]:
        return self._weights.read_steps()


class DummyCheckpoint(Checkpoint):
    """Random weights for the config of a folder or of a GGUF file; no weights are read."""

    load_format = "dummy"

    def __init__(self, path: Path, seed: int) -> None:
        self.config = read_gguf_config(GGUFFile(path)) if path.is_file() else read_hf_config(path)
        self._seed = seed

    def sources(self, num_threads: int = 1) -> Iterator[TensorSource]:
        return random_sources(iterate_parameter_shapes(self.config), self._seed)

    def headers(self) -> list[TensorHeader]:
        shapes = iterate_parameter_shapes(self.config)
        return [TensorHeader(name, shape, "float32", math.prod(shape) * FLOAT32_BYTES) for name, shape in shapes]

    def num_weights(self) -> int:
        return count_parameters(self.config)[1]

    def read_steps(self) -> list[ReadStep]:
        sizes = (math.prod(shape) for _, shape in iterate_parameter_shapes(self.config))
        return [ReadStep(size, size * FLOAT32_BYTES, 0) for size in sizes]


def check_tensors(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], source: Path) -> None:
    """Compare the tensors a file describes with those the model needs, before anything is built from the config.

    Stops at the first that is not there, so it takes no longer than the file has tensors, whatever the config says.

    Raises:
        InvalidInput: a tensor of the model is missing in `shapes` or has another shape.
    """
    for name, needed in iterate_parameter_shapes(config):
        found = shapes.get(name)
        if found is None:
            raise InvalidInput(
                f"{source}: tensors of the model are missing, the first is {name}: the config describes "
                f"{count_parameters(config)[0]} tensors, the weights hold {len(shapes)}; get the files again"
            )
        if found != needed:
            raise InvalidInput(
                f"{source}: tensor {name} has shape {short_repr(found)}, the model needs {needed}; "
                "config and weights do not belong together"
            )


def open_checkpoint(path: Path, load_format: str = "auto", seed: int = 0) -> Checkpoint:
    """The checkpoint at `path`: a folder in Hugging Face format or a GGUF file. `seed` is that of dummy weights.

    Raises:
        InvalidInput: nothing there, not readable as `load_format`, incomplete, or a model that is not supported.
    """
    if load_format not in LOAD_FORMATS:
        raise InvalidInput(f"load_format={load_format!r} is not known, use {', '.join(LOAD_FORMATS)}")
    path = Path(path)
    if not exists(path):
        raise InvalidInput(f"{path} does not exist; give a folder in Hugging Face format or a .gguf file")
    if path.is_dir():
        _check_folder(path, load_format)
        return DummyCheckpoint(path, seed) if load_format == "dummy" else SafetensorsCheckpoint(path)
    _check_file(path, load_format)
    return DummyCheckpoint(path, seed) if load_format == "dummy" else GGUFCheckpoint(path)


def _check_folder(path: Path, load_format: str) -> None:
    gguf_files = sorted(path.glob("*.gguf"))
    hint = f"give the file itself: {gguf_files[0]}" if gguf_files else f"it needs {CONFIG_FILE} and the weights"
    if load_format == "gguf":
        raise InvalidInput(f"load_format='gguf' needs a .gguf file, {path} is a folder; {hint}")
    if not exists(path / CONFIG_FILE):
        raise InvalidInput(f"{path} is no folder in Hugging Face format: {CONFIG_FILE} is missing; {hint}")


def _check_file(path: Path, load_format: str) -> None:
    if load_format == "safetensors":
        raise InvalidInput(f"load_format='safetensors' needs a folder in Hugging Face format, {path} is a file")
    with open_regular(path) as file:
        try:
            is_gguf = file.read(len(MAGIC)) == MAGIC
        except OSError as error:
            raise unreadable(path, error) from error
    if not is_gguf and path.suffix == ".safetensors":
        raise InvalidInput(f"{path} is a file of weights; give the folder it lies in, which also holds {CONFIG_FILE}")
