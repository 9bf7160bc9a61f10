"""Sampling fields that users know from other engines, and what takes their place here. Pure data and one look-up."""

from octavo.errors import not_built, short_repr

_STRUCTURED = "answers in a given form are not there; ask for the form in the prompt, or leave it out"
_BEAMS = "beams are LLM.beam_search(prompts, BeamSearchParams(...))"

NOT_BUILT: dict[str, tuple[tuple[object, ...], str]] = {
    "best_of": ((1,), "give n and logprobs=0, and keep the outputs with the highest cumulative_logprob"),
    "use_beam_search": ((False,), _BEAMS),
    "structured_outputs": ((), _STRUCTURED),
    "guided_decoding": ((), _STRUCTURED),
    "guided_json": ((), _STRUCTURED),
    "guided_regex": ((), _STRUCTURED),
    "guided_choice": ((), _STRUCTURED),
    "guided_grammar": ((), _STRUCTURED),
    "guided_decoding_backend": ((), _STRUCTURED),
    "guided_whitespace_pattern": ((), _STRUCTURED),
    "structural_tag": ((), _STRUCTURED),
    "response_format": (({"type": "text"},), _STRUCTURED),
    "json_schema": ((), _STRUCTURED),
    "regex": ((), _STRUCTURED),
    "ebnf": ((), _STRUCTURED),
    "grammar": (("",), _STRUCTURED),
    "truncate_prompt_tokens": ((), "shorten the prompt before"),
    "no_repeat_ngram_size": ((0,), "repetition_penalty and frequency_penalty hold back what was said"),
    "typical_p": ((1.0,), "top_p and min_p leave out what is improbable"),
    "mirostat": ((0,), "top_p and min_p leave out what is improbable"),
    "mirostat_mode": ((0,), "top_p and min_p leave out what is improbable"),
    "tfs_z": ((1.0,), "top_p and min_p leave out what is improbable"),
    "xtc_probability": ((0.0,), "leave it out"),
    "dry_multiplier": ((0.0,), "repetition_penalty and frequency_penalty hold back what was said"),
}
"""Fields whose feature does not exist here -> the values that ask for nothing, beside None, and the way out."""

RENAMED: dict[str, str] = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_gen_len": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "stop_strings": "stop",
    "stop_sequences": "stop",
    "eos_token_id": "stop_token_ids",
    "bad_words_ids": "bad_words",
    "repeat_penalty": "repetition_penalty",
    "random_seed": "seed",
    "sampling_seed": "seed",
    "logits_processor": "logits_processors",
}
"""Fields with another name here."""

ELSEWHERE: dict[str, str] = {
    "max_length": "max_tokens counts the output alone",
    "do_sample": "temperature=0 takes the most probable token each time",
    "suppress_tokens": "give them a logit_bias of -100",
    "top_logprobs": "logprobs says how many",
    "num_beams": _BEAMS,
    "beam_width": _BEAMS,
    "length_penalty": f"it is for beams, and {_BEAMS}",
    "early_stopping": f"it is for beams, and {_BEAMS}",
    "stream": "AsyncLLM.generate streams",
    "echo": "an output has its prompt",
}
"""Fields with another place here -> which."""


def explain(name: str, value: object) -> bool:
    """What a user should know who sets a field of another engine.

    Returns:
        Whether the field is known and this value asks for nothing, so that it may be dropped.

    Raises:
        InvalidInput: its feature does not exist here.
        TypeError: it has another name or place.
    """
    if name in NOT_BUILT:
        neutral, way_out = NOT_BUILT[name]
        if value is None or any(type(value) is type(one) and value == one for one in neutral):
            return True
        raise not_built(f"{name}={short_repr(value)}", way_out)
    if name in RENAMED or name in ELSEWHERE:
        way_out = f"it is {RENAMED[name]} here" if name in RENAMED else ELSEWHERE[name]
        raise TypeError(f"{name!r} is no field of SamplingParams; {way_out}")
    return False
