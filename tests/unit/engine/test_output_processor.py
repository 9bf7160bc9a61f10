"""OutputProcessor: core outputs in, RequestOutputs out. The core is scripted; tokenizer and detokenizer are real."""

import copy

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from output_core import EOS, Core, prompt_entries
from tokenizers import models

from octavo.engine import stop_search
from octavo.engine.detokenizer import _TextStream
from octavo.errors import InvalidInput
from octavo.protocol.messages import (
    FinishReason,
    PromptEmbeds,
    RequestTimings,
    TokenLogprobs,
)
from octavo.protocol.outputs import Logprob
from octavo.protocol.sampling_params import RequestOutputKind
from octavo.tokenization.tokenizer import Tokenizer

DELTA, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


# Output kinds


def test_cumulative_outputs_hold_everything_so_far(core):
    core.add()
    outputs = core.stream("abc")
    assert [output.text for output in outputs] == ["a", "ab", "abc"]
    assert [output.token_ids for output in outputs] == [core.ids("abc"[:n]) for n in (1, 2, 3)]
    assert [output.finish_reason for output in outputs] == [None, None, "length"]
    assert [output.finished for output in core.emitted] == [False, False, True]
    assert not core.processor.has_unfinished_requests()


def test_deltas_hold_what_is_new(core):
    core.add(output_kind=DELTA)
    outputs = core.stream("abc")
    assert [(output.text, output.token_ids) for output in outputs] == [(char, core.ids(char)) for char in "abc"]


def test_final_only_shows_nothing_before_the_end(core):
    core.add(output_kind=FINAL_ONLY)
    (output,) = core.stream("abc")
    assert (output.text, output.token_ids, output.finish_reason) == ("abc", core.ids("abc"), "length")


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_request_is_described_in_every_output(core, kind):
    core.add(output_kind=kind)
    core.stream("ab")
    for output in core.emitted:
        assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "hi", core.ids("hi"))
        assert output.prompt_logprobs is None
        assert [completion.index for completion in output.outputs] == [0]


def test_half_a_character_makes_no_delta(core):
    core.add(output_kind=DELTA)
    outputs = core.stream("é日")
    assert [output.text for output in outputs] == ["é", "日"]
    assert [output.token_ids for output in outputs] == [core.ids("é"), core.ids("日")]


def test_delta_without_text_is_still_sent_at_the_end(core):
    core.add(output_kind=DELTA)
    core.send(core.ids("a"))
    core.send([EOS], FinishReason.STOP)
    last = core.emitted[-1].outputs[0]
    assert (last.text, last.token_ids, last.finish_reason) == ("", [EOS], "stop")


def test_step_that_adds_nothing_shows_nothing(core):
    core.add()
    core.send(core.ids("a"))
    assert core.send() == []


def test_without_detokenisation_there_are_ids_and_no_text(core):
    core.add(detokenize=False, output_kind=DELTA, logprobs=0)
    core.send([65], logprobs=[TokenLogprobs(token_ids=[65], logprobs=[-1.0], sampled_rank=1)])
    core.send([EOS], FinishReason.STOP, logprobs=[TokenLogprobs(token_ids=[EOS], logprobs=[-1.0], sampled_rank=1)])
    assert [output.outputs[0].token_ids for output in core.emitted] == [[65], [EOS]]
    assert [output.outputs[0].text for output in core.emitted] == ["", ""]
    assert core.emitted[0].outputs[0].logprobs == [{65: Logprob(-1.0, 1, None)}]


def test_outputs_handed_out_do_not_change_later(core):
    core.add(logprobs=0)
    kept = []
    for index in range(5):
        entry = TokenLogprobs(token_ids=[65 + index], logprobs=[-1.0], sampled_rank=1)
        kept += core.send([65 + index], logprobs=[entry])
    snapshot = copy.deepcopy(kept[:3])
    core.send([EOS], FinishReason.STOP, logprobs=[TokenLogprobs(token_ids=[EOS], logprobs=[-1.0], sampled_rank=1)])
    assert kept[:3] == snapshot


def test_users_may_change_their_outputs(core):
    core.add(logprobs=0)
    for index in range(3):
        entry = TokenLogprobs(token_ids=[65 + index], logprobs=[-1.0], sampled_rank=1)
        (output,) = core.send([65 + index], logprobs=[entry])
        assert output.outputs[0].token_ids == [65, 66, 67][: index + 1]
        assert len(output.outputs[0].logprobs) == index + 1
        output.outputs[0].token_ids.clear()
        output.outputs[0].logprobs.clear()


def test_prompt_ids_are_not_the_requests_own_list(core):
    request = core.add()
    (output,) = core.send([65])
    output.prompt_token_ids.clear()
    assert request.prompt_token_ids == core.ids("hi")


# How a request ends


@pytest.mark.parametrize("stop_reason", [None, 300])
def test_ending_token_is_among_the_ids_but_not_in_the_text(core, stop_reason):
    core.add(skip_special_tokens=False)
    core.send(core.ids("a"))
    core.send(core.ids("b"), FinishReason.STOP, stop_reason=stop_reason)
    output = core.emitted[-1].outputs[0]
    assert (output.text, output.token_ids) == ("a", core.ids("ab"))
    assert (output.finish_reason, output.stop_reason) == ("stop", stop_reason)
    assert core.dropped == []


def test_only_the_last_token_of_a_step_is_the_ending_one(core):
    core.add()
    (output,) = core.send(core.ids("abc"), FinishReason.STOP)
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("ab", core.ids("abc"))


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_nothing_of_a_stop_string_leaks_and_nothing_before_it_is_lost(core, kind):
    core.add(stop=["DEFGHIJ"], output_kind=kind)
    outputs = core.stream("ABCDEFGHIJKLM")
    last = outputs[-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", "DEFGHIJ")
    assert core.dropped == ["r"]
    if kind is DELTA:
        assert "".join(output.text for output in outputs) == "ABC"
        assert [id for output in outputs for id in output.token_ids] == core.ids("ABCDEFGHIJ")
        assert all(output.text for output in outputs[:-1])
    else:
        assert (last.text, last.token_ids) == ("ABC", core.ids("ABCDEFGHIJ"))
        assert all("ABC".startswith(output.text) for output in outputs)


def test_output_ends_at_the_token_that_completed_the_stop_string(core):
    core.add(stop="cd", logprobs=0)
    ids = core.ids("abcdef")
    entries = [TokenLogprobs(token_ids=[id], logprobs=[-1.0], sampled_rank=1) for id in ids]
    (output,) = core.send(ids, logprobs=entries)
    completion = output.outputs[0]
    assert (completion.text, completion.token_ids) == ("ab", core.ids("abcd"))
    assert len(completion.logprobs) == 4
    assert completion.cumulative_logprob == -4.0


def test_core_is_not_asked_to_drop_what_it_ended_itself(core):
    core.add(stop="b")
    core.send(core.ids("a"))
    core.send(core.ids("b"), FinishReason.LENGTH)
    output = core.emitted[-1].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", "b")
    assert core.dropped == []


def test_beginning_of_a_stop_string_that_does_not_come_is_text(core):
    core.add(stop="cdX", output_kind=DELTA)
    outputs = core.stream("abcd")
    assert "".join(output.text for output in outputs) == "abcd"
    assert outputs[-1].finish_reason == "length"


def test_min_tokens_holds_stop_strings_back(core):
    core.add(stop="a", min_tokens=3)
    outputs = core.stream("aaaaaa")
    assert (len(outputs[-1].token_ids), outputs[-1].text, outputs[-1].stop_reason) == (4, "aaa", "a")


def test_outputs_after_the_end_are_ignored(core):
    core.add(stop="b")
    core.stream("ab")
    assert core.send(core.ids("c")) == []
    assert core.send((), FinishReason.ABORT) == []
    assert core.send(core.ids("c"), request_id="unknown") == []


def test_abort_by_the_core_ends_the_request(core):
    core.add(output_kind=FINAL_ONLY)
    core.send(core.ids("a"))
    (output,) = core.send((), FinishReason.ABORT)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("a", "abort")
    assert not core.processor.has_unfinished_requests()


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_abort_hands_out_what_was_held_back(core, kind):
    core.add(stop="bXX", output_kind=kind)
    core.send(core.ids("a"))
    core.send(core.ids("b"))
    outputs = core.processor.abort(["unknown", "r"])
    (completion,) = [output.outputs[0] for output in outputs]
    assert (completion.finish_reason, completion.stop_reason, outputs[0].finished) == ("abort", None, True)
    texts = [output.outputs[0].text for output in core.emitted] + [completion.text]
    assert ("".join(texts) if kind is DELTA else texts[-1]) == "ab"
    assert core.processor.abort(["r"]) == []


def test_abort_before_the_first_token(core):
    core.add()
    (output,) = core.processor.abort(["r"])
    assert (output.outputs[0].text, output.outputs[0].token_ids, output.finished) == ("", [], True)
    assert output.metrics.queue_time == 0.0


def test_live_id_is_refused_and_free_again_after_the_end(core):
    core.add()
    with pytest.raises(InvalidInput, match="'r'"):
        core.add()
    assert core.processor.is_live("r")
    core.stream("a")
    assert not core.processor.is_live("r")
    core.add()
    assert core.stream("b")[-1].text == "b"


# Log-probabilities


def test_sampled_token_comes_first_then_the_top_ones(core):
    core.add(logprobs=2)
    entry = TokenLogprobs(token_ids=[67, 65, 66], logprobs=[-3.0, -0.5, -1.0], sampled_rank=9)
    (output,) = core.send([67], logprobs=[entry])
    (position,) = output.outputs[0].logprobs
    decode = core.tokenizer.decode_token
    assert list(position.items()) == [
        (67, Logprob(-3.0, 9, decode(67))),
        (65, Logprob(-0.5, 1, decode(65))),
        (66, Logprob(-1.0, 2, decode(66))),
    ]


def test_sampled_token_among_the_top_ones_appears_once(core):
    core.add(logprobs=2)
    entry = TokenLogprobs(token_ids=[66, 65, 66], logprobs=[-1.0, -0.5, -1.0], sampled_rank=2)
    (output,) = core.send([66], logprobs=[entry])
    (position,) = output.outputs[0].logprobs
    assert [(id, logprob.rank) for id, logprob in position.items()] == [(66, 2), (65, 1)]


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_cumulative_logprob_sums_the_sampled_tokens(core, kind):
    core.add(logprobs=1, output_kind=kind)
    for index, token_id in enumerate(core.ids("abc")):
        entry = TokenLogprobs(token_ids=[token_id, 5], logprobs=[-1.5, -0.1], sampled_rank=2)
        core.send([token_id], FinishReason.LENGTH if index == 2 else None, logprobs=[entry])
    completion = core.emitted[-1].outputs[0]
    assert completion.cumulative_logprob == -4.5
    assert len(completion.logprobs) == len(completion.token_ids) == (1 if kind is DELTA else 3)


def test_without_logprobs_there_are_none(core):
    core.add()
    (output,) = core.send([65])
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None


def test_each_token_is_decoded_once_for_logprobs(core, monkeypatch):
    asked = []
    decode = core.tokenizer.decode_token
    monkeypatch.setattr(core.tokenizer, "decode_token", lambda id: asked.append(id) or decode(id))
    for request_id in ("a", "b"):
        core.add(request_id, logprobs=-1)
        for _ in range(3):
            entry = TokenLogprobs(token_ids=[65, *range(257)], logprobs=[-1.0] * 258, sampled_rank=66)
            core.send([65], request_id=request_id, logprobs=[entry])
    assert sorted(asked) == list(range(257))
    assert len(core.emitted[-1].outputs[0].logprobs[0]) == 257


# Metrics


def test_times_of_phases_are_differences(core):
    core.add()
    timings = RequestTimings(arrival=10.0, scheduled=11.0, first_token=13.0, last_token=17.0)
    (output,) = core.send([65], timings=timings, num_preemptions=2, num_cached_tokens=16)
    metrics = output.metrics
    assert (metrics.queue_time, metrics.prefill_time, metrics.decode_time) == (1.0, 2.0, 4.0)
    assert metrics.num_preemptions == 2
    assert output.num_cached_tokens == 16


def test_phases_not_reached_take_no_time(core):
    core.add(output_kind=FINAL_ONLY)
    core.send((), timings=RequestTimings(arrival=10.0, scheduled=11.0))
    (output,) = core.processor.abort(["r"])
    metrics = output.metrics
    assert (metrics.queue_time, metrics.prefill_time, metrics.decode_time) == (1.0, 0.0, 0.0)


def test_receipt_is_on_every_output(core):
    core.add(receipt={"clamps": ["max_tokens 9 -> 5 (room left)"], "ignored": ["top_p=0.5: greedy"]})
    for output in (core.send([65])[0], core.send([66], FinishReason.LENGTH)[0]):
        assert output.metrics.clamps == ["max_tokens 9 -> 5 (room left)"]
        assert output.metrics.ignored == ["top_p=0.5: greedy"]
        output.metrics.clamps.clear()


# What ends the text


def test_last_whole_characters_can_complete_a_stop_string(core, monkeypatch):
    """What is pending at the end is taken in before it is decided why the request ended."""
    core.add(stop="P", output_kind=DELTA)
    monkeypatch.setattr(_TextStream, "flush", lambda self: "P")
    core.send(core.ids("a"))
    (output,) = core.send(core.ids("日")[:1], FinishReason.LENGTH)
    completion = output.outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("", "stop", "P")
    assert core.dropped == []


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_stop_string_is_kept_if_asked_for(core, kind):
    core.add(stop="CD", include_stop_str_in_output=True, output_kind=kind)
    outputs = core.stream("ABCDEF")
    text = "".join(output.text for output in outputs) if kind is DELTA else outputs[-1].text
    assert (text, outputs[-1].stop_reason) == ("ABCD", "CD")


@pytest.mark.parametrize(("skip", "shown"), [(True, "a"), (False, "a<eos>")])
def test_stop_token_is_shown_if_asked_for_and_special_ones_if_these_are(core, skip, shown):
    core.add(include_stop_str_in_output=True, skip_special_tokens=skip)
    core.send(core.ids("a"))
    (output,) = core.send([EOS], FinishReason.STOP)
    assert output.outputs[0].text == shown
    core.add("q", include_stop_str_in_output=True, skip_special_tokens=skip)
    (output,) = core.send(core.ids("ab"), FinishReason.STOP, "q", stop_reason=core.ids("b")[0])
    assert output.outputs[0].text == "ab"


def test_match_of_an_expression_ends_the_request_and_names_it(core):
    core.add(stop_regex=r"\d{2}", logprobs=0)
    ids = core.ids("ab12cd")
    (output,) = core.send(ids, logprobs=[TokenLogprobs([id], [-1.0], 1) for id in ids])
    completion = output.outputs[0]
    assert (completion.text, completion.token_ids) == ("ab", core.ids("ab12"))
    assert (completion.finish_reason, completion.stop_reason, len(completion.logprobs)) == ("stop", r"\d{2}", 4)
    assert core.dropped == ["r"]


def test_expression_that_never_comes_to_an_end_aborts_its_own_request_only(core, monkeypatch):
    monkeypatch.setattr(stop_search, "TIME_LIMIT", 0.05)
    core.add(stop_regex="(a|aa)+c")
    core.add("other")
    core.send(core.ids("a" * 60 + "b"))
    (output,) = core.emitted
    assert output.outputs[0].finish_reason == "abort"
    assert "stop_regex='(a|aa)+c' takes more than" in output.outputs[0].stop_reason
    assert core.dropped == ["r"]
    assert core.send(core.ids("x"), request_id="other")[0].outputs[0].text == "x"


def test_request_that_could_not_go_on_says_why(core):
    core.add()
    core.send(core.ids("a"))
    (output,) = core.send((), FinishReason.ABORT, error="logits processor a:B failed")
    completion = output.outputs[0]
    assert (completion.text, completion.finish_reason) == ("a", "abort")
    assert completion.stop_reason == "logits processor a:B failed"


def test_placeholders_of_embeddings_are_no_context_for_the_text():
    """Behind a token this tokenizer writes a space; embeddings are no tokens."""
    core = Core(Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a"))))
    core.add("ids", receipt={"prompt_token_ids": [0, 0]})
    assert core.send([1], request_id="ids")[0].outputs[0].text == " b"
    embeds = PromptEmbeds(b"", "float32", (2, 4))
    core.add("embeds", prompt=None, receipt={"prompt_token_ids": [0, 0], "prompt_embeds": embeds})
    (output,) = core.send([1], request_id="embeds")
    assert (output.prompt, output.prompt_token_ids, output.outputs[0].text) == (None, [0, 0], "b")


# Log-probabilities of the prompt


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_prompt_logprobs_are_one_a_token_and_the_first_is_none(core, kind):
    core.add(prompt_logprobs=1, output_kind=kind)
    core.send(core.ids("a"), prompt_logprobs=prompt_entries(core.ids("hi")))
    core.send(core.ids("b"), FinishReason.LENGTH)
    decode = core.tokenizer.decode_token
    (second,) = core.ids("i")
    expected = [None, {second: Logprob(-2.0, 3, "i"), 5: Logprob(-0.5, 1, decode(5))}]
    assert core.emitted[0].prompt_logprobs == expected
    if kind is not FINAL_ONLY:
        assert core.emitted[1].prompt_logprobs == (None if kind is DELTA else expected)
    assert core.emitted[0].outputs[0].logprobs is None


def test_deltas_bring_prompt_logprobs_with_the_first_text(core):
    core.add(prompt_logprobs=0, output_kind=DELTA)
    assert core.send(core.ids("é")[:1], prompt_logprobs=prompt_entries(core.ids("hi"))) == []
    (output,) = core.send(core.ids("é")[1:])
    assert len(output.prompt_logprobs) == 2


@pytest.mark.parametrize("entries", [None, []])
def test_prompt_of_one_token_has_one_none(core, entries):
    core.add(prompt_logprobs=2, receipt={"prompt_token_ids": core.ids("h")})
    assert core.send([65], prompt_logprobs=entries)[0].prompt_logprobs == [None]


def test_request_that_ends_before_its_prompt_is_computed_has_none(core):
    core.add(prompt_logprobs=2)
    (output,) = core.processor.abort(["r"])
    assert output.prompt_logprobs is None


def test_users_may_change_prompt_logprobs(core):
    core.add(prompt_logprobs=1)
    core.send([65], prompt_logprobs=prompt_entries(core.ids("hi")))[0].prompt_logprobs.clear()
    assert len(core.send([66])[0].prompt_logprobs) == 2


def test_infinite_values_are_passed_as_they_come(core):
    core.add(logprobs=1)
    entry = TokenLogprobs(token_ids=[65, 66], logprobs=[float("-inf"), 3.5], sampled_rank=2)
    completion = core.send([65], logprobs=[entry])[0].outputs[0]
    assert [logprob.logprob for logprob in completion.logprobs[0].values()] == [float("-inf"), 3.5]
    assert completion.cumulative_logprob == float("-inf")


@st.composite
def schedules(draw):
    """Texts of several requests, their kinds, and the order in which their tokens come, in chunks."""
    texts = draw(st.lists(st.text("abcé日👋 ", min_size=1, max_size=8), min_size=1, max_size=4))
    kinds = [draw(st.sampled_from(RequestOutputKind)) for _ in texts]
    stops = [draw(st.lists(st.text("abé日", min_size=1, max_size=3), max_size=2)) for _ in texts]
    order = draw(st.lists(st.tuples(st.integers(0, len(texts) - 1), st.integers(1, 4)), max_size=60))
    return texts, kinds, stops, order


def expected_text(text, stops):
    """The text before the stop string that is complete first; among those, the one that begins first."""
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return text[: min(ends)[1]] if ends else text


@settings(max_examples=150, deadline=None)
@given(schedules())
def test_every_request_gets_its_own_text_whatever_runs_beside_it(tokenizer, schedule):
    texts, kinds, stops, order = schedule
    core = Core(tokenizer)
    left = [core.ids(text) for text in texts]
    for index, (kind, stop) in enumerate(zip(kinds, stops, strict=True)):
        core.add(str(index), output_kind=kind, stop=stop)
    for index, count in [*order, *((index, 1000) for index in range(len(texts)))]:
        if str(index) in core.dropped or not left[index]:
            continue
        new, left[index] = left[index][:count], left[index][count:]
        core.send(new, None if left[index] else FinishReason.LENGTH, str(index))
    assert not core.processor.has_unfinished_requests()
    for index, kind in enumerate(kinds):
        outputs = [output for output in core.emitted if output.request_id == str(index)]
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        parts = [output.outputs[0].text for output in outputs]
        assert ("".join(parts) if kind is DELTA else parts[-1]) == expected_text(texts[index], stops[index])
        assert kind is not FINAL_ONLY or len(outputs) == 1
