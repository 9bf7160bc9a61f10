import pytest

from octavo.entrypoints.server.schema.chat import ChatCompletionRequest
from octavo.entrypoints.server.schema.common import validate_body
from octavo.errors import InvalidInput
from octavo.protocol.sampling_params import RequestOutputKind, SamplingParams

MESSAGES = [{"role": "user", "content": "Hi"}]
VOCAB = 1000


def request(**fields: object) -> ChatCompletionRequest:
    return validate_body(ChatCompletionRequest, {"messages": MESSAGES, **fields})


def params(**fields: object) -> SamplingParams:
    return request(**fields).to_sampling_params(SamplingParams(), VOCAB)


def test_an_answer_may_be_as_long_as_there_is_room():
    assert params().max_tokens is None


def test_max_tokens_is_the_older_name_of_max_completion_tokens():
    assert params(max_tokens=5).max_tokens == 5
    assert params(max_completion_tokens=6).max_tokens == 6
    assert params(max_completion_tokens=6, max_tokens=5).max_tokens == 6
    assert request(max_completion_tokens=6, max_tokens=5).no_effect_warnings()
    assert not request(max_completion_tokens=6, max_tokens=6).no_effect_warnings()


def test_streams_are_of_deltas():
    assert params(stream=True).output_kind is RequestOutputKind.DELTA
    assert params().output_kind is RequestOutputKind.FINAL_ONLY


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 4}, 4),
        ({"logprobs": True, "top_logprobs": -1}, -1),
    ],
)
def test_logprobs_are_those_of_the_most_probable_tokens(fields, logprobs):
    assert params(**fields).logprobs == logprobs


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", None),
        ("max_completion_tokens", 0),
        ("max_completion_tokens", 1.5),
        ("max_completion_tokens", True),
        ("max_tokens", 0),
        ("top_logprobs", 2),
        ("top_logprobs", -2),
        ("top_logprobs", "many"),
        ("logprobs", 3),
        ("logprobs", "yes"),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "auto"),
        ("functions", [{"name": "f"}]),
        ("function_call", "auto"),
        ("audio", {"voice": "x"}),
        ("modalities", ["text", "audio"]),
        ("prediction", {"type": "content"}),
        ("web_search_options", {}),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "not-a-type"}),
        ("echo", True),
        ("add_special_tokens", True),
        ("continue_final_message", "yes"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(field, value):
    with pytest.raises(InvalidInput, match=field):
        params(**{field: value})


def test_more_logprobs_than_tokens_are_refused_by_the_name_the_client_used():
    with pytest.raises(InvalidInput, match="top_logprobs=1001 is more than the vocabulary of 1000"):
        params(logprobs=True, top_logprobs=1001)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", []),
        ("tool_choice", "none"),
        ("functions", []),
        ("function_call", "none"),
        ("modalities", ["text"]),
        ("response_format", {"type": "text"}),
        ("echo", False),
        ("service_tier", "auto"),
        ("store", False),
        ("stream_options", None),
    ],
)
def test_values_that_ask_for_nothing_are_taken_without_a_word(field, value):
    body = request(**{field: value})
    assert not body.unknown_field_warnings() + body.no_effect_warnings()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("parallel_tool_calls", True),
        ("service_tier", "priority"),
        ("reasoning_effort", "high"),
        ("verbosity", "low"),
        ("prompt_cache_key", "k"),
        ("prompt_cache_retention", "24h"),
        ("safety_identifier", "s"),
        ("metadata", {"a": "b"}),
    ],
)
def test_known_fields_that_change_nothing_are_named(field, value):
    (warning,) = request(**{field: value}).no_effect_warnings()
    assert warning.startswith(f"{field}: ")


def test_null_means_absent_for_every_field():
    nulls = dict.fromkeys({*ChatCompletionRequest.model_fields, *ChatCompletionRequest.not_built} - {"messages"})
    body = request(**nulls)
    assert body == request()
    assert body.to_sampling_params(SamplingParams(), VOCAB) == params()
    assert not body.unknown_field_warnings() + body.no_effect_warnings()


def test_defaults_of_the_model_are_kept_where_the_request_says_nothing():
    defaults = SamplingParams(temperature=0.6, top_p=0.9)
    chosen = request(top_p=0.5).to_sampling_params(defaults, VOCAB)
    assert (chosen.temperature, chosen.top_p) == (0.6, 0.5)
