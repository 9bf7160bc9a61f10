"""Floats or few bits: what is chosen, why, and what cannot be."""

from dataclasses import replace

import pytest

from octavo.config.engine_config import WorkerConfig
from octavo.config.model import ModelConfig
from octavo.config.options import make_engine_args
from octavo.config.platform_traits import PlatformTraits, WorkspaceTraits
from octavo.config.weights import (
    bytes_by_form,
    choose_weights,
    matrix_forms,
    report_kernels,
    weight_choice,
    weights_note,
)
from octavo.errors import InvalidInput

MODEL = ModelConfig(
    architecture="LlamaForCausalLM", vocab_size=64, hidden_size=64, intermediate_size=64, num_layers=1, num_heads=1,
    num_kv_heads=1, head_dim=64, max_position_embeddings=64, dtype="quantized",
)  # fmt: skip
KEPT = {"int4": 3200, "int8": 320, "float": 64, "vector": 10}


class Sizes:
    """3584 weights in matrices and 10 others, of a GGUF file in few bits or of floats."""

    def __init__(self, quantized=True):
        self.quantized = quantized

    def elements(self, quantization):
        if quantization == "none":
            return {"float": 3584, "vector": 10}
        if (quantization == "gguf") != self.quantized:
            raise InvalidInput(f"quantization={quantization!r} cannot be here")
        return KEPT if quantization != "int8" else {"int8": 3584, "vector": 10}

    def loading_peak(self, choice):
        raise NotImplementedError


def traits(bits=(8, 4), auto="bfloat16"):
    return PlatformTraits(
        name="cpu",
        auto_dtype=(auto, "half is read"),
        kv_cache_dtypes=("float32",),
        workspace=WorkspaceTraits(scores_at_once=1, score_bytes=1, gathers_kv=False, sampling_bytes=1),
        weight_bits=bits,
    )


def choose(bits=(8, 4), sizes=None, model=MODEL, load_format="gguf", **options):
    return choose_weights(make_engine_args(**options), model, load_format, sizes or Sizes(), traits(bits))


def test_a_quantised_file_is_kept_in_few_bits_where_there_are_kernels_and_no_dtype_was_given():
    choice, dtype_reason, reason = choose()
    assert (choice.quantization, choice.dtype) == ("gguf", "bfloat16")
    assert dtype_reason == "half is read"
    assert "as the file has them" in reason


@pytest.mark.parametrize(
    ("bits", "options", "said"),
    [
        ((), {}, "no kernels for 4 bits and 8 bits"),
        ((8,), {}, "no kernels for 4 bits"),
        ((8, 4), {"dtype": "float32"}, "dtype=float32 asks for the dequantised weights"),
        ((8, 4), {"dtype": "bfloat16"}, "dtype=bfloat16 asks"),
        ((8, 4), {"quantization": "none"}, "as asked"),
    ],
)
def test_otherwise_it_is_dequantised_and_the_reason_said(bits, options, said):
    choice, _, reason = choose(bits, **options)
    assert choice.quantization == "none"
    assert choice.dtype == options.get("dtype", "bfloat16")
    assert said in reason


def test_a_quantization_that_is_asked_for_leaves_the_dtype_to_the_rest():
    choice, dtype_reason, reason = choose(quantization="gguf", dtype="float32")
    assert (choice.quantization, choice.dtype) == ("gguf", "float32")
    assert dtype_reason == reason == "as asked"


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_floats_and_random_weights_stay_floats_unless_asked_otherwise(load_format):
    choice, _, reason = choose(sizes=Sizes(quantized=False), load_format=load_format)
    assert (choice.quantization, reason) == ("none", "")
    choice, _, _ = choose(sizes=Sizes(quantized=False), load_format=load_format, quantization="int4")
    assert choice.quantization == "int4"


def test_what_the_weights_cannot_be_is_refused():
    with pytest.raises(InvalidInput, match="'int8' cannot be here"):
        choose(quantization="int8")


def test_without_kernels_few_bits_that_are_asked_for_are_dequantised_to_float32():
    for dtype in ("auto", "float32"):
        choice, reason, _ = choose((), quantization="gguf", dtype=dtype)
        assert (choice.quantization, choice.dtype) == ("gguf", "float32")
        assert "no kernels for few bits" in reason
    with pytest.raises(InvalidInput, match=r"quantization='gguf' with dtype='bfloat16': the cpu platform.*'float32'"):
        choose((), quantization="gguf", dtype="bfloat16")


def test_bytes_follow_from_the_forms():
    sizes = Sizes()
    assert bytes_by_form(sizes, weight_choice("bfloat16", "gguf", traits())) == {
        "int4": 100 * 20, "int8": 10 * 34, "bfloat16": 2 * 74,
    }  # fmt: skip
    assert bytes_by_form(sizes, weight_choice("float32", "gguf", traits((8,)))) == {
        "int4 dequantised to float32": 4 * 3200, "int8": 10 * 34, "float32": 4 * 74,
    }  # fmt: skip
    assert bytes_by_form(sizes, weight_choice("float16", "none", traits())) == {"float16": 2 * 3594}


def test_norms_and_biases_make_no_form_of_matrices():
    choice = weight_choice("bfloat16", "gguf", traits())
    assert matrix_forms(Sizes(), choice) == ("int4", "int8", "bfloat16")
    only = Sizes(quantized=False)
    assert matrix_forms(only, weight_choice("bfloat16", "int8", traits())) == ("int8",)


def test_the_note_and_the_report_name_the_forms():
    choice = weight_choice("bfloat16", "gguf", traits())
    note = weights_note(bytes_by_form(Sizes(), choice), choice, "as asked")
    assert note == "weights: int4 1.95 KiB + int8 340 B + bfloat16 148 B (quantization gguf: as asked)"
    kernels = {"linear": "k", "embedding": "k", "norm": "k"}
    worker = WorkerConfig(platform="cpu", dtype="bfloat16", kv_cache_dtype="int8", num_threads=1)
    assert report_kernels(kernels, worker) == kernels
    few = replace(worker, quantization="gguf", weight_forms=("int4",))
    assert report_kernels(kernels, few) == {"linear": "k: int4", "embedding": "k: int4", "norm": "k"}


@pytest.mark.parametrize(
    ("value", "said"), [("awq", "not built yet"), ("fp8", "not built yet"), ("q4", "not supported")]
)
def test_other_quantizations_are_refused_with_those_there_are(value, said):
    with pytest.raises(InvalidInput, match=rf"quantization='{value}'.* {said}.*; use none, gguf, int8 or int4"):
        make_engine_args(quantization=value)
