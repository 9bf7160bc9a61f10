"""Goals that are missed come with what limits them, worked out from the numbers of the run."""

import pytest

from octavo.bench.goals import OURS, Least, Machine, ModelSize, least_seconds, limits, machine_of
from octavo.bench.scenarios import FIRST_TOKEN, MIXED, Load

MODEL = ModelSize(body=90, head=10, item_size=4)
MACHINE = Machine(read=400.0, arithmetic=1000.0, dtype="float32")
KINDS = {OURS: OURS, "slow": "a", "better": "a", "other": "b"}
EMPTY = {"value": None, "ratio": None}


def cell(value, ratio):
    return {"value": {"median": value}, "ratio": {"median": ratio}}


def document(metric, cells, loads=None):
    names = ("throughput", "ttft", "ttft_cached", "p99_latency", "kv_utilization")
    return {
        "metrics": {name: cells if name == metric else dict.fromkeys(KINDS, EMPTY) for name in names},
        "throughput_by_requests": loads or {},
    }


def test_one_request_is_limited_by_memory_and_many_by_arithmetic():
    one = Load(MIXED, "all", [([1] * 2, 5)])
    assert least_seconds(one, MODEL, MACHINE) == Least(5 * 100 * 4 / 400, True)
    many = Load(MIXED, "all", [([1] * 2, 5)] * 100)
    least = least_seconds(many, MODEL, MACHINE)
    assert not least.is_memory and least.seconds == pytest.approx(2 * 100 * (6 * 90 + 5 * 10) / 1000)


def test_cached_tokens_need_not_be_computed():
    cold = Load(FIRST_TOKEN, "cold", [([1] * 100, 1)])
    cached = Load(FIRST_TOKEN, "cached", [([1] * 100, 1)], num_cached=90)
    first, second = (least_seconds(load, MODEL, MACHINE).seconds for load in (cold, cached))
    assert first == pytest.approx(2 * (100 * 90 + 10) / 1000) and second == pytest.approx(2 * (10 * 90 + 10) / 1000)


def test_the_best_of_the_probes_is_what_the_machine_gives():
    probes = [{"read": 1.0, "float32": 5.0, "bfloat16": 7.0}, {"read": 2.0, "float32": 9.0, "bfloat16": 6.0}]
    assert machine_of(probes) == Machine(2.0, 9.0, "float32")


def test_what_a_rival_uses_of_the_machine_bounds_every_ratio():
    load = Load(MIXED, "all", [([1] * 2, 5)])  # 5 s at least, of memory
    cells = {OURS: cell(1.0, 1.0), "slow": cell(0.1, 10.0), "better": cell(0.5, 2.0), "other": EMPTY}
    (missed,) = limits(document("throughput", cells), [load], MODEL, MACHINE, KINDS)
    assert (missed["rival"], missed["ratio"], missed["goal"]) == ("better", 2.0, 10.0)
    assert "better reaches 50% and this engine 100%" in missed["sentence"] and "memory" in missed["sentence"]
    assert "no engine can be more than 2.0 times as fast" in missed["sentence"]


def test_what_the_machine_would_allow_is_not_said_to_limit():
    load = Load(MIXED, "8", [([1] * 2, 5)])
    cells = {OURS: cell(0.2, 1.0), "slow": cell(0.1, 2.0), "better": cell(0.1, 2.0), "other": EMPTY}
    found = limits(document("throughput", dict.fromkeys(KINDS, EMPTY), {"8": cells}), [load], MODEL, MACHINE, KINDS)
    assert len(found) == 1 and "10.0 times: the rest is this engine's to gain" in found[0]["sentence"]


def test_a_goal_that_is_reached_needs_no_sentence():
    cells = {OURS: cell(0.9, 1.0), "slow": cell(0.2, 4.5), "better": cell(0.2, 4.5), "other": EMPTY}
    assert limits(document("kv_utilization", cells), [], MODEL, MACHINE, KINDS) == []
    cells["other"] = cell(0.5, 1.8)
    (missed,) = limits(document("kv_utilization", cells), [], MODEL, MACHINE, KINDS)
    assert missed["rival"] == "other" and "more than 2.0 times as good" in missed["sentence"]
