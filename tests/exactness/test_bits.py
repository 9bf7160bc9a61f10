"""On the cpu platform nothing that changes the schedule changes a bit: whole distributions, random schedules, each
request against itself alone, for every dtype of weights and KV cache and any number of threads.
"""

import struct
from collections.abc import Callable

import pytest
from engine_driver import ScriptedRequest, run_script, shuffle_blocks
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedules import engine_options, scripts
from tiny_models import LLAMA, QWEN2, write_model

from octavo import LLM, RequestOutput, SamplingParams

pytest.importorskip("octavo.ops.cpu._native", reason="installed without native kernels")

SIZES = {
    "hidden_size": 120,
    "intermediate_size": 200,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
}
"""Nothing is a multiple of a vector or a panel."""
GROUPED = {**SIZES, "hidden_size": 96, "intermediate_size": 224, "num_attention_heads": 4}
"""K is a multiple of 32, N is not one of a panel."""
DTYPES = [
    ("float32", "float32"),
    ("float32", "bfloat16"),
    ("float32", "int8"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float32"),
    ("bfloat16", "int8"),
    ("bfloat16", "fp8"),
    ("float16", "float16"),
    ("int8", "bfloat16"),
    ("int4", "float32"),
    ("int4", "int8"),
]
"""Of the weights, or in which few bits they are quantised, and of the KV cache."""

Alone = Callable[[ScriptedRequest], RequestOutput]


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def model(request, dtypes, tmp_path_factory):
    family = QWEN2 if request.param == "qwen2" else LLAMA
    sizes = GROUPED if "quantization" in dtypes else SIZES
    return write_model(tmp_path_factory.mktemp(request.param), {**family, **sizes}, sliding_window=None)


@pytest.fixture(scope="module", params=DTYPES, ids="-".join)
def dtypes(request):
    weights, kv_cache = request.param
    kind = "quantization" if weights.startswith("int") else "dtype"
    return {"platform": "cpu", kind: weights, "kv_cache_dtype": kv_cache, "disable_log_stats": True}


@pytest.fixture(scope="module")
def alone(model, dtypes):
    """The output of a request computed alone, by one thread: one chunk, a roomy pool, nothing cached."""
    known: dict[tuple, RequestOutput] = {}
    with LLM(
        str(model), **dtypes, num_threads=1, num_kv_blocks=64, enable_prefix_caching=False,
        enable_chunked_prefill=False,
    ) as llm:  # fmt: skip
        assert_native(llm)

        def compute(request: ScriptedRequest) -> RequestOutput:
            key = (request.prompt, repr(request.params))
            if key not in known:
                known[key] = llm.generate(list(request.prompt), request.params, use_tqdm=False)[0]
            return known[key]

        yield compute


def assert_native(llm: LLM) -> None:
    """A layer that falls back to other operators is a failure, not a slow success."""
    report = llm.kernel_report()
    assert report
    assert all(kernel.startswith("cpu") and "dequantised" not in kernel for kernel in report.values()), report


def sampling_params() -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        n=st.sampled_from([1, 1, 1, 2, 3]),
        temperature=st.sampled_from([0.0, 0.0, 0.9]),
        top_k=st.sampled_from([0, 0, 7]),
        top_p=st.sampled_from([1.0, 0.9]),
        seed=st.integers(0, 3),
        max_tokens=st.integers(1, 40),
        ignore_eos=st.just(True),
        logprobs=st.just(-1),
        prompt_logprobs=st.sampled_from([None, None, -1]),
        logprobs_mode=st.sampled_from([None, None, "processed_logprobs"]),
    )


def bits(entries: list) -> list:
    """The distribution at each position, to the bit."""
    return [
        None
        if entry is None
        else sorted((token, struct.pack("<d", logprob.logprob)) for token, logprob in entry.items())
        for entry in entries
    ]


def assert_same_bits(got: RequestOutput, expected: RequestOutput) -> None:
    for mine, theirs in zip(got.outputs, expected.outputs, strict=True):
        count = len(mine.token_ids)
        assert mine.token_ids == theirs.token_ids[:count]
        assert bits(mine.logprobs) == bits(theirs.logprobs[:count])
        assert mine.finish_reason == "abort" or count == len(theirs.token_ids)
    if got.prompt_logprobs is not None:
        assert bits(got.prompt_logprobs) == bits(expected.prompt_logprobs)


def play(model, dtypes: dict, alone: Alone, script: list[ScriptedRequest], options: dict, order: int) -> int:
    """Run the script and compare. Returns the number of preemptions."""
    with LLM(str(model), **dtypes, **options) as llm:
        shuffle_blocks(llm, order)
        run = run_script(llm, script)
    for request, output in zip(script, run.outputs, strict=True):
        assert_same_bits(output, alone(request))
    return run.num_preemptions


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    script=scripts(sampling_params()),
    options=engine_options(),
    num_threads=st.sampled_from([1, 2]),
    order=st.integers(0, 1000),
)
def test_whole_distributions_have_the_bits_of_the_request_alone(
    model, dtypes, alone, script, options, num_threads, order
):
    play(model, dtypes, alone, script, {**options, "num_threads": num_threads}, order)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_many_preemptions_chunks_and_threads_change_no_bit(model, dtypes, alone, caching, num_threads):
    script = [
        ScriptedRequest(
            prompt=tuple((7 * i + j) % 250 for j in range(3 + 11 * i)),
            params=SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=60, ignore_eos=True, logprobs=-1),
            arrival=i,
        )
        for i in range(6)
    ]
    options = {
        "num_kv_blocks": 24, "block_size": 8, "max_num_batched_tokens": 9, "enable_prefix_caching": caching,
        "num_threads": num_threads,
    }  # fmt: skip
    assert play(model, dtypes, alone, script, options, order=3) > 0
