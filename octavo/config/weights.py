"""How the weights are kept: the choice between floats and few bits, its reason, and what it takes. Pure.

A matrix has one of three forms: float (of the chosen dtype), int8 or int4: groups of 32 weights with a scale, and in
int4 a minimum. What is no matrix, norms and biases, has the form vector and is a float, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from octavo.config.engine_args import EngineArgs
from octavo.config.engine_config import WorkerConfig
from octavo.config.memory import format_bytes
from octavo.config.model import ModelConfig
from octavo.config.options import QUANTIZATIONS
from octavo.config.platform_traits import PlatformTraits
from octavo.errors import InvalidInput

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GROUP = 32
FORMS = ("int4", "int8", "float")
FORM_BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True, kw_only=True)
class WeightChoice:
    """What was decided."""

    dtype: str
    """Of everything that is not kept in few bits."""
    quantization: str = "none"
    """none: all is kept in floats; gguf: as the file has it; int8, int4: quantised while it is loaded."""
    group_bytes: Mapping[int, int] = field(default_factory=dict)
    """Bits the platform computes with -> bytes a group takes there. Other bits are dequantised to float32."""

    def bytes_of(self, form: str, elements: int) -> int:
        """What the platform keeps of so many weights."""
        if form not in FORM_BITS:
            return elements * ITEM_BYTES[self.dtype]
        group = self.group_bytes.get(FORM_BITS[form], GROUP * ITEM_BYTES["float32"])
        return -(-elements // GROUP) * group

    def name_of(self, form: str) -> str:
        """The form, for people."""
        if form not in FORM_BITS:
            return self.dtype
        return form if FORM_BITS[form] in self.group_bytes else f"{form} dequantised to float32"


class WeightSizes(Protocol):
    """What is known of the weights of a checkpoint."""

    def elements(self, quantization: str) -> Mapping[str, int]:
        """Form -> how many weights are kept in it.

        Raises:
            InvalidInput: these weights cannot be kept so.
        """

    def loading_peak(self, choice: WeightChoice) -> tuple[int, int]:
        """Bytes at the worst moment of loading: all that is seen to be held, and what must be there."""


def bytes_by_form(weights: WeightSizes, choice: WeightChoice) -> dict[str, int]:
    """Name of each form, the most bytes first, -> bytes of all weights in it."""
    sizes: dict[str, int] = {}
    for form, count in weights.elements(choice.quantization).items():
        name = choice.name_of(form)
        sizes[name] = sizes.get(name, 0) + choice.bytes_of(form, count)
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def matrix_forms(weights: WeightSizes, choice: WeightChoice) -> tuple[str, ...]:
    """Names of the forms in which the matrices are kept."""
    elements = weights.elements(choice.quantization)
    return tuple(choice.name_of(form) for form in FORMS if elements.get(form))


def choose_weights(
    args: EngineArgs, model: ModelConfig, load_format: str, weights: WeightSizes, platform: PlatformTraits
) -> tuple[WeightChoice, str, str]:
    """The choice, the reason of its dtype, and that of its quantization (empty: there was nothing to choose).

    Raises:
        InvalidInput: the weights cannot be kept as asked, or the platform cannot compute so.
    """
    quantization, reason = _choose_quantization(args, model, load_format, weights, platform)
    dtype, dtype_reason = platform.auto_dtype if args.dtype == "auto" else (args.dtype, "as asked")
    if not _few_bits(weights, quantization) <= set(platform.weight_bits):
        if args.dtype not in ("auto", "float32"):
            raise InvalidInput(
                f"quantization={quantization!r} with dtype={args.dtype!r}: the {platform.name} platform has no kernels "
                "for it and computes dequantised weights, in float32 only; give dtype='float32' or leave it out"
            )
        dtype, dtype_reason = (
            "float32",
            f"the {platform.name} platform has no kernels for few bits: it dequantises them",
        )
    return weight_choice(dtype, quantization, platform), dtype_reason, reason


def weight_choice(dtype: str, quantization: str, platform: PlatformTraits) -> WeightChoice:
    """The choice on this platform."""
    group_bytes = {bits: platform.weight_group_bytes[bits] for bits in platform.weight_bits}
    return WeightChoice(dtype=dtype, quantization=quantization, group_bytes=group_bytes)


def smaller_quantizations(weights: WeightSizes, dtype: str, than: int, platform: PlatformTraits) -> list[str]:
    """Those that there are kernels for and that make less than `than` bytes of these weights."""
    found = []
    for quantization in QUANTIZATIONS:
        try:
            computed = _few_bits(weights, quantization) <= set(platform.weight_bits)
        except InvalidInput:
            continue
        if computed and sum(bytes_by_form(weights, weight_choice(dtype, quantization, platform)).values()) < than:
            found.append(quantization)
    return found


def _choose_quantization(
    args: EngineArgs, model: ModelConfig, load_format: str, weights: WeightSizes, platform: PlatformTraits
) -> tuple[str, str]:
    if args.quantization is not None:
        weights.elements(args.quantization)  # raises where it cannot be
        return args.quantization, "as asked"
    if load_format != "gguf" or model.dtype != "quantized":
        return "none", ""
    if args.dtype != "auto":
        return "none", f"dtype={args.dtype} asks for the dequantised weights"
    missing = _few_bits(weights, "gguf") - set(platform.weight_bits)
    if missing:
        return "none", f"the {platform.name} platform has no kernels for {_listing(missing)}"
    return "gguf", "as the file has them; a dtype, or quantization=none, dequantises them"


def _few_bits(weights: WeightSizes, quantization: str) -> set[int]:
    return {FORM_BITS[form] for form, n in weights.elements(quantization).items() if form in FORM_BITS and n}


def _listing(bits: set[int]) -> str:
    return " and ".join(f"{number} bits" for number in sorted(bits))


def report_kernels(kernels: Mapping[str, str], worker: WorkerConfig) -> dict[str, str]:
    """The platform's report, with the forms of the weights where there was a choice."""
    report = dict(kernels)
    if worker.quantization != "none":
        forms = ", ".join(worker.weight_forms)
        report |= {kind: f"{report[kind]}: {forms}" for kind in ("linear", "embedding") if kind in report}
    return report


def weights_note(sizes: Mapping[str, int], choice: WeightChoice, reason: str) -> str:
    """The line at start."""
    parts = " + ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items() if size)
    return f"weights: {parts} (quantization {choice.quantization}: {reason})"
