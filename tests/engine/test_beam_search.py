"""Beam search finds what an exhaustive search finds."""

import itertools

import pytest
import torch
from tiny_models import LLAMA, VOCAB_SIZE, random_weights, write_model

from octavo import BeamSearchParams, SamplingParams


def test_a_wide_enough_beam_finds_the_most_probable_pair_of_tokens(make_llm):
    llm = make_llm()
    step = SamplingParams(temperature=0, max_tokens=1, logprobs=-1)
    first = llm.generate([5, 6, 7], step)[0].outputs[0].logprobs[0]
    firsts = sorted(first, key=lambda token_id: -first[token_id].logprob)[:16]
    seconds = [out.outputs[0].logprobs[0] for out in llm.generate([[5, 6, 7, token_id] for token_id in firsts], step)]
    scores = {
        (token_id, other): first[token_id].logprob + entry[other].logprob
        for (token_id, entry), other in itertools.product(zip(firsts, seconds, strict=True), range(VOCAB_SIZE))
    }
    best = sorted(scores, key=lambda pair: -scores[pair])[:4]
    params = BeamSearchParams(beam_width=16, max_tokens=2, ignore_eos=True)
    found = llm.beam_search([5, 6, 7], params)[0].sequences
    assert [tuple(sequence.tokens[3:]) for sequence in found[:4]] == best
    assert [sequence.cum_logprob for sequence in found[:4]] == pytest.approx([scores[pair] for pair in best], abs=1e-3)
    assert len(found) == 16
    assert all(sequence.finish_reason == "length" and len(sequence.logprobs) == 2 for sequence in found)


def test_one_beam_is_greedy_decoding(make_llm):
    llm = make_llm()
    greedy = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0].outputs[0]
    beam = llm.beam_search("Hello", BeamSearchParams(beam_width=1, max_tokens=8, ignore_eos=True))[0].sequences[0]
    assert beam.tokens[5:] == greedy.token_ids
    assert beam.text.startswith(greedy.text)


def test_rows_of_the_output_layer_that_are_no_tokens_are_never_taken(make_llm, tmp_path):
    # most of the model's rows lie beyond the tokenizer's vocabulary, so they crowd the most probable ones
    llm = make_llm(write_model(tmp_path / "padded", vocab_size=1031))
    params = BeamSearchParams(beam_width=4, max_tokens=3, ignore_eos=True)
    found = llm.beam_search([1, 2, 3], params)[0].sequences
    assert len(found) == 4
    assert all(max(sequence.tokens) < VOCAB_SIZE and len(sequence.tokens) == 6 for sequence in found)


def test_a_beam_whose_logits_are_not_finite_ends_and_says_so(make_llm, tmp_path):
    weights = random_weights(LLAMA)
    weights["model.embed_tokens.weight"][5] = torch.nan
    llm = make_llm(write_model(tmp_path / "damaged", weights=weights))
    damaged, sound = llm.beam_search([[1, 5, 2], [1, 2]], BeamSearchParams(beam_width=2, max_tokens=2, ignore_eos=True))
    assert [sequence.finish_reason for sequence in damaged.sequences] == ["abort"]
    assert len(sound.sequences) == 2


def test_bad_values_are_refused_by_name():
    for field in ("beam_width", "max_tokens"):
        with pytest.raises(ValueError, match=field):
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, field: 0})
    with pytest.raises(TypeError):
        BeamSearchParams(beam_width=2, max_tokens=2, width=3)
