"""What a block's KV depends on besides token ids, as text for the block's digest."""

from hashlib import sha256

from octavo.protocol.messages import PromptEmbeds


def extra_keys_of(cache_salt: str | None, prompt_embeds: PromptEmbeds | None, start: int, end: int) -> tuple[str, ...]:
    """Extra keys of the block at positions `start` .. `end` - 1."""
    keys: tuple[str, ...] = () if cache_salt is None else ("cache_salt", cache_salt)
    if prompt_embeds is None or start >= prompt_embeds.shape[0]:
        return keys
    return (*keys, "prompt_embeds", _digest(prompt_embeds, start, end))


def _digest(embeds: PromptEmbeds, start: int, end: int) -> str:
    """Of the embeddings at positions `start` .. `end` - 1, as far as there are any: bytes and how to read them."""
    num_tokens, hidden = embeds.shape
    row = len(embeds.data) // num_tokens
    return sha256(f"{embeds.dtype} {hidden} ".encode() + embeds.data[start * row : end * row]).hexdigest()
