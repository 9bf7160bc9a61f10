"""Memory that the system refuses is named in one sentence, and other faults stay what they are."""

import pytest
import torch

from octavo.errors import InvalidInput
from octavo.worker.worker import _memory_for


def test_an_allocation_that_torch_is_refused_names_what_it_was_for_and_the_way_out():
    with (
        pytest.raises(InvalidInput, match=r"refuses the memory for the KV cache .*lower kv_cache_memory.*ulimit -v"),
        _memory_for("the KV cache", "lower kv_cache_memory"),
    ):
        torch.empty(2**60, dtype=torch.uint8)


def test_so_does_one_that_python_is_refused():
    with pytest.raises(InvalidInput, match="the weights"), _memory_for("the weights", "use a smaller model"):
        bytearray(2**62)


def test_another_fault_is_not_taken_for_it():
    with pytest.raises(RuntimeError, match="something else"), _memory_for("the weights", "use a smaller model"):
        raise RuntimeError("something else")
