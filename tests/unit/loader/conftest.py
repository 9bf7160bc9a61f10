"""Tiny GGUF files."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_gguf


@pytest.fixture
def write_gguf(tmp_path) -> Callable[..., Path]:
    """write(config, weights, quant=F32, name="model.gguf", ...) -> path: `tiny_gguf.write_gguf` into tmp_path."""

    def write(*args: object, name: str = "model.gguf", **options: object) -> Path:
        return tiny_gguf.write_gguf(tmp_path / name, *args, **options)

    return write
