"""The body of /v1/completions."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import WithJsonSchema

from octavo.engine.input_processor import Prompt, as_prompt_list
from octavo.entrypoints.server.schema.common import Integer, SamplingFields
from octavo.errors import InvalidInput, short_repr
from octavo.protocol.checks import as_int
from octavo.protocol.sampling_params import MAX_N, RequestOutputKind, SamplingParams

MAX_TOKENS = 16
"""Tokens of a completion that does not say."""
MAX_PROMPTS = 2048
"""Prompts of one request."""

_FORMS = "a text, a list of texts, a list of token ids, or a list of such lists"
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer", "minimum": 0}}, "minItems": 1},
    ]
}


class CompletionRequest(SamplingFields):
    """What /v1/completions takes."""

    prompt: Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    max_tokens: Integer = None
    """0 is for `echo`: the prompt alone."""
    logprobs: Integer = None
    echo: bool = False
    """The text begins with the prompt."""
    best_of: Integer = None
    """Compute so many samples and answer with the n most probable ones."""

    not_built: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **SamplingFields.not_built,
        "suffix": ("",),
        "add_special_tokens": (True,),
    }

    def check(self) -> None:
        self.prompt = _parse_prompts(self.prompt)
        super().check()
        if as_int(self.max_tokens) == 0 and not self.echo:
            raise InvalidInput("max_tokens=0 asks for nothing; give at least 1, or echo=true")
        if self.best_of is not None:
            self._check_best_of()

    @property
    def prompts(self) -> list[Prompt]:
        """One or more, each a text or a list of token ids."""
        return self.prompt  # type: ignore[no-any-return]

    @property
    def num_prompts(self) -> int:
        return len(self.prompt)

    @property
    def wants_prompt_only(self) -> bool:
        """`echo` without a completion."""
        return as_int(self.max_tokens) == 0

    @property
    def num_choices(self) -> int:
        """Choices of each prompt."""
        return 1 if self.n is None else self.n

    def to_sampling_params(self, defaults: SamplingParams) -> SamplingParams:
        """What the engine is to do. Raises InvalidInput that names the field."""
        special: dict[str, Any] = {
            "max_tokens": MAX_TOKENS if self.max_tokens is None else self.max_tokens,
            "logprobs": self.logprobs,
        }
        if self.wants_prompt_only:
            special["max_tokens"] = 1
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            special["prompt_logprobs"] = self.logprobs
        if self.best_of is not None:
            special["n"] = self.best_of
            if self.logprobs is None:
                special["logprobs"] = 0  # for the sums
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        return self.sampling_params(defaults, output_kind=kind, **special)

    def _check_best_of(self) -> None:
        best_of, n = as_int(self.best_of), as_int(self.num_choices)
        if best_of is None or not 1 <= best_of <= MAX_N:
            raise InvalidInput(f"best_of={short_repr(self.best_of)} must be an integer between 1 and {MAX_N}")
        if n is None or n < 1:
            raise InvalidInput(f"n={short_repr(self.n)} must be an integer between 1 and {MAX_N}")
        if best_of < n:
            raise InvalidInput(f"best_of={best_of} is less than n={n}; it must be at least n")
        if self.stream:
            raise InvalidInput("best_of shows which samples are the best only at the end; leave out best_of or stream")


def _parse_prompts(value: object) -> list[Prompt]:
    """Every form of `prompt` as a list. Raises InvalidInput for what can be told without the model."""
    if not isinstance(value, str | list):
        raise InvalidInput(f"prompt={short_repr(value)} must be {_FORMS}")
    if value == []:
        raise InvalidInput(f"prompt=[] is empty; it must be {_FORMS}")
    if isinstance(value, list) and not isinstance(value[0], int | float):
        _check_number(len(value))
        for index, prompt in enumerate(value):
            if not isinstance(prompt, str | list):
                raise InvalidInput(f"prompt {index} is {short_repr(prompt)}; prompt must be {_FORMS}")
    return as_prompt_list(value)


def _check_number(num_prompts: int) -> None:
    if num_prompts > MAX_PROMPTS:
        raise InvalidInput(f"prompt holds {num_prompts} prompts, but a request may have {MAX_PROMPTS} at most")
