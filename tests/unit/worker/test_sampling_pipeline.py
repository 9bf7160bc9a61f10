"""From request rows to tokens: every parameter against its formula, in float64, alone and beside others."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.ops.reference import ReferencePlatform
from octavo.protocol.messages import PromptEmbeds
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.scheduler_output import NewRequest, SchedulerOutput
from octavo.sampling.logits_processors import LogitsProcessor
from octavo.sampling.sampler import Sampler, SamplerOutput
from octavo.worker.request_rows import RequestRows
from octavo.worker.sampling_inputs import gather_sampling

WIDTH, VOCAB = 40, 37
EOS = 0
INF = math.inf


class FavourLast(LogitsProcessor):
    """Lifts the last token, lowers the first of the prompt; a large lift makes it raise at the fourth token."""

    def __init__(self, params, prompt_token_ids):
        self.lift = params.extra_args["lift"]
        self.prompt = prompt_token_ids

    def __call__(self, output_token_ids, logits):
        if len(output_token_ids) == 3 and self.lift > 4:
            raise RuntimeError("three is too many")
        logits[(output_token_ids or [0])[-1]] += self.lift
        logits[self.prompt[0]] -= self.lift
        return logits


PROCESSOR = f"{__name__}:FavourLast"


def new(name: str, tokens: list[int], num_prompt: int, *, bad_words=(), embeds=False, **params) -> NewRequest:
    sampling_params = SamplingParams(**params)
    return NewRequest(
        request_id=name,
        token_ids=[0] * num_prompt + tokens[num_prompt:] if embeds else tokens,
        num_prompt_tokens=num_prompt,
        block_ids=[],
        sampling_params=sampling_params,
        held_back_token_ids=[EOS] if sampling_params.min_tokens else [],
        bad_words_token_ids=[list(word) for word in bad_words],
        prompt_embeds=PromptEmbeds(bytes(num_prompt * 4), "float32", (num_prompt, 1)) if embeds else None,
    )


def draw(requests: list[NewRequest], logits: torch.Tensor) -> SamplerOutput:
    rows = RequestRows(len(requests) + 1, 64, 16)
    rows.apply(SchedulerOutput(request_ids=[], num_scheduled_tokens=[], num_computed_tokens=[], new_requests=requests))
    sampled = rows.rows_of([request.request_id for request in requests])
    return Sampler(ReferencePlatform(), VOCAB)(logits.clone(), gather_sampling(rows, sampled))


def formula(request: NewRequest, logits: list[float]) -> list[float]:
    """The logits of one row before temperature and filters, by the definitions, in plain float64."""
    params = request.sampling_params
    prompt, output = request.token_ids[: request.num_prompt_tokens], request.token_ids[request.num_prompt_tokens :]
    if request.prompt_embeds is not None:
        prompt = []
    changed = list(logits)
    for token in range(WIDTH):
        if token in prompt or token in output:
            changed[token] *= 1 / params.repetition_penalty if changed[token] > 0 else params.repetition_penalty
        changed[token] -= params.frequency_penalty * output.count(token)
        changed[token] -= params.presence_penalty * (token in output)
        changed[token] += (params.logit_bias or {}).get(token, 0.0)
    if params.logits_processors:
        lift = params.extra_args["lift"]
        changed[(output or [0])[-1]] += lift
        changed[prompt[0]] -= lift
    for token in range(WIDTH):
        banned = token >= VOCAB or (params.allowed_token_ids is not None and token not in params.allowed_token_ids)
        banned |= len(output) < params.min_tokens and token in request.held_back_token_ids
        for word in request.bad_words_token_ids:
            before = word[:-1]
            banned |= word[-1] == token and (not before or output[-len(before) :] == before)
        if banned:
            changed[token] = -INF
    return changed


def random_logits(seed: int, num_rows: int = 1) -> torch.Tensor:
    return torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(seed)) * 4


PROMPT, OUTPUT = [5, 6, 7, 5], [9, 9, 6, 9, 12]

CASES = {
    "repetition": {"repetition_penalty": 1.7},
    "repetition below 1": {"repetition_penalty": 0.4},
    "frequency": {"frequency_penalty": 1.3},
    "negative frequency": {"frequency_penalty": -2.0},
    "presence": {"presence_penalty": 0.9},
    "all penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": -0.7},
    "penalties without the placeholders of embeddings": {"repetition_penalty": 3.0, "embeds": True},
    "bias": {"logit_bias": {3: 5.0, 9: -100.0, 36: 100.0}},
    "penalties and bias": {"repetition_penalty": 2.0, "presence_penalty": 2.0, "logit_bias": {9: 3.0, 5: 1.0}},
    "allowed": {"allowed_token_ids": [3, 9, 20, 3]},
    "bad words": {"bad_words": [(4,), (9, 12, 30), (12, 31), (12, 9, 32), (5, 33), (9, 9, 6, 9, 12, 34), (1,) * 9]},
    "min_tokens": {"min_tokens": 6, "logit_bias": {EOS: 100.0}},
    "min_tokens reached": {"min_tokens": 5, "logit_bias": {EOS: 100.0}},
    "processor": {"logits_processors": [PROCESSOR], "extra_args": {"lift": 2.5}, "repetition_penalty": 1.5},
}


def entry_values(output: SamplerOutput, row: int) -> dict[int, float]:
    entry = output.logprobs[row]
    return dict(zip(entry.token_ids, entry.logprobs, strict=True))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("beside", [False, True])
def test_processed_logits_follow_the_formula_alone_and_beside_all_others(name, beside):
    common = {"logprobs": -1, "logprobs_mode": "processed_logits", "temperature": 0.8}
    names = [name, *(CASES if beside else ())]
    requests = [new(str(i), PROMPT + OUTPUT, len(PROMPT), **CASES[n], **common) for i, n in enumerate(names)]
    logits = random_logits(3, len(names))
    got = entry_values(draw(requests, logits), 0)
    expected = [value / 0.8 for value in formula(requests[0], logits[0].tolist())]
    np.testing.assert_allclose([got[token] for token in range(WIDTH)], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_each_parameter_changes_which_token_is_drawn_by_its_formula_alone(name):
    for seed in range(20):
        logits = random_logits(seed)
        request = new("a", PROMPT + OUTPUT, len(PROMPT), temperature=0.0, **CASES[name])
        expected = int(np.argmax(formula(request, logits[0].tolist())))
        assert draw([request], logits).token_ids.tolist() == [expected]


def test_an_end_of_sequence_biased_by_100_is_held_back_until_min_tokens():
    for have in range(5):
        request = new("a", [1] + [2] * have, 1, min_tokens=4, logit_bias={EOS: 100.0}, temperature=0.0)
        assert (draw([request], torch.zeros(1, WIDTH)).token_ids[0] == EOS) == (have >= 4)


def test_a_mode_that_is_not_given_is_raw_logprobs():
    request = new("a", PROMPT, len(PROMPT), logprobs=-1, temperature=0.5, repetition_penalty=3.0, top_k=1)
    logits = random_logits(1)
    got = entry_values(draw([request], logits), 0)
    expected = logits[0].double().log_softmax(-1)
    np.testing.assert_allclose([got[token] for token in range(WIDTH)], expected, atol=1e-5)


token = st.integers(0, VOCAB - 1)


@st.composite
def requests(draw_from) -> NewRequest:
    prompt = draw_from(st.lists(token, min_size=1, max_size=12))
    output = draw_from(st.lists(st.integers(0, 8), max_size=12))
    embeds = draw_from(st.sampled_from([False, False, True]))
    params = {
        "temperature": draw_from(st.sampled_from([0.0, 0.7, 1.4])),
        "top_k": draw_from(st.sampled_from([0, 0, 3])),
        "top_p": draw_from(st.sampled_from([1.0, 0.8])),
        "min_p": draw_from(st.sampled_from([0.0, 0.1])),
        "seed": draw_from(st.integers(0, 5)),
        "repetition_penalty": draw_from(st.sampled_from([1.0, 1.0, 1.3, 0.6])),
        "frequency_penalty": draw_from(st.sampled_from([0.0, 0.0, 0.7, -1.1])),
        "presence_penalty": draw_from(st.sampled_from([0.0, 0.0, 0.4])),
        "logit_bias": draw_from(st.one_of(st.none(), st.dictionaries(token, st.floats(-100, 100), max_size=4))),
        "allowed_token_ids": draw_from(st.one_of(st.none(), st.none(), st.lists(token, min_size=1, max_size=5))),
        "bad_words": draw_from(st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=3), max_size=3)),
        "min_tokens": draw_from(st.integers(0, 10)),
        "logprobs": draw_from(st.sampled_from([None, 0, 2, -1])),
        "logprobs_mode": draw_from(
            st.sampled_from([None, "raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
        ),
    }
    if not embeds and draw_from(st.booleans()):
        params |= {"logits_processors": [PROCESSOR], "extra_args": {"lift": draw_from(st.floats(-6, 6))}}
    name = draw_from(st.uuids()).hex
    return new(name, prompt + output, len(prompt), embeds=embeds, max_tokens=50, **params)


@settings(max_examples=60, deadline=None)
@given(st.lists(requests(), min_size=2, max_size=7, unique_by=lambda r: r.request_id), st.integers(0, 2**31))
def test_a_row_is_bitwise_the_same_alone_and_in_any_mixture(batch, seed):
    logits = random_logits(seed, len(batch))
    together = draw(batch, logits)
    for row, request in enumerate(batch):
        alone = draw([request], logits[row : row + 1])
        assert alone.failed.get(0) == together.failed.get(row)
        if row not in together.failed:
            assert alone.token_ids[0] == together.token_ids[row]
            assert repr(alone.logprobs[0]) == repr(together.logprobs[row])
    order = np.random.default_rng(seed).permutation(len(batch))
    mixed = draw([batch[i] for i in order], logits[torch.from_numpy(order)])
    for place, row in enumerate(order):
        assert mixed.failed.get(place) == together.failed.get(row)
        assert row in together.failed or mixed.token_ids[place] == together.token_ids[row]


@settings(max_examples=60, deadline=None)
@given(requests(), st.integers(0, 2**31))
def test_no_masked_token_is_ever_drawn(request, seed):
    request.sampling_params.logits_processors = None
    logits = random_logits(seed)
    changed = formula(request, logits[0].tolist())
    output = draw([request], logits)
    if max(changed) == -INF:
        assert output.failed
    else:
        assert not output.failed
        assert changed[output.token_ids[0]] > -INF
