import dataclasses
from pathlib import Path

import numpy as np
import pytest

from octavo.config.engine_args import NOT_BUILT, EngineArgs
from octavo.config.options import make_engine_args
from octavo.errors import InvalidInput


def test_without_options_everything_has_its_default():
    assert make_engine_args() == EngineArgs()


def test_every_option_is_checked():
    for field in dataclasses.fields(EngineArgs):
        with pytest.raises(InvalidInput, match=f"{field.name}=<object"):
            make_engine_args(**{field.name: object()})


def test_an_unknown_option_is_a_type_error_with_the_nearest_name():
    with pytest.raises(TypeError, match=r"'max_num_seq' .*did you mean 'max_num_seqs'"):
        make_engine_args(max_num_seq=4)


def test_an_option_like_no_other_is_a_type_error_with_all_names():
    with pytest.raises(TypeError, match=r"'zzz' .*block_size"):
        make_engine_args(zzz=1)


@pytest.mark.parametrize("name", ["dtype", "kv_cache_dtype"])
@pytest.mark.parametrize(
    ("alias", "dtype"),
    [("half", "float16"), ("fp16", "float16"), ("float", "float32"), ("fp32", "float32"), ("bf16", "bfloat16")],
)
def test_a_dtype_may_be_called_by_the_other_names_that_users_know(name, alias, dtype):
    assert getattr(make_engine_args(**{name: alias}), name) == dtype


@pytest.mark.parametrize("name", NOT_BUILT)
def test_a_later_option_is_taken_only_where_it_asks_for_nothing(name):
    assert make_engine_args(**{name: NOT_BUILT[name]}) == EngineArgs()
    with pytest.raises(InvalidInput, match=rf"{name}=.* (not built yet|not supported)"):
        make_engine_args(**{name: "something"})


@pytest.mark.parametrize(("name", "value"), [("tensor_parallel_size", True), ("enable_lora", 0), ("swap_space", 4)])
def test_a_later_options_neutral_value_has_its_type(name, value):
    with pytest.raises(InvalidInput, match=rf"{name}=.* not built yet"):
        make_engine_args(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", ""),
        ("model", " "),
        ("model", 3),
        ("model", None),
        ("tokenizer", ""),
        ("revision", 1),
        ("load_format", "pt"),
        ("dtype", "float8"),
        ("dtype", None),
        ("dtype", ["auto"]),
        ("max_model_len", 1),
        ("max_model_len", -1),
        ("max_model_len", "2048"),
        ("max_model_len", 2048.0),
        ("max_num_seqs", 0),
        ("max_num_seqs", True),
        ("max_num_seqs", None),
        ("max_num_batched_tokens", 0),
        ("max_num_batched_tokens", False),
        ("block_size", 0),
        ("block_size", 12),
        ("block_size", 256),
        ("block_size", "16"),
        ("block_size", 16.0),
        ("enable_prefix_caching", 1),
        ("enable_prefix_caching", "yes"),
        ("enable_chunked_prefill", None),
        ("long_prefill_token_threshold", -1),
        ("long_prefill_token_threshold", 0.5),
        ("scheduling_policy", "lifo"),
        ("kv_cache_dtype", "int3"),
        ("num_kv_blocks", 0),
        ("num_kv_blocks", 2**31),
        ("num_kv_blocks", True),
        ("kv_cache_memory", "lots"),
        ("kv_cache_memory", 0),
        ("kv_cache_memory", 1.5),
        ("kv_cache_memory_bytes", True),
        ("num_threads", 0),
        ("num_threads", 10**6),
        ("seed", 1.0),
        ("seed", 2**64),
        ("seed", None),
        ("logprobs_mode", "cooked"),
        ("platform", ""),
        ("disable_log_stats", 1),
    ],
)
def test_a_bad_value_is_refused_by_name(name, value):
    with pytest.raises(InvalidInput, match=f"{name}="):
        make_engine_args(**{name: value})


def test_the_8_bit_floats_of_a_kv_cache_are_e4m3():
    assert make_engine_args(kv_cache_dtype="fp8").kv_cache_dtype == "fp8"
    assert make_engine_args(kv_cache_dtype="fp8_e4m3").kv_cache_dtype == "fp8"
    with pytest.raises(InvalidInput, match="kv_cache_dtype='fp8_e5m2' is not built yet"):
        make_engine_args(kv_cache_dtype="fp8_e5m2")


@pytest.mark.parametrize("value", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
def test_every_logprobs_mode_is_taken(value):
    assert make_engine_args(logprobs_mode=value).logprobs_mode == value


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("model", Path("some/folder"), "some/folder"),
        ("max_model_len", np.int64(64), 64),
        ("kv_cache_memory", "1KiB", 1024),
        ("kv_cache_memory_bytes", "2GiB", 2**31),
        ("num_kv_blocks", 1, 1),
        ("seed", -1, -1),
        ("block_size", 128, 128),
        ("platform", "somebody-elses", "somebody-elses"),
    ],
)
def test_a_good_value_is_kept_in_its_one_form(name, value, kept):
    args = make_engine_args(**{name: value})
    assert getattr(args, name) == kept
    assert type(getattr(args, name)) is type(kept)


@pytest.mark.parametrize(
    "pair",
    [
        {"num_kv_blocks": 4, "kv_cache_memory": "1MiB"},
        {"num_kv_blocks": 4, "kv_cache_memory_bytes": 4096},
        {"kv_cache_memory": 4096, "kv_cache_memory_bytes": 4096},
    ],
)
def test_the_size_of_the_kv_cache_is_given_once(pair):
    with pytest.raises(InvalidInput, match="give one of them") as caught:
        make_engine_args(**pair)
    assert all(name in str(caught.value) for name in pair)


def test_a_chunk_limit_needs_chunks():
    with pytest.raises(InvalidInput, match="long_prefill_token_threshold=64"):
        make_engine_args(enable_chunked_prefill=False, long_prefill_token_threshold=64)


def test_without_chunks_the_budget_holds_the_longest_prompt():
    with pytest.raises(InvalidInput, match="max_num_batched_tokens=255 is less than max_model_len=256"):
        make_engine_args(enable_chunked_prefill=False, max_num_batched_tokens=255, max_model_len=256)
    make_engine_args(enable_chunked_prefill=False, max_num_batched_tokens=256, max_model_len=256)


def test_a_budget_below_the_number_of_sequences_is_fine():
    assert make_engine_args(max_num_seqs=64, max_num_batched_tokens=8).max_num_batched_tokens == 8


class Hostile:
    def __repr__(self):
        raise RuntimeError("no")

    __fspath__ = __index__ = __repr__

    def __eq__(self, other):
        raise RuntimeError("no")

    __hash__ = None


HARD_TO_SHOW = [10**5000, -(10**5000), Hostile(), np.eye(50)]


@pytest.mark.parametrize("value", HARD_TO_SHOW, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("name", [*(field.name for field in dataclasses.fields(EngineArgs)), *NOT_BUILT])
def test_whatever_is_given_the_refusal_is_short_and_names_the_option(name, value):
    with pytest.raises(InvalidInput, match=f"^{name}") as refusal:
        make_engine_args(**{name: value})
    assert len(str(refusal.value)) < 300
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize("text", ["9" * 5000, "9" * 400 + ".5TB", "x" * 200_000])
def test_an_amount_of_memory_that_is_a_long_text_is_refused(text):
    with pytest.raises(InvalidInput, match=r"^kv_cache_memory=") as refusal:
        make_engine_args(kv_cache_memory=text)
    assert len(str(refusal.value)) < 300


def test_what_will_never_be_is_refused_with_what_there_is_instead():
    with pytest.raises(ValueError, match=r"gpu_memory_utilization=0.9 is not supported.*kv_cache_memory"):
        make_engine_args(gpu_memory_utilization=0.9)
    with pytest.raises(ValueError, match=r"trust_remote_code=True is not supported.*never run"):
        make_engine_args(trust_remote_code=True)
    make_engine_args(gpu_memory_utilization=None, trust_remote_code=False)
