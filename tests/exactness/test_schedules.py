"""Nothing that changes the schedule changes an answer: random schedules against each request alone."""

import math

import pytest
from engine_driver import ScriptedRequest, run_script, shuffle_blocks
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from schedules import engine_options, rich_sampling_params, sampling_params, scripts
from tiny_models import QWEN2, write_model

from octavo import LLM, RequestOutput, SamplingParams


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    return write_model(path, QWEN2 if request.param == "qwen2" else None, sliding_window=None)


@pytest.fixture(scope="module")
def alone(model):
    """The output of a request computed alone: one chunk, a roomy pool, nothing cached."""
    known: dict[tuple, RequestOutput] = {}
    with LLM(
        str(model), dtype="float32", num_kv_blocks=64, block_size=16, enable_prefix_caching=False,
        enable_chunked_prefill=False, disable_log_stats=True,
    ) as llm:  # fmt: skip

        def compute(request: ScriptedRequest) -> RequestOutput:
            key = (request.prompt, repr(request.params))
            if key not in known:
                known[key] = llm.generate(list(request.prompt), request.params, use_tqdm=False)[0]
            return known[key]

        yield compute


def assert_same(got: RequestOutput, expected: RequestOutput, *, aborted: bool) -> None:
    for one, other in zip(got.outputs, expected.outputs, strict=True):
        count = len(one.token_ids)
        assert one.token_ids == other.token_ids[:count]
        if not aborted or one.finish_reason != "abort":
            assert (one.text, one.finish_reason, one.stop_reason) == (
                other.text,
                other.finish_reason,
                other.stop_reason,
            )
            assert count == len(other.token_ids)
        if one.logprobs is not None:
            assert_same_logprobs(one.logprobs, other.logprobs[:count])
    if got.prompt_logprobs is not None and not aborted:
        assert got.prompt_logprobs[0] is None
        assert_same_logprobs(got.prompt_logprobs[1:], expected.prompt_logprobs[1:])


def assert_same_logprobs(got: list, expected: list) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(math.isclose(mine[i].logprob, theirs[i].logprob, abs_tol=1e-3) for i in mine)


def play(model, alone, script, options, order) -> None:
    with LLM(str(model), dtype="float32", disable_log_stats=True, **options) as llm:
        shuffle_blocks(llm, order)
        run = run_script(llm, script)
        metrics = llm.get_metrics()
    event(f"preempted: {run.num_preemptions > 0}")
    for request, output in zip(script, run.outputs, strict=True):
        assert_same(output, alone(request), aborted=request.abort is not None)
    assert metrics["kv_blocks_in_use"] == 0
    assert metrics["kv_blocks_free"] + metrics["kv_blocks_cached"] == options["num_kv_blocks"]


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(script=scripts(sampling_params()), options=engine_options(), order=st.integers(0, 1000))
def test_every_request_equals_itself_alone(model, alone, script, options, order):
    play(model, alone, script, options, order)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(script=scripts(rich_sampling_params()), options=engine_options(), order=st.integers(0, 1000))
def test_every_parameter_in_every_combination_equals_itself_alone(model, alone, script, options, order):
    play(model, alone, script, options, order)


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_schedule_with_many_preemptions_and_chunks_changes_nothing(model, alone, caching, policy):
    script = [
        ScriptedRequest(
            prompt=tuple((7 * i + j) % 250 for j in range(3 + 11 * i)),
            params=SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=100, ignore_eos=True),
            arrival=i,
            priority=i % 3,
        )
        for i in range(6)
    ]
    with LLM(
        str(model), dtype="float32", num_kv_blocks=24, block_size=8, max_num_batched_tokens=9,
        enable_prefix_caching=caching, scheduling_policy=policy, disable_log_stats=True,
    ) as llm:  # fmt: skip
        shuffle_blocks(llm, 3)
        run = run_script(llm, script)
    assert run.num_preemptions > 0
    assert max(run.chunks) > 1
    for request, output in zip(script, run.outputs, strict=True):
        assert_same(output, alone(request), aborted=False)
