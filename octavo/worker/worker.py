"""The worker: one device's share of the model. Loads the weights, owns the KV cache memory, runs steps."""

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from octavo.config.engine_config import CacheConfig, LoadConfig, ParallelConfig, SchedulerConfig, WorkerConfig
from octavo.config.model import ModelConfig
from octavo.config.weights import report_kernels
from octavo.errors import InvalidInput, describe
from octavo.layers.context import LayerContext
from octavo.loader.checkpoint import open_checkpoint
from octavo.loader.weights import load_weights
from octavo.logging import get_logger
from octavo.models.base import CausalLM
from octavo.models.registry import get_model_class
from octavo.ops.interface import DTYPES, Platform
from octavo.ops.registry import get_platform
from octavo.protocol.scheduler_output import PROTOCOL_VERSION, ModelRunnerOutput, SchedulerOutput
from octavo.quantization.read import read_tensors
from octavo.sampling.sampler import Sampler
from octavo.worker.model_runner import ModelRunner
from octavo.worker.request_rows import RequestRows

logger = get_logger(__name__)


class Worker:
    """Built in three steps: construct, `load_model`, `initialize_cache`; then it executes."""

    def __init__(self, config: WorkerConfig, model: ModelConfig, load: LoadConfig, parallel: ParallelConfig) -> None:
        self._config = config
        self._model_config = model
        self._load_config = load
        self._parallel = parallel
        self.platform: Platform = get_platform(config.platform)
        self.platform.set_num_threads(config.num_threads)

    @torch.inference_mode()
    def load_model(self, max_model_len: int) -> None:
        """Read the weights. Raises InvalidInput if the files do not hold the model, or memory is refused."""
        with _memory_for("the weights", "use a smaller model or dtype"):
            self._load_model(max_model_len)

    def _load_model(self, max_model_len: int) -> None:
        started = time.monotonic()
        context = LayerContext(platform=self.platform, dtype=DTYPES[self._config.dtype], parallel=self._parallel)
        model_class = get_model_class(self._model_config.architecture)
        self.model: CausalLM = model_class(self._model_config, context, max_model_len)
        checkpoint = open_checkpoint(self._load_config.path, self._load_config.load_format, self._load_config.seed)
        tensors = read_tensors(checkpoint, self._config.quantization, self._config.num_threads)
        load_weights(self.model.slots(), tensors, str(self._load_config.path))
        self.model.finish()
        _trim_heap()
        logger.info("weights loaded in %.1f s", time.monotonic() - started)

    @torch.inference_mode()
    def initialize_cache(self, scheduler: SchedulerConfig, cache: CacheConfig, vocab_size: int) -> None:
        """Allocate the KV cache and the request rows. vocab_size: tokens the tokenizer knows.

        Raises:
            InvalidInput: memory is refused.
        """
        with _memory_for("the KV cache", "lower kv_cache_memory"):
            self._initialize_cache(scheduler, cache, vocab_size)

    def _initialize_cache(self, scheduler: SchedulerConfig, cache: CacheConfig, vocab_size: int) -> None:
        kv_caches = [
            self.platform.allocate_kv_cache(spec, cache.num_blocks, cache.block_size)
            for spec in self.model.kv_cache_specs(self._config.kv_cache_dtype)
        ]
        # a request can be no longer than the pool: the rest of a long max_model_len needs no columns
        rows = RequestRows(scheduler.max_num_seqs, min(scheduler.max_model_len, cache.num_tokens), cache.block_size)
        self.runner = ModelRunner(self.platform, self.model, kv_caches, rows, Sampler(self.platform, vocab_size))

    def kernel_report(self) -> dict[str, str]:
        """Kernel name of each kind of layer."""
        return report_kernels(self.platform.kernel_report(), self._config)

    def execute_model(self, step: SchedulerOutput) -> None:
        """Compute the scheduled tokens of one step."""
        assert step.version == PROTOCOL_VERSION, f"scheduler speaks version {step.version}, not {PROTOCOL_VERSION}"
        self.runner.execute(step)

    def sample_tokens(self) -> ModelRunnerOutput:
        """Draw the tokens of the step that was executed last."""
        return self.runner.sample()

    def reset(self) -> None:
        """Forget every request, after a step that failed half-way."""
        self.runner.reset()


def _trim_heap() -> None:
    """Give freed memory back to the system, which glibc does by itself only at the end of the heap: what was packed
    leaves holes between what is kept."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextmanager
def _memory_for(what: str, way_out: str) -> Iterator[None]:
    """The plan asks how much memory there is; the system may refuse it all the same (a limit on address space)."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "allocate memory" not in str(error):
            raise
        raise InvalidInput(
            f"the system refuses the memory for {what} ({describe(error, 120)}): {way_out}, "
            "or raise the limit (ulimit -v)"
        ) from error
