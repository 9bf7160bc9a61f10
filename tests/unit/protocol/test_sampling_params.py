"""SamplingParams: what each field takes, and how it refuses the rest."""

import math

import msgspec
import numpy as np
import pytest

from octavo.errors import InvalidInput
from octavo.protocol.sampling_params import LOGPROBS_MODES, RequestOutputKind, SamplingParams

PENALTIES = ("presence_penalty", "frequency_penalty")
FLAGS = (
    "ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output", "spaces_between_special_tokens",
)  # fmt: skip

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
    ("n", 1, 1),
    ("n", np.int64(16384), 16384),
    *((name, value, float(value)) for name in PENALTIES for value in (-2, 0, 0.5, 2.0)),
    ("repetition_penalty", 1, 1.0),
    ("repetition_penalty", np.float32(0.5), 0.5),
    ("logit_bias", None, None),
    ("logit_bias", {}, None),
    ("logit_bias", {5: -100}, {5: -100.0}),
    ("logit_bias", {"5": 1, " 7 ": 100.0, 0: 0}, {5: 1.0, 7: 100.0, 0: 0.0}),
    ("logit_bias", {np.int64(5): np.float32(0.5)}, {5: 0.5}),
    ("bad_words", None, None),
    ("bad_words", [], None),
    ("bad_words", ("no", " never"), ["no", " never"]),
    ("allowed_token_ids", None, None),
    ("allowed_token_ids", (3, 3, 0), [3, 3, 0]),
    ("include_stop_str_in_output", True, True),
    ("prompt_logprobs", None, None),
    ("prompt_logprobs", 0, 0),
    ("prompt_logprobs", -1, -1),
    ("logprobs_mode", None, None),
    *(("logprobs_mode", mode, mode) for mode in LOGPROBS_MODES),
    ("spaces_between_special_tokens", False, False),
    ("stop_regex", None, []),
    ("stop_regex", r"\d+", [r"\d+"]),
    ("stop_regex", ["a|b", "(?i)stop"], ["a|b", "(?i)stop"]),
    ("logits_processors", None, None),
    ("logits_processors", [], None),
    ("logits_processors", ["a.b:C", RequestOutputKind], ["a.b:C", f"{RequestOutputKind.__module__}:RequestOutputKind"]),
    ("extra_args", None, None),
    ("extra_args", {}, None),
    ("extra_args", {"a": [1, {"b": "c"}]}, {"a": [1, {"b": "c"}]}),
    ("extra_args", {"a": (1, 2)}, {"a": [1, 2]}),
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
    *((name, value) for name in FLAGS for value in (1, 0, None, "yes")),
    *(("output_kind", value) for value in (0, "DELTA", None)),
    *(("n", value) for value in (*NO_INTEGERS, None, 0, -1, 16385)),
    *((name, value) for name in PENALTIES for value in (*NO_NUMBERS, -2.1, 2.1)),
    *(("repetition_penalty", value) for value in (*NO_NUMBERS, 0, -1.0, 1e-300, 1e300)),
    *(("logit_bias", value) for value in (5, [5], {-1: 1}, {"-1": 1}, {"+-5": 1}, {"five": 1}, {"9" * 5000: 1})),
    *(("logit_bias", value) for value in ({True: 1}, {1.0: 1}, {5: 1, "5": 2}, {None: 1})),
    *(("logit_bias", {5: value}) for value in (*NO_NUMBERS, -101, 100.5)),
    *(("bad_words", value) for value in ("no", [""], ["a", ""], [1], 5, {"a": 1}, ["\ud800"])),
    *(("allowed_token_ids", value) for value in ([], (), 5, "5", [-1], [1.0], [True], [None], {1: 2})),
    *(("prompt_logprobs", value) for value in (*NO_INTEGERS, -2)),
    *(("logprobs_mode", value) for value in ("", "raw", "RAW_LOGPROBS", 0, True, ["raw_logprobs"])),
    *(("stop_regex", value) for value in ("", [""], "a*", "$", "x|", "(", "*", "(?r)ab", 5, [1], b"a", "a\ud800")),
    *(("logits_processors", value) for value in ("a:B", ["no_colon"], ["a:b:c"], [5], 5, [None])),
    *(("extra_args", value) for value in (5, [1], "a", {1: 2}, {"a": object()}, {"a": 2**70})),
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


def test_tables_above_cover_every_field():
    names = {field.name for field in msgspec.structs.fields(SamplingParams)}
    assert names == {name for name, _, _ in ACCEPTED} == {name for name, _ in REFUSED}


def test_vocabularies_of_bias_and_refusal_are_named():
    with pytest.raises(InvalidInput, match=r"logit_bias\[5\]=101 must be between -100 and 100"):
        SamplingParams(logit_bias={5: 101})
    with pytest.raises(InvalidInput, match="names token 5 twice"):
        SamplingParams(logit_bias={5: 1, "5": 1})


def test_expression_that_would_end_every_request_is_refused_with_the_reason():
    with pytest.raises(InvalidInput, match=r"stop_regex='a\*' matches the empty text"):
        SamplingParams(stop_regex="a*")


def test_refusal_names_value_and_limit():
    with pytest.raises(InvalidInput, match=r"top_p=1\.1 must be between 0 and 1"):
        SamplingParams(top_p=1.1)


def test_unknown_keyword_is_a_type_error():
    with pytest.raises(TypeError, match="'temperatur' is no field of SamplingParams; did you mean 'temperature'"):
        SamplingParams(temperatur=0.5)


def test_min_tokens_beyond_max_tokens_is_refused_with_both():
    with pytest.raises(InvalidInput, match=r"min_tokens=9 .*max_tokens=8"):
        SamplingParams(min_tokens=9, max_tokens=8)
    assert SamplingParams(min_tokens=9, max_tokens=None).min_tokens == 9


def test_stop_without_text_is_refused():
    with pytest.raises(InvalidInput, match=r"stop=.*'x'.*detokenize=False"):
        SamplingParams(stop="x", detokenize=False)
    with pytest.raises(InvalidInput, match=r"stop_regex=.*'x'.*detokenize=False"):
        SamplingParams(stop_regex="x", detokenize=False)
    assert SamplingParams(stop_token_ids=[1], detokenize=False).stop_token_ids == [1]


def test_clone_shares_nothing_that_can_change():
    fields = {
        "stop": ["a"],
        "stop_regex": ["a"],
        "stop_token_ids": [1],
        "bad_words": ["a"],
        "allowed_token_ids": [1],
        "logit_bias": {1: 1.0},
        "logits_processors": ["a:B"],
        "extra_args": {"a": [1]},
    }
    params = SamplingParams(**fields)
    copy = params.clone()
    assert copy == params
    for name in fields:
        getattr(params, name).clear()
    params.temperature = 0.0
    assert {name: getattr(copy, name) for name in fields} == fields
    assert copy.temperature == 1.0


def test_arguments_of_processors_are_copied_to_their_depths():
    inner = [1]
    params = SamplingParams(extra_args={"a": inner})
    inner.append(2)
    assert params.extra_args == {"a": [1]}


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


class Hostile:
    def __repr__(self):
        raise RuntimeError("no")

    __float__ = __index__ = __repr__


@pytest.mark.parametrize(
    "value", [-(10**5000), "x" * 200_000, Hostile(), [Hostile()], "a\n\0"], ids=lambda v: type(v).__name__
)
@pytest.mark.parametrize(
    "name", [n for n in SamplingParams.__struct_fields__ if n not in ("extra_args", "stop", "stop_regex")]
)
def test_whatever_is_given_the_refusal_is_short_and_names_the_field(name, value):
    with pytest.raises(InvalidInput, match=f"^{name}=") as refusal:
        SamplingParams(**{name: value})
    assert len(str(refusal.value)) < 300
    assert str(refusal.value).isprintable()
