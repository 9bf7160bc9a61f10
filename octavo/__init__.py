"""Octavo: a serving engine for large language models. CPU-first, GPU-ready, exact."""

from typing import TYPE_CHECKING, Any

from octavo.envs import bound_openmp_spin

if TYPE_CHECKING:
    from octavo.engine.async_llm import AsyncLLM
    from octavo.engine.llm_engine import LLMEngine
    from octavo.entrypoints.llm import LLM
    from octavo.errors import EngineDeadError
    from octavo.protocol.beam_search import BeamSearchParams
    from octavo.protocol.outputs import CompletionOutput, Logprob, RequestOutput
    from octavo.protocol.sampling_params import RequestOutputKind, SamplingParams

__version__ = "0.1.0"

bound_openmp_spin()

_EXPORTS = {
    "AsyncLLM": "octavo.engine.async_llm",
    "BeamSearchParams": "octavo.protocol.beam_search",
    "LLM": "octavo.entrypoints.llm",
    "LLMEngine": "octavo.engine.llm_engine",
    "EngineDeadError": "octavo.errors",
    "CompletionOutput": "octavo.protocol.outputs",
    "Logprob": "octavo.protocol.outputs",
    "RequestOutput": "octavo.protocol.outputs",
    "RequestOutputKind": "octavo.protocol.sampling_params",
    "SamplingParams": "octavo.protocol.sampling_params",
}
__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineDeadError",
    "LLMEngine",
    "Logprob",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
]


def __getattr__(name: str) -> Any:
    """Exports are imported when first used: `octavo --help` must not wait for torch."""
    if name not in _EXPORTS:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value
