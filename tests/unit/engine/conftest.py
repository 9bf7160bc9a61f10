"""What several files here ask for by name."""

from output_core import core, tokenizer

__all__ = ["core", "tokenizer"]
