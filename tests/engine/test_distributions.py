"""Samples follow the distribution that `logprobs=-1` tells: chi-square with fixed seeds."""

import math

import pytest
from tiny_models import VOCAB_SIZE

from octavo import LLM, SamplingParams

SAMPLES = 4000
PROMPT = [72, 101, 108, 108, 111]


@pytest.fixture(scope="module")
def llm(tiny_llama):
    with LLM(tiny_llama, dtype="float32", num_kv_blocks=512, disable_log_stats=True, max_num_seqs=512) as llm:
        yield llm


@pytest.fixture(scope="module")
def logits(llm) -> list[float]:
    """The model's log-probabilities of the next token, by id."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1)
    entry = llm.generate(PROMPT, params)[0].outputs[0].logprobs[0]
    return [entry[token_id].logprob for token_id in range(VOCAB_SIZE)]


def softmax(logits: list[float], temperature: float) -> list[float]:
    weights = [math.exp(logit / temperature) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def expected_probabilities(logits: list[float], temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> list[float]:
    probs = softmax(logits, temperature)
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    kept = order[:top_k] if top_k else order
    total, nucleus, mass = sum(probs[i] for i in kept), [], 0.0
    for token_id in kept:
        nucleus.append(token_id)
        mass += probs[token_id]
        if mass >= top_p * total:
            break
    floor = min_p * max(probs)
    left = [i for i in nucleus if probs[i] >= floor]
    total = sum(probs[i] for i in left)
    return [probs[i] / total if i in set(left) else 0.0 for i in range(len(probs))]


def chi_square_is_plausible(counts: list[int], probabilities: list[float]) -> bool:
    """Pearson's statistic over cells of 5 expected or more, the rest pooled: below its mean + 4 deviations."""
    total = sum(counts)
    cells, pooled = [], [0.0, 0.0]
    for count, probability in zip(counts, probabilities, strict=True):
        if probability * total >= 5:
            cells.append((count, probability * total))
        else:
            pooled[0] += count
            pooled[1] += probability * total
    if pooled[1] > 0:
        cells.append((pooled[0], max(pooled[1], 1e-9)))
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    freedom = max(len(cells) - 1, 1)
    return statistic < freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0}, {"temperature": 0.6}, {"temperature": 1.7}, {"top_k": 7}, {"top_k": 1}, {"top_p": 0.8},
        {"top_p": 0.0}, {"min_p": 0.1}, {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    ],
)  # fmt: skip
def test_samples_follow_the_filtered_distribution(llm, logits, fields):
    fields = {"temperature": 1.0, **fields}
    probabilities = expected_probabilities(logits, **fields)
    outputs = llm.generate(PROMPT, SamplingParams(n=SAMPLES, seed=11, max_tokens=1, ignore_eos=True, **fields))
    counts = [0] * VOCAB_SIZE
    for output in outputs[0].outputs:
        counts[output.token_ids[0]] += 1
    assert all(count == 0 or probabilities[token_id] > 0 for token_id, count in enumerate(counts))
    assert chi_square_is_plausible(counts, probabilities)


def test_the_check_would_notice_a_wrong_temperature(llm, logits):
    outputs = llm.generate(PROMPT, SamplingParams(n=SAMPLES, seed=11, max_tokens=1, temperature=1.3, ignore_eos=True))
    counts = [0] * VOCAB_SIZE
    for output in outputs[0].outputs:
        counts[output.token_ids[0]] += 1
    assert not chi_square_is_plausible(counts, expected_probabilities(logits, temperature=1.0))


def test_consecutive_positions_and_seeds_are_independent_draws(llm):
    params = [SamplingParams(seed=seed, max_tokens=8, temperature=5.0, ignore_eos=True) for seed in range(64)]
    outputs = llm.generate([PROMPT] * 64, params)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 64
