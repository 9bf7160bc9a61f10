"""Engines that `octavo bench compare` measures, each in a process of its own, maybe of another environment.

A rival is a script: `python SCRIPT OPTIONS_AS_JSON`. It loads, writes a line of JSON {version, load, ...}, and answers
each line {requests [[token ids, output tokens], ...], batch_size} with a line {seconds, output_tokens, latencies,
between_tokens, kv_utilization, peak_rss}: seconds, and bytes. Full output lengths are computed. What else a library
prints must not reach stdout. A rival other than this engine uses nothing of this package: that is all it needs to know.
"""

from typing import NamedTuple


class RivalKind(NamedTuple):
    """Another engine."""

    script: str
    """The module here that runs it."""
    module: str
    """What it imports."""
    packages: tuple[str, ...]
    """What pip installs for it; {torch} is the torch of this installation."""
    reads: tuple[str, ...]
    """dtypes of the GGUF files it reads, the best first; empty: any model that this engine reads, as it is."""


RIVALS = {
    "transformers": RivalKind(
        "static_batches", "transformers", ("torch=={torch}", "transformers>=5.0", "accelerate>=1.1", "gguf>=0.17"), ()
    ),
    "llama-cpp": RivalKind(
        "llama_cpp_slots", "llama_cpp", ("llama-cpp-python",), ("float32", "bfloat16", "float16")
    ),
    "openvino": RivalKind("openvino_blocks", "openvino_genai", ("openvino-genai",), ("float16",)),
}  # fmt: skip
