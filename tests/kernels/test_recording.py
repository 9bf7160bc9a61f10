"""A replayed forward gives the bits of the forward it was recorded from, and one that cannot be replayed is not."""

import threading
from collections.abc import Callable

import pytest
import torch
from engine_driver import model_runner_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import LLAMA, QWEN2, write_model
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.ops.interface import AttentionMetadata

pytest.importorskip("octavo.ops.cpu._native", reason="this installation has no native kernels")

from octavo.ops.cpu import _native, elementwise, linear, recording
from octavo.ops.cpu.recording import NotReplayable, RecordedForward, record

BLOCK_SIZE = 16
NUM_BLOCKS = 24


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def runner(request, tmp_path_factory):
    family = QWEN2 if request.param == "qwen2" else LLAMA
    path = write_model(tmp_path_factory.mktemp(request.param), family)
    with LLM(str(path), platform="cpu", num_kv_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE) as llm:
        yield model_runner_of(llm)


def example(num_tokens: int) -> tuple[Tensor, Tensor, AttentionMetadata]:
    metadata = AttentionMetadata(
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        query_start_loc=torch.tensor([0, num_tokens], dtype=torch.int32),
        seq_lens=torch.tensor([num_tokens], dtype=torch.int32),
        slot_mapping=torch.arange(num_tokens),
    )
    return torch.randn(num_tokens, 24), torch.arange(num_tokens), metadata


def record_of(forward: Callable) -> RecordedForward:
    return record(forward, [example(2), example(3)])


def test_the_models_of_this_project_are_replayed(runner):
    assert isinstance(runner._forward, RecordedForward)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 24)), min_size=1, max_size=4), st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
@torch.inference_mode()
def test_a_replay_gives_the_bits_of_the_forward(runner, requests, seed):
    """requests: (tokens computed before, tokens of this step) of each; the KV before is random, the same for both."""
    generator = torch.Generator().manual_seed(seed)
    x, positions, metadata = step_of(requests, runner.model.config.hidden_size, generator)
    for cache in runner.kv_caches:
        for part in cache:
            part.normal_(generator=generator)
    before = [part.clone() for cache in runner.kv_caches for part in cache]
    expected = runner._run_model(x.clone(), positions, metadata)
    written = [part.clone() for cache in runner.kv_caches for part in cache]
    for part, value in zip((part for cache in runner.kv_caches for part in cache), before, strict=True):
        part.copy_(value)
    metadata.plans.clear()
    memory = torch.full((runner._forward.num_bytes(len(x)),), 255, dtype=torch.uint8)  # NaN
    replayed = runner._forward.run_in(memory, x, positions, metadata)
    assert torch.equal(replayed, expected)
    now = [part for cache in runner.kv_caches for part in cache]
    assert all(torch.equal(a, b) for a, b in zip(now, written, strict=True))


def step_of(requests, hidden_size, generator):
    width = max(-(-(before + count) // BLOCK_SIZE) for before, count in requests)
    tables = torch.randperm(NUM_BLOCKS, generator=generator)[: len(requests) * width].view(-1, width)
    starts = [0]
    positions, slots = [], []
    for (before, count), table in zip(requests, tables, strict=True):
        starts.append(starts[-1] + count)
        own = torch.arange(before, before + count)
        positions.append(own)
        slots.append(table[own // BLOCK_SIZE] * BLOCK_SIZE + own % BLOCK_SIZE)
    metadata = AttentionMetadata(
        block_tables=tables.int().contiguous(),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor([before + count for before, count in requests], dtype=torch.int32),
        slot_mapping=torch.cat(slots),
    )
    return torch.randn(starts[-1], hidden_size, generator=generator), torch.cat(positions), metadata


NORM = torch.rand(24) + 0.5


def test_a_chain_of_operators_is_replayed_for_any_number_of_tokens():
    weight = linear.pack_linear(torch.randn(48, 24), torch.randn(48))
    back = linear.pack_linear(torch.randn(24, 24), None)

    def forward(x: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        total = x
        for _ in range(5):
            x, total = elementwise.fused_add_rms_norm(x, total, NORM, 1e-5)
            both = linear.linear(x, weight)
            x = linear.linear(elementwise.silu_and_mul(both), back)
        return elementwise.rms_norm(x, NORM, 1e-5)

    replay = record_of(forward)
    for num_tokens in (1, 2, 7, 100):
        inputs = example(num_tokens)
        assert torch.equal(replay(*inputs), forward(*inputs))


def test_memory_of_tensors_that_are_done_with_is_used_again():
    weights = [linear.pack_linear(torch.randn(24, 24), None) for _ in range(20)]

    def forward(x: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        for weight in weights:
            x = linear.linear(x, weight)
        return x

    assert record_of(forward).num_bytes(16) <= 3 * 16 * 24 * 4


def test_a_step_of_torch_is_not_replayed():
    with pytest.raises(NotReplayable, match="aten::mul"):
        record_of(lambda x, positions, metadata: elementwise.rms_norm(x * 2, NORM, 1e-5))


def test_a_change_in_place_by_torch_is_not_replayed():
    with pytest.raises(NotReplayable, match="aten::add_"):
        record_of(lambda x, positions, metadata: elementwise.rms_norm(x, NORM, 1e-5).add_(1))


def test_calls_that_depend_on_the_number_of_tokens_are_not_replayed():
    def forward(x: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        for _ in range(len(x)):
            x = elementwise.rms_norm(x, NORM, 1e-5)
        return x

    with pytest.raises(NotReplayable, match="number of tokens"):
        record_of(forward)


def test_an_operand_that_depends_on_the_number_of_tokens_in_another_way_is_not_replayed():
    with pytest.raises(NotReplayable, match="rms_norm takes"):
        record_of(lambda x, positions, metadata: elementwise.rms_norm(x, NORM, 1 / len(x)))
    with pytest.raises(NotReplayable, match="for 2 tokens"):
        record_of(lambda x, positions, metadata: elementwise.rms_norm(x[1:], NORM, 1e-5))


def test_a_result_that_is_no_tensor_of_its_own_is_not_replayed():
    def forward(x: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        elementwise.rms_norm(x, NORM, 1e-5)
        return x

    with pytest.raises(NotReplayable, match="result"):
        record_of(forward)


def test_a_call_that_the_trace_does_not_see_is_found_by_its_replay():
    def forward(x: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        y = elementwise.rms_norm(x, NORM, 1e-5)
        y.numpy()[...] *= 2
        return y

    with pytest.raises(NotReplayable, match="other values"):
        record_of(forward)


def test_the_shortest_context_and_the_smallest_vocabulary_can_be_recorded(tmp_path):
    tiny = write_model(tmp_path / "tiny", {**LLAMA, "max_position_embeddings": 2})
    with LLM(str(tiny), platform="cpu", num_kv_blocks=4, max_model_len=2) as llm:
        assert isinstance(model_runner_of(llm)._forward, RecordedForward)
        assert llm.generate([[5]], SamplingParams(max_tokens=1), use_tqdm=False)[0].outputs[0].token_ids


def test_engines_of_several_thread_numbers_are_built_and_used_beside_each_other(tmp_path):
    path = str(write_model(tmp_path / "model", LLAMA))
    greedy = SamplingParams(temperature=0, max_tokens=3)
    failures: list[Exception] = []
    answers: set[tuple[int, ...]] = set()

    def build_and_use(num_threads: int) -> None:
        try:
            for _ in range(6):
                with LLM(path, platform="cpu", num_kv_blocks=8, num_threads=num_threads, disable_log_stats=True) as llm:
                    answers.add(tuple(llm.generate([[1, 2, 3]], greedy, use_tqdm=False)[0].outputs[0].token_ids))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=build_and_use, args=(count,)) for count in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert len(answers) == 1


def test_plans_that_differ_from_run_to_run_are_not_replayed():
    calls = iter(range(10))

    def forward(x: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        if next(calls):
            metadata.plans["extra"] = None
        return elementwise.rms_norm(x, NORM, 1e-5)

    with pytest.raises(NotReplayable, match="plans depend"):
        record_of(forward)


def test_a_tensor_of_a_size_of_its_own_is_not_replayed():
    def forward(x: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        fixed = x.new_empty(4, 24)
        elementwise._native.rms_norm(x.data_ptr(), 24, NORM.data_ptr(), 1e-5, fixed.data_ptr(), len(x), 24)
        return elementwise.rms_norm(fixed[: len(x)], NORM, 1e-5)

    with pytest.raises(NotReplayable, match="makes a tensor"):
        record_of(forward)


def test_a_forward_that_raises_leaves_no_trace_behind():
    def forward(x: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        elementwise.rms_norm(x, NORM, 1e-5)
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        record_of(forward)
    assert _native.end_trace() == []


def test_what_a_call_raises_is_raised_by_the_replay(runner):
    x, positions, metadata = example(3)
    x = torch.randn(3, runner.model.config.hidden_size)
    metadata.slot_mapping[1] = NUM_BLOCKS * BLOCK_SIZE
    with pytest.raises(IndexError, match="slot_mapping"):
        runner._forward(x, positions, metadata)


def test_inputs_that_are_not_contiguous_are_refused():
    replay = record_of(lambda x, positions, metadata: elementwise.rms_norm(x, NORM, 1e-5))
    _, positions, metadata = example(4)
    with pytest.raises(ValueError, match="contiguous"):
        replay(torch.randn(24, 4).t(), positions, metadata)


@pytest.mark.parametrize(
    ("name", "operands", "patches"),
    [
        ("no_such_function", [1], []),
        ("rms_norm", [1, 2], []),
        ("rms_norm", [0, 24, 0, 1e-5, 0, 1, 24], [(7, 0, 1, 0)]),
        ("rms_norm", [0, 24, 0, 1e-5, 0, 1, 24], [(3, 0, 1, 0)]),
    ],
)
def test_a_program_refuses_calls_that_cannot_be(name, operands, patches):
    with pytest.raises(ValueError, match=name):
        _native.Program().add(name, operands, patches)


def test_a_program_refuses_to_run_without_its_slots():
    program = _native.Program()
    program.add("rms_norm", [0, 24, 0, 1e-5, 0, 0, 24], [(0, 4, 1, 0)])
    with pytest.raises(ValueError, match="5 slots"):
        program.run([1, 2])


def test_places_are_found_at_both_ends_of_a_tensor_and_not_beyond():
    made = torch.empty(2, 8)
    run = recording._Run(2, [], [made], example(2)[2], made, [])
    start = made.data_ptr()
    assert run.place(start) == (0, 0)
    assert run.place(start + made.nbytes - 1) == (0, made.nbytes - 1)
    assert run.place(start + made.nbytes) is None
    assert run.place(start - 1) is None
