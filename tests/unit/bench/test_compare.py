"""Comparing: ratios and their spread, static batches, and the whole on a tiny model."""

import importlib
import json

import pytest
import torch
from tiny_models import write_model

from octavo.bench.compare import Found, _before, _check_same, measure
from octavo.bench.contenders import Contender, Rival, RivalFailed, ServerRunner
from octavo.bench.goals import OURS
from octavo.bench.http_client import Answer, make_target
from octavo.bench.ratios import summarise
from octavo.bench.rivals.static_batches import run
from octavo.bench.scenarios import Plan
from octavo.bench.traffic import TrafficArgs
from octavo.entrypoints.cli.main import main
from octavo.errors import InvalidInput


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "tiny"))


class FakeModel:
    """Keeps the shapes it is asked for, and calls the logits processor once a token."""

    def __init__(self):
        self.calls = []

    def generate(self, *, input_ids, attention_mask, max_new_tokens, min_new_tokens, logits_processor, **_):
        assert max_new_tokens == min_new_tokens
        self.calls.append((tuple(input_ids.shape), max_new_tokens, attention_mask.sum(1).tolist()))
        assert bool((attention_mask[:, -1] == 1).all())
        for _ in range(max_new_tokens):
            for processor in logits_processor:
                assert processor(input_ids, "scores") == "scores"


def test_static_batches_are_sorted_by_output_length_and_padded_on_the_left():
    model = FakeModel()
    found = run(model, [([1] * 4, 9), ([2] * 2, 3), ([3] * 6, 10), ([4] * 3, 2)], 2)
    assert model.calls == [((2, 3), 3, [3, 2]), ((2, 6), 10, [4, 6])]
    assert found["output_tokens"] == 24
    assert found["kv_utilization"] == pytest.approx((5 + 5 + 13 + 16) / (2 * 6 + 2 * 16))
    assert len(found["latencies"]) == 4 and len(found["between_tokens"]) == 24 - 4
    assert found["latencies"][0] < found["latencies"][-1] <= found["seconds"]


def test_above_one_this_engine_is_better_whatever_the_metric():
    rounds = {OURS: [(10.0, 2.0), (12.0, 2.0)], "other": [(5.0, 4.0), (4.0, 8.0)]}
    found = {
        name: {"all": [{"throughput": t, "ttft": f} for t, f in pairs], "8": [{"throughput": t} for t, _ in pairs]}
        for name, pairs in rounds.items()
    }
    result = summarise(found)
    assert result["metrics"]["throughput"]["other"]["ratio"] == {"median": 2.5, "min": 2.0, "max": 3.0}
    assert result["metrics"]["ttft"]["other"]["ratio"] == {"median": 3.0, "min": 2.0, "max": 4.0}
    assert result["metrics"]["kv_utilization"]["other"] == {"value": None, "ratio": None}
    assert result["throughput_by_requests"]["8"]["other"]["value"]["median"] == 4.5
    assert result["metrics"]["ttft"][OURS]["ratio"]["median"] == 1.0


def test_this_engine_and_transformers_take_turns_on_the_same_requests(tmp_path, model, capsys):
    pytest.importorskip("transformers")
    path = tmp_path / "c.json"
    argv = [
        "--model", model, "--num-kv-blocks", "128", "--num-prompts", "4", "--input-len", "12", "--output-len", "6",
        "--rounds", "1", "--prefix-len", "32", "--static-batches", "2", "--concurrency", "1", "--block-sizes", "8",
        "--rivals", "transformers", "llama-cpp", "--measure", "mixed", "first-token", "one-stream", "shared-prefix",
        "--shared-requests", "2", "--shared-prefix-len", "16",
    ]  # fmt: skip
    assert main(["bench", "compare", *argv, "--output-json", str(path)]) == 0
    found = json.loads(path.read_text())
    theirs, blocks = "transformers, batches of 2", f"{OURS}, blocks of 8"
    assert set(found["engines"]) == {OURS, theirs, blocks} and found["engines"][theirs]["version"]
    assert "GGUF" in found["left_out"]["llama-cpp"]
    for name, cells in found["metrics"].items():
        assert all(cells[one]["value"]["median"] > 0 for one in (OURS, theirs, blocks)), name
    assert found["throughput_by_requests"]["1"][theirs]["ratio"]["median"] > 0
    assert {one["rival"] for one in found["limits"]} == {theirs}
    out = capsys.readouterr().out
    assert "ratio (spread)" in out and "block sizes" in out and "llama-cpp takes no part" in out
    assert all(one["sentence"] in out for one in found["limits"])


class FakeRunner:
    """Takes part in so many turns."""

    def __init__(self, turns):
        self.turns, self.seen = turns, []

    def hello(self):
        return {}

    def run(self, work, batch_size):
        if len(self.seen) == self.turns:
            raise RivalFailed("out of memory")
        self.seen.append(work)
        times = {"latencies": [1.0], "between_tokens": [0.1]}
        return {"seconds": 2.0, "output_tokens": 8, "kv_utilization": None, "peak_rss": None, **times}


class FakeProbe:
    def hello(self):
        return {}

    def ask(self, _):
        return {"read": 1.0, "float32": 1.0}


class Numbers:
    def make(self, rng, length):
        return [rng.randrange(100) for _ in range(length)]


def compared(*turns, rounds=2, found=None):
    plan = Plan(
        traffic=TrafficArgs(num_prompts=3, input_len=4, output_len=2), measures=("mixed", "first-token"),
        concurrency=(), prefix_len=8, shared_requests=1, shared_prefix_len=1,
    )  # fmt: skip
    runners = [FakeRunner(count) for count in turns]
    contenders = [Contender(OURS if not number else f"r{number}", one) for number, one in enumerate(runners)]
    found = found or Found({}, [], {})
    measure(contenders, plan, Numbers(), rounds, FakeProbe(), found)
    return found, runners


def test_all_get_the_same_requests_and_other_ones_each_round():
    found, (ours, theirs) = compared(None, None)
    assert ours.seen == theirs.seen and len(ours.seen) == 1 + 2 * 3
    _, first, cold, cached, second, *_ = ours.seen
    assert first != second and len(first) == 3
    assert cold[0][0][:8] == cached[0][0][:8] and cold[0][0] != cached[0][0]
    assert [list(one) for one in found.rounds[OURS]["all"]] == [list(found.rounds["r1"]["all"][0])] * 2
    assert len(found.probes) == 2


def test_a_rival_that_fails_on_the_way_is_left_out_and_the_others_go_on():
    found, (_, failing, lasting) = compared(None, 3, None)
    assert set(found.rounds) == {OURS, "r2"} and found.left_out == {"r1": "out of memory"}
    assert len(failing.seen) == 3 and len(lasting.seen) == 7
    assert len(found.rounds["r2"]["all"]) == 2


def test_without_this_engine_or_anybody_else_there_is_no_comparison():
    with pytest.raises(RivalFailed):
        compared(2, None)
    with pytest.raises(RivalFailed, match="out of memory"):
        compared(None, 2)


def test_a_rival_that_cannot_load_says_why():
    import sys

    with Rival(sys.executable, "static_batches", {"model": "/nowhere", "dtype": "float32", "num_threads": 1}) as rival:
        with pytest.raises(RivalFailed, match="nowhere"):
            rival.hello()
        with pytest.raises(RivalFailed, match="status"):
            rival.run([([1], 1)], 1)


@pytest.mark.parametrize(
    ("answer", "what"), [(Answer(error="HTTP 500: no"), "HTTP 500"), (Answer(output_tokens=2), "2 tokens of 3")]
)
def test_a_server_that_fails_or_stops_early_is_not_compared(monkeypatch, answer, what):
    async def stream(*_):
        return answer

    monkeypatch.setattr("octavo.bench.contenders.stream", stream)
    runner = ServerRunner(make_target("http://127.0.0.1:9", None, 1.0), "m")
    with pytest.raises(RivalFailed, match=what):
        runner.run([([1], 3)], 0)


@pytest.mark.parametrize(
    "flags",
    [
        ["--dtype", "auto"],
        ["--rounds", "0"],
        ["--static-batches", "8", "8"],
        ["--static-batches", "0"],
        ["--concurrency", "0"],
        ["--env", "transformers=/nowhere/python"],
        ["--env", "transformers"],
        ["--env", "vllm=/usr"],
        ["--rivals", "openvino", "--env", "llama-cpp=/usr"],
        ["--rivals"],
        ["--measure"],
        ["--block-sizes", "17"],
        ["--block-sizes", "8", "8"],
        ["--quantization", "int4"],
        ["--url", "nope"],
        ["--url", "http://a", "--url", "http://a"],
        ["--num-prompts", "0"],
    ],
)
def test_a_comparison_that_cannot_be_meant_is_refused_before_it_begins(flags, capsys, monkeypatch):
    compare = importlib.import_module("octavo.bench.compare")
    monkeypatch.setattr(compare, "_start", lambda *_: pytest.fail("it began"))
    assert main(["bench", "compare", *flags]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_clock_changes_no_logits():
    from octavo.bench.rivals.static_batches import Clock

    scores = torch.ones(2, 3)
    clock = Clock()
    assert clock(None, scores) is scores and len(clock.times) == 1


def earlier(tmp_path, options, **changes):
    path = tmp_path / "earlier.json"
    document = {"options": options, "rounds": {OURS: {"all": [{}]}}, "probes": [{"read": 1.0}]}
    path.write_text(json.dumps({**document, **changes}))
    return str(path)


def test_rounds_of_an_earlier_run_count_and_new_ones_have_other_requests(tmp_path):
    path = earlier(tmp_path, {"seed": 1, "rounds": 5})
    found = _before(path, {"seed": 1, "rounds": 1, "add_to": path})
    assert len(found.probes) == len(found.rounds[OURS]["all"]) == 1
    alone, (first, _) = compared(None, None, rounds=2)
    again, (second, _) = compared(None, None, rounds=1, found=Found(dict(alone.rounds), list(alone.probes[:1]), {}))
    assert len(again.probes) == 2 and second.seen[1:] == first.seen[4:]


@pytest.mark.parametrize(
    ("options", "changes", "what"),
    [
        ({"seed": 2}, {}, "seed=2"),
        ({}, {}, "seed=None"),
        ({"seed": 1}, {"probes": None}, "is no file"),
        ({"seed": 1, "dtype": "x"}, {}, "dtype"),
    ],
)
def test_rounds_of_another_measurement_are_not_added_to(tmp_path, options, changes, what):
    document = earlier(tmp_path, options, **changes)
    with pytest.raises(InvalidInput, match=what):
        _before(document, {"seed": 1})


def test_rounds_can_be_added_only_if_the_same_engines_take_part():
    found = Found({OURS: {}, "gone": {}}, [], {})
    contenders = [Contender(name, FakeRunner(None)) for name in (OURS, "new")]
    with pytest.raises(RivalFailed, match="gone, new"):
        _check_same(found, contenders, "f.json")
    _check_same(found, contenders, None)


def test_a_comparison_in_which_nobody_else_takes_part_says_why_and_fails(model, capsys):
    argv = ["--model", model, "--num-kv-blocks", "64", "--num-prompts", "2", "--input-len", "8", "--output-len", "4"]
    assert main(["bench", "compare", *argv, "--rivals", "llama-cpp"]) == 2
    assert "llama-cpp: llama-cpp reads GGUF files" in capsys.readouterr().err
