"""The answer of `octavo plan`: what an engine would decide, without building it. Pure: reads and changes nothing.

Every decision is resolve()'s own, so plan and engine cannot differ in them. What is estimated here is only what an
engine measures: the memory that Python and the libraries will hold, and what loading takes at its peak.
"""

from dataclasses import dataclass, replace

from octavo.config.engine_args import EngineArgs
from octavo.config.engine_config import EngineConfig, LoadConfig
from octavo.config.machine import MachineInfo
from octavo.config.memory import format_bytes
from octavo.config.model import ModelConfig
from octavo.config.platform_traits import PlatformTraits
from octavo.config.resolve import MEMORY_SHARE, resolve
from octavo.config.weights import (
    ITEM_BYTES,
    WeightChoice,
    WeightSizes,
    bytes_by_form,
    choose_weights,
    smaller_quantizations,
    weight_choice,
)
from octavo.errors import InvalidInput
from octavo.protocol.kv_cache_spec import KVCacheSpec

MIB = 2**20
LIBRARIES_ANONYMOUS, LIBRARIES_MAPPED = 155 * MIB, 83 * MIB
"""What a process holds that has imported the engine with torch's CPU build: memory of its own, and pages of files."""
TOKENIZER_BYTES_PER_TOKEN = 430
"""And the tokenizer on top, for each token of the vocabulary."""
UNLIMITED = 2**80
SIZES = ("num_kv_blocks", "kv_cache_memory", "kv_cache_memory_bytes")
"""Options that set the size of the KV cache."""
SMALL_BATCH, FEW_SEQS = 256, 16
"""max_num_batched_tokens and max_num_seqs that advice goes down to: less costs more speed than it saves RAM."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is planned for: a model, a machine and a platform."""

    model: ModelConfig
    load: LoadConfig
    weights: WeightSizes
    machine: MachineInfo
    platform: PlatformTraits


@dataclass(frozen=True, slots=True)
class Load:
    """How many requests of one kind can run together."""

    input_len: int
    output_len: int
    requests: int
    """0: not even one."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A change of options that was tried and helps."""

    options: dict[str, str | int]
    kv_tokens: int
    """Tokens the KV cache holds with it."""
    instead_of: tuple[str, ...] = ()
    """Options that were given and must be left out."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes in bytes, lengths in tokens."""

    config: EngineConfig
    """What the engine would decide; where it does not fit, what the smallest KV cache, or the one asked for, takes."""
    problem: str
    """Why it does not fit; empty: it does."""
    weights: dict[str, int]
    """dtype, and where they can be kept so gguf, int8 and int4 -> all weights."""
    weight_forms: dict[str, int]
    """The weights as they will be kept: form -> those that are kept in it."""
    kv_per_token: dict[str, int]
    """KV dtype -> one token in all layers."""
    loading: int
    """RAM beside the libraries at the worst moment of loading."""
    loads: list[Load]
    advice: list[Advice]
    """What helps where it does not fit, or where no request can be as long as it should."""
    least_memory: int
    """Bytes that must be left beside the libraries for the smallest engine of this model."""

    @property
    def fits(self) -> bool:
        return not self.problem

    @property
    def largest_prompt(self) -> int:
        """Tokens; one more is generated."""
        return max(0, self.longest_request - 1)

    @property
    def longest_request(self) -> int:
        """Tokens of prompt and output."""
        return min(self.config.scheduler.max_model_len, self.config.cache.num_tokens)

    @property
    def peak_rss(self) -> int:
        """What the process is seen to hold at most: while loading, or with a full KV cache and a full batch."""
        memory = self.config.memory
        return memory.libraries + max(self.loading, memory.total)


def make_plan(args: EngineArgs, subject: Subject, lengths: tuple[tuple[int, int], ...] = ()) -> Plan:
    """Work it all out.

    Args:
        args: checked by `make_engine_args`.
        lengths: (input_len, output_len) of requests that must be possible; none: the usual ones are shown, and what is
            wanted is one request of max_model_len.

    Raises:
        InvalidInput: an option does not go with the model or the platform; not that the memory is too small.
    """
    subject = replace(subject, machine=with_libraries(subject.machine, subject.model))
    config, problem = _decide(args, subject)
    choice = _choice(config, subject)
    goal = max((a + b for a, b in lengths), default=config.scheduler.max_model_len)
    longest = min(config.cache.num_tokens, config.scheduler.max_model_len)
    if not problem and lengths and longest < goal:
        problem = (
            f"a request of {goal} tokens does not fit: the KV cache holds {config.cache.num_tokens} tokens and "
            f"max_model_len is {config.scheduler.max_model_len}"
        )
    return Plan(
        config=config,
        problem=problem,
        weights=_weight_sizes(choice.dtype, subject),
        weight_forms=bytes_by_form(subject.weights, choice),
        kv_per_token=_kv_per_token(subject),
        loading=subject.weights.loading_peak(choice)[0],
        loads=[_count_requests(config, *length) for length in lengths or _usual_lengths(config)],
        advice=_advise(args, subject, goal, shorten=not lengths) if problem or longest < goal else [],
        least_memory=_least_memory(args, subject),
    )


def with_libraries(machine: MachineInfo, model: ModelConfig) -> MachineInfo:
    """The machine as an engine will find it, once it has imported everything and read the tokenizer.

    Pages of mapped files are the kernel's to give back, so only the rest is missing from the room that is left.
    """
    anonymous = LIBRARIES_ANONYMOUS + TOKENIZER_BYTES_PER_TOKEN * model.vocab_size
    taken = max(0, anonymous - machine.process_anonymous)
    return replace(
        machine,
        memory_limit=max(0, machine.memory_limit - taken),
        process_memory=anonymous + LIBRARIES_MAPPED,
        process_anonymous=anonymous,
    )


def with_core_process(machine: MachineInfo) -> MachineInfo:
    """The machine as it will be once the engine core, in a process of its own, has imported everything, too."""
    return replace(
        machine,
        memory_limit=max(0, machine.memory_limit - LIBRARIES_ANONYMOUS),
        process_memory=machine.process_memory + LIBRARIES_ANONYMOUS,
        process_anonymous=machine.process_anonymous + LIBRARIES_ANONYMOUS,
    )


def _resolve(args: EngineArgs, subject: Subject, machine: MachineInfo) -> EngineConfig:
    return resolve(
        args,
        model=subject.model,
        load=subject.load,
        weights=subject.weights,
        machine=machine,
        platform=subject.platform,
    )


def _decide(args: EngineArgs, subject: Subject) -> tuple[EngineConfig, str]:
    """The decisions, and why they do not fit, if so."""
    machine = subject.machine
    # whatever is refused with all the memory of the world is no matter of memory, and raised from here
    sized = _is_sized(args)
    unlimited = _resolve(
        args if sized else replace(args, num_kv_blocks=1), subject, replace(machine, memory_limit=UNLIMITED)
    )
    try:
        config = _resolve(args, subject, machine)
    except InvalidInput as error:
        memory = replace(unlimited.memory, limit=machine.memory_limit)
        return replace(unlimited, memory=memory, notes=()), str(error)
    needed = subject.weights.loading_peak(_choice(config, subject))[1]
    if needed > machine.memory_limit:
        return config, (
            f"loading the weights takes {format_bytes(needed)} at its peak, of {format_bytes(machine.memory_limit)} "
            f"({machine.memory_source})"
        )
    return config, ""


def _is_sized(args: EngineArgs) -> bool:
    return any(getattr(args, name) is not None for name in SIZES)


def _least_memory(args: EngineArgs, subject: Subject) -> int:
    """Bytes beside the libraries with which it would start, when all that can be changed is small."""
    change: dict[str, str | int | None] = {}
    for one in _changes(args, subject):
        change |= one
    smallest = replace(args, **{**change, **dict.fromkeys(SIZES), "num_kv_blocks": 1})  # type: ignore[arg-type]
    config = _resolve(smallest, subject, replace(subject.machine, memory_limit=UNLIMITED))
    return max(int(config.memory.total / MEMORY_SHARE) + 1, subject.weights.loading_peak(_choice(config, subject))[1])


def _choice(config: EngineConfig, subject: Subject) -> WeightChoice:
    return weight_choice(config.worker.dtype, config.worker.quantization, subject.platform)


def _weight_sizes(dtype: str, subject: Subject) -> dict[str, int]:
    """Bytes of all weights in each dtype, and in each quantization that they and the platform know."""
    choices = {name: weight_choice(name, "none", subject.platform) for name in ITEM_BYTES}
    for name in smaller_quantizations(subject.weights, dtype, UNLIMITED, subject.platform):
        if name != "none":
            choices[name] = weight_choice(dtype, name, subject.platform)
    return {name: sum(bytes_by_form(subject.weights, choice).values()) for name, choice in choices.items()}


def _kv_per_token(subject: Subject) -> dict[str, int]:
    model = subject.model
    specs = (
        KVCacheSpec(num_kv_heads=model.num_kv_heads, head_dim_k=model.head_dim, head_dim_v=model.head_dim, dtype=dtype)
        for dtype in subject.platform.kv_cache_dtypes
    )
    return {spec.dtype: model.num_layers * spec.bytes_per_token for spec in specs}


def _count_requests(config: EngineConfig, input_len: int, output_len: int) -> Load:
    cache, scheduler = config.cache, config.scheduler
    length = input_len + output_len
    if length > scheduler.max_model_len:
        return Load(input_len, output_len, 0)
    blocks = -(-length // cache.block_size)
    return Load(input_len, output_len, min(scheduler.max_num_seqs, cache.num_blocks // blocks))


def _usual_lengths(config: EngineConfig) -> list[tuple[int, int]]:
    """A chat turn, a page, a document, and all that the model takes."""
    longest = config.scheduler.max_model_len
    usual = [(128, 128), (1024, 256), (8192, 512)]
    return [(a, b) for a, b in usual if a + b < longest] + [(longest - 1, 1)]


def _advise(args: EngineArgs, subject: Subject, goal: int, shorten: bool) -> list[Advice]:
    """Changes after which the engine starts and a request of `goal` tokens fits: each alone, else all together.

    shorten: a smaller max_model_len may be part of them.
    """
    singles = _changes(args, subject)
    good = [_try(args, change, subject, goal, shorten) for change in singles]
    if not any(good):
        together: dict[str, str | int | None] = {}
        for change in singles:
            together |= change
            if (advice := _try(args, together, subject, goal, shorten)) is not None:
                good = [advice]
                break
    found = [advice for advice in good if advice is not None]
    # where it starts as it is, other ways to shorten it are of no interest
    as_it_is = _try(args, {}, subject, goal, shorten)
    if as_it_is is None:
        return found
    return [as_it_is, *(advice for advice in found if "max_model_len" not in advice.options)]


def _changes(args: EngineArgs, subject: Subject) -> list[dict[str, str | int | None]]:
    """What may help, in the order in which people would rather have it."""
    dtype = subject.platform.auto_dtype[0] if args.dtype == "auto" else args.dtype
    kv_dtype = dtype if args.kv_cache_dtype == "auto" else args.kv_cache_dtype
    changes: list[dict[str, str | int | None]] = []
    choice, _, _ = choose_weights(args, subject.model, subject.load.load_format, subject.weights, subject.platform)
    size = sum(bytes_by_form(subject.weights, choice).values())
    few_bits = smaller_quantizations(subject.weights, choice.dtype, size, subject.platform)
    halves_kv = args.kv_cache_dtype != "auto" or "bfloat16" in subject.platform.kv_cache_dtypes
    if dtype == "float32" and halves_kv and _can_keep(replace(args, dtype="bfloat16"), subject):
        changes.append({"dtype": "bfloat16"})
    changes.extend({"quantization": name} for name in few_bits if name != "none")
    if kv_dtype != "int8" and "int8" in subject.platform.kv_cache_dtypes:
        changes.append({"kv_cache_dtype": "int8"})
    if _is_sized(args):
        changes.append(dict.fromkeys(SIZES))
    if args.enable_chunked_prefill and (args.max_num_batched_tokens or SMALL_BATCH + 1) > SMALL_BATCH:
        changes.append({"max_num_batched_tokens": SMALL_BATCH})
    if args.max_num_seqs > FEW_SEQS:
        changes.append({"max_num_seqs": FEW_SEQS})
    return changes


def _can_keep(args: EngineArgs, subject: Subject) -> bool:
    """Whether the weights can be kept so on this platform."""
    try:
        choose_weights(args, subject.model, subject.load.load_format, subject.weights, subject.platform)
    except InvalidInput:
        return False
    return True


def _try(
    args: EngineArgs, change: dict[str, str | int | None], subject: Subject, goal: int, shorten: bool
) -> Advice | None:
    """The change with all that belongs to it, if it helps."""
    try:
        config, problem = _decide(replace(args, **change), subject)  # type: ignore[arg-type]  # EngineArgs' own names
    except InvalidInput:  # it contradicts another option
        return None
    tokens = config.cache.num_tokens
    if problem or (tokens < goal and not shorten):
        return None
    options = {name: value for name, value in change.items() if value is not None}
    if "num_kv_blocks" in change:
        options["num_kv_blocks"] = config.cache.num_blocks
    if tokens < goal:
        options["max_model_len"] = tokens
    left_out = tuple(
        name
        for name, value in change.items()
        if value is None and name not in options and getattr(args, name) is not None
    )
    return Advice(options, tokens, left_out) if goal <= config.scheduler.max_model_len else None
