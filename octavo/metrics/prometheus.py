"""PrometheusExporter: the engine's statistics and its requests in the Prometheus text format.

Metrics are named as in vLLM, with `octavo_` or, for dashboards made for it, with `vllm:` in front. Each exporter has a
registry of its own; nothing is global. Thread-safe. What always holds: a counter never falls, whatever engine core it
counts: `engine_ended` carries what one has counted over to the next.
"""

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from octavo.errors import InvalidInput, short_repr
from octavo.metrics.request_record import RequestRecord
from octavo.protocol.stats import EngineStats

PREFIXES = {"octavo": "octavo_", "vllm": "vllm:"}
"""What metrics' names begin with, by kind of compatibility."""

_FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
_BETWEEN_TOKENS_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0,
)  # fmt: skip
_PHASE_BUCKETS = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip

_GAUGES = {
    "num_requests_running": "Requests that are being computed; each sample counts.",
    "num_requests_waiting": "Requests that wait to be computed; each sample counts.",
    "kv_cache_usage_perc": "Blocks of the KV cache that requests hold, as a share: 1 is all.",
}
_COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "num_preemptions": "How often a request lost its KV cache to others and was computed again.",
    "prompt_tokens": "Prompt tokens of requests that were begun.",
    "generation_tokens": "Tokens generated.",
}
"""By the name of the field of `EngineStats`."""


class PrometheusExporter:
    """All metrics of one served model.

    Args:
        model_name: the `model_name` label.
        compat: "octavo" or "vllm": whose names the metrics bear. vLLM's also have the label `engine`, "0".

    Raises:
        InvalidInput: another `compat`.
    """

    def __init__(self, model_name: str, compat: str = "octavo") -> None:
        if compat not in PREFIXES:
            raise InvalidInput(f"metrics_compat={short_repr(compat)} is not known; use {' or '.join(PREFIXES)}")
        prefix = PREFIXES[compat]
        labels = {"model_name": model_name} | ({"engine": "0"} if compat == "vllm" else {})
        self._registry = CollectorRegistry(auto_describe=False)
        self._engine = _EngineCollector(prefix, labels)
        self._registry.register(self._engine)
        self._histograms = _Histograms(self._registry, prefix, labels)
        names, values = tuple(labels), tuple(labels.values())
        self._success = Counter(
            f"{prefix}request_success", "Samples that ended, by the reason.", (*names, "finished_reason"),
            registry=self._registry,
        )  # fmt: skip
        self._rejected = Counter(
            f"{prefix}requests_rejected", "Requests that were not admitted, by the reason.", (*names, "reason"),
            registry=self._registry,
        )  # fmt: skip
        self._labels = values
        for reason in ("stop", "length", "abort"):  # so that a rate can be taken from the start
            self._success.labels(*values, reason)
        self._rejected.labels(*values, "queue_full")

    def observe_token_times(self, time_to_first_token: float | None, between_tokens: Iterable[float] = ()) -> None:
        """Tokens have come. To be called with every output, or once with all.

        Args:
            time_to_first_token: seconds from the request's arrival, if its first token is among them.
            between_tokens: seconds from one token of a sample to the next.
        """
        if time_to_first_token is not None:
            self._histograms.first_token.observe(time_to_first_token)
        self._histograms.between_tokens.observe(*between_tokens)

    def observe_request(self, record: RequestRecord) -> None:
        """A request that had been admitted has ended, in whatever way. Its token times are not taken from here."""
        phases = self._histograms
        for histogram, seconds in (
            (phases.e2e, record.e2e_seconds),
            (phases.queue, record.queue_seconds),
            (phases.prefill, record.prefill_seconds),
            (phases.decode, record.decode_seconds),
        ):
            if seconds is not None:
                histogram.observe(seconds)
        for reason in record.finish_reasons:
            self._success.labels(*self._labels, reason).inc()

    def reject(self, reason: str) -> None:
        """A request was not admitted: "queue_full", "draining", ..."""
        self._rejected.labels(*self._labels, reason).inc()

    def engine_ended(self, last: EngineStats) -> None:
        """The engine core that reported this is gone; another may come and count from 0."""
        self._engine.end(last)

    def render(self, stats: EngineStats | None) -> tuple[bytes, str]:
        """The text, and its content type.

        Args:
            stats: of the core that runs; None: there is none, and nothing runs or waits.
        """
        self._engine.set(stats)
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


class _Histograms:
    def __init__(self, registry: CollectorRegistry, prefix: str, labels: dict[str, str]) -> None:
        def make(name: str, text: str, buckets: tuple[float, ...]) -> _Histogram:
            histogram = _Histogram(f"{prefix}{name}", text, labels, buckets)
            registry.register(histogram)
            return histogram

        self.first_token = make("time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_BUCKETS)
        self.between_tokens = make(
            "inter_token_latency_seconds", "From one token of a sample to the next.", _BETWEEN_TOKENS_BUCKETS
        )
        self.e2e = make("e2e_request_latency_seconds", "From arrival to the end of the answer.", _PHASE_BUCKETS)
        self.queue = make("request_queue_time_seconds", "From arrival to being first scheduled.", _PHASE_BUCKETS)
        self.prefill = make("request_prefill_time_seconds", "From there to the first token.", _PHASE_BUCKETS)
        self.decode = make("request_decode_time_seconds", "From the first token to the last.", _PHASE_BUCKETS)


class _Histogram(Collector):
    """Counts by bucket. Observed for every token, so it does as little as it can: the library's takes several times
    as long, with a lock and a label for each bucket."""

    def __init__(self, name: str, text: str, labels: dict[str, str], buckets: tuple[float, ...]) -> None:
        self._name, self._text, self._labels, self._buckets = name, text, labels, buckets
        self._lock = threading.Lock()
        self._counts = [0] * (len(buckets) + 1)
        """How many were at most the bucket's bound and more than the one before; the last: more than all."""
        self._sum = 0.0

    def observe(self, *values: float) -> None:
        with self._lock:
            for value in values:
                self._counts[bisect_left(self._buckets, value)] += 1
                self._sum += value

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            cumulative, total = list(accumulate(self._counts)), self._sum
        bounds = [*map(floatToGoString, self._buckets), "+Inf"]
        family = HistogramMetricFamily(self._name, self._text, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), list(zip(bounds, cumulative, strict=True)), total)
        yield family


class _EngineCollector(Collector):
    """Gauges and counters out of the statistics that were set last."""

    def __init__(self, prefix: str, labels: dict[str, str]) -> None:
        self._prefix = prefix
        self._labels = labels
        self._lock = threading.Lock()
        self._stats = EngineStats()
        self._base = dict.fromkeys(_COUNTERS, 0)
        """What earlier cores have counted."""

    def set(self, stats: EngineStats | None) -> None:
        with self._lock:
            if stats is None:
                stats = EngineStats(**{name: getattr(self._stats, name) for name in _COUNTERS})
            if any(getattr(stats, name) < getattr(self._stats, name) for name in _COUNTERS):
                for name in _COUNTERS:  # another core, and nobody said so
                    self._base[name] += getattr(self._stats, name)
            self._stats = stats

    def end(self, last: EngineStats) -> None:
        with self._lock:
            for name in _COUNTERS:
                self._base[name] += max(getattr(last, name), getattr(self._stats, name))
            self._stats = EngineStats()

    def collect(self) -> Iterator[Metric]:
        with self._lock:
            stats, base = self._stats, dict(self._base)
        names, values = tuple(self._labels), tuple(self._labels.values())
        gauges = {
            "num_requests_running": stats.num_running,
            "num_requests_waiting": stats.num_waiting,
            "kv_cache_usage_perc": stats.kv_blocks_in_use / stats.kv_blocks_total if stats.kv_blocks_total else 0.0,
        }
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"{self._prefix}{name}", text, labels=names)
            gauge.add_metric(values, gauges[name])
            yield gauge
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"{self._prefix}{name}", text, labels=names)
            counter.add_metric(values, base[name] + getattr(stats, name))
            yield counter
