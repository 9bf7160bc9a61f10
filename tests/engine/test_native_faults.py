"""What the native kernels cannot do is refused in one sentence with a way out, and nothing outlives a bad request."""

import pytest
import torch
from tiny_models import LLAMA, random_weights, write_model

from octavo import SamplingParams


@pytest.fixture(autouse=True)
def _native():
    pytest.importorskip("octavo.ops.cpu._native")


def test_a_head_size_without_a_kernel_is_refused_before_loading_with_the_option_that_runs_it(
    make_llm, tmp_path, monkeypatch
):
    model = write_model(tmp_path / "odd", head_dim=20)
    with monkeypatch.context() as patched:
        patched.setattr("octavo.worker.worker.Worker.load_model", lambda *_: pytest.fail("it was loaded"))
        with pytest.raises(ValueError, match=r"head size is 20, .*multiples of 8; use platform='reference'"):
            make_llm(model)
    assert make_llm(model, platform="reference").generate([1, 2], SamplingParams(temperature=0, max_tokens=2))


def test_more_threads_than_the_pool_takes_are_refused_before_anything_is_loaded(make_llm):
    with pytest.raises(ValueError, match=r"num_threads=1025 must be an integer between 1 and 1024"):
        make_llm(num_threads=1025)


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_blocks_that_held_nan_leave_nothing_to_their_next_owner(make_llm, tmp_path, kv_cache_dtype, num_threads):
    weights = random_weights(LLAMA)
    weights["model.embed_tokens.weight"][5] = torch.nan
    llm = make_llm(
        write_model(tmp_path / "damaged", weights=weights),
        num_kv_blocks=16,
        block_size=32,
        kv_cache_dtype=kv_cache_dtype,
        num_threads=num_threads,
    )
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=-1, ignore_eos=True)

    def answers() -> list:
        llm.reset_prefix_cache()
        outputs = llm.generate([[7] * 70, [8] * 3], params, use_tqdm=False)
        return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]

    before = answers()
    failed = llm.generate([[5] * 200, [5] * 200], params, use_tqdm=False)
    assert all("not finite" in str(output.outputs[0].stop_reason) for output in failed)
    assert answers() == before
    llm.audit()


def test_another_instruction_set_is_refused_while_an_engine_computes_with_the_first(make_llm, monkeypatch):
    from octavo.ops.cpu import _native

    others = [isa for isa in _native.supported_isas() if isa != _native.isa()]
    if not others:
        pytest.skip("this machine has one instruction set")
    params = SamplingParams(temperature=0, max_tokens=4)
    llm, isa = make_llm(), _native.isa()
    before = llm.generate([1, 2], params, use_tqdm=False)[0].outputs[0].token_ids
    monkeypatch.setenv("OCTAVO_CPU_ISA", others[0])
    with pytest.raises(ValueError, match=f"would change to {others[0]}.* computes with {isa}"):
        make_llm()
    assert llm.generate([1, 2], params, use_tqdm=False)[0].outputs[0].token_ids == before
    llm.close()
    assert make_llm().kernel_report()["linear"] == f"cpu ({others[0]})"
    # the instruction set is the process's: it is put back for the tests that follow
    monkeypatch.delenv("OCTAVO_CPU_ISA")
