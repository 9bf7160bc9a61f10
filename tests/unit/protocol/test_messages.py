"""Every message survives the trip through msgpack: it can cross a process border unchanged."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.protocol.kv_cache_spec import KVCacheSpec
from octavo.protocol.messages import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    PromptEmbeds,
    RequestTimings,
    TokenLogprobs,
    sample_request_ids,
)
from octavo.protocol.sampling_params import LOGPROBS_MODES, RequestOutputKind, SamplingParams
from octavo.protocol.scheduler_output import PROTOCOL_VERSION, ModelRunnerOutput, NewRequest, SchedulerOutput
from octavo.protocol.stats import EngineStats

PARAMS = SamplingParams(
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    seed=2**64 - 1,
    max_tokens=8,
    min_tokens=2,
    stop=["END", "日本"],
    stop_token_ids=[3, 4],
    ignore_eos=True,
    logprobs=5,
    skip_special_tokens=False,
    output_kind=RequestOutputKind.FINAL_ONLY,
    n=3,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    repetition_penalty=1.2,
    logit_bias={"5": 1.5},
    bad_words=["no"],
    allowed_token_ids=[5, 6],
    include_stop_str_in_output=True,
    prompt_logprobs=-1,
    logprobs_mode="raw_logits",
    spaces_between_special_tokens=False,
    stop_regex=r"\d+",
    logits_processors=["package.module:Class"],
    extra_args={"a": [1, None, {"b": 2.5}]},
)
EMBEDS = PromptEmbeds(b"\x00\xff" * 8, "float16", (2, 4))
LOGPROBS = TokenLogprobs(token_ids=[7, 7, 1], logprobs=[-0.1, -0.1, float("-inf")], sampled_rank=1)
NEW_REQUEST = NewRequest(
    request_id="a",
    token_ids=[1, 2, 3],
    num_prompt_tokens=2,
    block_ids=[5, 0],
    sampling_params=PARAMS,
    held_back_token_ids=[0],
    sample_index=2,
    prompt_embeds=EMBEDS,
    bad_words_token_ids=[[1], [2, 3]],
)

MESSAGES = [
    PARAMS,
    SamplingParams(),
    EngineCoreRequest(
        request_id="é",
        prompt_token_ids=[1, 2],
        sampling_params=PARAMS,
        eos_token_ids=[0, 2],
        arrival_time=12.5,
        priority=-3,
        cache_salt="tenant",
        prompt_embeds=EMBEDS,
        bad_words_token_ids=[[1], [2, 3]],
        clamps=["max_tokens 9 -> 8 (room left)"],
        ignored=["top_p=0.5: temperature=0"],
    ),
    EngineCoreRequest(request_id="a", prompt_token_ids=[1], sampling_params=SamplingParams(), arrival_time=0.0),
    LOGPROBS,
    RequestTimings(arrival=1.0, scheduled=2.0, first_token=3.0, last_token=4.0),
    EngineCoreOutput(
        request_id="a",
        new_token_ids=[7],
        logprobs=[LOGPROBS],
        prompt_logprobs=[LOGPROBS, LOGPROBS],
        finish_reason=FinishReason.STOP,
        stop_reason=7,
        num_cached_tokens=16,
        num_preemptions=2,
        timings=RequestTimings(arrival=1.0),
    ),
    *(
        EngineCoreOutput(request_id="a", new_token_ids=[], finish_reason=reason, timings=RequestTimings(arrival=1.0))
        for reason in (None, *FinishReason)
    ),
    NEW_REQUEST,
    SchedulerOutput(
        request_ids=["b", "a"],
        num_scheduled_tokens=[1, 3],
        num_computed_tokens=[10, 0],
        new_requests=[NEW_REQUEST],
        new_block_ids={"b": [9]},
        released_request_ids=["c"],
        block_copies=[(1, 2), (3, 4)],
    ),
    SchedulerOutput(request_ids=[], num_scheduled_tokens=[], num_computed_tokens=[]),
    ModelRunnerOutput(request_ids=["a", "b"], sampled_token_ids=[[1], []], logprobs={"a": [LOGPROBS]}),
    ModelRunnerOutput(request_ids=["a"], sampled_token_ids=[[]], prompt_logprobs={"a": [LOGPROBS]}),
    EngineStats(num_running=1, kv_blocks_total=8, kv_blocks_free=7, kv_blocks_in_use=1, kv_utilization=0.5),
    KVCacheSpec(num_kv_heads=2, head_dim_k=64, head_dim_v=32, dtype="bfloat16"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_survives_msgpack(message):
    data = msgspec.msgpack.encode(message)
    assert msgspec.msgpack.decode(data, type=type(message)) == message


def test_default_lists_are_not_shared_between_messages():
    first, second = (SchedulerOutput(request_ids=[], num_scheduled_tokens=[], num_computed_tokens=[]) for _ in "ab")
    first.released_request_ids.append("a")
    first.new_block_ids["a"] = [1]
    assert second.released_request_ids == []
    assert second.new_block_ids == {}


def test_decoded_sampling_params_are_validated():
    data = msgspec.msgpack.encode({"top_p": 2.0})
    with pytest.raises(ValueError, match="top_p"):
        msgspec.msgpack.decode(data, type=SamplingParams)


@given(
    st.builds(
        SamplingParams,
        temperature=st.floats(0, 1e6),
        top_p=st.floats(0, 1),
        top_k=st.integers(-1, 2**31),
        min_p=st.floats(0, 1),
        seed=st.none() | st.integers(-(2**63), 2**64 - 1),
        max_tokens=st.none() | st.integers(16, 2**31),
        min_tokens=st.integers(0, 16),
        stop=st.none() | st.text(min_size=1) | st.lists(st.text(min_size=1), max_size=3),
        stop_token_ids=st.none() | st.lists(st.integers(0, 2**31), max_size=3),
        ignore_eos=st.booleans(),
        logprobs=st.none() | st.integers(-1, 50),
        output_kind=st.sampled_from(RequestOutputKind),
        n=st.integers(1, 100),
        logit_bias=st.none() | st.dictionaries(st.integers(0, 2**31), st.floats(-100, 100), max_size=3),
        bad_words=st.none() | st.lists(st.text(min_size=1), max_size=3),
        allowed_token_ids=st.none() | st.lists(st.integers(0, 2**31), min_size=1, max_size=3),
        logprobs_mode=st.none() | st.sampled_from(LOGPROBS_MODES),
        extra_args=st.none() | st.dictionaries(st.text(), st.integers(-(2**63), 2**63) | st.text(), max_size=3),
    )
)
def test_any_valid_sampling_params_survive_msgpack(params):
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_samples_have_ids_of_their_own_and_a_lone_one_has_its_requests():
    assert sample_request_ids("r", 1) == ["r"]
    assert sample_request_ids("r", 3) == ["0_r", "1_r", "2_r"]


def test_both_ends_of_the_runner_seam_carry_the_version():
    assert SchedulerOutput(request_ids=[], num_scheduled_tokens=[], num_computed_tokens=[]).version == PROTOCOL_VERSION
    assert ModelRunnerOutput(request_ids=[], sampled_token_ids=[]).version == PROTOCOL_VERSION


def test_scheduled_tokens_are_summed():
    step = SchedulerOutput(request_ids=["a", "b"], num_scheduled_tokens=[1, 5], num_computed_tokens=[9, 0])
    assert step.total_num_scheduled_tokens == 6


def test_kv_bytes_count_k_and_v_of_different_head_sizes():
    spec = KVCacheSpec(num_kv_heads=2, head_dim_k=64, head_dim_v=32, dtype="bfloat16")
    assert spec.bytes_per_token == 2 * (64 + 32) * 2
