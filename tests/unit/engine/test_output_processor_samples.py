"""OutputProcessor: several samples of one request, each as if it were alone."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from output_core import Core, prompt_entries

from octavo.errors import InvalidInput
from octavo.protocol.messages import (
    EngineCoreOutput,
    FinishReason,
    RequestTimings,
    sample_request_ids,
)
from octavo.protocol.sampling_params import RequestOutputKind

DELTA, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


# Several samples of one request


def test_cumulative_outputs_hold_all_samples_in_order(core):
    core.add(n=3)
    (output,) = core.send(core.ids("b"), request_id="1_r")
    assert [(c.index, c.text, c.finish_reason) for c in output.outputs] == [
        (0, "", None),
        (1, "b", None),
        (2, "", None),
    ]
    core.send(core.ids("a"), FinishReason.LENGTH, "0_r")
    (output,) = core.send(core.ids("c"), FinishReason.STOP, "2_r", stop_reason=7)
    assert [(c.text, c.finish_reason, c.stop_reason) for c in output.outputs] == [
        ("a", "length", None),
        ("b", None, None),
        ("", "stop", 7),
    ]
    assert (output.request_id, output.finished) == ("r", False)
    (output,) = core.send(core.ids("!"), FinishReason.LENGTH, "1_r")
    assert [c.text for c in output.outputs] == ["a", "b!", ""]
    assert output.finished
    assert not core.processor.has_unfinished_requests()


def test_samples_of_one_step_come_in_one_output(core):
    core.add(n=2)
    outputs = [
        EngineCoreOutput(request_id=f"{i}_r", new_token_ids=core.ids("ab"[i]), timings=RequestTimings(arrival=10.0))
        for i in (1, 0)
    ]
    (output,), stopped = core.processor.process(outputs)
    assert ([c.text for c in output.outputs], stopped) == (["a", "b"], [])


def test_deltas_hold_only_the_samples_that_changed(core):
    core.add(n=3, output_kind=DELTA)
    (output,) = core.send(core.ids("x"), request_id="2_r")
    assert [(c.index, c.text) for c in output.outputs] == [(2, "x")]
    core.send(core.ids("y"), FinishReason.LENGTH, "2_r")
    (output,) = core.send(core.ids("z"), request_id="0_r")
    assert [(c.index, c.text) for c in output.outputs] == [(0, "z")]
    core.send((), FinishReason.LENGTH, "1_r")
    (output,) = core.send((), FinishReason.LENGTH, "0_r")
    assert [(c.index, c.text, c.finish_reason) for c in output.outputs] == [(0, "", "length")]
    assert output.finished


def test_final_only_waits_for_the_last_sample(core):
    core.add(n=2, output_kind=FINAL_ONLY)
    assert core.send(core.ids("b"), FinishReason.LENGTH, "1_r") == []
    (output,) = core.send(core.ids("a"), FinishReason.LENGTH, "0_r")
    assert [(c.index, c.text) for c in output.outputs] == [(0, "a"), (1, "b")]


def test_stop_ends_its_sample_only_and_the_core_is_told_which(core):
    core.add(n=2, stop="b")
    core.send(core.ids("ab"), request_id="1_r")
    assert core.dropped == ["1_r"]
    assert core.send(core.ids("x"), request_id="1_r") == []
    (output,) = core.send(core.ids("c"), request_id="0_r")
    assert [(c.text, c.finish_reason) for c in output.outputs] == [("c", None), ("a", "stop")]


def test_abort_ends_the_samples_that_are_open(core):
    core.add(n=3)
    core.send(core.ids("a"), FinishReason.LENGTH, "0_r")
    core.send(core.ids("b"), request_id="1_r")
    (output,) = core.processor.abort(["r"])
    assert [(c.text, c.finish_reason) for c in output.outputs] == [("a", "length"), ("b", "abort"), ("", "abort")]
    assert output.finished
    assert core.processor.abort(["r", "0_r"]) == []


def test_one_sample_can_be_aborted(core):
    core.add(n=2)
    (output,) = core.processor.abort(["1_r", "1_r"])
    assert [c.finish_reason for c in output.outputs] == [None, "abort"]
    assert core.processor.is_live("r")
    assert core.send(core.ids("a"), FinishReason.LENGTH, "0_r")[0].finished
    assert not core.processor.is_live("r")


def test_ids_of_samples_are_taken_as_long_as_their_request_lives(core):
    core.add(n=2)
    core.send(core.ids("a"), FinishReason.LENGTH, "0_r")
    assert all(core.processor.is_live(id) for id in ("r", "0_r", "1_r"))
    for clash in ("r", "0_r", "1_r"):
        with pytest.raises(InvalidInput, match=clash):
            core.add(clash)
    core.add("0_q")
    with pytest.raises(InvalidInput, match="request_id='q' needs the id '0_q'"):
        core.add("q", n=2)
    assert not core.processor.is_live("1_q")
    core.add("q")
    core.send((), FinishReason.ABORT, "1_r")
    assert not any(core.processor.is_live(id) for id in ("r", "0_r", "1_r"))


def test_metrics_of_samples_are_merged(core):
    core.add(n=2)
    early = RequestTimings(arrival=10.0, scheduled=11.0, first_token=13.0, last_token=15.0)
    late = RequestTimings(arrival=10.0, scheduled=14.0, first_token=14.5, last_token=17.0)
    core.send([65], request_id="1_r", timings=late, num_preemptions=2, num_cached_tokens=1)
    (output,) = core.send([65], request_id="0_r", timings=early, num_preemptions=1, num_cached_tokens=16)
    metrics = output.metrics
    assert (metrics.queue_time, metrics.prefill_time, metrics.decode_time) == (1.0, 2.0, 4.0)
    assert (metrics.num_preemptions, output.num_cached_tokens) == (3, 16)


@pytest.mark.parametrize("first", ["0_r", "1_r"])
def test_prompt_logprobs_come_with_the_first_token_of_any_sample(core, first):
    core.add(n=2, prompt_logprobs=0)
    (output,) = core.send(core.ids("a"), request_id=first, prompt_logprobs=prompt_entries(core.ids("hi")))
    assert len(output.prompt_logprobs) == 2
    other = "1_r" if first == "0_r" else "0_r"
    assert len(core.send(core.ids("b"), request_id=other)[0].prompt_logprobs) == 2


# Any interleaving


@st.composite
def groups(draw):
    """Requests of one to three samples each: texts, kind, stops; and the order in which tokens and aborts come."""
    requests = draw(
        st.lists(
            st.tuples(
                st.lists(st.text("ab1é日", max_size=6), min_size=1, max_size=3),
                st.sampled_from(RequestOutputKind),
                st.lists(st.text("abé日", min_size=1, max_size=3), max_size=2),
                st.sampled_from([[], ["[ab]1"], ["é+b"]]),
                st.booleans(),
            ),
            min_size=1,
            max_size=3,
        )
    )
    turns = st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 4), st.integers(0, 15))
    return requests, draw(st.lists(turns, max_size=60))


def run_alone(tokenizer, text, stop, stop_regex, keep, num_tokens):
    """The completion of one sample as a request of its own, aborted after `num_tokens` tokens (None: never)."""
    core = Core(tokenizer)
    core.add(stop=stop, stop_regex=stop_regex, include_stop_str_in_output=keep, output_kind=FINAL_ONLY)
    ids = core.ids(text)
    for index, token_id in enumerate(ids if num_tokens is None else ids[:num_tokens]):
        core.send([token_id], FinishReason.LENGTH if index == len(ids) - 1 else None)
        if core.emitted:
            break
    if not core.emitted:
        core.emitted += core.send((), FinishReason.LENGTH) if num_tokens is None else core.processor.abort(["r"])
    return core.emitted[0].outputs[0]


@settings(max_examples=150, deadline=None)
@given(groups())
def test_every_sample_equals_itself_alone_whatever_runs_beside_it(tokenizer, group):
    requests, turns = group
    core = Core(tokenizer)
    left, ended, aborted_after = {}, set(), {}
    for number, (texts, kind, stop, stop_regex, keep) in enumerate(requests):
        core.add(str(number), n=len(texts), output_kind=kind, stop=stop, stop_regex=stop_regex,
                 include_stop_str_in_output=keep)  # fmt: skip
        for index, sample_id in enumerate(sample_request_ids(str(number), len(texts))):
            left[number, index] = (sample_id, core.ids(texts[index]))
    turns += [(number, index, 1000, 1) for number, index in left]
    for number, index, count, chance in turns:
        if (number, index) not in left or not core.processor.is_live(str(number)):
            continue
        if chance == 0:
            core.emitted += core.processor.abort([str(number)])
            for key, (_, ids) in left.items():
                if key[0] == number and key not in ended:
                    aborted_after[key] = len(core.ids(requests[number][0][key[1]])) - len(ids)
            continue
        sample_id, ids = left[number, index]
        left[number, index] = (sample_id, ids[count:])
        if ids[:count] or not requests[number][0][index]:
            core.send(ids[:count], None if ids[count:] else FinishReason.LENGTH, sample_id)
            ended |= set() if ids[count:] else {(number, index)}
    assert not core.processor.has_unfinished_requests()
    for number, (texts, kind, *options) in enumerate(requests):
        outputs = [output for output in core.emitted if output.request_id == str(number)]
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        for index, text in enumerate(texts):
            expected = run_alone(tokenizer, text, *options, aborted_after.get((number, index)))
            parts = [c for output in outputs for c in output.outputs if c.index == index]
            assert {part.finish_reason for part in parts} - {None} == {expected.finish_reason}
            if kind is DELTA:
                assert "".join(part.text for part in parts) == expected.text
                assert [id for part in parts for id in part.token_ids] == expected.token_ids
                assert [bool(part.finish_reason) for part in parts] == [False] * (len(parts) - 1) + [True]
            else:
                assert (parts[-1].text, parts[-1].token_ids) == (expected.text, expected.token_ids)
                assert all(later.text.startswith(part.text) for part, later in itertools.pairwise(parts))
            assert parts[-1].stop_reason == expected.stop_reason
