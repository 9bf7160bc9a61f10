"""What crosses the socket arrives as it was sent."""

import msgspec
import pytest
from tiny_models import write_model

from octavo.config.resolve import make_engine_args
from octavo.engine.assemble import decode_config, encode_config, make_front_end
from octavo.protocol.core_messages import (
    AbortRequests,
    AddRequest,
    CallResult,
    CoreCall,
    CoreMethod,
    EngineFailed,
    EngineReady,
    FromCore,
    Heartbeat,
    RequestFailure,
    Shutdown,
    StartEngine,
    StepOutputs,
    ToCore,
)
from octavo.protocol.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, RequestTimings, TokenLogprobs
from octavo.protocol.sampling_params import RequestOutputKind, SamplingParams
from octavo.protocol.stats import EngineStats

PARAMS = SamplingParams(
    seed=2**63 + 5, max_tokens=7, stop=["a", "b"], logprobs=-1, logit_bias={"3": -100}, bad_words=["x"], n=3,
    allowed_token_ids=[1, 2], output_kind=RequestOutputKind.DELTA, extra_args={"deep": [1, {"er": None}]},
)  # fmt: skip
REQUEST = EngineCoreRequest(
    request_id="7", prompt_token_ids=[1, 2], sampling_params=PARAMS, eos_token_ids=[3], arrival_time=1.5,
    priority=-(2**63), cache_salt="salt", bad_words_token_ids=[[1, 2], [3]],
)  # fmt: skip
OUTPUT = EngineCoreOutput(
    request_id="1_7", new_token_ids=[4], finish_reason=FinishReason.STOP, stop_reason=4, num_cached_tokens=16,
    logprobs=[TokenLogprobs([4, 5], [-0.5, float("-inf")], 9)], timings=RequestTimings(arrival=1.5, last_token=2.5),
)  # fmt: skip
FAILURE = RequestFailure(request_id="7", message="why", is_invalid_input=False)
STATS = EngineStats(num_running=3, kv_utilization=0.25)


@pytest.mark.parametrize(
    "message",
    [
        AddRequest(REQUEST), AbortRequests(["a"]), Shutdown(),
        *(CoreCall(call_id=1, method=method) for method in CoreMethod),
    ],
    ids=lambda message: type(message).__name__,
)  # fmt: skip
def test_a_message_to_the_core_arrives_as_it_was_sent(message):
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToCore) == message


@pytest.mark.parametrize(
    "message",
    [
        EngineReady(stats=STATS, kernels={"linear": "reference"}),
        EngineFailed(message="why", is_invalid_input=True),
        StepOutputs(outputs=[OUTPUT], stats=STATS, failures=[FAILURE]),
        CallResult(call_id=1, value=STATS), CallResult(call_id=1, value=True), CallResult(call_id=1),
        CallResult(call_id=1, error="off"), Heartbeat(seconds_in_step=1.5),
    ],
    ids=lambda message: type(message).__name__,
)  # fmt: skip
def test_a_message_from_the_core_arrives_as_it_was_sent(message):
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=FromCore) == message


def test_a_configuration_arrives_as_it_was_sent(tmp_path):
    config = make_front_end(make_engine_args(model=str(write_model(tmp_path)), num_kv_blocks=8, seed=2**64 - 1)).config
    start = StartEngine(config=msgspec.Raw(encode_config(config)), vocab_size=259, heartbeat_interval=0.5)
    arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(start), type=ToCore)
    assert decode_config(arrived.config) == config
    assert (arrived.vocab_size, arrived.heartbeat_interval) == (259, 0.5)
