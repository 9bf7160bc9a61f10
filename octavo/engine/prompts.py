"""What users may give as a prompt, and what a prompt is once its form has been checked. Pure, and without the model.

Torch is touched only for prompts that are tensors.
"""

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypedDict, Union

from octavo.errors import InvalidInput, printable, short_repr
from octavo.protocol.checks import as_int, is_encodable
from octavo.protocol.messages import PromptEmbeds

if TYPE_CHECKING:
    import torch


class PromptDict(TypedDict, total=False):
    """A prompt with options: exactly one of `prompt`, `prompt_token_ids` and `prompt_embeds`."""

    prompt: str
    prompt_token_ids: Sequence[int]
    prompt_embeds: "torch.Tensor"
    """[num_tokens, hidden_size], float32, bfloat16 or float16."""
    cache_salt: str | None
    """Share cached prefixes only with prompts of the same salt."""


# A Union, because it takes the name of a type that is not imported.
Prompt: TypeAlias = Union[str, Sequence[int], "torch.Tensor", PromptDict]

EMBEDS_DTYPES = ("float32", "bfloat16", "float16")
_FORMS = (
    "a string, a list of token ids, a torch.Tensor of embeddings, or a dict with 'prompt', 'prompt_token_ids' or "
    "'prompt_embeds'"
)
_CONTENT_KEYS = ("prompt", "prompt_token_ids", "prompt_embeds")
_PROMPT_KEYS = (*_CONTENT_KEYS, "cache_salt")


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """Exactly one of `text`, `token_ids` and `embeds` is set, and it is not empty."""

    text: str | None = None
    token_ids: list[int] | None = None
    embeds: "torch.Tensor | None" = None
    """[num_tokens, hidden], of one of EMBEDS_DTYPES."""
    cache_salt: str | None = None


def as_prompt_list(prompts: object) -> list[Prompt]:
    """One prompt or a list of prompts, as a list of checked prompts.

    A lone string, dict, tensor, or list of token ids is one prompt; a list of lists of ids, or of tensors, is several.
    Tuples count as lists.

    Raises:
        InvalidInput: no prompts, or one that is empty or of no known form; names its place in the list.
    """
    if not isinstance(prompts, (list, tuple)):
        parse_prompt(prompts)
        return [prompts]  # type: ignore[list-item]
    if not prompts:
        raise InvalidInput(f"prompts={short_repr(prompts)} is empty; give at least one prompt ({_FORMS})")
    if isinstance(prompts[0], numbers.Number):
        return [_parse_token_ids(prompts)]
    for index, prompt in enumerate(prompts):
        try:
            parse_prompt(prompt)
        except InvalidInput as error:
            raise InvalidInput(f"prompt {index}: {error}") from None
    return list(prompts)


def parse_prompt(prompt: object) -> ParsedPrompt:
    """One prompt of any form. Raises InvalidInput for what can be told without the model."""
    if isinstance(prompt, str):
        return ParsedPrompt(text=parse_text("prompt", prompt))
    if isinstance(prompt, (list, tuple)):
        return ParsedPrompt(token_ids=_parse_token_ids(prompt))
    if isinstance(prompt, Mapping):
        return _parse_dict(prompt)
    if _is_tensor(prompt):
        return ParsedPrompt(embeds=_parse_embeds(prompt))
    raise InvalidInput(f"prompt={short_repr(prompt)} is a {type(prompt).__name__}; give {_FORMS}")


def size_hint(prompt: object, enough: int) -> int:
    """About how many characters or ids there are in a prompt or conversation of whatever form; no more than told.

    Stops counting at `enough`. Never raises: what has no known form counts as nothing.
    """
    size, parts = 0, [prompt]
    while parts and size < enough:
        part = parts.pop()
        if isinstance(part, str):
            size += len(part)
        elif isinstance(part, dict):
            size += len(part)
            parts += part.values()
        elif isinstance(part, (list, tuple)):
            size += len(part)
            parts += part if part and not isinstance(part[0], int) else ()
    return size


def _parse_dict(prompt: Mapping[object, object]) -> ParsedPrompt:
    unknown = [key for key in prompt if key not in _PROMPT_KEYS]
    if unknown:
        raise InvalidInput(f"prompt has unknown keys {short_repr(unknown)}; known ones are {', '.join(_PROMPT_KEYS)}")
    text, token_ids, embeds, salt = (prompt.get(key) for key in _PROMPT_KEYS)
    if [text is None, token_ids is None, embeds is None].count(False) != 1:
        keys = short_repr(list(prompt))
        raise InvalidInput(f"prompt with keys {keys} must have exactly one of {', '.join(_CONTENT_KEYS)}")
    return ParsedPrompt(
        text=None if text is None else parse_text("prompt", text),
        token_ids=None if token_ids is None else _parse_token_ids(token_ids),
        embeds=None if embeds is None else _parse_embeds(embeds),
        cache_salt=None if salt is None else parse_text("cache_salt", salt),
    )


def _is_tensor(value: object) -> bool:
    """Whether it is a torch.Tensor, told without importing torch."""
    return all(hasattr(value, name) for name in ("shape", "dtype", "detach"))


def _parse_embeds(embeds: object) -> "torch.Tensor":
    if not _is_tensor(embeds):
        raise InvalidInput(
            f"prompt_embeds={short_repr(embeds)} is a {type(embeds).__name__}; it must be a torch.Tensor of shape "
            "[num_tokens, hidden_size]"
        )
    tensor: torch.Tensor = embeds  # type: ignore[assignment]
    shape, dtype = list(tensor.shape), _dtype_name(tensor)
    if len(shape) != 2 or shape[1] == 0:
        raise InvalidInput(f"prompt_embeds has the shape {shape}; it must be [num_tokens, hidden_size]")
    if shape[0] == 0:
        raise InvalidInput(f"prompt_embeds has the shape {shape}, so it is empty; it needs at least one row")
    if dtype not in EMBEDS_DTYPES:
        raise InvalidInput(f"prompt_embeds has the dtype {dtype}; it must be one of {', '.join(EMBEDS_DTYPES)}")
    return tensor


def pack_embeds(embeds: "torch.Tensor", hidden_size: int) -> PromptEmbeds:
    """A parsed prompt's embeddings as plain bytes.

    Raises:
        InvalidInput: rows of another size than the model's, or values that are no finite numbers.
    """
    import torch  # only where there is a tensor: reading texts must not need it

    num_tokens, size = embeds.shape
    if size != hidden_size:
        raise InvalidInput(
            f"prompt_embeds has rows of {size} numbers, but the model's hidden size is {hidden_size}; "
            "take them from this model's embedding table"
        )
    try:
        rows = embeds.detach().cpu().contiguous()
        finite = bool(torch.isfinite(rows).all())
    except (RuntimeError, NotImplementedError) as error:
        reason = printable(str(error))
        raise InvalidInput(f"prompt_embeds cannot be read: {reason}; give a dense tensor with data") from None
    if not finite:
        raise InvalidInput("prompt_embeds holds values that are no finite numbers (NaN or infinity); remove them")
    return PromptEmbeds(rows.view(torch.uint8).numpy().tobytes(), _dtype_name(rows), (num_tokens, size))


def _dtype_name(tensor: "torch.Tensor") -> str:
    return str(tensor.dtype).removeprefix("torch.")


def parse_text(name: str, text: object) -> str:
    """`text` if it is a non-empty string of real characters, else InvalidInput that names it."""
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
