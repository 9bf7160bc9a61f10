"""Requests to measure with: made ones (random, shared prefixes) and recorded ones (ShareGPT, agents, JSON lines).

The same options give the same requests, whatever runs them. No torch.
"""

import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from tqdm import tqdm

from octavo.bench.recordings import agent_turns, sharegpt_turns
from octavo.errors import InvalidInput, short_repr
from octavo.files import open_regular
from octavo.tokenization.tokenizer import Tokenizer

DatasetName = Literal["random", "shared-prefix", "sharegpt", "agents", "jsonl"]
MADE = ("random", "shared-prefix")
DEFAULT_LENGTH = 128
DEFAULT_PREFIX_LENGTH = 256
DEFAULT_PREFIXES = 4
_MAX_PROMPTS = 10_000_000
_LINE_FIELDS = {"prompt", "prompt_token_ids", "output_len", "arrival"}


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request."""

    prompt: str | list[int]
    """Text or token ids."""
    prompt_len: int
    """Tokens of the prompt, as far as they can be known."""
    output_len: int
    """Output tokens to ask for."""
    arrival: float | None = None
    """Seconds after the start at which it was recorded to come; None: no such record."""


@dataclass(frozen=True, kw_only=True)
class TrafficArgs:
    """What requests to send."""

    dataset_name: DatasetName = "random"
    """random: random tokens. shared-prefix: random tokens behind a few common beginnings. sharegpt: first questions of
    a ShareGPT file. agents: every turn of recorded agent conversations. jsonl: lines with prompt or prompt_token_ids,
    and perhaps output_len and arrival (seconds)."""
    dataset_path: str | None = None
    """The file of a recorded dataset."""
    num_prompts: int = 64
    """Requests; of a recording the first ones that fit."""
    input_len: int | None = None
    """Tokens of a made prompt (default 128), a shared prefix not counted; of a recording the longest prompt taken."""
    output_len: int | None = None
    """Output tokens of a request; default: as recorded, else 128."""
    range_ratio: float = 0.0
    """Made lengths are spread evenly from (1 - this) to (1 + this) times the lengths given."""
    prefix_len: int | None = None
    """Of shared-prefix: tokens of each common beginning; default 256."""
    num_prefixes: int | None = None
    """Of shared-prefix: how many different beginnings there are; default 4."""
    traffic_seed: int = 0
    """Seed of everything random about the requests."""


class Words(Protocol):
    """Makes prompts of a length, and measures texts."""

    def make(self, rng: random.Random, length: int) -> str | list[int]: ...

    def count(self, text: str) -> int: ...


class TokenizerWords:
    """Random ordinary tokens, as ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = set(tokenizer.backend.get_added_tokens_decoder())
        self._ids = sorted(set(tokenizer.get_vocab().values()) - special) or list(range(len(tokenizer)))
        self._tokenizer = tokenizer

    def make(self, rng: random.Random, length: int) -> list[int]:
        return rng.choices(self._ids, k=length)

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text))


class PlainWords:
    """For a server whose tokenizer is not at hand: short common words, about a token each."""

    _WORDS = (
        "the", "of", "and", "to", "in", "is", "that", "it", "for", "was", "on", "are", "as", "with", "at", "be",
        "this", "from", "have", "or", "by", "one", "had", "not", "but", "what", "all", "were", "when", "we", "there",
    )  # fmt: skip

    def make(self, rng: random.Random, length: int) -> str:
        return " ".join(rng.choices(self._WORDS, k=length))

    def count(self, text: str) -> int:
        return max(1, math.ceil(len(text) / 4))


def check_traffic(args: TrafficArgs) -> None:
    """Refuse what cannot be meant, before anything is loaded."""
    limits = (("num_prompts", 1), ("input_len", 1), ("output_len", 1), ("prefix_len", 1), ("num_prefixes", 1))
    for name, low in limits:
        value = getattr(args, name)
        if value is not None and not low <= value <= _MAX_PROMPTS:
            raise InvalidInput(f"{name}={short_repr(value)} must be from {low} to {_MAX_PROMPTS}")
    if not 0 <= args.range_ratio < 1:
        raise InvalidInput(f"range_ratio={args.range_ratio:g} must be from 0 to less than 1")
    made = args.dataset_name in MADE
    if made and args.dataset_path is not None:
        raise InvalidInput(f"dataset_name={args.dataset_name} needs no file; leave dataset_path out")
    if not made and args.dataset_path is None:
        raise InvalidInput(f"dataset_name={args.dataset_name} needs a file; give dataset_path")
    if not made and args.range_ratio:
        raise InvalidInput(f"range_ratio is of made lengths, and dataset_name={args.dataset_name} is recorded")
    for name in ("prefix_len", "num_prefixes"):
        if args.dataset_name != "shared-prefix" and getattr(args, name) is not None:
            raise InvalidInput(f"{name} is of dataset_name=shared-prefix; leave it out, or choose that")


def make_traffic(args: TrafficArgs, words: Words, max_len: int | None = None) -> list[BenchRequest]:
    """The requests.

    Args:
        words: makes and measures prompts.
        max_len: tokens of prompt and output that a request may have; recorded ones that are longer are passed over.

    Raises:
        InvalidInput: the options contradict each other, a file cannot be read, nothing in it fits, or a made request
            is longer than `max_len`.
    """
    check_traffic(args)
    rng = random.Random(args.traffic_seed)
    if args.dataset_name in MADE:
        requests = list(_made(args, words, rng))
        longest = max(requests, key=lambda request: request.prompt_len + request.output_len)
        if max_len is not None and longest.prompt_len + longest.output_len > max_len:
            raise InvalidInput(
                f"a request of {longest.prompt_len} + {longest.output_len} tokens is longer than max_model_len or the "
                f"KV cache allows, {max_len}; lower input_len or output_len"
            )
        return requests
    requests = []
    recorded = tqdm(_recorded(args, words), desc="reading", delay=2, disable=None, leave=False)
    for request in recorded:
        if (args.input_len is None or request.prompt_len <= args.input_len) and (
            max_len is None or request.prompt_len + request.output_len <= max_len
        ):
            requests.append(request)
            if len(requests) == args.num_prompts:
                break
    recorded.close()
    if not requests:
        limits = " and ".join(f"{name} {value}" for name, value in _limits(args, max_len))
        raise InvalidInput(f"{args.dataset_path} has no request{f' within {limits}' if limits else ''}")
    return requests


def _limits(args: TrafficArgs, max_len: int | None) -> Iterator[tuple[str, int]]:
    if args.input_len is not None:
        yield "input_len", args.input_len
    if max_len is not None:
        yield "a length of", max_len


def poisson_arrivals(requests: Sequence[BenchRequest], rate: float, seed: int) -> list[BenchRequest]:
    """The requests with arrivals of a Poisson process of `rate` requests a second; the first comes at once."""
    rng = random.Random(seed)
    now, timed = 0.0, []
    for request in requests:
        timed.append(replace(request, arrival=now))
        now += rng.expovariate(rate)
    return timed


def _made(args: TrafficArgs, words: Words, rng: random.Random) -> Iterator[BenchRequest]:
    prefixes: list[str | list[int]] = []
    prefix_len = 0
    if args.dataset_name == "shared-prefix":
        prefix_len = args.prefix_len or DEFAULT_PREFIX_LENGTH
        prefixes = [words.make(rng, prefix_len) for _ in range(args.num_prefixes or DEFAULT_PREFIXES)]
    for number in range(args.num_prompts):
        length = _spread(rng, args.input_len or DEFAULT_LENGTH, args.range_ratio)
        output_len = _spread(rng, args.output_len or DEFAULT_LENGTH, args.range_ratio)
        prompt = words.make(rng, length)
        if prefixes:
            prompt = _joined(prefixes[number % len(prefixes)], prompt)
        yield BenchRequest(prompt, prefix_len + length, output_len)


def _spread(rng: random.Random, length: int, ratio: float) -> int:
    return rng.randint(max(1, math.ceil(length * (1 - ratio))), max(1, math.floor(length * (1 + ratio))))


def _joined(prefix: str | list[int], rest: str | list[int]) -> str | list[int]:
    if isinstance(prefix, str) or isinstance(rest, str):
        return f"{prefix} {rest}"
    return prefix + rest


def _recorded(args: TrafficArgs, words: Words) -> Iterator[BenchRequest]:
    assert args.dataset_path is not None
    path = Path(args.dataset_path)
    if args.dataset_name == "jsonl":
        yield from _json_lines(path, args.output_len, words)
        return
    turns: Iterable[tuple[str, str]] = (sharegpt_turns if args.dataset_name == "sharegpt" else agent_turns)(path)
    for prompt, answer in turns:
        output_len = args.output_len or max(1, words.count(answer))
        yield BenchRequest(prompt, words.count(prompt), output_len)


def _json_lines(path: Path, output_len: int | None, words: Words) -> Iterator[BenchRequest]:
    with open_regular(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _line_request(f"{path} line {number}", line, output_len, words)


def _line_request(where: str, line: bytes, output_len: int | None, words: Words) -> BenchRequest:
    record: Any
    text: Any
    ids: Any
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{where} is not JSON: {error}") from error
    if not isinstance(record, dict) or not record.keys() <= _LINE_FIELDS:
        raise InvalidInput(f"{where} must be an object with some of the fields {', '.join(sorted(_LINE_FIELDS))}")
    text, ids = record.get("prompt"), record.get("prompt_token_ids")
    if (text is None) == (ids is None):
        raise InvalidInput(f"{where} must have prompt or prompt_token_ids, and not both")
    if ids is None and not (isinstance(text, str) and text):
        raise InvalidInput(f"{where}: prompt={short_repr(text)} must be a non-empty text")
    if ids is not None and not (isinstance(ids, list) and ids and all(type(token) is int for token in ids)):
        raise InvalidInput(f"{where}: prompt_token_ids={short_repr(ids)} must be a non-empty list of integers")
    length = record.get("output_len", DEFAULT_LENGTH) if output_len is None else output_len
    if type(length) is not int or not 1 <= length <= _MAX_PROMPTS:
        raise InvalidInput(f"{where}: output_len={short_repr(length)} must be from 1 to {_MAX_PROMPTS}")
    arrival = record.get("arrival")
    if arrival is not None and not (type(arrival) in (int, float) and 0 <= arrival < math.inf):
        raise InvalidInput(f"{where}: arrival={short_repr(arrival)} must be a number of seconds from 0")
    if ids is None:
        return BenchRequest(text, words.count(text), length, arrival)
    return BenchRequest(ids, len(ids), length, arrival)
