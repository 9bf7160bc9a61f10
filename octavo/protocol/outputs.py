"""What a user gets back: RequestOutput and its parts, with vLLM's field names."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one position."""

    logprob: float
    rank: int | None = None
    """1 for the most probable token of the vocabulary."""
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One generated sequence."""

    index: int
    text: str
    token_ids: list[int]
    """Includes the token that ended the sequence; the text does not show that one, unless asked for with
    `include_stop_str_in_output`."""
    cumulative_logprob: float | None = None
    """Sum of the sampled tokens' `logprobs`; None unless these were asked for."""
    logprobs: list[dict[int, Logprob]] | None = None
    """One dict a token: the sampled token first, then the most probable ones in order."""
    finish_reason: str | None = None
    """None while running, then "stop", "length" or "abort"."""
    stop_reason: int | str | None = None
    """The stop string, pattern of `stop_regex` or stop token id that ended the sequence; None for an end-of-sequence
    token. Of a sequence that was aborted because it could not go on: why."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Where the time of one request went, in seconds. Times of phases not yet reached are 0."""

    queue_time: float = 0.0
    """From arrival to first being scheduled."""
    prefill_time: float = 0.0
    """From first being scheduled to the first output token."""
    decode_time: float = 0.0
    """From the first output token to the last."""
    time_to_first_token: float = 0.0
    """From arrival to the first output token."""
    between_tokens: list[float] = field(default_factory=list)
    """From each token to the next of the same sample, for the tokens that are new in this output."""
    num_preemptions: int = 0
    """How often the request lost its KV cache and computed it again; of n samples, the sum."""
    clamps: list[str] = field(default_factory=list)
    """Receipt: values that were lowered to what is possible, such as "max_tokens 1000 -> 485 (room left)"."""
    ignored: list[str] = field(default_factory=list)
    """Receipt: fields that were given and do not apply, each with its reason."""


@dataclass(slots=True)
class RequestOutput:
    """The state of one request."""

    request_id: str
    prompt: str | None
    """None when the prompt was given as token ids or embeddings."""
    prompt_token_ids: list[int]
    """Of a prompt given as embeddings: one 0 a row."""
    outputs: list[CompletionOutput]
    """The samples in order of their index: all n, but of a stream of deltas only those with something new."""
    finished: bool
    """Nothing more comes of any sample."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache at the request's first admission."""
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One dict a prompt token, the first None: nothing predicts it. A stream of deltas brings them once."""
