"""Engines over weights in few bits: the same answers as over a checkpoint of what they stand for, and what is said."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_models import LLAMA, QWEN2, random_weights, write_model

from octavo import LLM, SamplingParams
from octavo.loader.checkpoint import open_checkpoint
from octavo.ops.interface import QuantizedMatrix, dequantized
from octavo.ops.registry import choose_platform
from octavo.quantization.read import read_tensors

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, prompt_logprobs=0, logprobs=0)
PLATFORMS = ("cpu", "reference") if choose_platform()[0] == "cpu" else ("reference",)
PROMPTS = [[72, 101, 108, 108, 111], [1, 2, 3] * 9, [200]]


def answers(llm: LLM) -> list:
    return [
        (
            list(out.outputs[0].token_ids),
            [row[t].logprob for row, t in zip(out.outputs[0].logprobs, out.outputs[0].token_ids, strict=True)],
        )
        for out in llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    ]


def prompt_logprobs(llm: LLM) -> list[np.ndarray]:
    outputs = llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)
    return [
        np.array([row[t].logprob for row, t in zip(o.prompt_logprobs[1:], o.prompt_token_ids[1:], strict=True)])
        for o in outputs
    ]


def dequantised_copy(path: Path, target: Path, config: dict, quantization: str) -> Path:
    """A folder whose weights are what the few bits of `path` stand for."""
    read = read_tensors(open_checkpoint(path), quantization, 1)
    return write_model(target, config, weights={
        name: dequantized(tensor) if isinstance(tensor, QuantizedMatrix) else tensor.clone() for name, tensor in read
    })  # fmt: skip


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("config", [LLAMA, QWEN2], ids=["llama", "qwen2, tied"])
def test_the_reference_answers_as_for_the_dequantised_weights(tmp_path, make_llm, config, quantization):
    path = write_model(tmp_path / "m", config, weights=random_weights(config))
    same = dequantised_copy(path, tmp_path / "same", config, quantization)
    few = make_llm(path, platform="reference", dtype="auto", quantization=quantization)
    assert answers(few) == answers(make_llm(same, platform="reference"))
    assert answers(few) != answers(make_llm(path, platform="reference"))
    form = f"{quantization} dequantised to float32"
    assert form in few.kernel_report()["linear"]
    assert "int" not in few.kernel_report()["attention"]


def test_a_choice_is_said_at_start(tmp_path, make_llm, caplog):
    path = write_model(tmp_path / "m")
    with caplog.at_level(logging.INFO, "octavo"):
        make_llm(path, platform="reference", dtype="auto", quantization="int8")
    assert any("weights: int8 dequantised to float32 " in m and "as asked" in m for m in caplog.messages)


def test_what_cannot_be_is_a_value_error(tiny_llama):
    with pytest.raises(ValueError, match="quantization='gguf' keeps the weights of a GGUF file"):
        LLM(tiny_llama, quantization="gguf", num_kv_blocks=8)
    with pytest.raises(ValueError, match=r"quantization='int8' with dtype='bfloat16': the reference platform"):
        LLM(tiny_llama, quantization="int8", platform="reference", dtype="bfloat16", num_kv_blocks=8)


def test_random_weights_can_be_quantised(tiny_llama, make_llm):
    llm = make_llm(tiny_llama, load_format="dummy", platform="reference", dtype="auto", quantization="int4")
    assert answers(llm)


@pytest.mark.skipif("cpu" not in PLATFORMS, reason="no native kernels")
@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("config", [LLAMA, QWEN2], ids=["llama", "qwen2, tied"])
def test_native_kernels_come_near_the_dequantised_weights(tmp_path, make_llm, config, quantization):
    path = write_model(tmp_path / "m", config, weights=random_weights(config))
    native, plain = (
        make_llm(path, platform=platform, dtype="auto", quantization=quantization) for platform in ("cpu", "reference")
    )
    assert "dequantised" not in native.kernel_report()["linear"]
    for got, expected in zip(prompt_logprobs(native), prompt_logprobs(plain), strict=True):
        # activations of 8 bits, in a random model of large weights
        assert abs(got - expected).mean() < 0.05 * abs(expected).mean()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "qwen05"])
def test_a_real_file_in_few_bits_answers_as_dequantised(model_path, name):
    text = {}
    for options in ({"dtype": "float32"}, {"quantization": "gguf"}):
        with LLM(
            str(model_path(name)), platform="reference", num_kv_blocks=16, max_num_batched_tokens=64, **options
        ) as llm:
            params = SamplingParams(temperature=0, max_tokens=12)
            (out,) = llm.generate("The capital of France is", params, use_tqdm=False)
            text[next(iter(options))] = out.outputs[0].text
    assert text["dtype"] == text["quantization"]
    assert "Paris" in text["dtype"]


KEEP = """
import sys
from octavo.loader.checkpoint import open_checkpoint
from octavo.ops.interface import QuantizedMatrix
from octavo.quantization.read import read_tensors
import torch

def held(name):
    return 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))

checkpoint, kept = open_checkpoint(sys.argv[1]), []
before, libraries = held("RssAnon"), held("VmRSS")
for _, tensor in read_tensors(checkpoint, "gguf", 1):
    kept.append(tensor if isinstance(tensor, QuantizedMatrix) else tensor.clone())
print(held("RssAnon") - before, held("VmHWM") - libraries)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "qwen05"])
def test_reading_few_bits_holds_them_and_little_else(model_path, name):
    path = str(model_path(name))
    plan = [sys.executable, "-m", "octavo.entrypoints.cli.main", "plan", path, "--json", "--platform", "reference"]
    parameters = json.loads(_output(plan))["parameters"]
    kept, peak = map(int, _output([sys.executable, "-c", KEEP, path]).split())
    assert kept < 1.2 * parameters  # bytes: 8 bits are 1.06 of them, 4 bits 0.63, float32 4
    # beside them one tensor of the file and its pieces; embedding and head are a quarter of such small models
    assert peak < 1.4 * kept + 32 * 2**20


def _output(command: list[str]) -> str:
    result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert result.returncode in (0, 1), result.stderr
    return result.stdout
