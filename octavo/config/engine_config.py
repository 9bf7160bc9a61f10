"""EngineConfig: every decision made, before anything is loaded. A component is given its own part, never the whole."""

from dataclasses import dataclass
from pathlib import Path

from octavo.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Budgets and order of the scheduler. Everything in tokens or requests."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    """0: off."""
    policy: str = "fcfs"
    fair_share: bool = False
    """Tenants share the running slots and the token budget."""


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The block pool."""

    num_blocks: int
    block_size: int = 16
    """Tokens a block."""
    enable_prefix_caching: bool = True

    @property
    def num_tokens(self) -> int:
        """Tokens the whole pool holds."""
        return self.num_blocks * self.block_size


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """This process's place among those that share one model."""

    tensor_parallel_size: int = 1
    tensor_parallel_rank: int = 0


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """Where the weights come from."""

    path: Path
    load_format: str
    """safetensors, gguf or dummy."""
    seed: int = 0
    """Of dummy weights."""


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """How the model is computed."""

    platform: str
    dtype: str
    """Of what is kept in floats."""
    kv_cache_dtype: str
    num_threads: int
    dtype_reason: str = ""
    quantization: str = "none"
    """none, gguf, int8 or int4: `config.weights.WeightChoice`."""
    quantization_reason: str = ""
    """Empty: there was nothing to choose."""
    weight_forms: tuple[str, ...] = ()
    """In which forms the matrices are kept."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The sum that is printed at start, in bytes."""

    weights: int
    kv_cache: int
    workspace: int
    limit: int
    limit_source: str
    """What set the limit: "cgroup" or "available RAM"."""
    libraries: int = 0
    """What Python and the libraries held already when the plan was made; the limit is what was left beside it."""

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.workspace


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All of it. `notes` are the lines that explain the choices at start."""

    model: ModelConfig
    scheduler: SchedulerConfig
    cache: CacheConfig
    parallel: ParallelConfig
    load: LoadConfig
    worker: WorkerConfig
    memory: MemoryPlan
    seed: int
    logprobs_mode: str
    log_stats: bool
    notes: tuple[str, ...] = ()
