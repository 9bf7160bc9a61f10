"""Logits processors: classes of the user's own that change the logits of one request.

They are named in `SamplingParams.logits_processors` as "package.module:Class", so that the name can travel to the
process that computes. They come after penalties and bias and before every mask: a processor cannot lift a mask. One
that raises or returns something else than logits ends its own request and touches no other.
"""

import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import deepcopy
from functools import reduce
from importlib import import_module

import torch
from torch import Tensor

from octavo.errors import InvalidInput, describe, printable
from octavo.protocol.sampling_params import SamplingParams


class LogitsProcessor(ABC):
    """One request's processor, called once for each of its output tokens.

    An instance may be built anew in the middle of a request (after a preemption): what it returns must follow from its
    arguments alone. Each of n samples has its own.
    """

    @abstractmethod
    def __init__(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        """params: the request's; `params.extra_args` are its arguments. prompt_token_ids: none if embeddings are given.

        Whatever is raised here ends the request.
        """

    @abstractmethod
    def __call__(self, output_token_ids: Sequence[int], logits: Tensor) -> Tensor:
        """output_token_ids so far, logits [V] float32, which may be changed in place -> logits [V].

        -inf bans a token, inf is taken as the largest finite number; NaN is an error.
        """


def load_logits_processor(path: str) -> type[LogitsProcessor]:
    """The class that `path` ("package.module:Class") names.

    Raises:
        InvalidInput: it cannot be imported or is no LogitsProcessor.
    """
    module, _, name = path.partition(":")
    try:
        found = reduce(getattr, name.split("."), import_module(module))
    except BaseException as error:  # an import runs code of any kind, `sys.exit()` too
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise  # only there it may be a real Ctrl-C
        raise InvalidInput(
            f"logits_processors={path!r} cannot be imported ({describe(error)}); "
            'name an importable class as "package.module:Class"'
        ) from error
    if not (isinstance(found, type) and issubclass(found, LogitsProcessor)) or inspect.isabstract(found):
        raise InvalidInput(
            f"logits_processors={path!r} is no LogitsProcessor; derive the class from "
            "octavo.sampling.logits_processors.LogitsProcessor and define __init__ and __call__"
        )
    return found


class ProcessorFailure(Exception):
    """A logits processor of a request failed; the message says which and how."""


class ProcessorChain:
    """The logits processors of one request, in the order of its list.

    Whatever their code raises ends that request only, `SystemExit` and `KeyboardInterrupt` too: these are then the
    processor's own. A real Ctrl-C does not arrive here as an exception: a core's process ignores the signal, Python
    raises in no thread but the main one, and there an offline LLM puts it off until the step is done.
    """

    def __init__(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        """Build `params.logits_processors`.

        Raises:
            ProcessorFailure: one cannot be imported or built.
        """
        self._processors: list[tuple[str, LogitsProcessor]] = []
        for path in params.logits_processors or ():
            # Each gets its own copies: what one changes in them is no other's business.
            own_params, own_prompt = deepcopy(params), list(prompt_token_ids)
            try:
                processor = load_logits_processor(path)(own_params, own_prompt)
            except BaseException as error:
                raise _failure(path, error) from error
            self._processors.append((path, processor))

    def __call__(self, output_token_ids: Sequence[int], logits: Tensor) -> Tensor:
        """output_token_ids, logits [V] float32, left as it is -> the processed logits [V] float32.

        Raises:
            ProcessorFailure: a processor raised, or returned something that is not logits [V].
        """
        for path, processor in self._processors:
            own_output, own_logits = list(output_token_ids), logits.clone()
            try:
                result = processor(own_output, own_logits)
            except BaseException as error:
                raise _failure(path, error) from error
            try:
                logits = _checked(result, logits)
            except Exception as error:
                raise _failure(path, error) from error
        return logits


def _checked(result: object, logits: Tensor) -> Tensor:
    if not isinstance(result, Tensor) or result.shape != logits.shape or not result.is_floating_point():
        form = f"{result.dtype} {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        raise ValueError(f"returned {form} instead of logits {list(logits.shape)}")
    result = result.to(logits).clamp(max=torch.finfo(logits.dtype).max)
    if bool(result.isnan().any()):
        raise ValueError("returned NaN")
    return result


def _failure(path: str, error: BaseException) -> ProcessorFailure:
    return ProcessorFailure(f"logits processor {printable(path)} failed: {describe(error)}")
