"""Comparing: ratios and their spread, static batches, and the whole on a tiny model."""

import importlib
import json

import pytest
import torch
from tiny_models import write_model

from octavo.bench.compare import OURS, summarise
from octavo.bench.contenders import Rival, RivalFailed, ServerRunner
from octavo.bench.http_client import Answer, make_target
from octavo.bench.rivals.static_batches import run
from octavo.entrypoints.cli.main import main


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
        "--rounds", "1", "--prefix-len", "32", "--static-batches", "2", "--concurrency", "1",
    ]  # fmt: skip
    assert main(["bench", "compare", *argv, "--output-json", str(path)]) == 0
    found = json.loads(path.read_text())
    theirs = "transformers, batches of 2"
    assert set(found["engines"]) == {OURS, theirs} and found["engines"][theirs]["version"]
    for name, cells in found["metrics"].items():
        assert cells[OURS]["value"]["median"] > 0 and cells[theirs]["value"]["median"] > 0, name
    assert found["throughput_by_requests"]["1"][theirs]["ratio"]["median"] > 0
    assert "ratio (spread)" in capsys.readouterr().out


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
        ["--transformers-python", "/nowhere/python"],
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
