"""Beam search over an LLM: each step extends every beam by its most probable tokens and keeps the best.

A step is an ordinary batch of one-token requests, so the beams of all prompts are computed together and find their
common beginnings in the prefix cache.
"""

import math
from collections.abc import Callable

from octavo.protocol.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from octavo.protocol.outputs import RequestOutput
from octavo.protocol.sampling_params import SamplingParams
from octavo.tokenization.tokenizer import Tokenizer

Generate = Callable[[list[list[int]], SamplingParams], list[RequestOutput]]


def beam_search(
    generate: Generate,
    tokenizer: Tokenizer,
    eos_token_ids: frozenset[int],
    prompts: list[list[int]],
    params: BeamSearchParams,
    max_model_len: int,
    num_logits: int,
) -> list[BeamSearchOutput]:
    """Search for each of the prompts (token ids).

    num_logits: rows of the model's output layer; those beyond the tokenizer's vocabulary are no tokens, and no beam
    takes one.

    Twice as many candidates as beams are looked at in each step, so that beams that end cannot starve the search. A
    prompt's search ends when all its beams are as long as they may be, or when as many ended sequences as beams are
    known and no open beam scores better. A beam that the engine cannot extend ends with finish_reason "abort".
    """
    vocab_size = min(tokenizer.vocab_size, num_logits)
    searches = [_Search(prompt, eos_token_ids, params, max_model_len, vocab_size) for prompt in prompts]
    # any of the rows that are no tokens may be among the most probable
    num_logprobs = 2 * params.beam_width + num_logits - vocab_size
    step = SamplingParams(
        temperature=0,
        max_tokens=1,
        ignore_eos=True,
        logprobs=num_logprobs if num_logprobs < vocab_size else -1,
        detokenize=False,
    )
    while open_searches := [search for search in searches if search.beams]:
        outputs = iter(generate([beam.tokens for search in open_searches for beam in search.beams], step))
        for search in open_searches:
            search.extend([next(outputs) for _ in search.beams])
    return [search.result(tokenizer) for search in searches]


class _Search:
    """The state of one prompt's search."""

    def __init__(
        self,
        prompt: list[int],
        eos_token_ids: frozenset[int],
        params: BeamSearchParams,
        max_model_len: int,
        vocab_size: int,
    ) -> None:
        self.beams = [BeamSearchSequence(tokens=prompt, logprobs=[], cum_logprob=0.0)]
        self._ended: list[BeamSearchSequence] = []
        self._num_prompt = len(prompt)
        self._eos = frozenset() if params.ignore_eos else eos_token_ids
        self._params = params
        self._vocab_size = vocab_size
        self._longest = min(len(prompt) + params.max_tokens, max_model_len)

    def extend(self, outputs: list[RequestOutput]) -> None:
        """Take in the next-token log-probabilities of every beam."""
        candidates = []
        for beam, output in zip(self.beams, outputs, strict=True):
            if output.outputs[0].finish_reason == "abort":
                beam.finish_reason = "abort"
                self._ended.append(beam)
                continue
            entry = (output.outputs[0].logprobs or [{}])[0]
            for token_id, logprob in entry.items():
                if token_id >= self._vocab_size:
                    continue
                candidates.append(
                    BeamSearchSequence(
                        tokens=[*beam.tokens, token_id],
                        logprobs=[*beam.logprobs, entry],
                        cum_logprob=beam.cum_logprob + logprob.logprob,
                    )
                )
        candidates.sort(key=lambda sequence: -sequence.cum_logprob)
        self.beams = []
        for candidate in candidates[: 2 * self._params.beam_width]:
            if candidate.tokens[-1] in self._eos:
                candidate.finish_reason = "stop"
                self._ended.append(candidate)
            elif len(self.beams) < self._params.beam_width:
                self.beams.append(candidate)
        self._close()

    def _close(self) -> None:
        """End the search if nothing better can come."""
        if self.beams and len(self.beams[0].tokens) >= self._longest:
            for beam in self.beams:
                beam.finish_reason = "length"
            self._ended += self.beams
            self.beams = []
        scores = sorted((self._score(sequence) for sequence in self._ended), reverse=True)
        width = self._params.beam_width
        if len(scores) >= width and all(self._score(beam) <= scores[width - 1] for beam in self.beams):
            self.beams = []

    def _score(self, sequence: BeamSearchSequence) -> float:
        if not sequence.logprobs:  # ended before its first token
            return -math.inf
        return sequence.cum_logprob / len(sequence.logprobs) ** self._params.length_penalty

    def result(self, tokenizer: Tokenizer) -> BeamSearchOutput:
        best = sorted(self._ended, key=self._score, reverse=True)[: self._params.beam_width]
        for sequence in best:
            sequence.text = tokenizer.decode(sequence.tokens[self._num_prompt :])
        return BeamSearchOutput(best)
