"""Driving an engine: what is counted, and that nothing is left behind when it goes wrong."""

import pytest

from octavo.bench.offline import _Samples, run_requests
from octavo.bench.traffic import BenchRequest
from octavo.protocol.outputs import CompletionOutput, RequestMetrics, RequestOutput
from octavo.protocol.stats import EngineStats


class FakeEngine:
    """One token of every request a step."""

    def __init__(self, fails_at=None):
        self.live, self.done, self.steps, self.aborted = {}, {}, 0, []
        self.fails_at = fails_at

    def add_request(self, request_id, prompt, params=None):
        assert params.ignore_eos and params.temperature == 0
        self.live[request_id] = (prompt, params.max_tokens)
        self.done[request_id] = 0

    def step(self):
        self.steps += 1
        if self.steps == self.fails_at:
            raise RuntimeError("broken")
        outputs = []
        for request_id, (prompt, wanted) in list(self.live.items()):
            self.done[request_id] += 1
            if self.done[request_id] == wanted:
                del self.live[request_id]
                metrics = RequestMetrics(time_to_first_token=0.5, between_tokens=[0.1] * (wanted - 1))
                sample = CompletionOutput(0, "", [7] * wanted, finish_reason="length")
                outputs.append(RequestOutput(request_id, None, prompt, [sample], True, metrics=metrics))
        return outputs

    def has_unfinished_requests(self):
        return bool(self.live)

    def abort_request(self, request_ids):
        self.aborted += request_ids
        self.live.clear()

    def stats(self):
        running = len(self.live)
        return EngineStats(
            num_running=running, kv_blocks_total=10, kv_blocks_in_use=running, kv_utilization=0.5 * bool(running),
            prefix_cache_queries=4 * self.steps, prefix_cache_hits=self.steps,
        )  # fmt: skip


def test_tokens_times_and_the_kv_cache_are_counted():
    results = run_requests(FakeEngine(), [BenchRequest([1, 2, 3], 3, 2), BenchRequest([1], 1, 4)])
    assert (results["total_prompt_tokens"], results["total_output_tokens"], results["num_requests"]) == (4, 6, 2)
    assert results["tokens_per_second"] == pytest.approx(10 / results["elapsed_time"])
    assert results["ttft"]["p99"] == 0.5 and results["itl"]["p50"] == pytest.approx(0.1)
    assert results["kv_utilization"] == 0.5 and results["prefix_cache_hit_rate"] == 0.25
    assert results["kv_blocks_most_in_use"] == 2 and results["latency"]["max"] <= results["elapsed_time"]


def test_one_token_has_no_time_between_tokens():
    assert run_requests(FakeEngine(), [BenchRequest([1], 1, 1)])["itl"] is None


def test_what_is_still_running_is_aborted_when_a_step_fails():
    engine = FakeEngine(fails_at=2)
    with pytest.raises(RuntimeError, match="broken"):
        run_requests(engine, [BenchRequest([1], 1, 4)])
    assert engine.aborted == ["bench-0"] and not engine.live


def test_samples_of_a_long_run_stay_few_and_reach_its_end(monkeypatch):
    monkeypatch.setattr("octavo.bench.offline._MOST_SAMPLES", 16)
    samples = _Samples()
    for step in range(10_000):
        samples.take(float(step), EngineStats(kv_blocks_in_use=1))
    assert 8 <= len(samples.kept) <= 16 and samples.kept[-1].time > 9000
