"""Reading the structure of a GGUF file: metadata and where each tensor lies. No torch, no meaning given to any key.

The gguf package's own reader makes a Python object of every one of some 300,000 vocabulary strings (seconds). This one
walks over them once when the file is opened and decodes a value only when it is asked for. The file is mapped, not
read; it is checked to be complete when it is opened.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian.
"""

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType

from octavo.errors import InvalidInput, printable
from octavo.files import open_regular, unreadable

MAGIC = b"GGUF"
READABLE_VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
STRING, ARRAY = 8, 9
SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
"""GGUF value type -> numpy dtype."""
SIZES = {kind: np.dtype(dtype).itemsize for kind, dtype in SCALARS.items()}
_U32, _U64, _ARRAY_HEAD = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<IQ")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies in the file."""

    name: str
    shape: tuple[int, ...]
    """In elements, slowest dimension first (rows, columns), as numpy and torch write it."""
    type: GGMLQuantizationType | int
    """A bare number is a type this release of the gguf package does not know."""
    offset: int
    """Of the first byte in the file."""
    num_bytes: int
    """0 where the type is not known."""

    @property
    def type_name(self) -> str:
        return self.type.name if isinstance(self.type, GGMLQuantizationType) else f"number {self.type}"

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class GGUFMetadata(Mapping[str, object]):
    """Key -> value (int, float, bool, str or list), decoded when first asked for.

    Raises:
        InvalidInput: on access, a string is not UTF-8.
    """

    def __init__(self, source: str, data: mmap.mmap, places: dict[str, tuple[int, int]]) -> None:
        """`places`: for each key its value type and the offset of its value. `data` was checked to hold them all."""
        self._source = source
        self._data = data
        self._places = places
        self._values: dict[str, object] = {}

    def __getitem__(self, key: str) -> object:
        if key not in self._values:
            kind, offset = self._places[key]
            try:
                self._values[key] = self._decode(kind, offset)
            except UnicodeDecodeError as error:
                name = printable(key)
                raise InvalidInput(f"{self._source}: metadata {name} is not UTF-8; get the file again") from error
        return self._values[key]

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def array_length(self, key: str) -> int:
        """Elements of the array at `key`, without decoding it; raises KeyError, or TypeError if it is no array."""
        kind, offset = self._places[key]
        if kind != ARRAY:
            raise TypeError(f"metadata {key} is no array")
        return int(_ARRAY_HEAD.unpack_from(self._data, offset)[1])

    def _decode(self, kind: int, offset: int) -> object:
        if kind != ARRAY:
            return self._decode_items(kind, 1, offset)[0]
        item_kind, count = _ARRAY_HEAD.unpack_from(self._data, offset)
        return self._decode_items(item_kind, count, offset + _ARRAY_HEAD.size)

    def _decode_items(self, kind: int, count: int, offset: int) -> list[object]:
        if kind == STRING:
            return self._decode_strings(count, offset)
        return np.frombuffer(self._data, SCALARS[kind], count, offset).tolist() if count else []

    def _decode_strings(self, count: int, offset: int) -> list[object]:
        data, length_at = self._data, _U64.unpack_from
        strings: list[object] = []
        for _ in range(count):
            start = offset + 8
            offset = start + length_at(data, offset)[0]
            strings.append(data[start:offset].decode())
        return strings


class GGUFFile:
    """One opened GGUF file.

    Raises:
        InvalidInput: `path` is no GGUF file, of another version or byte order, or shorter than its header says.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._data = _map(self.path)
        walk = _HeaderWalk(str(path), self._data)
        self.version = walk.version
        self.metadata = GGUFMetadata(str(path), self._data, walk.places)
        alignment = self.metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise InvalidInput(f"{path}: general.alignment is {alignment!r}, it must be a power of two")
        data_start = -(-walk.end // alignment) * alignment
        self.tensors: dict[str, GGUFTensor] = {}
        for name, (shape, kind, offset) in walk.tensors.items():
            self.tensors[name] = _place_tensor(str(path), name, shape, kind, data_start + offset)
        self._check_complete()

    def raw(self, tensor: GGUFTensor) -> np.ndarray:
        """The stored bytes of `tensor`, uint8 [num_bytes], mapped read-only and not copied."""
        return self._bytes[tensor.offset : tensor.offset + tensor.num_bytes]

    def release(self, tensor: GGUFTensor) -> None:
        """Give the pages of its bytes back to the system; they are read again when they are looked at."""
        start = tensor.offset // mmap.PAGESIZE * mmap.PAGESIZE
        if tensor.num_bytes:
            self._data.madvise(mmap.MADV_DONTNEED, start, tensor.offset + tensor.num_bytes - start)

    @cached_property
    def _bytes(self) -> np.ndarray:
        return np.frombuffer(self._data, np.uint8)

    def _check_complete(self) -> None:
        expected = max((tensor.offset + tensor.num_bytes for tensor in self.tensors.values()), default=0)
        if len(self._data) < expected:
            raise InvalidInput(
                f"{self.path} has {len(self._data)} bytes but its header describes {expected}; "
                "the download was not finished, get the file again"
            )


class _HeaderWalk:
    """One pass over the header: finds every value and tensor, decodes only keys and tensor descriptions."""

    def __init__(self, source: str, data: mmap.mmap) -> None:
        self._source = source
        self._data = data
        if data[:4] != MAGIC:
            raise InvalidInput(
                f"{source} ({len(data)} bytes) is no GGUF file: it begins with {data[:4]!r}, not {MAGIC!r}"
            )
        self.end = 4
        self.places: dict[str, tuple[int, int]] = {}
        self.tensors: dict[str, tuple[tuple[int, ...], int, int]] = {}
        try:
            self._walk()
        except (struct.error, OverflowError, _Truncated) as error:
            raise InvalidInput(
                f"{source} has {len(data)} bytes and ends inside its header, expected are at least {self.end + 1}; "
                "the download was not finished, get the file again"
            ) from error
        except UnicodeDecodeError as error:
            raise InvalidInput(f"{source}: a name in the header is not UTF-8; get the file again") from error

    def _walk(self) -> None:
        self.version = self._u32()
        if self.version not in READABLE_VERSIONS:
            hint = "it is big endian" if self.version & 0xFFFF == 0 else "convert it with a current llama.cpp"
            raise InvalidInput(f"{self._source}: GGUF version {self.version} is not read, only 2 and 3 are; {hint}")
        num_tensors, num_values = self._u64(), self._u64()
        for _ in range(num_values):
            key, kind = self._string(), self._u32()
            if key in self.places:
                raise InvalidInput(f"{self._source}: metadata {printable(key)} is there twice; get the file again")
            self.places[key] = (kind, self.end)
            self._skip(key, kind)
        for _ in range(num_tensors):
            name, num_dimensions = self._string(), self._u32()
            if name in self.tensors:  # here and not later: a wrong count would be counted out over zeros
                raise InvalidInput(f"{self._source}: tensor {printable(name)!r} is there twice; get the file again")
            if num_dimensions > MAX_DIMENSIONS:
                raise InvalidInput(
                    f"{self._source}: tensor {printable(name)} has {num_dimensions} dimensions, the limit is 4"
                )
            columns_first = [self._u64() for _ in range(num_dimensions)]
            self.tensors[name] = (tuple(reversed(columns_first)), self._u32(), self._u64())

    def _skip(self, key: str, kind: int) -> None:
        if kind in SIZES:
            self._advance(SIZES[kind])
        elif kind == STRING:
            self._skip_strings(1)
        elif kind == ARRAY:
            item_kind, count = self._u32(), self._u64()
            if item_kind in SIZES:
                self._advance(count * SIZES[item_kind])
            elif item_kind == STRING:
                self._skip_strings(count)
            else:
                raise InvalidInput(
                    f"{self._source}: metadata {printable(key)} is an array of type {item_kind}, which is not read"
                )
        else:
            raise InvalidInput(f"{self._source}: metadata {printable(key)} has value type {kind}, known are 0 to 12")

    def _skip_strings(self, count: int) -> None:
        data, offset, length_at = self._data, self.end, _U64.unpack_from
        if count * 8 > len(data) - offset:  # each has at least its length
            raise _Truncated
        try:
            for _ in range(count):
                offset += 8 + length_at(data, offset)[0]
        finally:
            self.end = min(offset, len(data))
        self._advance(offset - self.end)

    def _string(self) -> str:
        length = self._u64()
        start = self.end
        self._advance(length)
        return self._data[start : self.end].decode()

    def _u32(self) -> int:
        value = _U32.unpack_from(self._data, self.end)[0]
        self.end += 4
        return int(value)

    def _u64(self) -> int:
        value = _U64.unpack_from(self._data, self.end)[0]
        self.end += 8
        return int(value)

    def _advance(self, size: int) -> None:
        if self.end + size > len(self._data):
            raise _Truncated
        self.end += size


class _Truncated(Exception):
    """The header goes on behind the end of the file."""


def _map(path: Path) -> mmap.mmap:
    with open_regular(path) as file:
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise unreadable(path, error) from error
        except ValueError as error:
            raise InvalidInput(f"{path} has 0 bytes; the download was not finished, get the file again") from error


def _place_tensor(source: str, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
    try:
        known = GGMLQuantizationType(kind)
    except ValueError:
        return GGUFTensor(name, shape, kind, offset, 0)
    block_elements, block_bytes = GGML_QUANT_SIZES[known]
    row = shape[-1] if shape else 1
    if row % block_elements:
        raise InvalidInput(
            f"{source}: rows of tensor {printable(name)} have {row} elements, {known.name} needs {block_elements}s"
        )
    return GGUFTensor(name, shape, known, offset, math.prod(shape) // block_elements * block_bytes)
