"""What /metrics shows, read back with the parser that prometheus_client has."""

import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.errors import InvalidInput
from octavo.metrics.prometheus import PrometheusExporter
from octavo.metrics.request_record import RequestRecord
from octavo.protocol.stats import EngineStats

GAUGES = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"]
COUNTERS = [
    "prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens", "generation_tokens",
    "request_success", "requests_rejected",
]  # fmt: skip
HISTOGRAMS = [
    "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
]  # fmt: skip


def read(exporter: PrometheusExporter, stats: EngineStats | None) -> dict:
    """Families by name."""
    text, content_type = exporter.render(stats)
    assert content_type.startswith("text/plain")
    return {family.name: family for family in text_string_to_metric_families(text.decode())}


def value(exporter: PrometheusExporter, stats: EngineStats | None, name: str, **labels: str) -> float:
    """The one sample of this name with these labels."""
    found = [
        sample.value
        for family in read(exporter, stats).values()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    assert len(found) == 1, f"{name} has {found}"
    return found[0]


@pytest.mark.parametrize(
    ("compat", "prefix", "labels"),
    [("octavo", "octavo_", {"model_name"}), ("vllm", "vllm:", {"model_name", "engine"})],
)
def test_every_metric_is_there_from_the_start_with_its_kind_and_labels(compat, prefix, labels):
    families = read(PrometheusExporter("m", compat), EngineStats())
    for names, kind in ((GAUGES, "gauge"), (COUNTERS, "counter"), (HISTOGRAMS, "histogram")):
        for name in names:
            family = families[prefix + name]
            assert family.type == kind
            assert family.documentation
            for sample in family.samples:
                extra = set(sample.labels) - labels
                assert extra <= {"le", "finished_reason", "reason"} and labels <= set(sample.labels)


def test_the_state_of_the_engine_is_shown():
    exporter = PrometheusExporter("m")
    stats = EngineStats(
        num_running=2, num_waiting=3, kv_blocks_total=8, kv_blocks_in_use=2, kv_blocks_cached=4, prompt_tokens=11,
        generation_tokens=22, num_preemptions=1, prefix_cache_queries=40, prefix_cache_hits=16,
    )  # fmt: skip
    assert value(exporter, stats, "octavo_num_requests_running") == 2
    assert value(exporter, stats, "octavo_num_requests_waiting") == 3
    assert value(exporter, stats, "octavo_kv_cache_usage_perc") == 0.25
    assert value(exporter, stats, "octavo_prompt_tokens_total", model_name="m") == 11
    assert value(exporter, stats, "octavo_generation_tokens_total") == 22
    assert value(exporter, stats, "octavo_prefix_cache_queries_total") == 40
    assert value(exporter, stats, "octavo_prefix_cache_hits_total") == 16
    assert value(exporter, stats, "octavo_num_preemptions_total") == 1


def test_counters_never_fall_when_the_core_is_replaced_and_lose_nothing_that_was_told():
    exporter = PrometheusExporter("m")
    name = "octavo_prompt_tokens_total"
    assert value(exporter, EngineStats(prompt_tokens=100, num_running=1), name) == 100
    assert value(exporter, None, name) == 100
    assert value(exporter, None, "octavo_num_requests_running") == 0
    exporter.engine_ended(EngineStats(prompt_tokens=130))
    assert value(exporter, None, name) == 130
    assert value(exporter, EngineStats(prompt_tokens=5), name) == 135
    assert value(exporter, EngineStats(prompt_tokens=500), name) == 630
    assert value(exporter, EngineStats(prompt_tokens=1), name) == 631, "a core was replaced and nobody said so"
    exporter.engine_ended(EngineStats())
    assert value(exporter, None, name) == 631


def test_requests_are_counted_by_reason_and_their_phases_measured():
    exporter = PrometheusExporter("m", "vllm")
    exporter.observe_request(RequestRecord(
        request_id="a", endpoint="/v1/completions", e2e_seconds=3.0, queue_seconds=0.2, prefill_seconds=0.5,
        finish_reasons=["stop", "length", "stop"],
    ))  # fmt: skip
    exporter.reject("queue_full")
    assert value(exporter, None, "vllm:request_success_total", finished_reason="stop", engine="0") == 2
    assert value(exporter, None, "vllm:request_success_total", finished_reason="length") == 1
    assert value(exporter, None, "vllm:request_success_total", finished_reason="abort") == 0
    assert value(exporter, None, "vllm:requests_rejected_total", reason="queue_full") == 1
    assert value(exporter, None, "vllm:e2e_request_latency_seconds_sum") == 3.0
    assert value(exporter, None, "vllm:request_queue_time_seconds_bucket", le="0.3") == 1
    assert value(exporter, None, "vllm:request_queue_time_seconds_bucket", le="0.1") == 0
    assert value(exporter, None, "vllm:request_decode_time_seconds_count") == 0, "it was not reached"


def test_token_times_are_measured_as_they_come():
    exporter = PrometheusExporter("m")
    exporter.observe_token_times(0.3)
    exporter.observe_token_times(None, [0.02, 0.04])
    assert value(exporter, None, "octavo_time_to_first_token_seconds_count") == 1
    assert value(exporter, None, "octavo_inter_token_latency_seconds_sum") == pytest.approx(0.06)
    assert value(exporter, None, "octavo_inter_token_latency_seconds_bucket", le="0.025") == 1


def test_exporters_share_nothing():
    first, second = PrometheusExporter("a"), PrometheusExporter('b"\n\\ü')
    first.reject("queue_full")
    assert value(second, None, "octavo_requests_rejected_total") == 0
    assert read(second, None)["octavo_num_requests_running"].samples[0].labels["model_name"] == 'b"\n\\ü'


def test_an_unknown_kind_of_names_is_refused():
    with pytest.raises(InvalidInput, match=r"metrics_compat='sglang'.*octavo or vllm"):
        PrometheusExporter("m", "sglang")


def test_it_can_be_read_while_it_is_written():
    exporter, done = PrometheusExporter("m"), threading.Event()

    def write():
        for number in range(3000):
            exporter.observe_token_times(0.1, [0.1])
            exporter.reject(f"r{number % 5}")
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        read(exporter, EngineStats(prompt_tokens=1))
    writer.join()
    assert value(exporter, None, "octavo_time_to_first_token_seconds_count") == 3000
