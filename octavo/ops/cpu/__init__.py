"""The cpu platform: the operators as native kernels, from csrc/cpu. A row's result is one fixed sequence of operations,
so it has the same bits alone, in a batch, in chunks, and at any number of threads.

Imports without the native extension; CpuPlatform does not.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.ops.cpu.platform import CpuPlatform

__all__ = ["CpuPlatform"]


def __getattr__(name: str) -> object:
    if name != "CpuPlatform":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from octavo.ops.cpu.platform import CpuPlatform

    return CpuPlatform
