"""config.json and generation_config.json -> ModelConfig. No torch, no weights.

Both spellings load: transformers 5 (`rope_parameters` with `rope_theta` inside, `dtype`) and older (`rope_scaling`
with `type` or `rope_type`, `rope_theta`, `torch_dtype`). What an architecture would compute differently from us is
refused by name; fields that only training or generation helpers read are left alone.
"""

from dataclasses import dataclass
from pathlib import Path

from octavo.config.model import ModelConfig
from octavo.errors import InvalidInput, not_built, printable
from octavo.files import exists
from octavo.loader.fields import MAX_INTEGER, Fields, read_json_object
from octavo.loader.rope_config import read_rope, supported_length
from octavo.logging import get_logger

logger = get_logger(__name__)

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"


@dataclass(frozen=True, slots=True)
class ArchitectureRules:
    """How one architecture reads its config.json; the defaults are those of its transformers class."""

    qkv_bias: bool | None
    """None: what attention_bias says, for the output projection too."""
    sliding_window: str
    """"none": has none. "uniform": sliding_window, on every layer. "by_layer": use_sliding_window decides."""
    mlp_bias: bool
    """The field mlp_bias is looked at."""
    default_window: int | None = None


ARCHITECTURES = {
    "LlamaForCausalLM": ArchitectureRules(qkv_bias=None, sliding_window="none", mlp_bias=True),
    "MistralForCausalLM": ArchitectureRules(False, sliding_window="uniform", mlp_bias=False, default_window=4096),
    "Qwen2ForCausalLM": ArchitectureRules(True, sliding_window="by_layer", mlp_bias=False, default_window=4096),
}
MODEL_TYPES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
"""model_type -> architecture, for a config.json without `architectures`."""

ACTIVATIONS = {"silu": "silu", "swish": "silu"}
STORED_DTYPES = ("float32", "bfloat16", "float16")
SAMPLING_RANGES = {"temperature": (0.0, None), "top_p": (0.0, 1.0), "top_k": (-1, None), "min_p": (0.0, 1.0)}
"""Fields of generation_config.json that become sampling defaults, with their bounds."""


def read_hf_config(folder: Path) -> ModelConfig:
    """The ModelConfig of a folder in Hugging Face format.

    Raises:
        InvalidInput: a file is not readable, a field is missing, contradicts another or asks for what is not there.
    """
    path = folder / CONFIG_FILE
    fields = Fields(read_json_object(path), str(path))
    generation_path = folder / GENERATION_FILE
    generation_values = read_json_object(generation_path) if exists(generation_path) else {}
    return parse_hf_config(fields, Fields(generation_values, str(generation_path)))


def parse_hf_config(fields: Fields, generation: Fields) -> ModelConfig:
    """`read_hf_config` on what was read. An empty `generation` is a folder without generation_config.json."""
    architecture = _architecture(fields)
    rules = ARCHITECTURES[architecture]
    if "quantization_config" in fields:
        raise not_built(
            f"{fields.source}: quantization_config (a checkpoint with quantised weights)",
            "use the unquantised checkpoint or a GGUF file",
        )
    num_heads = fields.integer("num_attention_heads")
    head_dim = _head_dim(fields, num_heads)
    rope = read_rope(fields)
    max_positions = supported_length(rope, fields.integer("max_position_embeddings"))
    attention_bias = fields.boolean("attention_bias", bool(rules.qkv_bias))
    if rules.qkv_bias is not None and attention_bias != rules.qkv_bias:
        raise fields.refusal("attention_bias", f"{str(rules.qkv_bias).lower()} or absent for {architecture}")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, num_heads),
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        hidden_act=_activation(fields),
        rope=rope,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        qkv_bias=attention_bias,
        attention_output_bias=attention_bias and rules.qkv_bias is None,
        mlp_bias=_mlp_bias(fields, rules, architecture),
        sliding_window=_sliding_window(fields, rules, max_positions),
        dtype=_dtype(fields),
        eos_token_ids=tuple(sorted({*_token_ids(fields), *_token_ids(generation)})),
        default_sampling=read_default_sampling(generation),
    )


def _architecture(fields: Fields) -> str:
    names = fields.get("architectures")
    if names is None:
        model_type = fields.string("model_type")
        names = [MODEL_TYPES.get(model_type, model_type)]
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.refusal("architectures", "a list of one name")
    if names[0] not in ARCHITECTURES:
        raise InvalidInput(
            f"{fields.source}: architecture {printable(names[0])} is not known; "
            f"those there are: {', '.join(ARCHITECTURES)}"
        )
    return str(names[0])


def _head_dim(fields: Fields, num_heads: int) -> int:
    if "head_dim" in fields:
        head_dim = fields.integer("head_dim")
    else:
        hidden_size = fields.integer("hidden_size")
        head_dim, rest = divmod(hidden_size, num_heads)
        if rest:
            raise InvalidInput(
                f"{fields.source}: hidden_size={hidden_size} is no multiple of num_attention_heads={num_heads}, "
                "and head_dim is missing"
            )
    if head_dim % 2:
        raise InvalidInput(f"{fields.source}: head_dim={head_dim} is odd; rotary embeddings need pairs")
    return head_dim


def _num_kv_heads(fields: Fields, num_heads: int) -> int:
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise InvalidInput(
            f"{fields.source}: num_attention_heads={num_heads} is no multiple of num_key_value_heads={num_kv_heads}"
        )
    return num_kv_heads


def _activation(fields: Fields) -> str:
    name = fields.string("hidden_act", "silu")
    if name not in ACTIVATIONS:
        raise fields.refusal("hidden_act", f"one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _mlp_bias(fields: Fields, rules: ArchitectureRules, architecture: str) -> bool:
    mlp_bias = fields.boolean("mlp_bias", False)
    if mlp_bias and not rules.mlp_bias:
        raise fields.refusal("mlp_bias", f"false or absent for {architecture}")
    return mlp_bias


def _sliding_window(fields: Fields, rules: ArchitectureRules, max_positions: int) -> int | None:
    """The window every layer uses. One that no sequence can outgrow is none."""
    kinds = _layer_kinds(fields)
    # null asks for no window; only a field that is absent means the default
    window = fields.integer("sliding_window") if "sliding_window" in fields else None
    if not fields.has_key("sliding_window"):
        window = rules.default_window
    if rules.sliding_window == "by_layer" and not fields.boolean("use_sliding_window", False):
        window = None
    if window is None and kinds and "sliding_attention" in kinds:
        raise fields.refusal("layer_types", "full_attention throughout, as no sliding window is asked for")
    if window is None or window >= max_positions:
        return None
    if rules.sliding_window == "none":
        raise fields.refusal("sliding_window", "null for this architecture, which looks back without a limit")
    if rules.sliding_window == "by_layer":
        return _uniform_window(fields, kinds, window)
    if kinds and set(kinds) != {"sliding_attention"}:
        raise fields.refusal("layer_types", "sliding_attention throughout for this architecture")
    return window


def _uniform_window(fields: Fields, kinds: list[str] | None, window: int) -> int | None:
    """Layers from max_window_layers on have the window: supported when that is all of them or none."""
    num_layers = fields.integer("num_hidden_layers")
    if kinds is None:
        first = fields.integer("max_window_layers", 28, minimum=0)
        kinds = ["full_attention"] * (first > 0) + ["sliding_attention"] * (first < num_layers)
    if len(set(kinds)) > 1:
        raise not_built(
            f"{fields.source}: a sliding window on some layers only (use_sliding_window with "
            f"max_window_layers={fields.get('max_window_layers')} of {num_layers} layers)",
            "set use_sliding_window to false and stay within its length",
        )
    return window if "sliding_attention" in kinds else None


def _layer_kinds(fields: Fields) -> list[str] | None:
    kinds = fields.get("layer_types")
    if kinds is None:
        return None
    known = {"full_attention", "sliding_attention"}
    num_layers = fields.integer("num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(map(str, kinds)) <= known:
        raise fields.refusal("layer_types", f"{num_layers} times full_attention or sliding_attention")
    return [str(kind) for kind in kinds]


def _dtype(fields: Fields) -> str:
    key = "dtype" if "dtype" in fields else "torch_dtype"
    name = fields.string(key, "float32").removeprefix("torch.")
    if name not in STORED_DTYPES:
        raise fields.refusal(key, f"one of {', '.join(STORED_DTYPES)}")
    return name


def _token_ids(fields: Fields) -> list[int]:
    value = fields.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token <= MAX_INTEGER for token in ids):
        raise fields.refusal("eos_token_id", "a token id or a list of them")
    return ids


def read_default_sampling(generation: Fields) -> tuple[tuple[str, float | int], ...]:
    """The defaults a request inherits. `do_sample` is not looked at, as in vLLM: temperature=0 asks for greedy.

    Raises:
        InvalidInput: a value out of range.
    """
    penalty = generation.optional_number("repetition_penalty")
    if penalty not in (None, 1.0):
        logger.warning("%s: repetition_penalty=%s is not applied, it is not built yet", generation.source, penalty)
    defaults: list[tuple[str, float | int]] = []
    for name, (lowest, highest) in SAMPLING_RANGES.items():
        if name not in generation:
            continue
        whole = isinstance(lowest, int)
        value = generation.integer(name, minimum=int(lowest)) if whole else generation.number(name, minimum=lowest)
        if highest is not None and value > highest:
            raise generation.refusal(name, f"a number from {lowest:g} to {highest:g}")
        defaults.append((name, value))
    return tuple(defaults)
