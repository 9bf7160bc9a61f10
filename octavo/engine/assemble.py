"""From the options to the two halves of an engine: the front end, which knows text, and the core, which knows tokens.

Every engine is put together here, so that LLM and AsyncLLM accept, refuse and announce the same things.
"""

from dataclasses import dataclass

import msgspec

from octavo.config.engine_args import EngineArgs
from octavo.config.engine_config import EngineConfig, LoadConfig
from octavo.config.machine import detect
from octavo.config.plan import with_core_process
from octavo.config.resolve import resolve
from octavo.config.weights import report_kernels
from octavo.engine.core import EngineCore
from octavo.engine.input_processor import InputProcessor
from octavo.engine.output_processor import OutputProcessor
from octavo.loader.checkpoint import open_checkpoint
from octavo.loader.pull import find_model
from octavo.logging import configure_logging, get_logger
from octavo.ops.registry import get_platform
from octavo.quantization.forms import CheckpointSizes
from octavo.scheduler.scheduler import Scheduler
from octavo.tokenization.token_length import TokenLengthBound
from octavo.tokenization.tokenizer import Tokenizer, load_tokenizer

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class FrontEnd:
    """Everything of an engine but its core."""

    config: EngineConfig
    tokenizer: Tokenizer
    input_processor: InputProcessor
    output_processor: OutputProcessor

    @property
    def vocab_size(self) -> int:
        """Token ids that may be sampled: those that both the tokenizer and the model know."""
        return min(self.tokenizer.vocab_size, self.config.model.vocab_size)


def make_front_end(args: EngineArgs, *, is_core_elsewhere: bool = False) -> FrontEnd:
    """Find the model, plan the memory and print the plan; no weights are read.

    Args:
        is_core_elsewhere: the core will have a process of its own, with the libraries in memory once more.

    Raises:
        InvalidInput: an option is refused, the model cannot be had or does not fit.
    """
    configure_logging()
    path = find_model(args.model, args.revision)
    checkpoint = open_checkpoint(path, args.load_format)
    tokenizer = load_tokenizer(find_model(args.tokenizer) if args.tokenizer else path)
    platform = get_platform(args.platform)
    machine = detect()
    config = resolve(
        args,
        model=checkpoint.config,
        load=LoadConfig(path=path, load_format=checkpoint.load_format, seed=args.seed),
        weights=CheckpointSizes(checkpoint),
        machine=with_core_process(machine) if is_core_elsewhere else machine,
        platform=platform.traits(checkpoint.config.dtype),
    )
    for note in config.notes:
        logger.info("%s", note)
    logger.info("kernels: %s", _list_kernels(report_kernels(platform.kernel_report(), config.worker)))
    if tokenizer.chat_template is None:
        logger.warning("%s has no chat template: it can complete texts but not chat", args.model)
    front_end = FrontEnd(config, tokenizer, _input_processor(config, tokenizer), OutputProcessor(tokenizer))
    defaults = front_end.input_processor.default_sampling_params()
    shown = ("temperature", "top_p", "top_k", "min_p", "max_tokens")
    logger.info("default sampling: %s", ", ".join(f"{name}={getattr(defaults, name)}" for name in shown))
    return front_end


def make_core(config: EngineConfig, vocab_size: int) -> EngineCore:
    """Load the weights and allocate the KV cache.

    Raises:
        InvalidInput: the files do not hold the model.
    """
    from octavo.executor.uniproc import UniProcExecutor  # torch: a front end whose core is elsewhere goes without

    return EngineCore(Scheduler(config.scheduler, config.cache), UniProcExecutor(config, vocab_size))


def encode_config(config: EngineConfig) -> bytes:
    """The configuration as msgpack."""
    return msgspec.msgpack.encode(config, enc_hook=str)


def decode_config(data: bytes | msgspec.Raw) -> EngineConfig:
    """The inverse of `encode_config`."""
    return msgspec.msgpack.decode(data, type=EngineConfig, dec_hook=lambda kind, value: kind(value))


def _input_processor(config: EngineConfig, tokenizer: Tokenizer) -> InputProcessor:
    return InputProcessor(
        tokenizer=tokenizer,
        model=config.model,
        max_model_len=config.scheduler.max_model_len,
        num_blocks=config.cache.num_blocks,
        block_size=config.cache.block_size,
        engine_seed=config.seed,
        logprobs_mode=config.logprobs_mode,
        token_length=TokenLengthBound(tokenizer.backend),
    )


def _list_kernels(report: dict[str, str]) -> str:
    """Each kernel once, with the kinds of layer it computes."""
    kinds: dict[str, list[str]] = {}
    for kind, kernel in report.items():
        kinds.setdefault(kernel, []).append(kind)
    return "; ".join(f"{kernel}: {', '.join(names)}" for kernel, names in kinds.items())
