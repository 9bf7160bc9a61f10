"""SamplingParams: what each field takes, and how it refuses the rest."""

import math

import msgspec
import numpy as np
import pytest

from octavo.errors import InvalidInput
from octavo.protocol.sampling_params import RequestOutputKind, SamplingParams

NOT_BUILT = {
    "n": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {5: 1.0},
    "bad_words": ["no"],
    "allowed_token_ids": [1],
    "include_stop_str_in_output": True,
    "prompt_logprobs": 1,
    "spaces_between_special_tokens": False,
    "stop_regex": "a+",
}
NEUTRAL = {
    "n": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1,
    "logit_bias": {},
    "bad_words": [],
    "allowed_token_ids": None,
    "include_stop_str_in_output": False,
    "prompt_logprobs": None,
    "spaces_between_special_tokens": True,
    "stop_regex": None,
}

ACCEPTED = [
    ("temperature", 0, 0.0),
    ("temperature", 0.0, 0.0),
    ("temperature", 100.0, 100.0),
    ("temperature", np.float64(0.5), 0.5),
    ("temperature", np.float32(0.5), 0.5),
    ("top_p", 0, 0.0),
    ("top_p", 1, 1.0),
    ("min_p", 0, 0.0),
    ("min_p", 1.0, 1.0),
    ("top_k", 0, 0),
    ("top_k", -1, -1),
    ("top_k", np.int64(7), 7),
    ("seed", None, None),
    ("seed", -1, None),
    ("seed", 0, 0),
    ("seed", -2, -2),
    ("seed", 2**64 - 1, 2**64 - 1),
    ("max_tokens", None, None),
    ("max_tokens", 1, 1),
    ("max_tokens", 10**12, 10**12),
    ("min_tokens", 0, 0),
    ("min_tokens", 16, 16),
    ("stop", None, []),
    ("stop", [], []),
    ("stop", "end", ["end"]),
    ("stop", ["a", "b"], ["a", "b"]),
    ("stop", ("a", "b"), ["a", "b"]),
    ("stop_token_ids", None, []),
    ("stop_token_ids", [0, 3], [0, 3]),
    ("stop_token_ids", (np.int32(3),), [3]),
    ("ignore_eos", True, True),
    ("logprobs", None, None),
    ("logprobs", 0, 0),
    ("logprobs", -1, -1),
    ("logprobs", 20, 20),
    ("detokenize", False, False),
    ("skip_special_tokens", False, False),
    ("output_kind", RequestOutputKind.DELTA, RequestOutputKind.DELTA),
]

NO_NUMBERS = (True, False, "0.5", b"1", None, math.nan, math.inf, -math.inf, [0.5], 10**400, 1j)
NO_INTEGERS = (True, False, 1.0, "1", math.nan, [1], np.float64(1.0), np.bool_(True))

REFUSED = [
    *(("temperature", value) for value in (*NO_NUMBERS, -0.1)),
    *(("top_p", value) for value in (*NO_NUMBERS, -0.1, 1.1)),
    *(("min_p", value) for value in (*NO_NUMBERS, -0.1, 1.1)),
    *(("top_k", value) for value in (*NO_INTEGERS, None, -2)),
    *(("seed", value) for value in (*NO_INTEGERS, 2**64, -(2**63) - 1)),
    *(("max_tokens", value) for value in (*NO_INTEGERS, 0, -1)),
    *(("min_tokens", value) for value in (*NO_INTEGERS, None, -1)),
    *(("logprobs", value) for value in (*NO_INTEGERS, -2)),
    *(("stop", value) for value in ("", [""], ["a", ""], [1], 5, {"a": 1}, b"a", "\ud800", ["ok", "a\udfff"])),
    *(("stop_token_ids", value) for value in (5, "5", [-1], [1.0], [True], ["1"], [None], {1: 2})),
    *((name, value) for name in ("ignore_eos", "detokenize", "skip_special_tokens") for value in (1, 0, None, "yes")),
    *(("output_kind", value) for value in (0, "DELTA", None)),
]


@pytest.mark.parametrize(("name", "value", "stored"), ACCEPTED)
def test_value_is_taken_and_stored_in_its_plain_form(name, value, stored):
    result = getattr(SamplingParams(**{name: value}), name)
    assert result == stored
    assert type(result) is type(stored)


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_bad_value_is_refused_by_name(name, value):
    with pytest.raises(InvalidInput, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), NOT_BUILT.items())
def test_unbuilt_field_is_refused_by_name(name, value):
    with pytest.raises(InvalidInput, match=f"{name}.*not built"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), NEUTRAL.items())
def test_neutral_value_of_an_unbuilt_field_is_taken(name, value):
    assert SamplingParams(**{name: value}) == SamplingParams()


@pytest.mark.parametrize(
    ("name", "value"), [("n", True), ("presence_penalty", False), ("include_stop_str_in_output", 0), ("stop_regex", "")]
)
def test_neutral_value_of_another_type_is_refused(name, value):
    with pytest.raises(InvalidInput, match=name):
        SamplingParams(**{name: value})


def test_tables_above_cover_every_field():
    names = {field.name for field in msgspec.structs.fields(SamplingParams)}
    assert names == {name for name, _, _ in ACCEPTED} | set(NOT_BUILT)
    assert names == {name for name, _ in REFUSED} | set(NOT_BUILT)
    assert set(NEUTRAL) == set(NOT_BUILT)


def test_refusal_names_value_and_limit():
    with pytest.raises(InvalidInput, match=r"top_p=1\.1 must be between 0 and 1"):
        SamplingParams(top_p=1.1)


def test_unknown_keyword_is_a_type_error():
    with pytest.raises(TypeError, match="temperatur"):
        SamplingParams(temperatur=0.5)


def test_min_tokens_beyond_max_tokens_is_refused_with_both():
    with pytest.raises(InvalidInput, match=r"min_tokens=9 .*max_tokens=8"):
        SamplingParams(min_tokens=9, max_tokens=8)
    assert SamplingParams(min_tokens=9, max_tokens=None).min_tokens == 9


def test_stop_without_text_is_refused():
    with pytest.raises(InvalidInput, match=r"stop='x'.*detokenize=False"):
        SamplingParams(stop="x", detokenize=False)
    assert SamplingParams(stop_token_ids=[1], detokenize=False).stop_token_ids == [1]


def test_clone_shares_nothing_that_can_change():
    params = SamplingParams(stop=["a"], stop_token_ids=[1])
    copy = params.clone()
    assert copy == params
    params.stop.append("b")
    params.stop_token_ids.append(2)
    params.temperature = 0.0
    assert (copy.stop, copy.stop_token_ids, copy.temperature) == (["a"], [1], 1.0)


def test_caller_keeps_its_own_list():
    stops = ["a"]
    params = SamplingParams(stop=stops)
    stops.append("")
    assert params.stop == ["a"]


def test_clone_validates_what_was_changed_since():
    params = SamplingParams()
    params.stop = "word"
    assert params.clone().stop == ["word"]
    params.top_p = 2.0
    with pytest.raises(InvalidInput, match="top_p"):
        params.clone()


def test_only_temperature_zero_is_greedy():
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=1e-6).is_greedy
