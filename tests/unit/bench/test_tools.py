"""The tools as commands, on a tiny model: what they measure, recommend, draw and refuse."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from tiny_models import write_model

from octavo.bench import sweep
from octavo.bench.children import ChildFailed, flags, run_module
from octavo.bench.sweep import SweepArgs, make_settings, recommend, summarise
from octavo.bench.traffic import TrafficArgs
from octavo.config.engine_args import EngineArgs
from octavo.entrypoints.cli.bench import TOOLS
from octavo.entrypoints.cli.main import main
from octavo.errors import InvalidInput

SMALL = ("--input-len", "24", "--output-len", "6", "--num-kv-blocks", "64", "--dtype", "float32")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "tiny"))


def bench(tmp_path, tool, *argv):
    path = tmp_path / "out.json"
    assert main(["bench", tool, *argv, "--output-json", str(path)]) == 0
    return json.loads(path.read_text())


def test_throughput_counts_every_token(tmp_path, model, capsys):
    found = bench(tmp_path, "throughput", "--model", model, "--num-prompts", "5", *SMALL)
    assert (found["num_requests"], found["total_prompt_tokens"], found["total_output_tokens"]) == (5, 120, 30)
    assert found["tokens_per_second"] == pytest.approx(150 / found["elapsed_time"])
    assert 0 < found["kv_utilization"] <= 1 and found["prefix_cache_hit_rate"] == 0
    assert "output tokens/s" in capsys.readouterr().out


def test_latency_finds_the_prompts_of_the_second_time_in_the_cache(tmp_path, model):
    found = bench(
        tmp_path, "latency", "--model", model, *SMALL, "--batch-size", "1", "3", "--num-iters", "2",
        "--num-iters-warmup", "0",
    )  # fmt: skip
    assert [row["batch_size"] for row in found["batches"]] == [1, 3]
    for row in found["batches"]:
        assert len(row["latencies"]) == 2 and row["ttft_cold"]["p50"] > 0
        assert row["cached_hit_rate"]["mean"] == pytest.approx(16 / 24)


def test_every_setting_of_a_sweep_is_measured_and_the_best_recommended(tmp_path, model, capsys):
    argv = ("--num-prompts", "3", *SMALL, "--over", "max-num-seqs=1,3")
    found = bench(tmp_path, "sweep", "--model", model, *argv, "--recommend", "--latency-limit-ms", "60000")
    assert [row["setting"] for row in found["settings"]] == [{"max_num_seqs": 1}, {"max_num_seqs": 3}]
    fastest = max(found["settings"], key=lambda row: row["output_tokens_per_second"]["median"])
    assert found["recommended"] == fastest["setting"]
    assert "Recommended for p99_itl_ms <= 60000: max_num_seqs=" in capsys.readouterr().out


def test_a_setting_that_fails_is_reported_and_the_others_count():
    settings = make_settings(SweepArgs(over=("max_num_seqs=1,2",)))
    run = {"output_tokens_per_second": 5.0, "itl": None, "ttft": {"p50": 0.1, "p99": 0.2}}
    rows, failed = summarise(settings, [["exit status 1", run], [run, {**run, "output_tokens_per_second": 7.0}]])
    assert failed == [{"setting": {"max_num_seqs": 1}, "error": "exit status 1"}]
    assert rows[0]["output_tokens_per_second"] == {"median": 6.0, "min": 5.0, "max": 7.0}
    assert rows[0]["p99_ttft_ms"]["median"] == 200.0 and rows[0]["p99_itl_ms"] is None


def test_the_recommended_setting_is_the_fastest_within_the_limit():
    def row(name, speed, latency):
        found = None if latency is None else {"median": latency}
        return {"setting": name, "output_tokens_per_second": {"median": speed}, "p99_itl_ms": found}

    rows = [row("slow", 1.0, 5.0), row("good", 2.0, 10.0), row("late", 3.0, 11.0), row("unknown", 9.0, None)]
    assert recommend(rows, "p99_itl_ms", 10.0)["setting"] == "good"
    assert recommend(rows, "p99_itl_ms", 1.0) is None


def test_settings_are_every_combination_with_values_of_the_right_kind():
    over = ("block_size=8,16", "enable-prefix-caching=true,false", "input_len=5", "kv_cache_memory=1GiB")
    settings = make_settings(SweepArgs(over=over))
    assert len(settings) == 4 and {setting.traffic.input_len for setting in settings} == {5}
    assert {(s.engine.block_size, s.engine.enable_prefix_caching) for s in settings} == {
        (8, True), (8, False), (16, True), (16, False),
    }  # fmt: skip
    assert settings[0].engine.kv_cache_memory == 2**30


@pytest.mark.parametrize(
    "over",
    [(), ("x",), ("block_size=",), ("block_size=8,8",), ("block_size=17",), ("nope=1",), ("num_prompts=x",),
     ("num_prompts=0",), ("num_prompts=true",), ("block_size=8", "block_size=16"), ("tensor_parallel_size=2",),
     ("dataset_name=nope",), ("max_num_seqs=" + ",".join(map(str, range(1, 1002))),)],
)  # fmt: skip
def test_a_sweep_that_cannot_be_meant_is_refused_before_it_begins(over):
    with pytest.raises(InvalidInput):
        make_settings(SweepArgs(over=over))


@pytest.mark.parametrize("argv", [["--recommend"], ["--latency-limit-ms", "5"], ["--repeats", "0"]])
def test_a_limit_and_a_recommendation_belong_together(argv, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "_measure", lambda *_: pytest.fail("it began"))
    assert main(["bench", "sweep", "--over", "block_size=8,16", *argv]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_flags_give_the_same_options_again():
    args = replace(EngineArgs(), enable_prefix_caching=False, block_size=8, model="-odd", fair_share=True)
    assert flags(args) == ["--model=-odd", "--block-size=8", "--no-enable-prefix-caching", "--fair-share"]
    assert flags(TrafficArgs()) == []


def test_the_end_of_what_a_failed_child_said_is_kept(tmp_path):
    with pytest.raises(ChildFailed, match=r"exit status 2.*sampling_nonsense"):
        run_module("octavo.entrypoints.cli.main", ["sampling_nonsense"], tmp_path / "none")


def test_startup_has_every_phase(tmp_path, model):
    found = bench(tmp_path, "startup", "--model", model, "--num-kv-blocks", "64", "--num-iters", "1")
    (one,) = found["runs"]
    assert all(one[name] >= 0 for name in ("python", "import", "load", "first_token"))
    assert one["total"] == pytest.approx(sum(one[name] for name in ("python", "import", "load", "first_token")))


@pytest.mark.parametrize("tool", TOOLS)
def test_help_needs_no_torch(tool):
    script = (
        "import sys\nfrom octavo.entrypoints.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nfinally:\n    print('torch' in sys.modules, file=sys.stderr)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", script, "bench", tool, "--help"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert f"usage: octavo bench {tool}" in result.stdout and result.stderr.strip() == "False"


@pytest.mark.parametrize("argv", [[], ["--help"]])
def test_help_names_the_tools(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", *argv])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in TOOLS)


def test_an_unknown_tool_is_refused_with_those_there_are(capsys):
    assert main(["bench", "nope"]) == 2
    shown = capsys.readouterr().err
    assert all(name in shown for name in TOOLS)


@pytest.mark.parametrize(
    "argv",
    [
        ["throughput", "--num-prompts", "0"],
        ["throughput", "--block-size", "17"],
        ["throughput", "--model", "/nowhere"],
        ["latency", "--batch-size", "0"],
        ["latency", "--batch-size", "2", "2"],
        ["latency", "--num-iters", "0"],
        ["startup", "--num-iters", "0"],
        ["startup", "--output-json", "/nowhere/x"],
    ],
)
def test_a_wrong_option_is_one_paragraph_and_status_2(argv, capsys):
    assert main(["bench", *argv]) == 2
    assert capsys.readouterr().err.count("\n") == 1
