"""Architecture names of config.json and the classes that serve them. A class is imported when it is asked for."""

from importlib import import_module

from octavo.errors import InvalidInput
from octavo.models.base import CausalLM

_MODELS = {
    "LlamaForCausalLM": ("octavo.models.llama", "LlamaForCausalLM"),
    "MistralForCausalLM": ("octavo.models.llama", "MistralForCausalLM"),
    "Qwen2ForCausalLM": ("octavo.models.qwen2", "Qwen2ForCausalLM"),
}


def supported_architectures() -> list[str]:
    """Names that `get_model_class` takes."""
    return sorted(_MODELS)


def get_model_class(architecture: str) -> type[CausalLM]:
    """The class that serves `architecture`.

    Raises:
        InvalidInput: there is none.
    """
    if architecture not in _MODELS:
        raise InvalidInput(
            f"architecture {architecture!r} is not supported; there are {', '.join(supported_architectures())}"
        )
    module, name = _MODELS[architecture]
    model_class: type[CausalLM] = getattr(import_module(module), name)
    return model_class
