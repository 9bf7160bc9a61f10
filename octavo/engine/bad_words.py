"""The token sequences that `bad_words` stand for, and whether a request could run out of tokens. Pure."""

from collections.abc import Collection, Sequence

from octavo.errors import InvalidInput, short_repr
from octavo.tokenization.tokenizer import Tokenizer


def bad_words_token_ids(tokenizer: Tokenizer, bad_words: Sequence[str]) -> list[list[int]]:
    """Token ids of each word as it stands at the start of a text, behind a space and behind other text.

    Byte-level tokenizers write the first and the last alike ("word") and the second in its own way (" word");
    SentencePiece puts a space before the first and writes the last ("word" behind a line break) in its own way.
    """
    sequences: dict[tuple[int, ...], None] = {}
    break_ids = tokenizer.encode("\n", add_special_tokens=False)
    for word in bad_words:
        bare = word.lstrip() or word
        forms = [tokenizer.encode(text, add_special_tokens=False) for text in (bare, f" {bare}")]
        behind = tokenizer.encode(f"\n{bare}", add_special_tokens=False)
        if break_ids and behind[: len(break_ids)] == break_ids:
            forms.append(behind[len(break_ids) :])
        forms = [form for form in forms if form]
        if not forms:
            raise InvalidInput(f"bad_words={list(bad_words)!r}: {word!r} has no tokens in this vocabulary; remove it")
        sequences.update(dict.fromkeys(tuple(form) for form in forms))
    return [list(sequence) for sequence in _without_longer_ones(sequences)]


def _without_longer_ones(sequences: Collection[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Without those that end with another one: that one bans them too."""
    known = set(sequences)
    return [s for s in sequences if not any(s[start:] in known for start in range(1, len(s)))]


def check_some_token_remains(
    allowed: Collection[int], held_back: Collection[int], min_tokens: int, banned: Sequence[Sequence[int]]
) -> None:
    """Refuse a request that could come to a place where no token is left.

    Args:
        allowed: ids that may be generated at all.
        held_back: those that end the request; they may come once `min_tokens` others have.
        banned: what `bad_words` stand for.

    Raises:
        InvalidInput: naming the fields that leave nothing.
    """
    allowed, before_end = set(allowed), set(allowed) - set(held_back)  # none of `held_back` has anything behind it
    if min_tokens and not before_end:
        raise InvalidInput(
            f"allowed_token_ids={short_repr(sorted(allowed))} holds only tokens that end the request, but "
            f"min_tokens={min_tokens} holds these back; allow another token or set min_tokens to 0"
        )
    sequences = {tuple(sequence) for sequence in banned}
    last_ids = {sequence[-1] for sequence in sequences}
    if not (last_ids >= allowed or (min_tokens and last_ids >= before_end)):
        return
    for context in {sequence[:-1] for sequence in sequences}:
        left = before_end if len(context) < min_tokens else allowed
        banned_here = {s[-1] for s in sequences if context[len(context) - len(s) + 1 :] == s[:-1]}
        if banned_here >= left and set(context) <= before_end and not _holds_any(context, sequences):
            behind = f" behind the tokens {list(context)}" if context else ""
            raise InvalidInput(
                f"allowed_token_ids={short_repr(sorted(allowed))} are all banned by bad_words{behind}, so no token is "
                "left; allow another token or ban fewer words"
            )


def _holds_any(tokens: tuple[int, ...], sequences: Collection[tuple[int, ...]]) -> bool:
    parts = (tokens[start:end] for end in range(1, len(tokens) + 1) for start in range(end))
    return any(part in sequences for part in parts)
