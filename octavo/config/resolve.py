"""resolve(): from what the user gave, the model and the machine to every decision. Pure: reads and changes nothing."""

from bisect import bisect_right
from dataclasses import dataclass

from octavo.config.engine_args import EngineArgs
from octavo.config.engine_config import (
    CacheConfig,
    EngineConfig,
    LoadConfig,
    MemoryPlan,
    ParallelConfig,
    SchedulerConfig,
    WorkerConfig,
)
from octavo.config.machine import MachineInfo
from octavo.config.memory import format_bytes, parse_bytes
from octavo.config.model import ModelConfig
from octavo.config.options import check_unchunked_budget, make_engine_args
from octavo.config.platform_traits import PlatformTraits, WorkspaceTraits
from octavo.config.weights import WeightSizes, bytes_by_form, choose_weights, matrix_forms, weights_note
from octavo.errors import InvalidInput
from octavo.protocol.kv_cache_spec import KVCacheSpec

__all__ = ["make_engine_args", "resolve"]

DEFAULT_BATCHED_TOKENS = 512
"""Products gain little from more rows, and others wait for their next token while a chunk is computed."""
LEFT_FOR_PROMPTS = 256
"""Of these tokens, when every sequence but one decodes."""
MEMORY_SHARE = 0.8
"""Of the free memory, what an automatic KV cache may bring the whole engine to."""
AUTO_KV_CACHE_BYTES = 4 * 2**30
"""An automatic KV cache is no larger; who wants more says so."""


def resolve(
    args: EngineArgs,
    *,
    model: ModelConfig,
    load: LoadConfig,
    weights: WeightSizes,
    machine: MachineInfo,
    platform: PlatformTraits,
) -> EngineConfig:
    """Decide everything.

    Args:
        args: checked by `make_engine_args`.
        weights: what they take, in each of the ways they can be kept.
        platform: the one that will compute.

    Raises:
        InvalidInput: an option does not go with the model, or the sum does not fit the machine's memory.
    """
    choice, dtype_reason, quantization_reason = choose_weights(args, model, load.load_format, weights, platform)
    dtype, sizes = choice.dtype, bytes_by_form(weights, choice)
    kv_cache_dtype = dtype if args.kv_cache_dtype == "auto" else args.kv_cache_dtype
    if kv_cache_dtype not in platform.kv_cache_dtypes:
        raise InvalidInput(
            f"kv_cache_dtype={kv_cache_dtype!r} is not supported by the {platform.name} platform; "
            f"use one of {', '.join(platform.kv_cache_dtypes)}"
        )
    if model.head_dim % platform.head_size_multiple:
        raise InvalidInput(
            f"this model's head size is {model.head_dim}, and the {platform.name} platform's attention takes multiples "
            f"of {platform.head_size_multiple}; use platform='reference'"
        )
    scheduler = _scheduler_config(args, model)
    num_threads = machine.num_cores if args.num_threads is None else args.num_threads
    demand = _Demand.of(args, model, scheduler, kv_cache_dtype, sum(sizes.values()), platform.workspace)
    num_blocks, how = _size_pool(args, demand, machine)
    cache = CacheConfig(
        num_blocks=num_blocks, block_size=args.block_size, enable_prefix_caching=args.enable_prefix_caching
    )
    memory = demand.plan(num_blocks, machine)
    notes = (
        f"dtype {dtype} ({dtype_reason})" + (f", KV cache {kv_cache_dtype}" if kv_cache_dtype != dtype else ""),
        *([weights_note(sizes, choice, quantization_reason)] if quantization_reason else []),
        _threads_note(num_threads, args, machine),
        f"memory: {_sum(memory)}",
        _pool_note(cache, how, scheduler),
    )
    return EngineConfig(
        model=model,
        scheduler=scheduler,
        cache=cache,
        parallel=ParallelConfig(),
        load=load,
        worker=WorkerConfig(
            platform=platform.name,
            dtype=dtype,
            dtype_reason=dtype_reason,
            quantization=choice.quantization,
            quantization_reason=quantization_reason,
            weight_forms=matrix_forms(weights, choice),
            kv_cache_dtype=kv_cache_dtype,
            num_threads=num_threads,
        ),
        memory=memory,
        seed=args.seed,
        logprobs_mode=args.logprobs_mode,
        log_stats=not args.disable_log_stats,
        notes=notes,
    )


def _scheduler_config(args: EngineArgs, model: ModelConfig) -> SchedulerConfig:
    longest = model.max_position_embeddings
    if args.max_model_len is not None and args.max_model_len > longest:
        raise InvalidInput(
            f"max_model_len={args.max_model_len} is more than the {longest} tokens this model supports; "
            f"give {longest} or less"
        )
    max_model_len = args.max_model_len or longest
    budget = args.max_num_batched_tokens
    if budget is None:
        enough = max(DEFAULT_BATCHED_TOKENS, args.max_num_seqs + LEFT_FOR_PROMPTS)
        budget = enough if args.enable_chunked_prefill else max_model_len
    if not args.enable_chunked_prefill:
        check_unchunked_budget(budget, max_model_len)
    return SchedulerConfig(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        enable_chunked_prefill=args.enable_chunked_prefill,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        policy=args.scheduling_policy,
        fair_share=args.fair_share,
    )


@dataclass(frozen=True, slots=True)
class _Demand:
    """What needs how much memory, in bytes. Everything grows with the number of blocks."""

    model: ModelConfig
    scheduler: SchedulerConfig
    block_size: int
    block: int
    """One block in all layers."""
    weights: int
    traits: WorkspaceTraits

    @classmethod
    def of(
        cls,
        args: EngineArgs,
        model: ModelConfig,
        scheduler: SchedulerConfig,
        kv_cache_dtype: str,
        weights: int,
        traits: WorkspaceTraits,
    ) -> "_Demand":
        spec = KVCacheSpec(
            num_kv_heads=model.num_kv_heads,
            head_dim_k=model.head_dim,
            head_dim_v=model.head_dim,
            dtype=kv_cache_dtype,
        )
        block = args.block_size * model.num_layers * spec.bytes_per_token
        return cls(model, scheduler, args.block_size, block, weights, traits)

    @property
    def useful_blocks(self) -> int:
        """Blocks that max_num_seqs requests of max_model_len tokens fill."""
        return self.scheduler.max_num_seqs * -(-self.scheduler.max_model_len // self.block_size)

    def workspace(self, num_blocks: int) -> int:
        """What one step takes besides. An estimate from above: everything in float32, nothing reused.

        Every running request holds a block of its own and none is longer than the pool, so a small pool bounds the
        rows that are sampled together and the length of a request too.
        """
        model, tokens, traits = self.model, self.scheduler.max_num_batched_tokens, self.traits
        length = min(self.scheduler.max_model_len, num_blocks * self.block_size)
        rows = min(self.scheduler.max_num_seqs, tokens, num_blocks)
        query, key = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
        activations = tokens * (4 * model.hidden_size + 4 * (query + key) + 4 * model.intermediate_size)
        gathered = 2 * length * key if traits.gathers_kv else 0  # K and V of one request
        tables = 2 * self.scheduler.max_num_seqs * length  # token ids and block tables
        rotary = self.scheduler.max_model_len * model.head_dim
        scores = min(traits.scores_at_once, tokens * model.num_heads * length) * traits.score_bytes
        sampling = rows * model.vocab_size * traits.sampling_bytes
        return 4 * (activations + gathered + tables + rotary) + scores + sampling

    def total(self, num_blocks: int) -> int:
        return self.weights + num_blocks * self.block + self.workspace(num_blocks)

    def plan(self, num_blocks: int, machine: MachineInfo) -> MemoryPlan:
        """The sum. Raises InvalidInput if it exceeds the limit."""
        plan = MemoryPlan(
            weights=self.weights,
            kv_cache=num_blocks * self.block,
            workspace=self.workspace(num_blocks),
            limit=machine.memory_limit,
            limit_source=machine.memory_source,
            libraries=machine.process_memory,
        )
        if plan.total > plan.limit:
            raise InvalidInput(
                f"the engine does not fit the memory: {_sum(plan)}; lower kv_cache_memory or num_kv_blocks, "
                "max_num_seqs or max_num_batched_tokens, use a smaller dtype or model, or raise the limit"
            )
        return plan


def _size_pool(args: EngineArgs, demand: _Demand, machine: MachineInfo) -> tuple[int, str]:
    """Blocks of the KV cache, and what set their number."""
    if args.num_kv_blocks is not None:
        return args.num_kv_blocks, f"num_kv_blocks={args.num_kv_blocks}"
    for name in ("kv_cache_memory", "kv_cache_memory_bytes"):
        given = getattr(args, name)
        if given is not None:
            return _blocks_of(parse_bytes(given, name), name, demand.block), f"{name}={given}"
    return _automatic_pool(demand, machine)


def _automatic_pool(demand: _Demand, machine: MachineInfo) -> tuple[int, str]:
    """As many blocks as can be of use, fit the memory and stay under the automatic maximum."""
    most = max(1, min(demand.useful_blocks, AUTO_KV_CACHE_BYTES // demand.block))
    budget = int(MEMORY_SHARE * machine.memory_limit)
    num_blocks = bisect_right(range(1, most + 1), budget, key=demand.total)
    if num_blocks < 1:
        raise InvalidInput(
            f"no room for a KV cache: weights {format_bytes(demand.weights)} + one block {format_bytes(demand.block)} "
            f"+ workspace {format_bytes(demand.workspace(1))} = {format_bytes(demand.total(1))}, but "
            f"{format_bytes(budget)} may be used, {MEMORY_SHARE:.0%} of {format_bytes(machine.memory_limit)} "
            f"({machine.memory_source}); lower max_num_batched_tokens, use a smaller dtype or model, or raise the limit"
        )
    if num_blocks < most:
        return num_blocks, "what the memory allows"
    if num_blocks == demand.useful_blocks:
        return num_blocks, "all that max_num_seqs requests of full length can use"
    return num_blocks, f"the automatic maximum of {format_bytes(AUTO_KV_CACHE_BYTES)}; kv_cache_memory gives more"


def _blocks_of(amount: int, name: str, block: int) -> int:
    if amount < block:
        raise InvalidInput(
            f"{name}={amount} bytes is less than one block of this model's KV cache, which takes {block} bytes; "
            "give at least that, or a smaller block_size"
        )
    return amount // block


def _sum(plan: MemoryPlan) -> str:
    beside = f", beside the libraries' {format_bytes(plan.libraries)}" if plan.libraries else ""
    return (
        f"weights {format_bytes(plan.weights)} + KV cache {format_bytes(plan.kv_cache)} + workspace "
        f"{format_bytes(plan.workspace)} = {format_bytes(plan.total)} of {format_bytes(plan.limit)} "
        f"({plan.limit_source}){beside}"
    )


def _threads_note(num_threads: int, args: EngineArgs, machine: MachineInfo) -> str:
    if args.num_threads is None:
        return f"threads: {num_threads} (set by {machine.num_cores_source})"
    slow = f"; more than the {machine.num_cores} cores it may use is slower" if num_threads > machine.num_cores else ""
    return f"threads: {num_threads} (as asked{slow})"


def _pool_note(cache: CacheConfig, how: str, scheduler: SchedulerConfig) -> str:
    note = f"KV cache: {cache.num_blocks} blocks x {cache.block_size} = {cache.num_tokens} tokens ({how})"
    if cache.num_tokens < scheduler.max_model_len:
        return f"{note}; max_model_len is {scheduler.max_model_len}, but no request can be longer than the pool"
    return f"{note}; max_model_len {scheduler.max_model_len}"
