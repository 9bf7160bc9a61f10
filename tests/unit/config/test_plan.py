"""The plan: resolve()'s own decisions, the memory an engine will find, and advice that was tried."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config.engine_config import LoadConfig
from octavo.config.machine import MachineInfo
from octavo.config.model import ModelConfig
from octavo.config.options import make_engine_args
from octavo.config.plan import LIBRARIES_ANONYMOUS, Subject, make_plan, with_core_process, with_libraries
from octavo.config.platform_traits import PlatformTraits, WorkspaceTraits
from octavo.config.resolve import resolve
from octavo.config.weights import bytes_by_form
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
WEIGHTS = {"float32": 540 * MIB, "bfloat16": 270 * MIB, "float16": 270 * MIB}
ALL_KV = ("float32", "bfloat16", "float16", "int8")


class Sizes:
    """Weights of as many bytes as WEIGHTS; in few bits where `few` says so."""

    def __init__(self, loading=None, few=None):
        self.loading, self.few = loading, few or {}

    def elements(self, quantization):
        if quantization == "none":
            return {"float": WEIGHTS["float32"] // 4}
        if quantization not in self.few:
            raise InvalidInput(f"quantization={quantization!r} cannot be here")
        return {self.few[quantization]: WEIGHTS["float32"] // 4}

    def loading_peak(self, choice):
        size = sum(bytes_by_form(self, choice).values())
        return self.loading or (size + 200 * MIB, size + 100 * MIB)


def subject(
    memory=24 * GIB, auto="bfloat16", kv=ALL_KV, loading=None, anonymous=0, few=None, bits=(), stored="float32"
):
    return Subject(
        model=replace(MODEL, dtype=stored),
        load=LoadConfig(path=Path("m.gguf"), load_format="gguf"),
        weights=Sizes(loading, few),
        machine=MachineInfo(
            cpu_flags=frozenset(),
            num_cores=2,
            num_cores_source="affinity",
            memory_limit=memory,
            memory_source="cgroup",
            process_memory=50 * MIB,
            process_anonymous=anonymous,
        ),
        platform=PlatformTraits(
            name="cpu",
            auto_dtype=(auto, "why"),
            kv_cache_dtypes=kv,
            workspace=WorkspaceTraits(scores_at_once=2**22, score_bytes=4, gathers_kv=False, sampling_bytes=8),
            weight_bits=bits,
        ),
    )


def plan(lengths=(), memory=24 * GIB, auto="bfloat16", kv=ALL_KV, loading=None, weights=None, **options):
    """weights: of `subject`, what concerns few bits."""
    return make_plan(make_engine_args(**options), subject(memory, auto, kv, loading, **(weights or {})), lengths)


def test_the_decisions_are_those_of_resolve_on_the_machine_as_the_engine_will_find_it():
    it = subject()
    args = make_engine_args(kv_cache_memory="256MiB")
    expected = resolve(
        args,
        model=it.model,
        load=it.load,
        weights=it.weights,
        machine=with_libraries(it.machine, it.model),
        platform=it.platform,
    )
    assert make_plan(args, it).config == expected


def test_a_core_in_a_process_of_its_own_holds_the_libraries_once_more():
    here = subject(anonymous=100 * MIB).machine
    apart = with_core_process(here)
    assert here.memory_limit - apart.memory_limit == LIBRARIES_ANONYMOUS
    assert apart.process_memory - here.process_memory == LIBRARIES_ANONYMOUS
    assert with_core_process(subject(memory=MIB).machine).memory_limit == 0


def test_the_room_shrinks_by_the_libraries_own_memory_that_is_not_there_yet():
    fresh, loaded = subject().machine, subject(anonymous=100 * MIB).machine
    later, sooner = with_libraries(fresh, MODEL), with_libraries(loaded, MODEL)
    assert fresh.memory_limit - later.memory_limit >= LIBRARIES_ANONYMOUS
    assert sooner.memory_limit - later.memory_limit == 100 * MIB
    assert later.process_memory == sooner.process_memory > 200 * MIB


def test_kv_bytes_a_token_are_given_for_every_dtype_of_the_platform():
    values = 30 * 3 * 2 * 64
    assert plan().kv_per_token == {
        "float32": 4 * values, "bfloat16": 2 * values, "float16": 2 * values, "int8": values + 30 * 3 * 2 * 4,
    }  # fmt: skip
    assert set(plan(kv=("float32",), dtype="float32").kv_per_token) == {"float32"}


@pytest.mark.parametrize(
    ("options", "longest"), [({}, 8192), ({"num_kv_blocks": 10}, 160), ({"max_model_len": 100}, 100)]
)
def test_the_largest_prompt_leaves_room_for_one_token(options, longest):
    assert plan(**options).largest_prompt == longest - 1


@pytest.mark.parametrize(
    ("length", "requests"),
    [((16, 16), 5), ((17, 16), 3), ((100, 60), 1), ((100, 61), 0), ((1, 1), 8), ((8000, 200), 0)],
)
def test_concurrent_requests_take_whole_blocks_and_running_slots(length, requests):
    (load,) = plan(lengths=(length,), num_kv_blocks=10, max_num_seqs=8).loads
    assert load.requests == requests


def test_usual_lengths_end_with_the_longest_of_the_model():
    lengths = [(load.input_len, load.output_len) for load in plan(max_model_len=2000).loads]
    assert lengths == [(128, 128), (1024, 256), (1999, 1)]


def test_a_plan_that_fits_has_no_problem_and_no_advice():
    it = plan()
    assert it.fits
    assert it.advice == []


def test_the_peak_is_the_worse_of_loading_and_running():
    small = plan(num_kv_blocks=1, max_num_batched_tokens=16, max_num_seqs=1)
    assert small.peak_rss == small.config.memory.libraries + small.loading
    large = plan(kv_cache_memory="1GiB")
    assert large.peak_rss == large.config.memory.libraries + large.config.memory.total


def test_float32_that_does_not_fit_is_advised_to_be_bfloat16():
    it = plan(memory=850 * MIB, dtype="float32")
    assert not it.fits
    assert "no room for a KV cache" in it.problem
    assert it.advice[0].options["dtype"] == "bfloat16"


def test_a_pool_that_was_asked_for_and_does_not_fit_is_advised_to_be_smaller():
    it = plan(memory=4 * GIB, kv_cache_memory="8GiB")
    assert "KV cache 8 GiB" in it.problem
    assert it.config.memory.kv_cache > 7 * GIB
    assert "num_kv_blocks" in it.advice[0].options
    assert it.advice[0].instead_of == ("kv_cache_memory",)


def test_int8_is_advised_where_it_makes_the_full_length_fit():
    it = plan(kv_cache_memory="128MiB", max_model_len=8000)
    assert it.fits
    assert {"max_model_len": 5824} in [advice.options for advice in it.advice]
    assert {"kv_cache_dtype": "int8"} in [advice.options for advice in it.advice]
    assert all("int8" not in str(a.options) for a in plan(kv_cache_memory="128MiB", kv=ALL_KV[:3]).advice)


def test_lengths_that_must_be_possible_and_are_not_do_not_fit():
    it = plan(lengths=((3000, 3000),), kv_cache_memory="128MiB")
    assert not it.fits
    assert "a request of 6000 tokens does not fit" in it.problem
    assert all(advice.kv_tokens >= 6000 for advice in it.advice)
    assert it.advice


def test_lengths_beyond_the_model_have_no_advice():
    it = plan(lengths=((9000, 10),))
    assert not it.fits
    assert it.advice == []


def test_a_model_that_nothing_helps_says_what_it_would_take():
    it = plan(memory=400 * MIB)
    assert not it.fits
    assert it.advice == []
    assert it.least_memory > 300 * MIB
    assert plan(memory=it.least_memory + 250 * MIB, max_num_batched_tokens=256, max_num_seqs=16).fits


def test_weights_that_fit_but_cannot_be_loaded_do_not_fit():
    it = plan(loading=(40 * GIB, 30 * GIB))
    assert not it.fits
    assert "loading the weights takes 30 GiB" in it.problem


def test_what_is_no_matter_of_memory_is_refused():
    with pytest.raises(InvalidInput, match="max_model_len=9000"):
        plan(max_model_len=9000)
    with pytest.raises(InvalidInput, match="kv_cache_dtype='int8' is not supported"):
        plan(kv=ALL_KV[:3], kv_cache_dtype="int8")


QUANTIZED = {"few": {"gguf": "int4"}, "bits": (8, 4), "stored": "quantized"}
FLOATS = {"few": {"int8": "int8", "int4": "int4"}, "bits": (8, 4)}


def test_sizes_are_given_for_every_dtype_and_for_the_few_bits_there_are_kernels_for():
    sixteenth = WEIGHTS["float32"] // 4 // 32
    assert plan().weights == WEIGHTS
    assert plan(weights=QUANTIZED).weights == {**WEIGHTS, "gguf": 20 * sixteenth}
    assert plan(weights=FLOATS).weights == {**WEIGHTS, "int8": 34 * sixteenth, "int4": 20 * sixteenth}
    assert plan(weights={**FLOATS, "bits": ()}).weights == WEIGHTS
    assert plan(weights={**FLOATS, "bits": (8,)}).weights.keys() == {*WEIGHTS, "int8"}


def test_the_forms_that_were_chosen_are_the_plans_weights():
    it = plan(weights=QUANTIZED)
    assert it.weight_forms == {"int4": it.config.memory.weights}
    assert it.config.worker.quantization == "gguf"
    assert plan(weights=QUANTIZED, dtype="float32").weight_forms == {"float32": WEIGHTS["float32"]}


def test_few_bits_are_advised_where_they_make_it_fit():
    floats = plan(memory=600 * MIB, weights=FLOATS, kv_cache_memory="64MiB")
    assert not floats.fits
    assert "int8" in [advice.options.get("quantization") for advice in floats.advice]
    kept = plan(memory=600 * MIB, weights=QUANTIZED, dtype="bfloat16", kv_cache_memory="64MiB")
    assert not kept.fits
    assert "gguf" in [advice.options.get("quantization") for advice in kept.advice]
    as_it_is = plan(memory=600 * MIB, weights=QUANTIZED)
    assert all("quantization" not in advice.options for advice in as_it_is.advice)


@settings(max_examples=60, deadline=None)
@given(
    memory=st.integers(300 * MIB, 3 * GIB),
    dtype=st.sampled_from(["auto", "float32"]),
    size=st.sampled_from([{}, {"num_kv_blocks": 40}, {"kv_cache_memory": "64MiB"}, {"kv_cache_memory": "2GiB"}]),
    lengths=st.sampled_from([(), ((500, 500),), ((4000, 1000),)]),
    max_num_seqs=st.sampled_from([1, 8, 256]),
)
def test_every_advice_makes_it_fit(memory, dtype, size, lengths, max_num_seqs):
    options = {"dtype": dtype, "max_num_seqs": max_num_seqs, **size}
    it = plan(lengths=lengths, memory=memory, **options)
    for advice in it.advice:
        changed = {**options, **advice.options}
        if "num_kv_blocks" in advice.options:
            changed.pop("kv_cache_memory", None)
        better = plan(lengths=lengths, memory=memory, **changed)
        assert better.fits
        assert not better.advice
        assert better.config.cache.num_tokens >= advice.kv_tokens


def test_only_numbers_of_the_machine_change_the_plan():
    it = subject()
    again = make_plan(make_engine_args(), replace(it, machine=replace(it.machine, num_cores=1)))
    assert again.config.cache == make_plan(make_engine_args(), it).config.cache
    assert again.config.worker.num_threads == 1
