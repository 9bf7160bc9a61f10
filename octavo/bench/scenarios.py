"""What is measured of each engine in a round of `octavo bench compare`: the same requests for all, new every round."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from octavo.bench.contenders import Contender, Work
from octavo.bench.report import percentile
from octavo.bench.traffic import TrafficArgs, Words, make_traffic

Measure = Literal["mixed", "first-token", "one-stream", "shared-prefix"]
MIXED: Measure = "mixed"
FIRST_TOKEN: Measure = "first-token"
ONE_STREAM: Measure = "one-stream"
SHARED: Measure = "shared-prefix"

METRICS = {
    "throughput": ("output tokens/s", True),
    "p50_itl": ("between tokens P50, ms", False),
    "p99_itl": ("between tokens P99, ms", False),
    "p99_latency": ("whole answer P99, s", False),
    "kv_utilization": ("KV utilisation", True),
    "peak_rss": ("peak RSS, MiB", False),
    "ttft": ("first token, ms", False),
    "ttft_cached": ("first token, prefix seen before, ms", False),
    "prefill": ("prefill tokens/s", True),
    "one_stream": ("one stream, tokens/s", True),
    "shared_prefix": ("requests on one shared prefix, s", False),
}
"""What is shown of each metric, and whether more is better."""
QUESTION = 16
"""Tokens of a prompt after its prefix."""
STREAM_TOKENS = 48
"""Output tokens of the one stream."""


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that are given to an engine at once."""

    measure: Measure
    name: str
    """"all", or the number of requests that the row is about."""
    work: Work
    num_cached: int = 0
    """Prompt tokens whose KV an engine with prefix caching need not compute."""

    @property
    def longest(self) -> int:
        """Tokens of prompt and output of one request at most."""
        return max(len(prompt) + wanted for prompt, wanted in self.work)

    @property
    def most_output(self) -> int:
        return max(wanted for _, wanted in self.work)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the loads of a round are made from."""

    traffic: TrafficArgs
    measures: Sequence[Measure]
    concurrency: Sequence[int]
    prefix_len: int
    shared_requests: int
    shared_prefix_len: int

    def loads(self, words: Words, number: int) -> list[list[Load]]:
        """Groups that belong together, one after the other on the same engine. Round -1 is a short one to warm up."""
        rng = random.Random(f"{self.traffic.traffic_seed} {number}")
        if number < 0:
            return [[Load(MIXED, "all", self._mixed(words, 2, rng))]]
        groups = [[Load(MIXED, str(count), self._mixed(words, count, rng))] for count in self.concurrency]
        if MIXED in self.measures:
            groups.insert(0, [Load(MIXED, "all", self._mixed(words, self.traffic.num_prompts, rng))])
        if FIRST_TOKEN in self.measures:
            prefix = self._ids(words, rng, self.prefix_len)
            cold, cached = ([(prefix + self._ids(words, rng, QUESTION), 1)] for _ in range(2))
            groups.append([Load(FIRST_TOKEN, "cold", cold), Load(FIRST_TOKEN, "cached", cached, self.prefix_len)])
        if ONE_STREAM in self.measures:
            groups.append([Load(ONE_STREAM, "all", [(self._ids(words, rng, self.prefix_len), STREAM_TOKENS)])])
        if SHARED in self.measures:
            groups.append([self._shared(words, rng)])
        return groups

    def _mixed(self, words: Words, count: int, rng: random.Random) -> Work:
        changed = {"num_prompts": count, "traffic_seed": rng.getrandbits(32)}
        traffic = TrafficArgs(**{**{name: getattr(self.traffic, name) for name in _LENGTHS}, **changed})
        return [(list(request.prompt), request.output_len) for request in make_traffic(traffic, words)]  # type: ignore[arg-type]  # ids

    def _shared(self, words: Words, rng: random.Random) -> Load:
        prefix, count = self._ids(words, rng, self.shared_prefix_len), self.shared_requests
        work = [(prefix + self._ids(words, rng, QUESTION), QUESTION) for _ in range(count)]
        return Load(SHARED, "all", work, (count - 1) * self.shared_prefix_len)

    @staticmethod
    def _ids(words: Words, rng: random.Random, length: int) -> list[int]:
        ids = words.make(rng, length)
        assert isinstance(ids, list)
        return ids


_LENGTHS = ("input_len", "output_len", "range_ratio")


def take(one: Contender, loads: Sequence[Load]) -> Iterator[tuple[str, dict[str, float]]]:
    """Let an engine compute a group of loads: (row, its metrics) of each."""
    for load in loads:
        answer = one.runner.run(load.work, min(one.batch_size, len(load.work)))
        if load.measure == MIXED:
            yield load.name, _mixed_metrics(answer, is_all=load.name == "all")
        elif load.measure == SHARED:
            yield "all", {"shared_prefix": answer["seconds"]}
        elif load.measure == ONE_STREAM:
            gaps = answer["between_tokens"]
            yield "all", {"one_stream": len(gaps) / sum(gaps)} if gaps else {}
        elif load.name == "cold":
            tokens = sum(len(prompt) for prompt, _ in load.work)
            yield "all", {"ttft": 1000 * answer["seconds"], "prefill": tokens / answer["seconds"]}
        else:
            yield "all", {"ttft_cached": 1000 * answer["seconds"]}


def _mixed_metrics(answer: dict[str, Any], is_all: bool) -> dict[str, float]:
    metrics = {"throughput": answer["output_tokens"] / answer["seconds"]}
    if not is_all:
        return metrics
    metrics["p99_latency"] = percentile(answer["latencies"], 99)
    if answer["between_tokens"]:
        metrics["p50_itl"], metrics["p99_itl"] = (1000 * percentile(answer["between_tokens"], p) for p in (50, 99))
    if answer["kv_utilization"] is not None:
        metrics["kv_utilization"] = answer["kv_utilization"]
    if answer["peak_rss"] is not None:
        metrics["peak_rss"] = answer["peak_rss"] / 2**20
    return metrics
