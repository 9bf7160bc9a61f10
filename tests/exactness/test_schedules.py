"""Nothing that changes the schedule changes an answer: random schedules against each request alone."""

import math

import pytest
from engine_driver import ScriptedRequest, run_script, shuffle_blocks
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from tiny_models import EOS, QWEN2, VOCAB_SIZE, write_model

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


def prompts() -> st.SearchStrategy[tuple[int, ...]]:
    """Prompts that often share a beginning, of lengths around the block sizes."""
    shared = [(37 * i + 11) % 250 for i in range(64)]
    tokens = st.integers(0, VOCAB_SIZE - 1)
    fresh = st.lists(tokens, min_size=1, max_size=40)
    common = st.tuples(st.integers(0, 64), st.lists(tokens, min_size=1, max_size=10)).map(
        lambda pair: shared[: pair[0]] + pair[1]
    )
    return st.one_of(fresh, common, common).map(tuple)


def sampling_params() -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.0, 0.7, 1.3]),
        top_k=st.sampled_from([0, 0, 5]),
        top_p=st.sampled_from([1.0, 0.9]),
        min_p=st.sampled_from([0.0, 0.05]),
        seed=st.integers(0, 3),
        max_tokens=st.integers(1, 50),
        ignore_eos=st.sampled_from([True, True, False]),
        logprobs=st.sampled_from([None, 0, 3]),
    )


def rich_sampling_params() -> st.SearchStrategy[SamplingParams]:
    """Everything that changes which tokens come, and what is told about them."""
    letters = st.sampled_from([[], ["e"], ["a", "th"], ["\n"]])
    return st.builds(
        SamplingParams,
        n=st.sampled_from([1, 1, 2, 3]),
        temperature=st.sampled_from([0.0, 0.8, 1.2]),
        top_k=st.sampled_from([0, 20]),
        seed=st.integers(0, 3),
        max_tokens=st.integers(4, 40),
        min_tokens=st.integers(0, 4),
        presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
        frequency_penalty=st.sampled_from([0.0, 0.0, -0.5]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
        logit_bias=st.sampled_from([None, None, {65: 5.0, EOS: 3.0}]),
        bad_words=st.sampled_from([None, None, ["a", "zz"]]),
        allowed_token_ids=st.sampled_from([None, None, None, [*range(40, 120), EOS]]),
        stop=letters,
        stop_token_ids=st.sampled_from([[], [70, 71]]),
        include_stop_str_in_output=st.booleans(),
        logprobs=st.sampled_from([None, 2]),
        prompt_logprobs=st.sampled_from([None, None, 0, 2]),
        logprobs_mode=st.sampled_from([None, "processed_logprobs", "raw_logits"]),
    )


def scripts(params: st.SearchStrategy[SamplingParams]) -> st.SearchStrategy[list[ScriptedRequest]]:
    return st.lists(
        st.builds(
            ScriptedRequest,
            prompt=prompts(),
            params=params,
            arrival=st.integers(0, 6),
            abort=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 40)),
            priority=st.integers(-2, 2),
            cache_salt=st.sampled_from([None, None, "a"]),
            tenant=st.sampled_from([None, "a", "b"]),
        ),
        min_size=2,
        max_size=8,
    )


@st.composite
def engine_options(draw) -> dict:
    block_size = draw(st.sampled_from([8, 16, 32]))
    chunked = draw(st.booleans())
    pool_tokens = draw(st.sampled_from([128, 128, 160, 512]))
    return {
        "block_size": block_size,
        "num_kv_blocks": pool_tokens // block_size,
        "enable_prefix_caching": draw(st.booleans()),
        "enable_chunked_prefill": chunked,
        "max_num_batched_tokens": draw(st.integers(1, 64)) if chunked else 512,
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 5])) if chunked else 0,
        "max_num_seqs": draw(st.integers(2, 8)),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
        "fair_share": draw(st.booleans()),
    }


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
