"""InputProcessor and as_prompt_list: what is one prompt, what is refused, what is resolved."""

import logging
import subprocess
import sys
import time

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.config.model import ModelConfig
from octavo.engine.input_processor import InputProcessor, as_prompt_list
from octavo.errors import InvalidInput
from octavo.protocol.messages import EngineCoreRequest
from octavo.protocol.sampling_params import SamplingParams
from octavo.sampling.logits_processors import LogitsProcessor

VOCAB_SIZE = 300


class ByteTokenizer:
    """Ids are bytes + 2, after a beginning-of-sequence token 1. Drops spaces, so " " has only that one."""

    def __init__(self, bos=True, vocab_size=VOCAB_SIZE):
        self.vocab_size = vocab_size
        self.eos_token_ids = (0, 299)
        self._bos = [1] if bos else []

    def encode(self, text, add_special_tokens=True):
        return (self._bos if add_special_tokens else []) + [byte + 2 for byte in text.encode() if byte != 32]


def model_config(**changes):
    values = {
        "architecture": "LlamaForCausalLM",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_layers": 1,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 4096,
        "eos_token_ids": (2, 0),
    }
    return ModelConfig(**{**values, **changes})


def make_processor(*, max_model_len=100, num_blocks=50, seed=0, tokenizer=None, logprobs_mode=None, **model):
    options = {} if logprobs_mode is None else {"logprobs_mode": logprobs_mode}
    return InputProcessor(
        tokenizer=tokenizer or ByteTokenizer(),
        model=model_config(**model),
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=16,
        engine_seed=seed,
        **options,
    )


def process(prompt, params=None, processor=None, **options):
    return (processor or make_processor()).process("r", prompt, params or SamplingParams(), **options)[0]


# What is one prompt


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("hello", ["hello"]),
        (["a", "b"], ["a", "b"]),
        (("a", "b"), ["a", "b"]),
        ([5, 6], [[5, 6]]),
        ((5, 6), [[5, 6]]),
        ([[5, 6]], [[5, 6]]),
        ([[5, 6], (7,)], [[5, 6], (7,)]),
        ({"prompt": "a"}, [{"prompt": "a"}]),
        ({"prompt_token_ids": (1, 2), "cache_salt": None}, [{"prompt_token_ids": (1, 2), "cache_salt": None}]),
        (["a", [1], {"prompt": "b", "cache_salt": "s"}], ["a", [1], {"prompt": "b", "cache_salt": "s"}]),
    ],
)
def test_one_prompt_is_told_from_several(prompts, expected):
    assert as_prompt_list(prompts) == expected


def test_numpy_ids_are_ids():
    (prompt,) = as_prompt_list(list(np.array([3, 4], dtype=np.int32)))
    assert prompt == [3, 4]
    assert all(type(token_id) is int for token_id in prompt)


BAD_PROMPTS = [
    ("", "prompt='' is empty"),
    ([], "is empty"),
    ((), "is empty"),
    (None, "NoneType"),
    (5, "prompt=5 is a int"),
    (b"bytes", "bytes"),
    (b"long" * 10**6, "b'long.{1,60}is a bytes"),
    ({}, "exactly one"),
    ({"prompt": ""}, "prompt='' is empty"),
    ({"prompt": 5}, "must be a string"),
    ({"prompt": None}, "exactly one"),
    ({"prompt": "a", "prompt_token_ids": [1]}, "exactly one"),
    ({"prompt": "a", "multi_modal_data": {}}, r"unknown keys \['multi_modal_data'\]"),
    ({"prompt": "a", 5: 1}, "unknown keys"),
    ({"prompt_token_ids": []}, r"prompt_token_ids=\[\] is empty"),
    ({"prompt_token_ids": "12"}, "must be a list"),
    ({"prompt_token_ids": [[1]]}, "position 0"),
    ({"prompt": "a", "cache_salt": ""}, "cache_salt='' is empty"),
    ({"prompt": "a", "cache_salt": 7}, "cache_salt=7"),
    ({"prompt": "a", "cache_salt": "\ud800"}, "cache_salt holds a lone surrogate"),
    ("broken \ud83d", "lone surrogate"),
    ([True], "token id True at position 0"),
    ([1, True], "token id True at position 1"),
    ([1, 2.0], "token id 2.0 at position 1"),
    ([1, "a"], "token id 'a' at position 1"),
    ([1, None], "position 1"),
    ([1, [2]], "position 1"),
]


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS)
def test_bad_prompt_is_refused(prompt, message):
    with pytest.raises(InvalidInput, match=message):
        as_prompt_list(prompt)
    with pytest.raises(InvalidInput, match="empty" if prompt in ([], ()) else message):
        process(prompt)


@pytest.mark.parametrize(
    "prompts", [["a", ""], ["a", 5], ["a", []], [[1], [True]], [[1], "\ud800"], ["a", [[1]]], ["a", None]]
)
def test_bad_prompt_in_a_list_is_refused_with_its_place(prompts):
    with pytest.raises(InvalidInput, match="prompt 1: "):
        as_prompt_list(prompts)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 400) | st.floats() | st.text(max_size=3) | st.binary(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["prompt", "prompt_token_ids", "cache_salt", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(ANYTHING)
def test_any_object_is_either_refused_or_a_list_of_prompts_that_serve(prompts):
    try:
        listed = as_prompt_list(prompts)
    except InvalidInput:
        return
    assert listed
    for prompt in listed:
        try:
            request = process(prompt)
        except InvalidInput as error:
            assert "vocabulary" in str(error)
        else:
            assert request.prompt_token_ids


# Prompts


def test_text_is_tokenised_with_special_tokens_and_kept():
    request, text = make_processor().process("r", {"prompt": "ab", "cache_salt": "s"}, SamplingParams(), priority=-4)
    assert request.prompt_token_ids == [1, 99, 100]
    assert (request.request_id, request.priority, request.cache_salt, text) == ("r", -4, "s", "ab")


def test_token_ids_are_taken_as_they_are_and_copied():
    ids = [5, 6]
    request, text = make_processor().process("r", ids, SamplingParams())
    ids.append(7)
    assert request.prompt_token_ids == [5, 6]
    assert text is None


def test_text_without_tokens_is_refused():
    processor = make_processor(tokenizer=ByteTokenizer(bos=False))
    with pytest.raises(InvalidInput, match="no tokens"):
        processor.process("r", " ", SamplingParams())


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 10**30])
def test_token_id_outside_the_vocabulary_is_refused_with_both_numbers(token_id):
    with pytest.raises(InvalidInput, match=rf"token id {token_id} at position 1 .* {VOCAB_SIZE} tokens"):
        process([0, token_id])


@pytest.mark.parametrize(("tokenizer_size", "model_size"), [(10, 20), (20, 10)])
def test_vocabulary_is_what_tokenizer_and_model_share(tokenizer_size, model_size):
    processor = make_processor(tokenizer=ByteTokenizer(vocab_size=tokenizer_size), vocab_size=model_size)
    assert process([9], processor=processor).prompt_token_ids == [9]
    with pytest.raises(InvalidInput, match="vocabulary of 10 tokens"):
        process([10], processor=processor)


def test_prompt_that_fits_neither_limit_names_the_smaller_one():
    processor = make_processor(max_model_len=4096, num_blocks=50)
    with pytest.raises(InvalidInput, match=r"1002 tokens .* KV cache holds 800 \(50 blocks x 16\).*kv_cache_memory"):
        process([7] * 1002, processor=processor)
    processor = make_processor(max_model_len=100, num_blocks=50)
    with pytest.raises(InvalidInput, match=r"1002 tokens .* max_model_len is 100; .*raise max_model_len"):
        process([7] * 1002, processor=processor)


@pytest.mark.parametrize(("max_model_len", "num_blocks", "longest"), [(4096, 50, 799), (100, 50, 99), (800, 50, 799)])
def test_prompt_is_served_if_one_more_token_fits_both_limits(max_model_len, num_blocks, longest):
    processor = make_processor(max_model_len=max_model_len, num_blocks=num_blocks)
    request = process([7] * longest, SamplingParams(max_tokens=50), processor)
    assert request.sampling_params.max_tokens == 1
    with pytest.raises(InvalidInput, match=f"prompt has {longest + 1} tokens .* {longest + 1}"):
        process([7] * (longest + 1), processor=processor)


@pytest.mark.parametrize("priority", [True, 1.0, "1", None, 2**63])
def test_priority_that_is_no_integer_is_refused(priority):
    with pytest.raises(InvalidInput, match="priority="):
        process("a", priority=priority)


@pytest.mark.parametrize("request_id", ["", 5, None, "\ud800"])
def test_request_id_that_is_no_text_is_refused(request_id):
    with pytest.raises(InvalidInput, match="request_id"):
        make_processor().process(request_id, "a", SamplingParams())


def test_arrival_is_now_on_the_monotonic_clock():
    before = time.monotonic()
    assert before <= process("a").arrival_time <= time.monotonic()


# Sampling parameters


def test_nothing_is_left_open_and_the_users_object_stays_as_it_is():
    given_params = SamplingParams(max_tokens=None, seed=None)
    untouched = msgspec.structs.replace(given_params)
    request = process([7] * 10, given_params)
    assert request.sampling_params.max_tokens == 90
    assert isinstance(request.sampling_params.seed, int)
    assert given_params == untouched
    given_params.temperature = 0.0
    assert request.sampling_params.temperature == 1.0


@pytest.mark.parametrize(("asked", "resolved"), [(None, 90), (91, 90), (10**30, 90), (90, 90), (5, 5)])
def test_max_tokens_is_clamped_to_the_room_left(asked, resolved):
    assert process([7] * 10, SamplingParams(max_tokens=asked)).sampling_params.max_tokens == resolved


def test_min_tokens_beyond_the_room_is_harmless():
    params = process([7] * 90, SamplingParams(max_tokens=200, min_tokens=150)).sampling_params
    assert (params.min_tokens, params.max_tokens) == (10, 10)


def test_parameters_changed_since_they_were_made_are_checked_again():
    params = SamplingParams()
    params.top_p = float("nan")
    with pytest.raises(InvalidInput, match="top_p"):
        process("a", params)
    params = SamplingParams()
    params.stop = "END"
    assert process("a", params).sampling_params.stop == ["END"]


@pytest.mark.parametrize("params", [{"temperature": 0}, 5, [SamplingParams()]])
def test_parameters_of_another_type_are_refused(params):
    with pytest.raises(InvalidInput, match="must be a SamplingParams"):
        process("a", params)


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_id_outside_the_vocabulary_is_refused_by_name_and_limit(name):
    def values(*ids):
        return {str(id): 1.0 for id in ids} if name == "logit_bias" else list(ids)

    process("a", SamplingParams(**{name: values(0, 299)}))
    with pytest.raises(InvalidInput, match=rf"{name} holds 300, .* 300 tokens; ids must be between 0 and 299"):
        process("a", SamplingParams(**{name: values(5, 300)}))
    with pytest.raises(InvalidInput, match=rf"{name} holds 191222, "):
        process("a", SamplingParams(**{name: values(191222)}))


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_logprobs_up_to_the_vocabulary_are_taken(name):
    for number in (-1, 0, 300):
        assert getattr(process("a", SamplingParams(**{name: number})).sampling_params, name) == number
    with pytest.raises(InvalidInput, match=rf"{name}=301 .* 300 tokens"):
        process("a", SamplingParams(**{name: 301}))


def test_logprobs_mode_is_the_requests_own_or_the_engines():
    assert process("a").sampling_params.logprobs_mode == "raw_logprobs"
    processor = make_processor(logprobs_mode="processed_logits")
    assert process("a", processor=processor).sampling_params.logprobs_mode == "processed_logits"
    own = SamplingParams(logprobs=1, logprobs_mode="raw_logits")
    assert process("a", own, processor).sampling_params.logprobs_mode == "raw_logits"


def test_samples_of_a_request_share_one_seed():
    request = process("a", SamplingParams(n=3))
    assert request.sampling_params.n == 3
    assert request.sampling_params.seed == process("a", SamplingParams()).sampling_params.seed


class Halve(LogitsProcessor):
    def __init__(self, params, prompt_token_ids):
        pass

    def __call__(self, output_token_ids, logits):
        return logits / 2


def test_logits_processors_are_loaded_at_the_door():
    sys.modules["halving"] = sys.modules[__name__]
    try:
        request = process("a", SamplingParams(logits_processors=["halving:Halve"]))
        assert request.sampling_params.logits_processors == ["halving:Halve"]
        for path in ("halving:Nothing", "no_such_module:Halve", "halving:InputProcessor"):
            with pytest.raises(InvalidInput, match=f"logits_processors.*{path}"):
                process("a", SamplingParams(logits_processors=["halving:Halve", path]))
    finally:
        del sys.modules["halving"]


# Words that are not generated


def test_bad_words_become_token_ids():
    request = process("a", SamplingParams(bad_words=["ab", "c"]))
    assert request.bad_words_token_ids == [[99, 100], [101]]
    assert process("a").bad_words_token_ids == []


def test_bad_words_that_leave_nothing_of_the_allowed_tokens_are_refused():
    params = {"allowed_token_ids": [99, 100]}
    process("a", SamplingParams(**params, bad_words=["a"]))
    with pytest.raises(InvalidInput, match=r"allowed_token_ids=\[99, 100\] are all banned by bad_words"):
        process("a", SamplingParams(**params, bad_words=["a", "b"]))
    with pytest.raises(InvalidInput, match=r"banned by bad_words behind the tokens \[99\]"):
        process("a", SamplingParams(**params, bad_words=["aa", "ab"]))


def test_min_tokens_that_hold_back_all_that_is_allowed_are_refused():
    SamplingParams(allowed_token_ids=[0, 5], min_tokens=1)
    process("a", SamplingParams(allowed_token_ids=[0, 5], stop_token_ids=[5]))
    with pytest.raises(InvalidInput, match=r"allowed_token_ids=\[0, 5\] .* min_tokens=1"):
        process("a", SamplingParams(allowed_token_ids=[0, 5], stop_token_ids=[5], min_tokens=1))
    process("a", SamplingParams(allowed_token_ids=[0, 5], ignore_eos=True, min_tokens=1))


# Prompts as embeddings


def embeddings(num_tokens=3, hidden=8, dtype=torch.float32):
    return torch.arange(num_tokens * hidden, dtype=torch.float32).reshape(num_tokens, hidden).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_embeddings_become_bytes_and_their_tokens_placeholders(dtype):
    tensor = embeddings(dtype=dtype)
    for prompt in (tensor, {"prompt_embeds": tensor, "cache_salt": "s"}, tensor.T.contiguous().T.requires_grad_()):
        request, text = make_processor().process("r", prompt, SamplingParams())
        packed = request.prompt_embeds
        assert (text, request.prompt_token_ids, packed.shape) == (None, [0, 0, 0], (3, 8))
        assert packed.dtype == str(dtype).removeprefix("torch.")
        rebuilt = torch.frombuffer(bytearray(packed.data), dtype=dtype).reshape(packed.shape)
        assert torch.equal(rebuilt, tensor)
        assert request.cache_salt == ("s" if isinstance(prompt, dict) else None)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=EngineCoreRequest) == request


def test_one_tensor_is_one_prompt_and_a_list_of_them_several():
    first, second = embeddings(1), embeddings(2)
    (prompt,) = as_prompt_list(first)
    assert prompt is first
    listed = as_prompt_list([first, second, {"prompt_embeds": first}, "text"])
    assert listed[0] is first
    assert listed[1] is second
    assert len(listed) == 4


BAD_EMBEDS = [
    (torch.zeros(8), r"shape \[8\]; it must be \[num_tokens, hidden_size\]"),
    (torch.zeros(1, 3, 8), r"shape \[1, 3, 8\]"),
    (torch.zeros(0, 8), r"shape \[0, 8\], so it is empty"),
    (torch.zeros(3, 0), r"shape \[3, 0\]"),
    (torch.zeros(()), r"shape \[\]"),
    (torch.zeros(3, 8, dtype=torch.int64), "dtype int64; it must be one of float32, bfloat16, float16"),
    (torch.zeros(3, 8, dtype=torch.float64), "dtype float64"),
    (np.zeros((3, 8)), "is a ndarray"),
]


@pytest.mark.parametrize(("tensor", "message"), BAD_EMBEDS)
def test_embeddings_of_another_form_are_refused(tensor, message):
    with pytest.raises(InvalidInput, match=message):
        as_prompt_list(tensor)
    with pytest.raises(InvalidInput, match=f"prompt 1: .*{message}"):
        as_prompt_list(["a", tensor])
    with pytest.raises(InvalidInput, match=message):
        process({"prompt_embeds": tensor})


def test_embeddings_that_do_not_fit_the_model_are_refused():
    with pytest.raises(InvalidInput, match=r"rows of 9 numbers, but the model's hidden size is 8"):
        process(embeddings(hidden=9))
    for bad in (float("nan"), float("inf"), float("-inf")):
        tensor = embeddings()
        tensor[1, 2] = bad
        with pytest.raises(InvalidInput, match="prompt_embeds holds values that are no finite numbers"):
            process(tensor)
    with pytest.raises(InvalidInput, match="prompt_embeds cannot be read"):
        process(torch.zeros(3, 8, device="meta"))
    with pytest.raises(InvalidInput, match="prompt has 100 tokens"):
        process(embeddings(100))


@pytest.mark.parametrize("value", [[[0.0] * 8], "text", 5, np.zeros((1, 8))])
def test_prompt_embeds_that_are_no_tensor_are_refused(value):
    with pytest.raises(InvalidInput, match=r"prompt_embeds=.*must be a torch\.Tensor"):
        process({"prompt_embeds": value})


def test_prompt_has_one_content():
    for extra in ({"prompt": "a"}, {"prompt_token_ids": [1]}):
        with pytest.raises(InvalidInput, match="exactly one of prompt, prompt_token_ids, prompt_embeds"):
            process({"prompt_embeds": embeddings(), **extra})


def test_prompt_logprobs_of_embeddings_are_refused():
    with pytest.raises(InvalidInput, match="prompt_logprobs=1 needs the tokens of the prompt"):
        process(embeddings(), SamplingParams(prompt_logprobs=1))


def test_texts_need_no_torch():
    code = "import sys, octavo.engine.input_processor; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


# The receipt


def test_receipt_of_plain_parameters_is_empty():
    for params in (SamplingParams(), SamplingParams(temperature=0, seed=-1, top_k=-1), SamplingParams(max_tokens=None)):
        request = process("a", params)
        assert (request.clamps, request.ignored) == ([], [])


def test_receipt_names_what_was_lowered():
    params = SamplingParams(max_tokens=1000, min_tokens=500, top_k=5000)
    request = process([7] * 15, params)
    assert request.clamps == [
        "max_tokens 1000 -> 85 (room left)",
        "min_tokens 500 -> 85 (max_tokens)",
        "top_k 5000 -> 300 (vocabulary)",
    ]


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"temperature": 0, "top_p": 0.5, "top_k": 3}, ["top_p=0.5", "top_k=3"]),
        ({"temperature": 0, "min_p": 0.1, "seed": 0}, ["min_p=0.1", "seed=0"]),
        ({"detokenize": False, "skip_special_tokens": False}, ["skip_special_tokens=False"]),
        ({"detokenize": False, "include_stop_str_in_output": True}, ["include_stop_str_in_output=True"]),
        ({"detokenize": False, "spaces_between_special_tokens": False}, ["spaces_between_special_tokens=False"]),
        ({"spaces_between_special_tokens": False}, ["spaces_between_special_tokens=False"]),
        ({"spaces_between_special_tokens": False, "skip_special_tokens": False}, []),
        ({"logprobs_mode": "raw_logits"}, ["logprobs_mode='raw_logits'"]),
        ({"logprobs_mode": "raw_logits", "prompt_logprobs": 0}, []),
        ({"extra_args": {"a": 1}}, ["extra_args={'a': 1}"]),
        ({"repetition_penalty": 1.2}, []),
    ],
)  # fmt: skip
def test_receipt_names_what_does_not_apply_and_why(params, named):
    ignored = process("a", SamplingParams(**params)).ignored
    assert [entry.split(": ")[0] if "{" not in entry else entry.rsplit(": ", 1)[0] for entry in ignored] == named
    assert all(len(entry.rsplit(": ", 1)[1]) > 10 for entry in ignored)


def test_receipt_says_that_embeddings_have_no_tokens_to_penalise():
    (entry,) = process(embeddings(), SamplingParams(repetition_penalty=1.2)).ignored
    assert entry.startswith("repetition_penalty=1.2: ")


def test_top_k_beyond_the_vocabulary_keeps_all_of_it():
    assert process("a", SamplingParams(top_k=10**30)).sampling_params.top_k == VOCAB_SIZE


def test_every_end_of_sequence_id_counts_unless_ignored():
    assert process("a").eos_token_ids == [0, 2, 299]
    request = process("a", SamplingParams(ignore_eos=True, stop_token_ids=[2]))
    assert request.eos_token_ids == []
    assert request.sampling_params.stop_token_ids == [2]


def test_request_crosses_a_process_border():
    request = process("a", SamplingParams(max_tokens=10**30, top_k=10**30, temperature=np.float64(0.5)))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=EngineCoreRequest) == request


# Seeds


def seeds(processor, count, params=None):
    return [process("a", params, processor).sampling_params.seed for _ in range(count)]


def test_equal_engines_repeat_and_requests_differ():
    first = seeds(make_processor(seed=3), 50)
    assert first == seeds(make_processor(seed=3), 50)
    assert len(set(first)) == 50
    assert not set(first) & set(seeds(make_processor(seed=4), 50))


def test_given_seed_stays_and_counts_as_an_arrival():
    processor = make_processor()
    expected = seeds(make_processor(), 2)[1]
    assert process("a", SamplingParams(seed=0), processor).sampling_params.seed == 0
    assert seeds(processor, 1, SamplingParams(seed=-1)) == [expected]


def test_refused_requests_leave_no_trace():
    processor = make_processor()
    refused = [
        ("", None, 0),
        ("a", SamplingParams(stop_token_ids=[300]), 0),
        ("a", None, "high"),
        ([7] * 5000, None, 0),
        ([-1], None, 0),
    ]
    for prompt, params, priority in refused:
        with pytest.raises(InvalidInput):
            processor.process("r", prompt, params, priority)
    assert seeds(processor, 3) == seeds(make_processor(), 3)


# Defaults of the model


def test_model_defaults_serve_requests_without_parameters():
    processor = make_processor(default_sampling=(("temperature", 0.6), ("top_p", 0.95), ("top_k", 20), ("min_p", 0)))
    params = processor.process("r", "a")[0].sampling_params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.6, 0.95, 20, 16)
    assert process("a", SamplingParams(), processor).sampling_params.temperature == 1.0


def test_defaults_handed_out_are_a_copy():
    processor = make_processor(default_sampling=(("temperature", 0.6),))
    processor.default_sampling_params().temperature = 0.0
    assert processor.default_sampling_params() == SamplingParams(temperature=0.6)


def test_defaults_that_cannot_be_honoured_are_left_out_and_named_in_one_line(caplog):
    caplog.set_level(logging.INFO, "octavo")
    processor = make_processor(
        default_sampling=(
            ("repetition_penalty", -1.0),
            ("temperature", 0.6),
            ("top_p", 1.5),
            ("do_sample", True),
            ("presence_penalty", 0.5),
        )
    )
    assert processor.default_sampling_params() == SamplingParams(temperature=0.6, presence_penalty=0.5)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "repetition_penalty=-1.0, top_p=1.5, do_sample=True" in line
    assert "presence_penalty" not in line


def test_nothing_is_said_when_every_default_is_honoured(caplog):
    caplog.set_level(logging.INFO, "octavo")
    make_processor(default_sampling=(("temperature", 0.6), ("repetition_penalty", 1.1)))
    assert caplog.records == []
