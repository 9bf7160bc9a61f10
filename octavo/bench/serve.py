"""`octavo bench serve`: requests to any OpenAI-compatible server, at a rate (open loop) or from so many clients that
each send one after the other (closed loop).
"""

import asyncio
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import tyro
from tqdm import tqdm

from octavo.bench.http_client import Answer, Target, first_model, make_target, stream
from octavo.bench.report import OutputArgs, Record, check_outputs, show_table, summary, write_outputs
from octavo.bench.throughput import load_line
from octavo.bench.traffic import (
    BenchRequest,
    PlainWords,
    TokenizerWords,
    TrafficArgs,
    Words,
    check_traffic,
    make_traffic,
    poisson_arrivals,
)
from octavo.config.command_line import parse_arguments
from octavo.errors import InvalidInput
from octavo.tokenization.tokenizer import Tokenizer

Endpoint = Literal["/v1/completions", "/v1/chat/completions"]
COMPLETIONS: Endpoint = "/v1/completions"
CHAT: Endpoint = "/v1/chat/completions"


@dataclass(frozen=True, kw_only=True)
class ServeArgs:
    """Send requests to a server and measure what comes back: first token, between tokens, throughput, errors.

    Open loop: --request-rate or --recorded-arrivals; requests come when they come, however slow the answers are.
    Closed loop: --max-concurrency clients. Neither: all at once. The key of a server that asks for one is taken from
    the environment variable OPENAI_API_KEY.

    The exit status is 1 if a request failed.
    """

    base_url: str = "http://127.0.0.1:8000"
    """The server."""
    endpoint: Endpoint = COMPLETIONS
    """Which kind of requests."""
    model: str | None = None
    """The name the server gives the model; default: the first it lists."""
    tokenizer: str | None = None
    """A model whose tokenizer makes prompts of exact lengths; default: prompts of short words, about a token each."""
    request_rate: float | None = None
    """Requests a second, of a Poisson process."""
    recorded_arrivals: bool = False
    """Send each request at the arrival that its line of a jsonl file has."""
    max_concurrency: int | None = None
    """Clients, each with one request at a time."""
    ignore_eos: bool = False
    """Ask for full output lengths. A field beyond OpenAI's: not every server takes it."""
    timeout: float = 600.0
    """Seconds after which a request counts as failed."""
    traffic: tyro.conf.OmitArgPrefixes[TrafficArgs] = field(default_factory=TrafficArgs)
    output: tyro.conf.OmitArgPrefixes[OutputArgs] = field(default_factory=OutputArgs)


def run(argv: Sequence[str]) -> int:
    """Measure, print the table, write the files.

    Returns:
        The exit status: 1 if a request failed.
    """
    args = parse_arguments(ServeArgs, "octavo bench serve", argv)
    check_traffic(args.traffic)
    check_outputs(args.output)
    _check(args)
    target = make_target(args.base_url, os.environ.get("OPENAI_API_KEY"), args.timeout)
    model = first_model(target) if args.model is None else args.model
    requests = _requests(args)
    options = {k: v for k, v in asdict(args).items() if k not in ("traffic", "output")}
    record = Record("serve", argv, {**asdict(args.traffic), **options, "model": model})
    bodies = [_body(args, model, request) for request in requests]
    answers, seconds, late = asyncio.run(_send_all(args, target, requests, bodies))
    document = record.finish({**results(answers, seconds), "most_late_send": late})
    _show(document, args.traffic.num_prompts)
    write_outputs(document, args.output if document["completed"] else replace(args.output, plot=None))
    return 1 if document["failed"] else 0


def _check(args: ServeArgs) -> None:
    ways = [
        name
        for name, given in (
            ("request_rate", args.request_rate is not None),
            ("recorded_arrivals", args.recorded_arrivals),
            ("max_concurrency", args.max_concurrency is not None),
        )
        if given
    ]
    if len(ways) > 1:
        raise InvalidInput(f"{' and '.join(ways)} each say when requests are sent; give one of them")
    if args.recorded_arrivals and args.traffic.dataset_name != "jsonl":
        raise InvalidInput(
            f"dataset_name={args.traffic.dataset_name} has no recorded arrivals; give a jsonl file, or request_rate"
        )
    for name in ("request_rate", "timeout"):
        value = getattr(args, name)
        if value is not None and not (0 < value < math.inf):
            raise InvalidInput(f"{name}={value:g} must be greater than 0 and finite; leave it out for the default")
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise InvalidInput(f"max_concurrency={args.max_concurrency} must be at least 1")


def _requests(args: ServeArgs) -> list[BenchRequest]:
    tokenizer, words = _words(args.tokenizer)
    requests = make_traffic(args.traffic, words)
    if args.endpoint == CHAT:
        requests = [_as_text(request, tokenizer) for request in requests]
    if args.request_rate is not None:
        return poisson_arrivals(requests, args.request_rate, args.traffic.traffic_seed)
    if args.recorded_arrivals:
        missing = sum(request.arrival is None for request in requests)
        if missing:
            raise InvalidInput(f"{missing} lines of {args.traffic.dataset_path} have no arrival; give request_rate")
        return sorted(requests, key=lambda request: request.arrival or 0.0)
    return requests


def _words(name: str | None) -> tuple[Tokenizer | None, Words]:
    if name is None:
        return None, PlainWords()
    from octavo.loader.pull import find_model
    from octavo.tokenization.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(Path(find_model(name)))
    return tokenizer, TokenizerWords(tokenizer)


def _as_text(request: BenchRequest, tokenizer: Tokenizer | None) -> BenchRequest:
    """Chats take no token ids."""
    if isinstance(request.prompt, str):
        return request
    if tokenizer is None:
        raise InvalidInput(f"{CHAT} takes no token ids; give texts, or a tokenizer that turns the ids into text")
    return replace(request, prompt=tokenizer.decode(request.prompt))


def _body(args: ServeArgs, model: str, request: BenchRequest) -> dict[str, Any]:
    prompt = (
        {"messages": [{"role": "user", "content": request.prompt}]}
        if args.endpoint == CHAT
        else {"prompt": request.prompt}
    )
    return {
        "model": model,
        **prompt,
        "max_tokens": request.output_len,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if args.ignore_eos else {}),
    }


async def _send_all(
    args: ServeArgs, target: Target, requests: Sequence[BenchRequest], bodies: Sequence[dict[str, Any]]
) -> tuple[list[Answer], float, float]:
    """(answers, seconds until the last one's end, seconds by which the latest request was sent too late)."""
    slots = asyncio.Semaphore(args.max_concurrency or len(requests))
    late = [0.0]
    start = time.perf_counter()

    async def send(request: BenchRequest, body: dict[str, Any], bar: Any) -> Answer:
        if open_loop:
            await asyncio.sleep((request.arrival or 0.0) - (time.perf_counter() - start))
            late.append(time.perf_counter() - start - (request.arrival or 0.0))
        async with slots:
            answer = await stream(target, args.endpoint, body, time.perf_counter() - start)
        bar.update()
        return answer

    open_loop = args.request_rate is not None or args.recorded_arrivals
    with tqdm(total=len(requests), desc="requests", delay=2, disable=None, leave=False) as bar:
        pairs = zip(requests, bodies, strict=True)
        answers = await asyncio.gather(*(send(request, body, bar) for request, body in pairs))
    return list(answers), time.perf_counter() - start, max(late)


def results(answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """Numbers under the names that vLLM's tool has for them; keys in _ms are milliseconds."""
    whole = [answer for answer in answers if answer.error is None]
    prompt_tokens, output_tokens, cached = (
        sum(getattr(answer, name) for answer in whole) for name in ("prompt_tokens", "output_tokens", "cached_tokens")
    )
    times = {
        "ttft": [answer.ttft for answer in whole if answer.ttft is not None],
        "tpot": [_per_token(answer) for answer in whole if answer.output_tokens > 1 and answer.ttft is not None],
        "itl": [seconds for answer in whole for seconds in answer.itls],
        "e2el": [answer.latency for answer in whole],
    }
    return {
        "duration": seconds,
        "completed": len(whole),
        "failed": len(answers) - len(whole),
        "errors": dict(Counter(answer.error for answer in answers if answer.error is not None).most_common()),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "total_cached_tokens": cached,
        "request_throughput": len(whole) / seconds,
        "output_throughput": output_tokens / seconds,
        "total_token_throughput": (prompt_tokens + output_tokens) / seconds,
        **{name: value for key, found in times.items() for name, value in _milliseconds(key, found)},
        "ttfts": times["ttft"],
        "itls": times["itl"],
    }


def _per_token(answer: Answer) -> float:
    assert answer.ttft is not None
    return (answer.latency - answer.ttft) / (answer.output_tokens - 1)


def _milliseconds(key: str, values: Sequence[float]) -> list[tuple[str, float | None]]:
    found = summary(values)
    names = (("mean", "mean"), ("median", "p50"), ("p90", "p90"), ("p99", "p99"))
    return [(f"{name}_{key}_ms", None if found is None else 1000 * found[entry]) for name, entry in names]


def _show(document: dict[str, Any], asked: int) -> None:
    rows: list[tuple[str, object]] = [
        ("completed", document["completed"]),
        ("failed", document["failed"]),
        ("seconds", document["duration"]),
        ("prompt tokens", document["total_input_tokens"]),
        ("of them cached", document["total_cached_tokens"]),
        ("output tokens", document["total_output_tokens"]),
        ("requests/s", document["request_throughput"]),
        ("output tokens/s", document["output_throughput"]),
    ]
    for title, key in (("first token", "ttft"), ("between tokens", "itl"), ("whole answer", "e2el")):
        rows += [
            (f"{title} {p.upper()}, ms", document[f"{n}_{key}_ms"]) for n, p in (("median", "p50"), ("p99", "p99"))
        ]
    notes = [f"{count} x {error}" for error, count in document["errors"].items()]
    sent = document["completed"] + document["failed"]
    if sent < asked:
        notes.append(f"The dataset has only {sent} of {asked} requests that fit.")
    if document["most_late_send"] > 0.1:
        notes.append(f"The client was {document['most_late_send']:.2f} s late at worst: it may be what was measured.")
    show_table("serve", ("", "value"), rows, [*notes, load_line(document)])
