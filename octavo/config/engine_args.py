"""EngineArgs: every option of the engine, as the user gives it. `LLM(...)` and the command line are made from it."""

from dataclasses import dataclass
from typing import Literal

DType = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """Options of the engine. Names are vLLM's where it has one."""

    model: str = "smollm2"
    """A folder in Hugging Face format, a .gguf file, an alias from the catalogue, or a hub id."""
    tokenizer: str | None = None
    """A folder or tokenizer.json; default: the model's own."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    """How weights are read; dummy: random weights."""
    dtype: str = "auto"
    """Of the weights: auto, float32 (float), bfloat16 or float16 (half). auto picks the fast choice of this machine and
    says why."""
    quantization: str | None = None
    """Weights in few bits. gguf: as the GGUF file has them; int8, int4: floats quantised while they are loaded, in
    groups of 32; none: all in dtype. Default: gguf where the platform has the kernels and no dtype is given, else none.
    """
    max_model_len: int | None = None
    """Longest sequence (prompt and output) in tokens; default: what the model supports."""
    max_num_seqs: int = 256
    """Requests computed together at most."""
    max_num_batched_tokens: int | None = None
    """Tokens computed in one step at most; default: 512 or max_num_seqs + 256 if that is more, and
    max_model_len without chunked prefill."""
    block_size: int = 16
    """Tokens a KV cache block: 8, 16, 32, 64 or 128."""
    enable_prefix_caching: bool = True
    """Reuse the KV cache of equal prompt beginnings."""
    enable_chunked_prefill: bool = True
    """Compute long prompts in chunks between other requests' tokens."""
    long_prefill_token_threshold: int = 0
    """Tokens of one prompt computed in a step at most; 0: the whole token budget."""
    scheduling_policy: str = "fcfs"
    """fcfs: first come, first served. priority: lower priority value first, then arrival."""
    fair_share: bool = False
    """Tenants share the running slots and the token budget: a flood from one does not starve another. The
    scheduling_policy holds inside a tenant."""
    kv_cache_dtype: str = "auto"
    """auto (as dtype), float32, bfloat16, float16, or int8 and fp8 (e4m3) with a scale a token and head."""
    num_kv_blocks: int | None = None
    """Size of the KV cache in blocks; default: from the memory that is free."""
    kv_cache_memory: int | str | None = None
    """Size of the KV cache in bytes, or as "512MiB" or "2GiB"."""
    kv_cache_memory_bytes: int | str | None = None
    """vLLM's name of kv_cache_memory."""
    num_threads: int | None = None
    """Threads that compute; default: the cores this process may use."""
    seed: int = 0
    """Requests without a seed derive theirs from this one and their arrival number."""
    logprobs_mode: str = "raw_logprobs"
    """raw_logprobs: log-probabilities of the model's own distribution; processed_logprobs: after penalties, bans,
    temperature and filters; raw_logits, processed_logits: the logits there. A request may choose its own."""
    platform: str = "auto"
    """Which operators compute: cpu (native kernels), reference (plain torch), or auto: cpu where it is installed."""
    disable_log_stats: bool = False
    """No statistics line in the log."""


NOT_BUILT: dict[str, object] = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "speculative_config": None,
    "enable_lora": False,
    "swap_space": 0,
    "cpu_offload_gb": 0,
    "preemption_mode": "recompute",
    "kv_cache_dir": None,
    "kv_transfer_config": None,
    "async_scheduling": False,
    "enforce_eager": False,
    "trust_remote_code": False,
    "skip_tokenizer_init": False,
    "hf_overrides": None,
    "generation_config": "auto",
    "gpu_memory_utilization": None,
    "max_logprobs": None,
    "download_dir": None,
    "limit_mm_per_prompt": None,
    "compilation_config": None,
    "disable_custom_all_reduce": False,
    "distributed_executor_backend": None,
}
"""Options users of such engines know and that do nothing here yet: only the value that asks for nothing is taken."""
