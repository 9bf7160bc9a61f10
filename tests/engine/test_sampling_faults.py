"""Small sampling inputs on which engines of this kind have gone wrong, through the whole engine."""

import math

import pytest
from tiny_models import VOCAB_SIZE

from octavo import SamplingParams

PROMPT = [72, 101, 108, 108, 111]


def first_logprobs(llm, **fields) -> dict[int, float]:
    """Log-probability of every token at the first output position."""
    params = SamplingParams(max_tokens=1, ignore_eos=True, logprobs=-1, **fields)
    entry = llm.generate(PROMPT, params)[0].outputs[0].logprobs[0]
    return {token_id: logprob.logprob for token_id, logprob in entry.items()}


@pytest.mark.parametrize(
    "fields", [{"top_p": math.nan}, {"top_p": 1.1}, {"min_p": 1.1}, {"top_k": -2}, {"temperature": -1}, {"n": 0}]
)
def test_values_out_of_range_are_refused_by_name(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        SamplingParams(**fields)


def test_top_p_zero_is_the_top_token_and_top_k_minus_one_is_off(make_llm):
    llm = make_llm()
    greedy = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0].outputs[0].token_ids
    for seed in range(3):
        params = SamplingParams(temperature=2.0, top_p=0.0, top_k=-1, seed=seed, max_tokens=8, ignore_eos=True)
        assert llm.generate(PROMPT, params)[0].outputs[0].token_ids == greedy


def test_logprobs_are_raw_by_default_and_processed_by_the_switch(make_llm):
    llm = make_llm()
    raw = first_logprobs(llm, temperature=0)
    assert first_logprobs(llm, temperature=0.5, top_k=1, seed=1) == pytest.approx(raw, abs=1e-4)
    processed = first_logprobs(llm, temperature=0.5, top_k=1, seed=1, logprobs_mode="processed_logprobs")
    assert sorted(processed.values())[-2:] == [-math.inf, pytest.approx(0.0, abs=1e-6)]
    logits = first_logprobs(llm, temperature=0, logprobs_mode="raw_logits")
    top = max(logits.values())
    total = top + math.log(sum(math.exp(value - top) for value in logits.values()))
    assert {i: value - total for i, value in logits.items()} == pytest.approx(raw, abs=1e-3)


@pytest.mark.parametrize(
    "fields",
    [{"logit_bias": {"191222": -100}}, {"stop_token_ids": [VOCAB_SIZE]}, {"allowed_token_ids": [VOCAB_SIZE]}],
)
def test_ids_outside_the_vocabulary_are_refused_and_the_engine_lives_on(make_llm, fields):
    llm = make_llm()
    with pytest.raises(ValueError, match=next(iter(fields))):
        llm.generate(PROMPT, SamplingParams(**fields))
    assert llm.generate(PROMPT, SamplingParams(max_tokens=2))[0].finished


def test_logit_bias_moves_exactly_its_own_tokens(make_llm):
    llm = make_llm()
    plain = first_logprobs(llm, temperature=0, logprobs_mode="raw_logits")
    biased = first_logprobs(llm, temperature=0, logit_bias={"65": 7.5, 66: -3}, logprobs_mode="processed_logits")
    moved = {i: biased[i] - plain[i] for i in plain if abs(biased[i] - plain[i]) > 1e-3}
    assert moved == pytest.approx({65: 7.5, 66: -3.0}, abs=1e-3)


def test_bad_words_ban_the_word_and_the_space_before_it(model_path):
    from octavo import LLM

    with LLM(str(model_path("smollm2")), max_model_len=256, kv_cache_memory="32MiB", disable_log_stats=True) as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        free = llm.generate("The capital of France is", params)[0].outputs[0].text
        assert "Paris" in free
        params.bad_words = ["Paris"]
        banned = llm.generate("The capital of France is", params)[0].outputs[0].text
        assert "Paris" not in banned


def test_penalties_beside_a_plain_request_of_another_length_are_the_same_as_alone(make_llm):
    llm = make_llm()
    fields = [
        {"presence_penalty": 1.5}, {"frequency_penalty": 1.5}, {"repetition_penalty": 1.8}, {},
        {"presence_penalty": -1.0, "frequency_penalty": 0.7, "repetition_penalty": 0.8},
    ]  # fmt: skip
    params = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, **f) for f in fields]
    prompts = [PROMPT * (i + 1) for i in range(len(fields))]
    together = llm.generate(prompts, params)
    for prompt, p, output in zip(prompts, params, together, strict=True):
        assert llm.generate(prompt, p)[0].outputs[0].token_ids == output.outputs[0].token_ids


def test_repetition_looks_at_prompt_and_output_presence_and_frequency_at_the_output_only(make_llm):
    llm = make_llm()
    plain = first_logprobs(llm, temperature=0, logprobs_mode="raw_logits")
    for name in ("presence_penalty", "frequency_penalty"):
        assert first_logprobs(llm, temperature=0, logprobs_mode="processed_logits", **{name: 2.0}) == pytest.approx(
            plain, abs=1e-3
        )
    repeated = first_logprobs(llm, temperature=0, logprobs_mode="processed_logits", repetition_penalty=2.0)
    for token_id, logit in plain.items():
        in_prompt = token_id in PROMPT
        expected = (logit / 2 if logit > 0 else logit * 2) if in_prompt else logit
        assert repeated[token_id] == pytest.approx(expected, abs=1e-3)
