"""The cpu platform: the operators as native kernels, from csrc/cpu. A row's result is one fixed sequence of operations,
so it has the same bits alone, in a batch, in chunks, and at any number of threads.
"""

from octavo.ops.cpu.platform import CpuPlatform

__all__ = ["CpuPlatform"]
