from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.config.engine_config import LoadConfig
from octavo.config.machine import MachineInfo
from octavo.config.model import ModelConfig
from octavo.config.options import make_engine_args
from octavo.config.platform_traits import PlatformTraits, WorkspaceTraits
from octavo.config.resolve import AUTO_KV_CACHE_BYTES, MEMORY_SHARE, resolve
from octavo.errors import InvalidInput

MIB, GIB = 2**20, 2**30

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
)
BLOCK_BYTES = 16 * 30 * 3 * 2 * 64 * 4
"""A block of 16 float32 tokens of MODEL."""
WEIGHTS = {"float32": 540 * MIB, "bfloat16": 270 * MIB, "float16": 270 * MIB}


class Sizes:
    """Weights that can be kept in floats only."""

    def __init__(self, sizes):
        self.sizes = sizes

    def elements(self, quantization):
        return {"float": self.sizes["float32"] // 4}


def plan(
    memory=24 * GIB,
    cores=2,
    source="cgroup",
    model=MODEL,
    weights=WEIGHTS,
    auto=("float32", "no bf16"),
    libraries=0,
    **options,
):
    machine = MachineInfo(
        cpu_flags=frozenset(),
        num_cores=cores,
        num_cores_source="affinity",
        memory_limit=memory,
        memory_source=source,
        process_memory=libraries,
    )
    return resolve(
        make_engine_args(**options),
        model=model,
        load=LoadConfig(path=Path("m.gguf"), load_format="gguf"),
        weights=Sizes(weights),
        machine=machine,
        platform=PlatformTraits(
            name="reference",
            auto_dtype=auto,
            kv_cache_dtypes=("float32", "bfloat16", "float16"),
            workspace=WorkspaceTraits(scores_at_once=2**24, score_bytes=12, gathers_kv=True, sampling_bytes=40),
        ),
    )


def test_num_kv_blocks_is_exact():
    assert plan(num_kv_blocks=7).cache.num_blocks == 7


@pytest.mark.parametrize("name", ["kv_cache_memory", "kv_cache_memory_bytes"])
@pytest.mark.parametrize(("spare", "blocks"), [(0, 5), (BLOCK_BYTES - 1, 5), (BLOCK_BYTES, 6)])
def test_kv_cache_memory_all_goes_to_blocks(name, spare, blocks):
    config = plan(**{name: 5 * BLOCK_BYTES + spare})
    assert config.cache.num_blocks == blocks
    assert config.memory.kv_cache == blocks * BLOCK_BYTES


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({"block_size": 32}, 2),
        ({"kv_cache_dtype": "bfloat16"}, 0.5),
        ({"dtype": "bfloat16"}, 0.5),
        ({"dtype": "bfloat16", "kv_cache_dtype": "float32"}, 1),
    ],
)
def test_a_block_counts_its_tokens_in_the_caches_dtype(options, factor):
    assert plan(kv_cache_memory=int(100 * factor * BLOCK_BYTES), **options).cache.num_blocks == 100


def test_less_memory_than_a_block_is_refused_with_both_numbers():
    with pytest.raises(InvalidInput, match=f"kv_cache_memory={BLOCK_BYTES - 1} .*{BLOCK_BYTES} bytes"):
        plan(kv_cache_memory=BLOCK_BYTES - 1)


def test_an_automatic_cache_is_no_larger_than_the_requests_can_fill():
    config = plan(max_num_seqs=3, max_model_len=100)
    assert config.cache.num_blocks == 3 * 7
    assert any("max_num_seqs requests of full length" in note for note in config.notes)


def test_an_automatic_cache_stops_at_its_maximum_on_a_big_machine():
    config = plan(memory=1024 * GIB)
    assert config.cache.num_blocks == AUTO_KV_CACHE_BYTES // BLOCK_BYTES
    assert any("kv_cache_memory gives more" in note for note in config.notes)


def test_more_than_the_automatic_maximum_is_given_when_asked_for():
    assert plan(memory=64 * GIB, kv_cache_memory="8GiB").memory.kv_cache > 2 * AUTO_KV_CACHE_BYTES - BLOCK_BYTES


@given(
    memory=st.integers(1, 16 * GIB),
    max_num_seqs=st.integers(1, 512),
    max_num_batched_tokens=st.integers(1, 8192),
    max_model_len=st.integers(2, 8192),
    block_size=st.sampled_from([8, 16, 32, 64, 128]),
)
def test_an_automatic_cache_fits_its_share_and_one_more_block_would_not(
    memory, max_num_seqs, max_num_batched_tokens, max_model_len, block_size
):
    options = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_model_len": max_model_len,
        "block_size": block_size,
    }
    budget = int(MEMORY_SHARE * memory)
    try:
        config = plan(memory=memory, **options)
    except InvalidInput:
        assert plan(memory=1024 * GIB, num_kv_blocks=1, **options).memory.total > budget
        return
    assert config.memory.total <= budget
    useful = max_num_seqs * -(-max_model_len // block_size)
    most = min(useful, AUTO_KV_CACHE_BYTES // (BLOCK_BYTES * block_size // 16))
    assert 1 <= config.cache.num_blocks <= most
    if config.cache.num_blocks < most:
        larger = plan(memory=1024 * GIB, num_kv_blocks=config.cache.num_blocks + 1, **options)
        assert larger.memory.total > budget


def test_a_two_gib_container_runs_the_default_model_within_its_limit():
    config = plan(memory=2 * GIB - 300 * MIB)
    assert config.memory.total <= MEMORY_SHARE * (2 * GIB - 300 * MIB)
    assert config.cache.num_tokens > 1024


def test_weights_that_do_not_fit_are_refused_with_the_sum():
    with pytest.raises(InvalidInput, match=r"weights 540 MiB .*of 600 MiB \(cgroup\)"):
        plan(memory=600 * MIB)


def test_a_requested_cache_that_does_not_fit_is_refused_with_the_sum():
    with pytest.raises(InvalidInput, match=r"weights 540 MiB \+ KV cache 4 GiB .*of 4 GiB \(cgroup\)"):
        plan(memory=4 * GIB, kv_cache_memory="4GiB")


def test_the_sum_is_in_the_notes():
    config = plan(kv_cache_memory="1GiB", source="available RAM")
    assert any(
        "weights 540 MiB + KV cache" in note and "+ workspace" in note and "of 24 GiB (available RAM)" in note
        for note in config.notes
    )
    memory = config.memory
    assert memory.total == memory.weights + memory.kv_cache + memory.workspace
    assert memory.workspace >= 512 * 1536 * 4


def test_the_automatic_dtype_comes_with_its_reason():
    config = plan(auto=("bfloat16", "this CPU multiplies it"))
    assert (config.worker.dtype, config.worker.kv_cache_dtype) == ("bfloat16", "bfloat16")
    assert config.memory.weights == WEIGHTS["bfloat16"]
    assert any("bfloat16" in note and "this CPU multiplies it" in note for note in config.notes)


def test_a_given_dtype_is_taken():
    config = plan(dtype="float16", kv_cache_dtype="bfloat16")
    assert (config.worker.dtype, config.worker.kv_cache_dtype) == ("float16", "bfloat16")


def test_threads_follow_the_machine_unless_given():
    assert plan(cores=5).worker.num_threads == 5
    config = plan(cores=5, num_threads=9)
    assert config.worker.num_threads == 9
    assert any("more than the 5 cores" in note for note in config.notes)


def test_the_length_defaults_to_the_models():
    assert plan().scheduler.max_model_len == 8192


def test_more_than_the_models_length_is_refused_with_both_numbers():
    assert plan(max_model_len=8192).scheduler.max_model_len == 8192
    with pytest.raises(InvalidInput, match=r"max_model_len=8193 .*8192"):
        plan(max_model_len=8193)


def test_a_pool_shorter_than_the_length_is_said():
    config = plan(num_kv_blocks=10)
    assert config.scheduler.max_model_len == 8192
    assert any("160 tokens" in note and "no request can be longer than the pool" in note for note in config.notes)


@pytest.mark.parametrize(
    ("options", "budget"),
    [
        ({}, 512),
        ({"max_num_seqs": 1000}, 1256),
        ({"max_num_batched_tokens": 8}, 8),
        ({"enable_chunked_prefill": False}, 8192),
        ({"enable_chunked_prefill": False, "max_model_len": 100}, 100),
        ({"enable_chunked_prefill": False, "max_model_len": 100, "max_num_batched_tokens": 300}, 300),
    ],
)
def test_the_token_budget(options, budget):
    assert plan(**options).scheduler.max_num_batched_tokens == budget


def test_without_chunks_the_budget_holds_the_models_length():
    with pytest.raises(InvalidInput, match="max_num_batched_tokens=4096 is less than max_model_len=8192"):
        plan(enable_chunked_prefill=False, max_num_batched_tokens=4096)


def test_every_other_option_arrives_where_it_belongs():
    config = plan(
        max_num_seqs=9,
        long_prefill_token_threshold=33,
        scheduling_policy="priority",
        enable_prefix_caching=False,
        block_size=32,
        seed=11,
        disable_log_stats=True,
    )
    scheduler = config.scheduler
    assert (scheduler.max_num_seqs, scheduler.long_prefill_token_threshold, scheduler.policy) == (9, 33, "priority")
    assert (config.cache.enable_prefix_caching, config.cache.block_size) == (False, 32)
    assert (config.seed, config.log_stats, config.worker.platform) == (11, False, "reference")
    assert config.model is MODEL
    assert config.load.path == Path("m.gguf")


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_seqs": 10**400},
        {"max_num_batched_tokens": 10**400},
        {"max_num_seqs": 10**400, "num_kv_blocks": 2**31 - 1},
        {"kv_cache_memory": 2**60},
    ],
    ids=str,
)
def test_sums_beyond_any_float_are_refused_in_one_sentence_or_bounded(options):
    try:
        config = plan(**options)
    except InvalidInput as refusal:
        assert len(str(refusal)) < 500
    else:
        assert config.memory.total <= config.memory.limit


def test_a_model_beyond_any_float_is_refused_with_the_sum():
    model = replace(MODEL, hidden_size=2**40, num_layers=2**40, intermediate_size=2**40, vocab_size=2**40)
    with pytest.raises(InvalidInput, match=r"no room for a KV cache: weights 2\*\*120 B"):
        plan(model=model, weights=dict.fromkeys(WEIGHTS, 2**120))


def test_a_kv_cache_dtype_the_platform_lacks_is_refused():
    with pytest.raises(InvalidInput, match="kv_cache_dtype='int8' is not supported by the reference platform"):
        plan(kv_cache_dtype="int8")


def test_the_printed_sum_names_what_the_libraries_hold_beside_it():
    assert any("beside the libraries' 250 MiB" in note for note in plan(libraries=250 * MIB).notes)
    assert not any("libraries" in note for note in plan().notes)
