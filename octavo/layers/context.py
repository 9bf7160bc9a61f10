"""What every layer is built with: the platform, the dtype, and its place among the processes that share the model."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from octavo.config.engine_config import ParallelConfig
from octavo.errors import InvalidInput
from octavo.ops.interface import Platform


class TensorParallelGroup:
    """The processes that hold the shards of one model. This one is a group of one: nothing to exchange."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x over all processes; the same on each."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Every process's x, in rank order, joined along the last dim; the same on each."""
        return x


@dataclass(frozen=True, slots=True)
class LayerContext:
    """Shared by all layers of a model."""

    platform: Platform
    dtype: torch.dtype
    """Of weights."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    group: TensorParallelGroup = field(default_factory=TensorParallelGroup)

    @property
    def activation_dtype(self) -> torch.dtype:
        """Of activations, norm weights and biases."""
        return self.platform.activation_dtype(self.dtype)

    @property
    def rank(self) -> int:
        return self.parallel.tensor_parallel_rank

    @property
    def size(self) -> int:
        return self.parallel.tensor_parallel_size

    def split(self, total: int, what: str) -> int:
        """This process's share of `total`.

        Raises:
            InvalidInput: `total` does not divide evenly.
        """
        if total % self.size:
            raise InvalidInput(
                f"{what}={total} cannot be split evenly over tensor_parallel_size={self.size}; "
                "use a size that divides it"
            )
        return total // self.size
