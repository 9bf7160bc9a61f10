"""InputProcessor: what a user gives, checked and resolved into an EngineCoreRequest.

Everything about one request that can be refused is refused here, before anything is queued. Touches the tokenizer only,
and the classes of logits processors, which it loads to see whether they can be.
What holds: a refused input leaves no trace, so the same accepted inputs in the same order get the same derived seeds;
and what was lowered or does not apply is written on the request's receipt.
"""

import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from octavo.config.model import ModelConfig
from octavo.engine.bad_words import bad_words_token_ids, check_some_token_remains
from octavo.engine.prompts import (
    ParsedPrompt,
    Prompt,
    PromptDict,
    as_prompt_list,
    pack_embeds,
    parse_prompt,
    parse_text,
)
from octavo.errors import InvalidInput, PromptTooLong, short_repr
from octavo.logging import get_logger
from octavo.protocol.checks import as_int
from octavo.protocol.messages import EngineCoreRequest, PromptEmbeds
from octavo.protocol.sampling_params import SamplingParams
from octavo.tokenization.token_length import TokenLengthBound
from octavo.tokenization.tokenizer import Tokenizer

__all__ = ["InputProcessor", "Prompt", "PromptDict", "as_prompt_list"]

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt that fits the engine."""

    token_ids: list[int]
    """Zeros for `embeds`."""
    text: str | None
    """If it was given as text."""
    embeds: PromptEmbeds | None
    cache_salt: str | None


class InputProcessor:
    """Turns prompts and sampling parameters into requests for the engine core.

    Args:
        tokenizer: for text prompts; its end-of-sequence ids count too.
        model: for end-of-sequence ids and sampling defaults.
        max_model_len: longest sequence (prompt and output), tokens.
        num_blocks: blocks the whole KV cache holds.
        block_size: tokens a block.
        engine_seed: requests without a seed derive theirs from it.
        logprobs_mode: of requests that do not choose their own.
        token_length: of the tokenizer; None: every text is tokenised.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        model: ModelConfig,
        max_model_len: int,
        num_blocks: int,
        block_size: int,
        engine_seed: int,
        logprobs_mode: str = "raw_logprobs",
        token_length: TokenLengthBound | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._token_length = token_length
        self._max_model_len = max_model_len
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._room = min(max_model_len, num_blocks * block_size)
        """Tokens a sequence may have."""
        self._engine_seed = engine_seed
        self._logprobs_mode = logprobs_mode
        self._hidden_size = model.hidden_size
        # Ids that only one of the two knows have no text or no embedding.
        self._vocab_size = min(tokenizer.vocab_size, model.vocab_size)
        self._eos_token_ids = self._known_eos_token_ids({*model.eos_token_ids, *tokenizer.eos_token_ids})
        self._defaults = _read_default_sampling(model.default_sampling)
        self.num_arrivals = 0
        """Requests processed so far. A caller that drops processed requests unqueued may set it back."""

    def _known_eos_token_ids(self, token_ids: set[int]) -> list[int]:
        """The end-of-sequence ids that can be generated at all. Files do name others."""
        unknown = sorted(token_id for token_id in token_ids if not 0 <= token_id < self._vocab_size)
        if unknown:
            logger.warning(
                "end-of-sequence ids outside the vocabulary of %d are not used: %.200s", self._vocab_size, unknown
            )
        return sorted(token_ids.difference(unknown))

    def default_sampling_params(self) -> SamplingParams:
        """What a request without parameters gets: SamplingParams' defaults and, over them, the model's own."""
        return self._defaults.clone()

    def process(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, priority: int = 0
    ) -> tuple[EngineCoreRequest, str | None]:
        """The request for the core, and the prompt's text (None if the prompt was no text).

        Raises:
            InvalidInput: anything about the request is refused; nothing has changed then.
        """
        parse_text("request_id", request_id)
        tokenized = self.tokenize(self.parse(prompt))
        return self.resolve(request_id, tokenized, params, priority), tokenized.text

    # The three parts of `process`. The first two change nothing and may run in several threads at once.

    def parse(self, prompt: Prompt) -> ParsedPrompt:
        """Check the form of a prompt, and whether its length alone proves that it is too long."""
        parsed = parse_prompt(prompt)
        num_tokens = self.min_tokens(parsed)
        if parsed.text is None:
            self._check_length(num_tokens)
        elif num_tokens + 1 > self._room:
            raise self._too_long(f"at least {num_tokens}")
        return parsed

    def min_tokens(self, prompt: ParsedPrompt) -> int:
        """How many tokens a prompt has, or of a text what is certain before it is tokenised."""
        if prompt.text is not None:
            return 0 if self._token_length is None else self._token_length.min_tokens(prompt.text)
        return len(prompt.token_ids or ()) if prompt.embeds is None else prompt.embeds.shape[0]

    def tokenize(self, prompt: ParsedPrompt) -> TokenizedPrompt:
        """The token ids of a prompt, and whether they fit. Takes seconds for a text of megabytes."""
        embeds = None if prompt.embeds is None else pack_embeds(prompt.embeds, self._hidden_size)
        token_ids = self._tokenize(prompt) if embeds is None else [0] * embeds.shape[0]
        self._check_length(len(token_ids))
        return TokenizedPrompt(token_ids, prompt.text, embeds, prompt.cache_salt)

    def resolve(
        self, request_id: str, prompt: TokenizedPrompt, params: SamplingParams | None, priority: int
    ) -> EngineCoreRequest:
        """The request of a prompt, and the next arrival."""
        embeds = prompt.embeds
        given = self._check_params(params, has_embeds=embeds is not None)
        resolved = self._resolve_params(given, len(prompt.token_ids))
        eos_token_ids = [] if given.ignore_eos else list(self._eos_token_ids)
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            sampling_params=resolved,
            eos_token_ids=eos_token_ids,
            arrival_time=time.monotonic(),
            priority=_parse_priority(priority),
            cache_salt=prompt.cache_salt,
            prompt_embeds=embeds,
            bad_words_token_ids=self._ban_words(resolved, eos_token_ids),
            clamps=_clamps(given, resolved),
            ignored=_ignored(given, has_embeds=embeds is not None),
        )
        self.num_arrivals += 1
        return request

    def _tokenize(self, prompt: ParsedPrompt) -> list[int]:
        if prompt.text is None:
            token_ids = prompt.token_ids or []
        else:
            token_ids = self._tokenizer.encode(prompt.text, add_special_tokens=True)
            if not token_ids:
                raise InvalidInput(f"prompt={short_repr(prompt.text)} has no tokens; it needs at least one")
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            position, token_id = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < self._vocab_size)
            raise InvalidInput(
                f"token id {short_repr(token_id)} at position {position} of the prompt is outside the vocabulary of "
                f"{self._vocab_size} tokens; ids must be between 0 and {self._vocab_size - 1}"
            )
        return token_ids

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens + 1 > self._room:
            raise self._too_long(str(num_tokens))

    def _too_long(self, num_tokens: str) -> PromptTooLong:
        needs = f"prompt has {num_tokens} tokens and needs room for at least one more, but"
        pool_tokens = self._num_blocks * self._block_size
        if self._max_model_len <= pool_tokens:
            return PromptTooLong(f"{needs} max_model_len is {self._max_model_len}; shorten it or raise max_model_len")
        return PromptTooLong(
            f"{needs} the KV cache holds {pool_tokens} ({self._num_blocks} blocks x {self._block_size}); "
            "shorten it, or raise num_kv_blocks or kv_cache_memory"
        )

    def _check_params(self, given: SamplingParams | None, has_embeds: bool) -> SamplingParams:
        """A validated copy of what the user gave. The user's object stays as it is."""
        if given is not None and not isinstance(given, SamplingParams):
            raise InvalidInput(f"params={short_repr(given)} is a {type(given).__name__}; it must be a SamplingParams")
        params = (self._defaults if given is None else given).clone()
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            self._check_ids(name, getattr(params, name) or ())
        for name in ("logprobs", "prompt_logprobs"):
            number = getattr(params, name)
            if number is not None and number > self._vocab_size:
                raise InvalidInput(
                    f"{name}={short_repr(number)} is more than the vocabulary of {self._vocab_size} tokens; "
                    "use -1 for the whole vocabulary"
                )
        if has_embeds and params.prompt_logprobs is not None:
            raise InvalidInput(
                f"prompt_logprobs={params.prompt_logprobs} needs the tokens of the prompt, but it was given as "
                "embeddings; leave it out or give token ids"
            )
        if params.logits_processors:
            from octavo.sampling.logits_processors import load_logits_processor  # brings torch

            for path in params.logits_processors:
                load_logits_processor(path)
        return params

    def _check_ids(self, name: str, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if token_id >= self._vocab_size:
                raise InvalidInput(
                    f"{name} holds {short_repr(token_id)}, outside the vocabulary of {self._vocab_size} tokens; "
                    f"ids must be between 0 and {self._vocab_size - 1}"
                )

    def _resolve_params(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        """A copy in which nothing is left open and every limit fits."""
        room = self._room - num_prompt_tokens
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        return msgspec.structs.replace(
            params,
            max_tokens=max_tokens,
            min_tokens=min(params.min_tokens, max_tokens),
            top_k=min(params.top_k, self._vocab_size),
            seed=self._derive_seed() if params.seed is None else params.seed,
            logprobs_mode=params.logprobs_mode or self._logprobs_mode,
        )

    def _ban_words(self, params: SamplingParams, eos_token_ids: list[int]) -> list[list[int]]:
        """The sequences that `bad_words` ban, after a check that they leave something."""
        banned = bad_words_token_ids(self._tokenizer, params.bad_words) if params.bad_words else []
        self._check_ids("bad_words", (token_id for sequence in banned for token_id in sequence))
        if params.allowed_token_ids is not None:
            ends = {*eos_token_ids, *(params.stop_token_ids or ())}
            check_some_token_remains(params.allowed_token_ids, ends, params.min_tokens, banned)
        return banned

    def _derive_seed(self) -> int:
        """63 bits that depend on the engine's seed and the arrival number only."""
        digest = hashlib.sha256(f"{self._engine_seed}/{self.num_arrivals}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1


def _clamps(given: SamplingParams, resolved: SamplingParams) -> list[str]:
    """Receipt: what was lowered to what is possible."""
    reasons = {"max_tokens": "room left", "min_tokens": "max_tokens", "top_k": "vocabulary"}
    return [
        f"{name} {short_repr(getattr(given, name))} -> {getattr(resolved, name)} ({reason})"
        for name, reason in reasons.items()
        if getattr(given, name) is not None and getattr(given, name) != getattr(resolved, name)
    ]


def _ignored(params: SamplingParams, has_embeds: bool) -> list[str]:
    """Receipt: fields that were given and change nothing, each with its reason."""
    greedy = "temperature=0 takes the most probable token"
    no_text = "detokenize=False makes no text"
    no_logprobs = params.logprobs is None and params.prompt_logprobs is None
    rules = [
        *((name, params.is_greedy, greedy) for name in ("top_p", "top_k", "min_p", "seed")),
        *((name, not params.detokenize, no_text) for name in _TEXT_FIELDS),
        (
            "spaces_between_special_tokens",
            params.detokenize and params.skip_special_tokens,
            "skip_special_tokens=True shows none",
        ),
        ("logprobs_mode", no_logprobs, "no logprobs were asked for"),
        ("extra_args", not params.logits_processors, "only logits_processors read them"),
        ("repetition_penalty", has_embeds, "of a prompt given as embeddings no token is known, only the output counts"),
    ]
    return [f"{name}={short_repr(getattr(params, name))}: {reason}" for name, applies, reason in rules
            if applies and getattr(params, name) not in _OFF[name]]  # fmt: skip


_TEXT_FIELDS = ("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output")
_OFF: dict[str, tuple[object, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "seed": (None,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "logprobs_mode": (None,),
    "extra_args": (None,),
    "repetition_penalty": (1.0,),
}
"""For each field that the receipt can name the values that ask for nothing."""


def _parse_priority(priority: object) -> int:
    number = as_int(priority)
    if number is None or not -(2**63) <= number < 2**63:
        raise InvalidInput(f"priority={short_repr(priority)} must be a 64-bit integer; lower is served first")
    return number


def _read_default_sampling(pairs: Sequence[tuple[str, float | int]]) -> SamplingParams:
    """The model's sampling defaults; those that cannot be honoured are left out, and one log line says which."""
    params = SamplingParams()
    left_out = []
    for name, value in pairs:
        try:
            params = msgspec.structs.replace(params, **{name: value})
        except (InvalidInput, TypeError):
            left_out.append(f"{name}={short_repr(value)}")
    if left_out:
        logger.warning("Left out of the model's own sampling defaults: %s", ", ".join(left_out))
    return params
