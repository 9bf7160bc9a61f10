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
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from octavo.errors import InvalidInput, not_built
from octavo.loader.fields import read_json_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""As the safetensors library."""
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

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) in the stored dtype, one at a time: views of the mapped file, not to be written."""
        for path, infos in self._placed.items():
            with _open(path) as shard:
                for name in infos:
                    yield name, shard.get_tensor(name)

    def _read_index(self, path: Path) -> None:
        weight_map = read_json_object(path).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise InvalidInput(f"{path}: weight_map is missing or empty; get the file again")
        for name, file_name in weight_map.items():
            if not isinstance(file_name, str) or not file_name or Path(file_name).name != file_name:
                raise InvalidInput(f"{path}: {name} is placed in {file_name!r}, which is no file name of this folder")
        for file_name in sorted(set(weight_map.values())):
            shard = self._folder / file_name
            if not shard.is_file():
                raise InvalidInput(f"{shard} is missing, {path.name} names it; get the file again")
            header = read_header(shard)
            # a tensor that lies in two shards is taken from the one the index names
            self._placed[shard] = {n: i for n, i in header.items() if weight_map.get(n, file_name) == file_name}
            absent = [n for n, f in weight_map.items() if f == file_name and n not in header]
            if absent:
                raise InvalidInput(
                    f"{shard} does not hold {absent[0]} ({len(absent)} tensors are absent) although {path.name} "
                    "says so; the files do not belong together, get them again"
                )


def _open(path: Path) -> Any:
    """The library checks what read_header does not: that shapes and places fit each other."""
    try:
        return safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise InvalidInput(f"{path} is not readable: {error}; get the file again") from error


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors a safetensors file describes; checks that the file is as long as it says."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            header_size = int.from_bytes(start, "little")
            text = file.read(header_size) if header_size <= MAX_HEADER_BYTES else b""
            size = file.seek(0, os.SEEK_END)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror or error}") from error
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
    """The tensors and the bytes of data."""
    infos, data_size = {}, 0
    try:
        for name, entry in json.loads(text).items():
            if name == "__metadata__":
                continue
            infos[name] = TensorInfo(str(entry["dtype"]), tuple(int(n) for n in entry["shape"]))
            data_size = max(data_size, int(entry["data_offsets"][1]))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise InvalidInput(f"{path}: its header is not a safetensors header; get the file again") from error
    for name, info in infos.items():
        if info.dtype not in ITEM_SIZES:
            raise not_built(
                f"{path}: {name} is {info.dtype}; reading other than {', '.join(ITEM_SIZES)}",
                "use the unquantised checkpoint or a GGUF file",
            )
    return infos, data_size


def _cut_short(path: Path, size: int, expected: int) -> InvalidInput:
    return InvalidInput(
        f"{path} has {size} bytes, expected are {expected}; the download was not finished, get the file again"
    )


def _single_file(folder: Path) -> Path | None:
    """The one file with all weights; None when there is an index of shards."""
    if (folder / SINGLE_FILE).exists():
        return folder / SINGLE_FILE
    if (folder / INDEX_FILE).exists():
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
