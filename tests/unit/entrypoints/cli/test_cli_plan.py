"""`octavo plan`: what it prints, and that it gets along without torch."""

import json
import os
import subprocess
import sys
import time

import pytest
from tiny_models import write_model

from octavo.config.memory import format_bytes
from octavo.entrypoints.cli.main import main
from octavo.ops.registry import get_platform, get_traits

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "tiny"))


def plan_json(capsys, *argv):
    status = main(["plan", *argv, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_it_imports_no_torch_and_answers_at_once(model):
    script = (
        "import sys; from octavo.entrypoints.cli.main import main; status = main(sys.argv[1:]); "
        "print(status, 'torch' in sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", script, "plan", model]
    seconds = []
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", ""], check=True)
    python_alone = time.perf_counter() - started
    for _ in range(3):
        started = time.perf_counter()
        result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
        seconds.append(time.perf_counter() - started)
        assert result.stderr.split() == ["0", "False"]
    assert "It fits." in result.stdout
    assert min(seconds) < max(3, 60 * python_alone)  # alone on a machine it is a third of a second


@pytest.mark.parametrize("name", ["auto", "cpu", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "quantized"])
def test_the_traits_without_torch_are_those_of_the_platform(name, dtype):
    if name == "cpu":
        pytest.importorskip("octavo.ops.cpu._native")
    assert get_traits(name, dtype) == get_platform(name).traits(dtype)


def test_json_has_plain_numbers(model, capsys):
    options = ("--num-kv-blocks", "12", "--dtype", "bfloat16", "--platform", "reference")
    status, plan = plan_json(capsys, model, *options)
    assert status == 0
    assert plan["fits"] is True
    assert plan["weights"] == {
        "float32": 4 * plan["parameters"], "bfloat16": 2 * plan["parameters"], "float16": 2 * plan["parameters"],
    }  # fmt: skip
    assert plan["weight_forms"] == {"bfloat16": 2 * plan["parameters"]}
    assert (plan["quantization"], plan["quantization_reason"]) == ("none", None)
    assert plan["kv_bytes_per_token"]["float32"] == 2 * 2 * 2 * 16 * 4
    assert plan["kv_cache"] == {"blocks": 12, "block_size": 16, "tokens": 192, "dtype": "bfloat16"}
    assert plan["largest_prompt"] == 191
    memory = plan["memory"]
    assert memory["total"] == memory["weights"] + memory["kv_cache"] + memory["workspace"]
    assert memory["peak_rss"] == memory["libraries"] + max(memory["loading"], memory["total"])
    assert plan["dtype_reason"] == "as asked"


def test_few_bits_are_planned_in_bytes_by_form_and_told(model, capsys):
    pytest.importorskip("octavo.ops.cpu._native")
    options = ("--platform", "cpu", "--quantization", "int4", "--num-kv-blocks", "12")
    _, plan = plan_json(capsys, model, *options)
    ends = 2 * 259 * 64
    layers = 2 * (64 * 64 * 2 + 32 * 64 * 2 + 3 * 96 * 64)
    assert plan["weight_forms"] == {"int8": ends // 32 * 34, "int4": layers // 32 * 20, "float32": 5 * 64 * 4}
    assert plan["weights"]["int4"] == plan["memory"]["weights"] == sum(plan["weight_forms"].values())
    assert plan["weights"].keys() == {"float32", "bfloat16", "float16", "int8", "int4"}
    assert (plan["quantization"], plan["quantization_reason"]) == ("int4", "as asked")
    assert plan["kernels"]["linear"].endswith(": int4, int8")
    main(["plan", model, *options])
    text = capsys.readouterr().out
    assert f"int4 {format_bytes(plan['weights']['int4'])} (chosen)" in text
    assert "int4 (as asked): " + " + ".join(f"{k} {format_bytes(v)}" for k, v in plan["weight_forms"].items()) in text


def test_few_bits_that_cannot_be_are_refused(model, capsys):
    assert main(["plan", model, "--quantization", "gguf"]) == 2
    assert "keeps the weights of a GGUF file as they are" in capsys.readouterr().err


def test_lengths_that_must_be_possible_are_answered(model, capsys):
    options = (model, "--num-kv-blocks", "12", "--input-len", "64", "--output-len", "32")
    status, plan = plan_json(capsys, *options)
    assert status == 0
    assert plan["concurrency"] == [{"input_len": 64, "output_len": 32, "requests": 2}]


def test_what_does_not_fit_is_told_with_advice_and_exit_1(model, capsys):
    options = (model, "--num-kv-blocks", "12", "--input-len", "300")
    status, plan = plan_json(capsys, *options)
    assert status == 1
    assert plan["fits"] is False
    assert "a request of 428 tokens" in plan["problem"]
    assert plan["advice"][0]["options"]["num_kv_blocks"] > 12
    assert main(["plan", *options]) == 1
    out = capsys.readouterr().out
    assert "It does not fit" in out
    assert "--num-kv-blocks" in out


def test_a_request_that_no_option_makes_fit_is_told_so(model, capsys):
    assert main(["plan", model, "--input-len", "1000"]) == 1
    assert "No option helps: shorten the request" in capsys.readouterr().out


def test_a_pool_shorter_than_the_model_is_told_and_fits(model, capsys):
    assert main(["plan", model, "--num-kv-blocks", "12"]) == 0
    out = capsys.readouterr().out
    assert "the KV cache holds 192 tokens" in out
    assert "--max-model-len 192" in out


@pytest.mark.parametrize(
    "argv",
    [["--max-model-len", "9999"], ["--input-len", "0"], ["--block-size", "17"], ["--platform", "cuda"]],
    ids=" ".join,
)
def test_a_wrong_option_is_one_paragraph_and_exit_2(model, argv, capsys):
    assert main(["plan", model, *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1


def test_two_models_are_refused(model, capsys):
    assert main(["plan", model, "--model", "other"]) == 2
    assert "two models are given" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_refused(capsys):
    assert main(["plan", "./nowhere.gguf"]) == 2
    assert "nowhere.gguf" in capsys.readouterr().err
