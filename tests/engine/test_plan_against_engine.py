"""`octavo plan` says beforehand what an engine then reports, and what its process is then seen to take."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import LLAMA, write_model

pytestmark = pytest.mark.slow

OPTIONS = {"kv_cache_memory": "192MiB", "max_num_seqs": 16, "max_num_batched_tokens": 256}
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
RUN_FULL = """
import json, sys
from octavo import LLM, SamplingParams
import torch

options = json.loads(sys.argv[1])
with LLM(**options) as llm:
    config = llm.llm_engine.config
    with torch.inference_mode():
        for cache in llm.llm_engine.client._core.executor.worker.runner.kv_caches:
            cache.k.zero_()
            cache.v.zero_()
    length = config.scheduler.max_num_batched_tokens // config.scheduler.max_num_seqs
    prompts = [[(i + j) % 200 for j in range(length)] for i in range(config.scheduler.max_num_seqs)]
    llm.generate(prompts, SamplingParams(max_tokens=3, ignore_eos=True, temperature=1, top_p=0.9), use_tqdm=False)
    peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
    memory = config.memory
    print(json.dumps({
        "blocks": config.cache.num_blocks, "tokens": config.cache.num_tokens, "dtype": config.worker.dtype,
        "quantization": config.worker.quantization,
        "weights": memory.weights, "kv_cache": memory.kv_cache, "total": memory.total, "limit": memory.limit,
        "libraries": memory.libraries, "kernels": llm.kernel_report(), "peak": int(peak) * 1024,
    }))
"""


@pytest.fixture(scope="module")
def mid_size(tmp_path_factory) -> Path:
    """A random model of about 100 MB in float32."""
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}
    return write_model(tmp_path_factory.mktemp("mid") / "model", LLAMA, **sizes, num_key_value_heads=4, head_dim=64)


@pytest.fixture
def path_of(model_path, mid_size):
    return lambda name: mid_size if name == "mid" else model_path(name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["mid", "smollm2", "qwen05"])
def test_the_plan_is_what_the_engine_reports_and_its_process_takes(path_of, name, dtype):
    planned = _compare(str(path_of(name)), dtype=dtype)
    assert (planned["dtype"], planned["quantization"]) == (dtype, "none")


@pytest.mark.parametrize(
    ("name", "quantization"), [("mid", "int4"), ("mid", "int8"), ("smollm2", "gguf"), ("qwen05", "gguf")]
)
def test_the_plan_is_right_about_few_bits_too(path_of, name, quantization):
    planned = _compare(str(path_of(name)), quantization=quantization)
    assert planned["quantization"] == quantization
    assert sum(planned["weight_forms"].values()) == planned["memory"]["weights"]


def _compare(path: str, **options: str) -> dict:
    """The plan, which the engine's own report and its process have borne out."""
    planned, measured = _plan(path, options), _run_full(path, options)
    assert planned["kv_cache"]["blocks"] == measured["blocks"]
    assert (planned["dtype"], planned["quantization"]) == (measured["dtype"], measured["quantization"])
    assert planned["kernels"] == measured["kernels"]
    for key in ("weights", "kv_cache", "total"):
        assert planned["memory"][key] == pytest.approx(measured[key], rel=0.05)
    assert planned["memory"]["limit"] == pytest.approx(measured["limit"], rel=0.2)  # others take and give on the way
    assert planned["memory"]["libraries"] == pytest.approx(measured["libraries"], rel=0.15)
    assert planned["memory"]["peak_rss"] == pytest.approx(measured["peak"], rel=0.15)
    print(f"{path} {options}: planned peak {planned['memory']['peak_rss']}, seen {measured['peak']}")
    return planned


def _plan(path: str, options: dict[str, str]) -> dict:
    given = {**OPTIONS, **options}
    flags = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return json.loads(_output([sys.executable, "-m", "octavo.entrypoints.cli.main", "plan", path, "--json", *flags]))


def _run_full(path: str, options: dict[str, str]) -> dict:
    command = [sys.executable, "-c", RUN_FULL, json.dumps({"model": path, **OPTIONS, **options})]
    return json.loads(_output(command).splitlines()[-1])


def _output(command: list[str]) -> str:
    result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout
