"""From bytes to a checked body: unknown fields are named, null is absent, and everything else is refused in words."""

import json

import pytest

from octavo.entrypoints.server.bodies import _parse, body_schemas
from octavo.entrypoints.server.errors import ApiError, from_exception, from_status, named_field
from octavo.entrypoints.server.schema.common import StreamOptions, validate_body
from octavo.entrypoints.server.schema.completions import CompletionRequest
from octavo.entrypoints.server.schema.responses import finite
from octavo.errors import InvalidInput
from octavo.protocol.sampling_params import RequestOutputKind, SamplingParams


def parse(**fields) -> CompletionRequest:
    return _parse(json.dumps({"prompt": "p", **fields}).encode(), CompletionRequest)


def test_fields_go_to_sampling_params_as_they_are_over_the_model_s_defaults():
    defaults = SamplingParams(temperature=0.5, top_p=0.9)
    params = parse(top_p=0.8, stop="x", n=2, logit_bias={"3": 1}).to_sampling_params(defaults)
    assert (params.temperature, params.top_p, params.stop, params.n) == (0.5, 0.8, ["x"], 2)
    assert params.logit_bias == {3: 1.0}
    assert params.max_tokens == 16
    assert params.output_kind is RequestOutputKind.FINAL_ONLY
    assert parse(stream=True).to_sampling_params(defaults).output_kind is RequestOutputKind.DELTA
    assert defaults == SamplingParams(temperature=0.5, top_p=0.9)


def test_null_is_absent_also_inside():
    body = parse(stream=True, stream_options={"include_usage": None}, top_p=None, what=None)
    assert body.stream_options == StreamOptions()
    assert "top_p" not in body.model_fields_set
    assert body.unknown_field_warnings() == []


def test_unknown_fields_are_named_with_the_nearest_known_one_also_inside():
    body = parse(temprature=1, stream=True, stream_options={"include_usages": True}, zzz=[], suffix="")
    warnings = body.unknown_field_warnings()
    assert len(warnings) == 3
    assert "temprature" in warnings[0] and "did you mean temperature?" in warnings[0]
    assert any(warning.startswith("stream_options: include_usages") for warning in warnings)
    assert any(warning.startswith("zzz") for warning in warnings)


def test_a_field_s_name_cannot_break_a_warning():
    name = "x\n\x1b[31m" + "y" * 1000
    (warning,) = parse(**{name: 1}).unknown_field_warnings()
    assert warning.isprintable()
    assert len(warning) < 200


def test_very_many_unknown_fields_are_counted():
    warnings = parse(**{f"temperature{number}" * 100: 1 for number in range(5000)}).unknown_field_warnings()
    assert len(warnings) == 21
    assert warnings[-1].startswith("4980 more")


def test_lists_that_would_take_too_long_to_check_are_refused():
    parse(stop=["x" * 1000] * 1000)
    for fields in ({"stop": ["x" * 1000] * 1100}, {"prompt": ["p"] * 2000, "bad_words": ["x" * 600]}):
        with pytest.raises(InvalidInput, match="1048576 at most"):
            parse(**fields)
    with pytest.raises(InvalidInput, match="2048 at most"):
        parse(prompt=["x"] * 3000)
    assert parse(stop_regex="a+").takes_long_to_prepare()
    assert parse(allowed_token_ids=list(range(1000))).takes_long_to_prepare()
    assert not parse(stop=["x"]).takes_long_to_prepare()


@pytest.mark.parametrize("value", [False, "", [], 0, 1.0])
def test_only_the_value_that_asks_for_nothing_is_taken_of_what_is_not_built(value):
    if value is False:
        parse(use_beam_search=value)
    else:
        with pytest.raises(InvalidInput, match="use_beam_search"):
            parse(use_beam_search=value)


@pytest.mark.parametrize(
    ("data", "names"),
    [
        ([], "JSON object"), (None, "null"), ("x", "a text"), (3, "a number"), ({}, "prompt is missing"),
        ({"prompt": "p", "stream": "yes"}, "stream='yes'"), ({"prompt": "p", "stream_options": []}, "stream_options"),
        ({"prompt": "p", "stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage=1"),
        ({"prompt": "p", "user": "x" * 1000}, "user="), ({"prompt": "p", "request_id": "é"}, "request_id="),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_one_sentence(data, names):
    with pytest.raises(InvalidInput) as caught:
        validate_body(CompletionRequest, data)
    assert names in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("data", [b"", b"{", b'{"a": "\\ud83d"}', b"[" * 100_000, b"NaN", b"\xff", b"9" * 5000])
def test_what_is_no_json_is_a_400(data):
    with pytest.raises(ApiError) as caught:
        _parse(data, CompletionRequest)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    assert ("surrogate" in caught.value.message) == (b"ud83d" in data)


def test_a_whole_pair_of_surrogates_is_a_character():
    assert _parse(b'{"prompt": "\\ud83d\\udc4b"}', CompletionRequest).prompts == ["👋"]


def test_schemas_of_all_bodies_are_in_the_document():
    import octavo.entrypoints.server.routes.completions  # noqa: F401  # names its body

    schemas = body_schemas()
    assert "prompt" in schemas["CompletionRequest"]["required"]
    assert "StreamOptions" in schemas
    assert "$defs" not in json.dumps(schemas)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("top_p=3 must be between 0 and 1", "top_p"), ("token id -1 at position 0 of the prompt is outside", "prompt"),
        ("min_tokens=5 must be at most max_tokens=3", "min_tokens"), ("nothing of that", None),
    ],
)  # fmt: skip
def test_the_param_of_an_error_is_the_field_its_message_names(message, field):
    assert named_field(message, {"top_p", "prompt", "max_tokens", "min_tokens"}) == field


def test_every_error_has_the_same_body():
    for error in (from_status(404, None, None), from_status(418, "x", None), from_exception(ValueError("a defect"))):
        assert set(error.body()["error"]) == {"message", "type", "param", "code"}
    assert from_status(405, "Method Not Allowed", {"allow": "GET"}).headers == {"allow": "GET"}
    assert from_exception(ValueError("a defect")).status == 500


def test_log_probabilities_are_finite():
    assert finite(-1.5) == -1.5
    assert finite(float("-inf")) == -9999.0
    assert finite(float("inf")) == 9999.0
    assert finite(float("nan")) == -9999.0
