"""Weights in safetensors files: one file, or shards with an index. Headers are checked before a weight is read.

The library's own errors name neither the file nor what to do; and a shard cut short must be told apart from one that
is missing. Format: https://huggingface.co/docs/safetensors (8 bytes of header length, JSON header, data).
"""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from octavo.errors import InvalidInput, not_built, printable, short_repr
from octavo.files import exists, open_regular, unreadable
from octavo.loader.fields import read_json_object
from octavo.loader.reading import ReadStep
from octavo.loader.tensor_source import TensorHeader, TensorSource

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""As the safetensors library."""
MAX_DIMENSIONS = 64
MAX_FILE_NAME = 255
ITEM_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
SHARD_NAME = re.compile(r"-\d+-of-\d+\.safetensors$")
LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a header."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * ITEM_SIZES[self.dtype]


class SafetensorsFiles:
    """The weights of one folder.

    Raises:
        InvalidInput: no weights, a shard that is missing or cut short, an index that does not fit its shards, or a
            dtype that is not a float: each with the file's name.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._placed: dict[Path, dict[str, TensorInfo]] = {}
        single = _single_file(folder)
        if single is not None:
            self._placed[single] = read_header(single)
        else:
            self._read_index(folder / INDEX_FILE)

    @property
    def infos(self) -> dict[str, TensorInfo]:
        """Every tensor, from the headers."""
        return {name: info for infos in self._placed.values() for name, info in infos.items()}

    def stored_dtype(self) -> str:
        """The dtype most of the weights have."""
        sizes: Counter[str] = Counter()
        for info in self.infos.values():
            sizes[info.dtype] += info.num_elements
        return DTYPES.get(sizes.most_common(1)[0][0], "float32") if sizes else "float32"

    def sources(self) -> Iterator[TensorSource]:
        """One a tensor, in the stored dtype: views of the mapped file, not to be written."""
        for path, infos in self._placed.items():
            with _open(path) as shard:
                for name in infos:
                    yield TensorSource(name, partial(shard.get_tensor, name))

    def headers(self) -> list[TensorHeader]:
        """One a tensor, in the order of `sources`."""
        return [
            TensorHeader(name, info.shape, DTYPES.get(info.dtype, "float32"), info.num_bytes)
            for infos in self._placed.values()
            for name, info in infos.items()
        ]

    def read_steps(self) -> list[ReadStep]:
        """One a tensor, in the order of `tensors`: a view of its shard, which is mapped until the next one's turn."""
        steps = []
        for infos in self._placed.values():
            mapped = 0
            for info in infos.values():
                mapped += info.num_bytes
                steps.append(ReadStep(info.num_elements, 0, mapped))
        return steps

    def _read_index(self, path: Path) -> None:
        weight_map = read_json_object(path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise InvalidInput(f"{path}: weight_map is missing or empty; get the file again")
        for name, file_name in weight_map.items():
            if not _is_file_name(file_name):
                raise InvalidInput(
                    f"{path}: {printable(name)} is placed in {short_repr(file_name)}, no file name of this folder"
                )
        for file_name in sorted(set(weight_map.values())):
            shard = self._folder / file_name
            if not exists(shard):
                raise InvalidInput(f"{shard} is missing, {path.name} names it; get the file again")
            header = read_header(shard)
            # a tensor that lies in two shards is taken from the one the index names
            self._placed[shard] = {n: i for n, i in header.items() if weight_map.get(n, file_name) == file_name}
            absent = [n for n, f in weight_map.items() if f == file_name and n not in header]
            if absent:
                raise InvalidInput(
                    f"{shard} does not hold {printable(absent[0])} ({len(absent)} tensors are absent) although "
                    f"{path.name} says so; the files do not belong together, get them again"
                )


def _is_file_name(name: object) -> bool:
    """A name in the same folder, not a path out of it."""
    return isinstance(name, str) and 0 < len(name) <= MAX_FILE_NAME and name.isprintable() and Path(name).name == name


def _open(path: Path) -> Any:
    """The library checks what read_header does not: that the tensors lie one behind the other without a gap."""
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise InvalidInput(f"{path} is not readable: {error}; get the file again") from error


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors a safetensors file describes; checks that the file is as long as it says."""
    with open_regular(path) as file:
        try:
            start = file.read(8)
            header_size = int.from_bytes(start, "little")
            text = file.read(header_size) if header_size <= MAX_HEADER_BYTES else b""
            size = file.seek(0, os.SEEK_END)
        except OSError as error:
            raise unreadable(path, error) from error
    if start == LFS_POINTER[:8]:
        raise InvalidInput(f"{path} is a Git LFS pointer of {size} bytes, not the weights; fetch it with git lfs pull")
    if len(start) < 8 or (header_size <= MAX_HEADER_BYTES and len(text) < header_size):
        raise _cut_short(path, size, 8 + header_size if len(start) == 8 else 9)
    if header_size > MAX_HEADER_BYTES:
        raise InvalidInput(
            f"{path} ({size} bytes) is no safetensors file: its header would have {header_size} bytes, the limit is "
            f"{MAX_HEADER_BYTES}; get the file again"
        )
    infos, data_size = _parse_header(path, text)
    expected = 8 + header_size + data_size
    if size < expected:
        raise _cut_short(path, size, expected)
    if size > expected:
        raise InvalidInput(f"{path} has {size} bytes but its header describes {expected}; get the file again")
    return infos


def _parse_header(path: Path, text: bytes) -> tuple[dict[str, TensorInfo], int]:
    """The tensors and the bytes of data. The shape of every tensor fits the place it has."""
    try:
        entries = {name: _parse_entry(e) for name, e in json.loads(text).items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidInput(f"{path}: its header is not a safetensors header; get the file again") from error
    for name, (info, place) in entries.items():
        _check_entry(path, name, info, place)
    data_size = max((end for _, (_, end) in entries.values()), default=0)
    return {name: info for name, (info, _) in entries.items()}, data_size


def _parse_entry(entry: Any) -> tuple[TensorInfo, tuple[int, int]]:
    """A tensor and its place in the data. Raises one of Python's own errors when it is not of the form."""
    shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
    if len(shape) > MAX_DIMENSIONS or not all(type(number) is int and number >= 0 for number in (*shape, begin, end)):
        raise ValueError("sizes and places are whole numbers")
    return TensorInfo(str(entry["dtype"]), shape), (begin, end)


def _check_entry(path: Path, name: str, info: TensorInfo, place: tuple[int, int]) -> None:
    if info.dtype not in ITEM_SIZES:
        raise not_built(
            f"{path}: {printable(name)} is {printable(info.dtype)}; reading other than {', '.join(ITEM_SIZES)}",
            "use the unquantised checkpoint or a GGUF file",
        )
    if info.num_bytes != place[1] - place[0]:
        raise InvalidInput(
            f"{path} is not readable: its header gives {printable(name)} the shape {short_repr(info.shape)} in "
            f"{info.dtype} but the bytes {short_repr(place[0])} to {short_repr(place[1])}, which do not fit; "
            "get the file again"
        )


def _cut_short(path: Path, size: int, expected: int) -> InvalidInput:
    return InvalidInput(
        f"{path} has {size} bytes, expected are {expected}; the download was not finished, get the file again"
    )


def _single_file(folder: Path) -> Path | None:
    """The one file with all weights; None when there is an index of shards."""
    if exists(folder / SINGLE_FILE):
        return folder / SINGLE_FILE
    if exists(folder / INDEX_FILE):
        return None
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1 and not SHARD_NAME.search(files[0].name):
        return files[0]
    if files:
        names = ", ".join(file.name for file in files[:4])
        raise InvalidInput(f"{folder} holds {names} but no {INDEX_FILE} that joins them; get the index too")
    others = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
    hint = f"{others[0]} is not read, convert it to safetensors" if others else "get the weights too"
    raise InvalidInput(f"{folder} holds no weights: neither {SINGLE_FILE} nor {INDEX_FILE}; {hint}")
