"""Runs requests through an engine in this process, step by step, and measures what comes out."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from tqdm import tqdm

from octavo.bench.report import summary
from octavo.bench.traffic import BenchRequest
from octavo.protocol.outputs import RequestOutput
from octavo.protocol.sampling_params import RequestOutputKind, SamplingParams
from octavo.protocol.stats import EngineStats

_MOST_SAMPLES = 2000


class Engine(Protocol):
    """What is asked of an engine; `octavo.engine.llm_engine.LLMEngine` is one."""

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams | None = None) -> None: ...

    def step(self) -> list[RequestOutput]: ...

    def has_unfinished_requests(self) -> bool: ...

    def abort_request(self, request_ids: Sequence[str]) -> None: ...

    def stats(self) -> EngineStats: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """The engine at one moment."""

    time: float
    """Seconds since the start."""
    running: int
    waiting: int
    kv_utilization: float
    kv_blocks_in_use: int


class _Samples:
    """Samples at an even pace: when there are many, every second one is dropped and the pace halved."""

    def __init__(self) -> None:
        self.kept: list[Sample] = []
        self._every, self._steps = 1, 0

    def take(self, seconds: float, stats: EngineStats) -> None:
        self._steps += 1
        if self._steps % self._every or not stats.kv_blocks_in_use:
            return
        self.kept.append(
            Sample(seconds, stats.num_running, stats.num_waiting, stats.kv_utilization, stats.kv_blocks_in_use)
        )
        if len(self.kept) >= _MOST_SAMPLES:
            self.kept = self.kept[1::2]
            self._every *= 2


def run_requests(engine: Engine, requests: Sequence[BenchRequest], desc: str = "output") -> dict[str, Any]:
    """Queue all requests at once, compute them to their full output lengths, and say how that went.

    Returns:
        elapsed_time, num_requests, total_num_tokens, requests_per_second, tokens_per_second (prompt and output),
        output_tokens_per_second, ttft, itl and latency {mean, p50, p90, p99, max}, num_preemptions,
        prefix_cache_hit_rate, kv_utilization (mean over time, of the blocks in use) and its samples;
        latencies and between_tokens, every single one.
    """
    ids = {f"bench-{number}" for number in range(len(requests))}
    before, samples = engine.stats(), _Samples()
    finished: list[RequestOutput] = []
    ends: list[float] = []
    start = time.perf_counter()
    try:
        for number, request in enumerate(requests):
            engine.add_request(f"bench-{number}", request.prompt, _params(request.output_len))
        num_tokens = sum(request.output_len for request in requests)
        with tqdm(total=num_tokens, desc=desc, unit="tok", delay=2, disable=None, leave=False) as bar:
            while engine.has_unfinished_requests():
                outputs = engine.step()
                now, stats = time.perf_counter() - start, engine.stats()
                samples.take(now, stats)
                bar.update(stats.generation_tokens - before.generation_tokens - bar.n)
                for output in outputs:
                    if output.finished:
                        finished.append(output)
                        ends.append(now)
    except BaseException:
        engine.abort_request(sorted(ids))
        engine.step()
        raise
    elapsed = time.perf_counter() - start
    return _results(elapsed, finished, ends, before, engine.stats(), samples.kept)


def _params(output_len: int) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=output_len, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )


def _results(
    elapsed: float,
    finished: list[RequestOutput],
    ends: list[float],
    before: EngineStats,
    after: EngineStats,
    samples: list[Sample],
) -> dict[str, Any]:
    prompt_tokens = sum(len(output.prompt_token_ids) for output in finished)
    output_tokens = sum(len(output.outputs[0].token_ids) for output in finished)
    queries = after.prefix_cache_queries - before.prefix_cache_queries
    hits = after.prefix_cache_hits - before.prefix_cache_hits
    utilization = [sample.kv_utilization for sample in samples]
    return {
        "elapsed_time": elapsed,
        "num_requests": len(finished),
        "total_prompt_tokens": prompt_tokens,
        "total_output_tokens": output_tokens,
        "total_num_tokens": prompt_tokens + output_tokens,
        "requests_per_second": len(finished) / elapsed,
        "tokens_per_second": (prompt_tokens + output_tokens) / elapsed,
        "output_tokens_per_second": output_tokens / elapsed,
        "ttft": summary([output.metrics.time_to_first_token for output in finished]),
        "itl": summary([seconds for output in finished for seconds in output.metrics.between_tokens]),
        "latency": summary(ends),
        "num_preemptions": after.num_preemptions - before.num_preemptions,
        "prefix_cache_hit_rate": hits / queries if queries else None,
        "kv_utilization": sum(utilization) / len(utilization) if utilization else None,
        "kv_blocks_total": after.kv_blocks_total,
        "kv_blocks_most_in_use": max((sample.kv_blocks_in_use for sample in samples), default=0),
        "samples": [asdict(sample) for sample in samples],
        "latencies": ends,
        "between_tokens": [seconds for output in finished for seconds in output.metrics.between_tokens],
    }
