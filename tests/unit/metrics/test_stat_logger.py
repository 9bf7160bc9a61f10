"""StatLogger, with a clock the test turns."""

import logging
import math

import pytest

from octavo.errors import InvalidInput
from octavo.metrics.stat_logger import StatLogger
from octavo.protocol.stats import EngineStats


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Driver:
    """Feeds a StatLogger and returns the lines each record wrote."""

    def __init__(self, caplog, interval=5.0):
        caplog.set_level(logging.INFO, "octavo")
        self.caplog = caplog
        self.clock = Clock()
        self.logger = StatLogger(interval, self.clock)

    def record(self, after, **stats):
        self.clock.now += after
        self.caplog.clear()
        self.logger.record(EngineStats(**stats))
        return [record.getMessage() for record in self.caplog.records if record.name.startswith("octavo")]


def test_line_shows_load_rates_usage_and_hit_rate_of_the_interval(caplog):
    driver = Driver(caplog)
    assert driver.record(0, num_running=2, prompt_tokens=1000) == []
    assert driver.record(2, num_running=2, prompt_tokens=1000) == []
    lines = driver.record(
        3,
        num_running=2,
        num_waiting=7,
        prompt_tokens=1500,
        generation_tokens=50,
        kv_blocks_total=8,
        kv_blocks_in_use=2,
        prefix_cache_queries=1500,
        prefix_cache_hits=300,
    )
    assert lines == [
        "running 2, waiting 7, prompt 300.0 tokens/s, generation 10.0 tokens/s, "
        "KV cache usage 25.0%, prefix cache hit rate 20.0%"
    ]


def test_rates_count_from_the_last_line(caplog):
    driver = Driver(caplog)
    driver.record(0, num_running=1)
    driver.record(5, num_running=1, generation_tokens=500, prefix_cache_queries=100, prefix_cache_hits=100)
    lines = driver.record(10, num_running=1, generation_tokens=600, prefix_cache_queries=200, prefix_cache_hits=150)
    assert "generation 10.0 tokens/s" in lines[0]
    assert "hit rate 50.0%" in lines[0]


def test_hit_rate_without_lookups_is_no_number(caplog):
    driver = Driver(caplog)
    driver.record(0, num_running=1)
    assert driver.record(5, num_running=1, generation_tokens=1)[0].endswith("hit rate -")


def test_at_most_one_line_an_interval(caplog):
    driver = Driver(caplog)
    lines = [driver.record(0.5, num_running=1, generation_tokens=step) for step in range(100)]
    assert 9 <= sum(map(len, lines)) <= 10


def test_nothing_is_said_while_idle(caplog):
    driver = Driver(caplog)
    driver.record(0, num_running=1, generation_tokens=5)
    driver.record(1, generation_tokens=6)
    assert [driver.record(4, generation_tokens=6) for _ in range(20)][2:] == [[]] * 18


def test_a_long_pause_does_not_dilute_the_rates_after_it(caplog):
    driver = Driver(caplog)
    driver.record(0, num_running=1, generation_tokens=5)
    assert driver.record(1, generation_tokens=6) == []
    assert driver.record(3600, num_running=1, generation_tokens=6, prompt_tokens=100) == []
    lines = driver.record(5, num_running=1, generation_tokens=56, prompt_tokens=100)
    assert "prompt 20.0 tokens/s, generation 10.0 tokens/s" in lines[0]


def test_one_slow_step_is_no_pause(caplog):
    driver = Driver(caplog)
    driver.record(0, num_running=1)
    assert "prompt 100.0 tokens/s" in driver.record(20, num_running=1, prompt_tokens=2000)[0]


def test_many_short_runs_are_load(caplog):
    driver = Driver(caplog)
    lines = []
    for run in range(10):
        lines += driver.record(0.1, num_running=1, generation_tokens=10 * run)
        lines += driver.record(0.9, generation_tokens=10 * run + 10)
    assert len(lines) == 2
    assert "generation 10.0 tokens/s" in lines[1]


@pytest.mark.parametrize("interval", [-1.0, math.nan, math.inf])
def test_interval_that_is_no_time_is_refused(interval):
    with pytest.raises(InvalidInput, match="interval"):
        StatLogger(interval)


def test_interval_zero_logs_every_step(caplog):
    driver = Driver(caplog, interval=0)
    assert driver.record(0, num_running=1) == []
    assert len(driver.record(0.1, num_running=1, generation_tokens=1)) == 1
