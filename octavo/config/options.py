"""Checks of the options a user gave, before anything of the model is known. Pure.

`make_engine_args` is the only door: what comes out of it has the right types, and no option in it is ignored later.
"""

import dataclasses
import difflib
import os
from collections.abc import Callable, Collection
from typing import Any

from octavo.config.engine_args import NOT_BUILT, EngineArgs
from octavo.config.memory import parse_bytes
from octavo.errors import InvalidInput, not_built, printable, short_repr
from octavo.protocol.checks import as_int
from octavo.protocol.kv_cache_spec import DTYPE_BYTES
from octavo.protocol.sampling_params import LOGPROBS_MODES

BLOCK_SIZES = (8, 16, 32, 64, 128)
SCHEDULING_POLICIES = ("fcfs", "priority")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
DTYPES = ("auto", "float32", "bfloat16", "float16")
DTYPE_ALIASES = {
    "float": "float32", "fp32": "float32", "half": "float16", "fp16": "float16", "bf16": "bfloat16",
    "fp8_e4m3": "fp8",
}  # fmt: skip
"""Other names that users know."""
QUANTIZATIONS = ("none", "gguf", "int8", "int4")
_LATER_QUANTIZATIONS = ("awq", "gptq", "fp8", "bitsandbytes", "compressed-tensors")
_LATER_KV_CACHE_DTYPES = ("fp8_e5m2",)
KV_CACHE_DTYPES = ("auto", *DTYPE_BYTES)

_MAX_THREADS = 1024
_MAX_INTEGER = 2**63 - 1
_MAX_AMOUNT_CHARACTERS = 40
_FIELDS = tuple(field.name for field in dataclasses.fields(EngineArgs))


def make_engine_args(**options: Any) -> EngineArgs:
    """EngineArgs of the given keywords, checked as far as that can be done without the model.

    Raises:
        TypeError: an unknown keyword; names it and the nearest known one.
        InvalidInput: a value of the wrong type or out of range, options that contradict each other, or an option
            whose feature is not built yet.
    """
    known = {}
    for name, value in options.items():
        if name in _FIELDS:
            known[name] = value
        elif name in NOT_BUILT:
            _refuse_not_built(name, value)
        else:
            near = difflib.get_close_matches(name, (*_FIELDS, *NOT_BUILT), n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; the options are {', '.join(_FIELDS)}"
            raise TypeError(f"{short_repr(name)} is no engine option{hint}")
    for name, value in known.items():
        known[name] = _CHECKS[name](name, value)
    args = EngineArgs(**known)
    _check_together(args)
    return args


def _refuse_not_built(name: str, value: object) -> None:
    neutral = NOT_BUILT[name]
    same_kind = isinstance(value, bool) == isinstance(neutral, bool)
    try:
        asks_nothing = same_kind and bool(value == neutral)
    except Exception:  # arrays, and objects that cannot be compared
        asks_nothing = False
    if asks_nothing:
        return
    if name in _NEVER:
        raise InvalidInput(f"{name}={short_repr(value)} is not supported: {_NEVER[name]}")
    raise not_built(f"{name}={short_repr(value)}", f"leave it out or give {neutral!r}")


_NEVER = {
    "gpu_memory_utilization": 'the KV cache has a size of its own; give kv_cache_memory, such as "2GiB", or neither',
    "trust_remote_code": "code that comes with a model is never run; leave it out",
}
"""Of those options the ones that will not be built as they are, with what there is instead."""


def _check_together(args: EngineArgs) -> None:
    """Options that exclude each other."""
    sizes = [name for name in ("num_kv_blocks", "kv_cache_memory", "kv_cache_memory_bytes") if getattr(args, name)]
    if len(sizes) > 1:
        given = ", ".join(f"{name}={getattr(args, name)}" for name in sizes)
        raise InvalidInput(f"{given}: each sets the size of the KV cache; give one of them")
    if args.enable_chunked_prefill:
        return
    if args.long_prefill_token_threshold > 0:
        raise InvalidInput(
            f"long_prefill_token_threshold={args.long_prefill_token_threshold} splits prompts into chunks, but "
            "enable_chunked_prefill=False; set it to 0 or turn chunked prefill on"
        )
    budget, longest = args.max_num_batched_tokens, args.max_model_len
    if budget is not None and longest is not None:
        check_unchunked_budget(budget, longest)


def check_unchunked_budget(max_num_batched_tokens: int, max_model_len: int) -> None:
    """Without chunked prefill a step must hold the longest prompt, or it would never be served."""
    if max_num_batched_tokens < max_model_len:
        raise InvalidInput(
            f"max_num_batched_tokens={max_num_batched_tokens} is less than max_model_len={max_model_len}, but "
            "enable_chunked_prefill=False computes a prompt in one step; raise the first, lower the second or turn "
            "chunked prefill on"
        )


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InvalidInput(f"{name}={short_repr(value)} must be a non-empty text")
    return value


def _path_or_name(name: str, value: object) -> str:
    try:
        return _text(name, os.fspath(value) if isinstance(value, os.PathLike) else value)
    except InvalidInput:
        raise
    except Exception as error:
        raise InvalidInput(f"{name}={short_repr(value)} gives no path: {printable(str(error))}") from error


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(f"{name}={short_repr(value)} must be True or False")
    return value


def _integer(low: int, high: int = _MAX_INTEGER) -> Callable[[str, object], int]:
    limit = f"an integer >= {low}" if high == _MAX_INTEGER else f"an integer between {low} and {high}"

    def check(name: str, value: object) -> int:
        number = as_int(value)
        if number is None or not low <= number <= high:
            too_large = number is not None and number > high == _MAX_INTEGER
            raise InvalidInput(f"{name}={short_repr(value)} must be {limit}{' and below 2**63' if too_large else ''}")
        return number

    return check


def _one_of(choices: Collection[object], later: Collection[str] = ()) -> Callable[[str, object], Any]:
    def check(name: str, value: object) -> object:
        if isinstance(value, str) and value in later:
            raise not_built(f"{name}={short_repr(value)}", f"use {listing(choices)}")
        if isinstance(value, bool) or not isinstance(value, (str, int)) or value not in choices:
            raise InvalidInput(f"{name}={short_repr(value)} is not supported; use {listing(choices)}")
        return value

    return check


def listing(choices: Collection[object]) -> str:
    """a, b or c."""
    *most, last = (str(choice) for choice in choices)
    return f"{', '.join(most)} or {last}" if most else last


def _dtype(choices: Collection[object], later: Collection[str] = ()) -> Callable[[str, object], Any]:
    check = _one_of(choices, later)
    return lambda name, value: check(name, DTYPE_ALIASES.get(value, value) if isinstance(value, str) else value)


def _amount(name: str, value: object) -> int:
    readable = len(value) <= _MAX_AMOUNT_CHARACTERS if isinstance(value, str) else as_int(value) is not None
    if not readable:
        raise InvalidInput(f'{name}={short_repr(value)} is no amount of memory; give bytes or a text such as "2GiB"')
    return parse_bytes(value, name)  # type: ignore[arg-type]  # it refuses other integers than Python's itself


def _optional(check: Callable[[str, object], Any]) -> Callable[[str, object], Any]:
    return lambda name, value: None if value is None else check(name, value)


_CHECKS: dict[str, Callable[[str, object], Any]] = {
    "model": _path_or_name,
    "tokenizer": _optional(_path_or_name),
    "revision": _optional(_text),
    "load_format": _one_of(LOAD_FORMATS),
    "dtype": _dtype(DTYPES),
    "quantization": _optional(_one_of(QUANTIZATIONS, _LATER_QUANTIZATIONS)),
    "max_model_len": _optional(_integer(2)),  # a prompt token and an output token
    "max_num_seqs": _integer(1),
    "max_num_batched_tokens": _optional(_integer(1)),
    "block_size": _one_of(BLOCK_SIZES),
    "enable_prefix_caching": _flag,
    "enable_chunked_prefill": _flag,
    "long_prefill_token_threshold": _integer(0),
    "scheduling_policy": _one_of(SCHEDULING_POLICIES),
    "fair_share": _flag,
    "kv_cache_dtype": _dtype(KV_CACHE_DTYPES, _LATER_KV_CACHE_DTYPES),
    "num_kv_blocks": _optional(_integer(1, 2**31 - 1)),
    "kv_cache_memory": _optional(_amount),
    "kv_cache_memory_bytes": _optional(_amount),
    "num_threads": _optional(_integer(1, _MAX_THREADS)),
    "seed": _integer(-(2**63), 2**64 - 1),
    "logprobs_mode": _one_of(LOGPROBS_MODES),
    "platform": _text,
    "disable_log_stats": _flag,
}
