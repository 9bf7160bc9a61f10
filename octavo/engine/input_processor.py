"""InputProcessor: what a user gives, checked and resolved into an EngineCoreRequest.

Everything about one request that can be refused is refused here, before anything is queued. Touches the tokenizer only.
What holds: a refused input leaves no trace, so the same accepted inputs in the same order get the same derived seeds.
"""

import hashlib
import numbers
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as short_repr
from typing import TypeAlias, TypedDict

import msgspec

from octavo.config.model import ModelConfig
from octavo.errors import InvalidInput
from octavo.logging import get_logger
from octavo.protocol.checks import as_int, is_encodable
from octavo.protocol.messages import EngineCoreRequest
from octavo.protocol.sampling_params import SamplingParams
from octavo.tokenization.tokenizer import Tokenizer

logger = get_logger(__name__)


class PromptDict(TypedDict, total=False):
    """A prompt with options: exactly one of `prompt` and `prompt_token_ids`."""

    prompt: str
    prompt_token_ids: Sequence[int]
    cache_salt: str | None
    """Share cached prefixes only with prompts of the same salt."""


Prompt: TypeAlias = str | Sequence[int] | PromptDict

_FORMS = "a string, a list of token ids, or a dict with 'prompt' or 'prompt_token_ids'"
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")


@dataclass(frozen=True, slots=True)
class _ParsedPrompt:
    """Exactly one of `text` and `token_ids` is set, and it is not empty."""

    text: str | None = None
    token_ids: list[int] | None = None
    cache_salt: str | None = None


def as_prompt_list(prompts: object) -> list[Prompt]:
    """One prompt or a list of prompts, as a list of checked prompts.

    A lone string, dict, or list of token ids is one prompt; a list of lists of ids is several. Tuples count as lists.

    Raises:
        InvalidInput: no prompts, or one that is empty or of no known form; names its place in the list.
    """
    if not isinstance(prompts, (list, tuple)):
        _parse_prompt(prompts)
        return [prompts]  # type: ignore[list-item]
    if not prompts:
        raise InvalidInput(f"prompts={prompts!r} is empty; give at least one prompt ({_FORMS})")
    if isinstance(prompts[0], numbers.Number):
        return [_parse_token_ids(prompts)]
    for index, prompt in enumerate(prompts):
        try:
            _parse_prompt(prompt)
        except InvalidInput as error:
            raise InvalidInput(f"prompt {index}: {error}") from None
    return list(prompts)


def _parse_prompt(prompt: object) -> _ParsedPrompt:
    if isinstance(prompt, str):
        return _ParsedPrompt(text=_parse_text("prompt", prompt))
    if isinstance(prompt, (list, tuple)):
        return _ParsedPrompt(token_ids=_parse_token_ids(prompt))
    if isinstance(prompt, Mapping):
        return _parse_dict(prompt)
    raise InvalidInput(f"prompt={short_repr(prompt)} is a {type(prompt).__name__}; give {_FORMS}")


def _parse_dict(prompt: Mapping[object, object]) -> _ParsedPrompt:
    unknown = [key for key in prompt if key not in _PROMPT_KEYS]
    if unknown:
        raise InvalidInput(f"prompt has unknown keys {unknown}; known ones are {', '.join(_PROMPT_KEYS)}")
    text, token_ids, salt = (prompt.get(key) for key in _PROMPT_KEYS)
    if (text is None) == (token_ids is None):
        raise InvalidInput(f"prompt with keys {list(prompt)} must have exactly one of 'prompt' and 'prompt_token_ids'")
    return _ParsedPrompt(
        text=None if text is None else _parse_text("prompt", text),
        token_ids=None if token_ids is None else _parse_token_ids(token_ids),
        cache_salt=None if salt is None else _parse_text("cache_salt", salt),
    )


def _parse_text(name: str, text: object) -> str:
    if not isinstance(text, str):
        raise InvalidInput(f"{name}={short_repr(text)} is a {type(text).__name__}; it must be a string")
    if not text:
        raise InvalidInput(f"{name}='' is empty; it needs at least one character")
    if not is_encodable(text):
        raise InvalidInput(f"{name} holds a lone surrogate, which is no character; decode the text properly first")
    return text


def _parse_token_ids(token_ids: object) -> list[int]:
    if not isinstance(token_ids, (list, tuple)):
        raise InvalidInput(
            f"prompt_token_ids={short_repr(token_ids)} is a {type(token_ids).__name__}; it must be a list of integers"
        )
    if not token_ids:
        raise InvalidInput("prompt_token_ids=[] is empty; it needs at least one token id")
    parsed = [as_int(token_id) for token_id in token_ids]
    if None in parsed:
        position = parsed.index(None)
        raise InvalidInput(
            f"token id {short_repr(token_ids[position])} at position {position} of the prompt must be an integer"
        )
    return parsed  # type: ignore[return-value]


class InputProcessor:
    """Turns prompts and sampling parameters into requests for the engine core.

    Args:
        tokenizer: for text prompts; its end-of-sequence ids count too.
        model: for end-of-sequence ids and sampling defaults.
        max_model_len: longest sequence (prompt and output), tokens.
        num_blocks: blocks the whole KV cache holds.
        block_size: tokens a block.
        engine_seed: requests without a seed derive theirs from it.
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
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._engine_seed = engine_seed
        # Ids that only one of the two knows have no text or no embedding.
        self._vocab_size = min(tokenizer.vocab_size, model.vocab_size)
        self._eos_token_ids = sorted({*model.eos_token_ids, *tokenizer.eos_token_ids})
        self._defaults = _read_default_sampling(model.default_sampling)
        self.num_arrivals = 0
        """Requests processed so far. A caller that drops processed requests unqueued may set it back."""

    def default_sampling_params(self) -> SamplingParams:
        """What a request without parameters gets: SamplingParams' defaults and, over them, the model's own."""
        return self._defaults.clone()

    def process(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, priority: int = 0
    ) -> tuple[EngineCoreRequest, str | None]:
        """The request for the core, and the prompt's text (None if the prompt was token ids).

        Raises:
            InvalidInput: anything about the request is refused; nothing has changed then.
        """
        _parse_text("request_id", request_id)
        parsed = _parse_prompt(prompt)
        token_ids = self._tokenize(parsed)
        self._check_length(len(token_ids))
        params = self._resolve_params(params, len(token_ids))
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=params,
            eos_token_ids=[] if params.ignore_eos else list(self._eos_token_ids),
            arrival_time=time.monotonic(),
            priority=_parse_priority(priority),
            cache_salt=parsed.cache_salt,
        )
        self.num_arrivals += 1
        return request, parsed.text

    def _tokenize(self, prompt: _ParsedPrompt) -> list[int]:
        if prompt.text is None:
            token_ids = prompt.token_ids or []
        else:
            token_ids = self._tokenizer.encode(prompt.text, add_special_tokens=True)
            if not token_ids:
                raise InvalidInput(f"prompt={short_repr(prompt.text)} has no tokens; it needs at least one")
        if min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            position, token_id = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < self._vocab_size)
            raise InvalidInput(
                f"token id {token_id} at position {position} of the prompt is outside the vocabulary of "
                f"{self._vocab_size} tokens; ids must be between 0 and {self._vocab_size - 1}"
            )
        return token_ids

    def _check_length(self, num_tokens: int) -> None:
        pool_tokens = self._num_blocks * self._block_size
        if num_tokens + 1 <= min(self._max_model_len, pool_tokens):
            return
        needs = f"prompt has {num_tokens} tokens and needs room for at least one more, but"
        if self._max_model_len <= pool_tokens:
            raise InvalidInput(f"{needs} max_model_len is {self._max_model_len}; shorten it or raise max_model_len")
        raise InvalidInput(
            f"{needs} the KV cache holds {pool_tokens} ({self._num_blocks} blocks x {self._block_size}); "
            "shorten it, or raise num_kv_blocks or kv_cache_memory"
        )

    def _resolve_params(self, given: SamplingParams | None, num_prompt_tokens: int) -> SamplingParams:
        """A validated copy in which nothing is left open. The user's object stays as it is."""
        if given is not None and not isinstance(given, SamplingParams):
            raise InvalidInput(f"params={given!r} is a {type(given).__name__}; it must be a SamplingParams")
        params = (self._defaults if given is None else given).clone()
        self._check_vocabulary(params)
        room = min(self._max_model_len, self._num_blocks * self._block_size) - num_prompt_tokens
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        return msgspec.structs.replace(
            params,
            max_tokens=max_tokens,
            min_tokens=min(params.min_tokens, max_tokens),
            top_k=min(params.top_k, self._vocab_size),
            seed=self._derive_seed() if params.seed is None else params.seed,
        )

    def _check_vocabulary(self, params: SamplingParams) -> None:
        for token_id in params.stop_token_ids or ():
            if token_id >= self._vocab_size:
                raise InvalidInput(
                    f"stop_token_ids holds {token_id}, outside the vocabulary of {self._vocab_size} tokens; "
                    f"ids must be between 0 and {self._vocab_size - 1}"
                )
        if params.logprobs is not None and params.logprobs > self._vocab_size:
            raise InvalidInput(
                f"logprobs={params.logprobs} is more than the vocabulary of {self._vocab_size} tokens; "
                "use -1 for the whole vocabulary"
            )

    def _derive_seed(self) -> int:
        """63 bits that depend on the engine's seed and the arrival number only."""
        digest = hashlib.sha256(f"{self._engine_seed}/{self.num_arrivals}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1


def _parse_priority(priority: object) -> int:
    number = as_int(priority)
    if number is None or not -(2**63) <= number < 2**63:
        raise InvalidInput(f"priority={priority!r} must be a 64-bit integer; lower is served first")
    return number


def _read_default_sampling(pairs: Sequence[tuple[str, float | int]]) -> SamplingParams:
    """The model's sampling defaults; those that cannot be honoured are left out, and one log line says which."""
    params = SamplingParams()
    left_out = []
    for name, value in pairs:
        try:
            params = msgspec.structs.replace(params, **{name: value})
        except (InvalidInput, TypeError):
            left_out.append(f"{name}={value!r}")
    if left_out:
        logger.warning("Left out of the model's own sampling defaults: %s", ", ".join(left_out))
    return params
