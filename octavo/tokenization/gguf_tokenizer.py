"""The tokenizer inside a GGUF file: its metadata turned into a `tokenizers.Tokenizer`. Touches metadata only.

Two vocabularies occur in the files of the architectures served: `gpt2` (byte-level BPE with a merge list) and `llama`
(SentencePiece BPE with scores). Either becomes the pipeline its original tokenizer.json describes.
Key names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, section "Tokenizer".
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from octavo.errors import InvalidInput, printable, short_repr
from octavo.logging import get_logger
from octavo.tokenization.pre_tokenizers import BPE_KINDS, BPEKind

logger = get_logger(__name__)
T = TypeVar("T")

WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"
"""SentencePiece's sign for a space."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
"""Values of `tokenizer.ggml.token_type`."""


@dataclass(frozen=True)
class GGUFVocabulary:
    """A GGUF file's tokenizer, ready to use."""

    backend: Tokenizer
    vocab_size: int
    """Highest id + 1; a run of unused ids at the end, which only pads the embedding table, is left out."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """End of sequence, of turn and of message, as far as the file names them."""
    chat_templates: dict[str, str] = field(default_factory=dict)


def build_tokenizer(metadata: Mapping[str, object], source: str) -> GGUFVocabulary:
    """Build the tokenizer that the `metadata` of the GGUF file `source` describes.

    Raises:
        InvalidInput: there is no tokenizer in it, its kind is not known, or its parts contradict each other.
    """
    reader = _Metadata(metadata, source)
    model = reader.get("model", str, "none")
    if model not in _BUILDERS:
        raise InvalidInput(
            f"{source} has a tokenizer of model {short_repr(model)}; only {', '.join(_BUILDERS)} are known: "
            "give a tokenizer.json with tokenizer="
        )
    tokens = reader.list("tokens", str)
    types = reader.list("token_type", int, [NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise InvalidInput(f"{source} has {len(tokens)} tokens but {len(types)} token types; get the file again")
    while types and types[-1] == UNUSED:
        types.pop()
    del tokens[len(types) :]
    ids = {key: reader.token_id(key, len(tokens)) for key in ("bos", "eos", "eot", "eom", "unknown")}
    pipeline = _BUILDERS[model](_Vocabulary(reader, tokens, types, ids["unknown"]))
    pipeline.backend.add_tokens(_added_tokens(tokens, types))
    _add_post_processor(pipeline, reader, tokens, ids["bos"], ids["eos"])
    return GGUFVocabulary(
        backend=pipeline.backend,
        vocab_size=len(tokens),
        bos_token_id=ids["bos"],
        eos_token_ids=tuple(dict.fromkeys(i for key in ("eos", "eot", "eom") if (i := ids[key]) is not None)),
        chat_templates=_chat_templates(metadata),
    )


class _Metadata:
    """Typed access to the keys `tokenizer.ggml.*`."""

    def __init__(self, metadata: Mapping[str, object], source: str) -> None:
        self._metadata = metadata
        self.source = source

    def get(self, key: str, kind: type[T], default: T) -> T:
        value = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, kind):
            raise self._wrong(key, value, kind.__name__)
        return value

    def list(self, key: str, kind: type[T], default: list[T] | None = None) -> list[T]:
        """A list of its own, which the caller may change."""
        value = self._metadata.get(f"tokenizer.ggml.{key}", default)
        if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
            raise self._wrong(key, value, f"a list of {kind.__name__}")
        return list(value)

    def token_id(self, name: str, num_tokens: int) -> int | None:
        value = self._metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None or (isinstance(value, int) and 0 <= value < num_tokens):
            return value
        raise InvalidInput(
            f"{self.source}: the {name} token has id {short_repr(value)}, but there are {num_tokens} tokens"
        )

    def _wrong(self, key: str, value: object, wanted: str) -> InvalidInput:
        found = "is missing" if value is None else f"is {short_repr(value)}"
        return InvalidInput(f"{self.source}: metadata tokenizer.ggml.{key} {found}, it must be {wanted}")


@dataclass(frozen=True)
class _Vocabulary:
    reader: _Metadata
    tokens: list[str]
    types: list[int]
    unknown_id: int | None

    @property
    def ids(self) -> dict[str, int]:
        return {token: token_id for token_id, token in enumerate(self.tokens)}


@dataclass(frozen=True)
class _Pipeline:
    backend: Tokenizer
    adds_bos: bool
    """Where the file does not say."""


def _byte_level_bpe(vocabulary: _Vocabulary) -> _Pipeline:
    kind = _bpe_kind(vocabulary.reader)
    merges = [merge.partition(" ")[::2] for merge in vocabulary.reader.list("merges", str)]
    try:
        model = models.BPE(vocabulary.ids, merges, ignore_merges=kind.ignore_merges)
    except Exception as error:  # bare, as the library raises it
        reason = printable(str(error))
        raise InvalidInput(f"{vocabulary.reader.source}: the merge list does not fit the tokens: {reason}") from error
    backend = Tokenizer(model)
    if kind.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(kind)
    backend.decoder = decoders.ByteLevel()
    return _Pipeline(backend, kind.add_bos)


def _bpe_kind(reader: _Metadata) -> BPEKind:
    name = reader.get("pre", str, "")
    if not name:
        logger.warning("%s does not name its pre-tokenizer; using the default, results may be worse", reader.source)
    kind = BPE_KINDS.get(name or "default")
    if kind is None:
        raise InvalidInput(
            f"{reader.source} has a pre-tokenizer of kind {short_repr(name)}, which is not known (known: "
            f"{', '.join(sorted(BPE_KINDS))}); give the model's tokenizer.json with tokenizer="
        )
    return kind


def _pre_tokenizer(kind: BPEKind) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in kind.patterns
    ]
    if kind.individual_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind.gpt2_words))
    return pre_tokenizers.Sequence(steps)


def _sentencepiece_bpe(vocabulary: _Vocabulary) -> _Pipeline:
    reader, unknown_id = vocabulary.reader, vocabulary.unknown_id
    scores = reader.list("scores", float)[: len(vocabulary.tokens)]
    if len(scores) != len(vocabulary.tokens):
        raise InvalidInput(f"{reader.source} has {len(vocabulary.tokens)} tokens but {len(scores)} scores")
    backend = Tokenizer(
        models.BPE(
            vocabulary.ids,
            merges_from_scores(vocabulary.tokens, vocabulary.types, scores),
            unk_token=None if unknown_id is None else vocabulary.tokens[unknown_id],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces: normalizers.Normalizer = normalizers.Replace(" ", WORD_START)
    steps = [decoders.Replace(WORD_START, " "), decoders.ByteFallback(), decoders.Fuse()]
    if reader.get("add_space_prefix", bool, True):
        spaces = normalizers.Sequence([normalizers.Prepend(WORD_START), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = spaces
    backend.decoder = decoders.Sequence(steps)
    return _Pipeline(backend, adds_bos=True)


def merges_from_scores(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """The merge list under which BPE gives what SentencePiece gives with `scores`.

    SentencePiece joins the neighbours whose union has the best score. So every way to cut a token in two that are
    tokens is a merge, ranked by the token's score.
    Algorithm: Kudo and Richardson 2018, https://arxiv.org/abs/1808.06226, section 3.
    """
    rows = zip(tokens, types, scores, strict=True)
    known = {token: score for token, kind, score in rows if kind in (NORMAL, USER_DEFINED)}
    merges = []
    for token in sorted(known, key=known.__getitem__, reverse=True):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in known and right in known:
                merges.append((left, right))
    return merges


_BUILDERS = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}


def _added_tokens(tokens: list[str], types: list[int]) -> list[AddedToken]:
    """Tokens found in a text before anything else; of these, control tokens are special: not shown in decoded text."""
    return [
        AddedToken(token, special=kind != USER_DEFINED, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED) and token
    ]


def _add_post_processor(
    pipeline: _Pipeline, reader: _Metadata, tokens: list[str], bos_id: int | None, eos_id: int | None
) -> None:
    template, pieces = ["$A"], []
    if reader.get("add_bos_token", bool, pipeline.adds_bos and bos_id is not None):
        template.insert(0, "bos")
        pieces.append(_template_piece(reader, "bos", bos_id, tokens))
    if reader.get("add_eos_token", bool, False):
        template.append("eos")
        pieces.append(_template_piece(reader, "eos", eos_id, tokens))
    if pieces:
        pipeline.backend.post_processor = processors.TemplateProcessing(
            single=template, pair=[*template, "$B:1"], special_tokens=pieces
        )


def _template_piece(reader: _Metadata, name: str, token_id: int | None, tokens: list[str]) -> dict[str, object]:
    if token_id is None:
        raise InvalidInput(f"{reader.source} asks for a {name} token around every text but names none")
    return {"id": name, "ids": [token_id], "tokens": [tokens[token_id]]}


def _chat_templates(metadata: Mapping[str, object]) -> dict[str, str]:
    """Template by name; `default` is the one without a name."""
    prefix = "tokenizer.chat_template"
    keys = [key for key in metadata if key == prefix or key.startswith(f"{prefix}.")]
    return {key[len(prefix) + 1 :] or "default": str(metadata[key]) for key in keys}
