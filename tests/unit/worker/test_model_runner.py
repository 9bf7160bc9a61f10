"""Steps of the runner over a tiny model, without a scheduler."""

from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import VOCAB_SIZE, write_model

from octavo.config.engine_config import CacheConfig, LoadConfig, ParallelConfig, SchedulerConfig, WorkerConfig
from octavo.loader.checkpoint import open_checkpoint
from octavo.protocol.messages import PromptEmbeds, TokenLogprobs
from octavo.protocol.sampling_params import SamplingParams
from octavo.protocol.scheduler_output import ModelRunnerOutput, NewRequest, SchedulerOutput
from octavo.sampling.logits_processors import LogitsProcessor
from octavo.worker.worker import Worker

NUM_BLOCKS, BLOCK_SIZE = 64, 8


class Explosive(LogitsProcessor):
    """Raises where extra_args["at"] says: "init", or a number of output tokens."""

    def __init__(self, params, prompt_token_ids):
        self.at = params.extra_args["at"]
        if self.at == "init":
            raise RuntimeError("not even built")

    def __call__(self, output_token_ids, logits):
        if len(output_token_ids) == self.at:
            raise RuntimeError("boom")
        return logits


EXPLOSIVE = f"{__name__}:Explosive"


@pytest.fixture(scope="module")
def worker(tmp_path_factory) -> Worker:
    path = write_model(tmp_path_factory.mktemp("tiny"))
    config = WorkerConfig(platform="reference", dtype="float32", kv_cache_dtype="float32", num_threads=1)
    model = open_checkpoint(path, "safetensors").config
    worker = Worker(config, model, LoadConfig(path=path, load_format="safetensors"), ParallelConfig())
    worker.load_model(256)
    scheduler = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=256)
    worker.initialize_cache(scheduler, CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE), VOCAB_SIZE)
    return worker


@pytest.fixture
def runner(worker):
    worker.reset()
    with torch.inference_mode():
        for cache in worker.runner.kv_caches:
            cache.k.fill_(torch.nan)
            cache.v.fill_(torch.nan)
    return worker.runner


def new(name, token_ids, blocks, num_prompt=None, embeds=None, sample_index=0, **params) -> NewRequest:
    return NewRequest(
        request_id=name,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids) if num_prompt is None else num_prompt,
        block_ids=list(blocks),
        sampling_params=SamplingParams(**{"temperature": 0.0, "logprobs": 3, **params}),
        prompt_embeds=embeds,
        sample_index=sample_index,
    )


def run(runner, work: dict[str, tuple[int, int]], **kwargs) -> ModelRunnerOutput:
    """work: request id -> (tokens already computed, tokens scheduled)."""
    runner.execute(
        SchedulerOutput(
            request_ids=list(work),
            num_computed_tokens=[computed for computed, _ in work.values()],
            num_scheduled_tokens=[count for _, count in work.values()],
            **kwargs,
        )
    )
    return runner.sample()


def generate(runner, request: NewRequest, chunks: list[int], num_tokens: int) -> list[tuple[int, TokenLogprobs]]:
    """The prompt in chunks, then token by token."""
    done, result = 0, []
    for number, chunk in enumerate([*chunks, *[1] * (num_tokens - 1)]):
        output = run(runner, {request.request_id: (done, chunk)}, new_requests=[] if number else [request])
        done += chunk
        if output.sampled_token_ids[0]:
            result.append((output.sampled_token_ids[0][0], output.logprobs[request.request_id][0]))
    return result


def assert_close(got: list[TokenLogprobs], expected: list[TokenLogprobs]) -> None:
    """Equal but for the last digits, which the reference platform's products do not keep from chunk to chunk."""
    assert [entry.token_ids for entry in got] == [entry.token_ids for entry in expected]
    assert [entry.sampled_rank for entry in got] == [entry.sampled_rank for entry in expected]
    for one, other in zip(got, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


PROMPT = [(37 * i + 11) % 250 for i in range(150)]
BLOCKS = range(40, 60)


def prompt_logprobs(runner, chunks: list[int], **params) -> list[TokenLogprobs]:
    done, entries = 0, []
    for chunk in chunks:
        request = new("a", PROMPT, BLOCKS, **{"prompt_logprobs": 2, **params})
        output = run(runner, {"a": (done, chunk)}, new_requests=[] if done else [request])
        got = output.prompt_logprobs.get("a", [])
        assert len(got) == min(done + chunk, len(PROMPT) - 1) - done
        entries += got
        done += chunk
    runner.rows.clear()
    return entries


@pytest.fixture(scope="module")
def oracle(worker) -> torch.Tensor:
    """Logits [150, vocab] of every prompt position, in one forward, float64."""
    worker.reset()
    runner = worker.runner
    kept = {}
    forward = runner.model.forward

    def keep(x, ctx):
        kept["hidden"] = forward(x, ctx)
        return kept["hidden"]

    runner.model.forward = keep
    run(runner, {"a": (0, len(PROMPT))}, new_requests=[new("a", PROMPT, BLOCKS)])
    del runner.model.forward
    worker.reset()
    with torch.inference_mode():
        return runner.model.compute_logits(kept["hidden"]).double().clone()


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
def test_prompt_logprobs_are_of_the_raw_logits_of_each_position(runner, oracle, mode):
    entries = prompt_logprobs(
        runner, [len(PROMPT)], logprobs_mode=mode, temperature=0.3, top_k=1, repetition_penalty=3.0, prompt_logprobs=-1
    )
    values = oracle if mode.endswith("logits") else oracle.log_softmax(-1)
    assert len(entries) == len(PROMPT) - 1
    for position, entry in enumerate(entries):
        assert entry.token_ids[0] == PROMPT[position + 1]
        assert entry.token_ids[1:] == oracle[position].sort(descending=True, stable=True).indices.tolist()
        assert entry.logprobs == pytest.approx(values[position, entry.token_ids].tolist(), abs=1e-4)
        assert entry.token_ids[entry.sampled_rank] == entry.token_ids[0]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 149), max_size=6, unique=True))
def test_prompt_logprobs_are_equal_for_every_chunking(runner, cuts):
    edges = [0, *sorted(cuts), len(PROMPT)]
    chunks = [stop - start for start, stop in pairwise(edges)]
    assert_close(prompt_logprobs(runner, chunks), prompt_logprobs(runner, [len(PROMPT)]))


def test_no_more_than_64_rows_of_logits_are_kept_for_a_prompt(runner, monkeypatch):
    sizes = []
    compute = runner.model.compute_logits
    monkeypatch.setattr(runner.model, "compute_logits", lambda hidden: (sizes.append(len(hidden)), compute(hidden))[1])
    prompt_logprobs(runner, [len(PROMPT)])
    assert sorted(sizes) == [1, 21, 64, 64]


def test_prompt_logprobs_go_to_those_who_asked_in_a_mixed_step(runner):
    requests = [
        new("a", PROMPT[:20], range(3)), new("b", PROMPT[:9], range(3, 5), prompt_logprobs=0),
        new("c", PROMPT[5:30], range(5, 9), prompt_logprobs=4), new("d", PROMPT[:1], [9], prompt_logprobs=4),
        new("e", PROMPT[:9], range(10, 12), prompt_logprobs=1),
    ]  # fmt: skip
    work = {"a": (0, 20), "b": (0, 9), "c": (0, 12), "d": (0, 1), "e": (0, 1)}
    output = run(runner, work, new_requests=requests)
    assert {name: len(entries) for name, entries in output.prompt_logprobs.items()} == {"b": 8, "c": 12, "e": 1}
    alone = run(runner, {"x": (0, 12)}, new_requests=[new("x", PROMPT[5:30], range(30, 34), prompt_logprobs=4)])
    assert_close(output.prompt_logprobs["c"], alone.prompt_logprobs["x"])
    rest = run(runner, {"c": (12, 13), "b": (9, 1)})
    assert {name: len(entries) for name, entries in rest.prompt_logprobs.items()} == {"c": 12}


def test_a_request_resumed_after_output_gives_prompt_logprobs_of_its_prompt_only(runner):
    whole = new("a", PROMPT[:8], range(2), prompt_logprobs=1)
    resumed = new("b", PROMPT[:12], range(2, 4), num_prompt=8, prompt_logprobs=1)
    output = run(runner, {"a": (0, 8), "b": (0, 12)}, new_requests=[whole, resumed])
    assert_close(output.prompt_logprobs["b"], output.prompt_logprobs["a"])


def embeds_of(runner, token_ids: list[int], dtype=torch.float32) -> PromptEmbeds:
    with torch.inference_mode():
        x = runner.model.embed(torch.tensor(token_ids)).to(dtype)
    data = x.contiguous().view(torch.uint8).numpy().tobytes()
    return PromptEmbeds(data, str(dtype).removeprefix("torch."), tuple(x.shape))


@pytest.mark.parametrize("chunks", [[23], [5, 18], [1, 1, 20, 1]])
def test_embeddings_of_tokens_are_equal_to_the_tokens_whatever_the_chunks(runner, chunks):
    prompt = PROMPT[:23]
    expected = generate(runner, new("ids", prompt, range(5)), chunks, 6)
    embeds = embeds_of(runner, prompt)
    got = generate(runner, new("embeds", [0] * 23, range(10, 15), embeds=embeds), chunks, 6)
    assert got == expected


def test_a_resumed_request_takes_its_embeddings_and_its_own_output_tokens(runner):
    prompt = PROMPT[:23]
    embeds = embeds_of(runner, prompt)
    expected = generate(runner, new("a", prompt, range(5)), [23], 6)
    output = [token for token, _ in expected[:4]]
    resumed = new("b", [0] * 23 + output, range(10, 15), num_prompt=23, embeds=embeds)
    got = generate(runner, resumed, [20, 7], 2)
    assert [token for token, _ in got] == [token for token, _ in expected[4:]]
    assert_close([entry for _, entry in got], [entry for _, entry in expected[4:]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_embeddings_may_be_of_another_dtype_than_the_model(runner, dtype):
    embeds = embeds_of(runner, PROMPT[:9], dtype)
    rounded = runner.model.embed(torch.tensor(PROMPT[:9])).to(dtype).float().contiguous()
    exact = PromptEmbeds(rounded.view(torch.uint8).numpy().tobytes(), "float32", tuple(rounded.shape))
    got = generate(runner, new("a", [0] * 9, range(2), embeds=embeds), [9], 3)
    assert got == generate(runner, new("b", [0] * 9, range(2, 4), embeds=exact), [9], 3)


def test_embeddings_leave_the_other_requests_of_the_step_alone(runner):
    embeds = embeds_of(runner, PROMPT[50:70])
    requests = [
        new("a", PROMPT[:20], range(3)), new("b", [0] * 20, range(3, 6), embeds=embeds), new("c", [0, 0], [6])
    ]  # fmt: skip
    work = {"a": (0, 20), "b": (0, 20), "c": (0, 2)}
    output = run(runner, work, new_requests=requests)
    for index, (name, prompt) in enumerate([("x", PROMPT[:20]), ("y", PROMPT[50:70]), ("z", [0, 0])]):
        alone = run(runner, {name: (0, len(prompt))}, new_requests=[new(name, prompt, range(20, 23))])
        assert output.sampled_token_ids[index] == alone.sampled_token_ids[0]
        assert_close(output.logprobs["abc"[index]], alone.logprobs[name])


def test_blocks_are_copied_in_every_layer_before_the_step_computes(runner):
    prompt = PROMPT[:12]
    expected = generate(runner, new("a", prompt, [0, 1]), [12], 5)
    # The copy shares the first block and goes on in a copy of the second, while the first one writes on in its own.
    fork = new("b", [*prompt, expected[0][0]], [0, 2], num_prompt=12)
    output = run(runner, {"b": (12, 1)}, new_requests=[fork], block_copies=[(1, 2)])
    assert (output.sampled_token_ids[0][0], output.logprobs["b"][0]) == expected[1]


def test_every_source_is_read_before_a_target_is_written(runner):
    with torch.inference_mode():
        for block in range(3):
            for cache in runner.kv_caches:
                cache.k[block] = cache.v[block] = block
    request = new("a", [1], [9])
    run(runner, {"a": (0, 1)}, new_requests=[request], block_copies=[(0, 1), (1, 2), (2, 0)])
    for cache in runner.kv_caches:
        for part in cache:
            assert [part[block].unique().tolist() for block in range(3)] == [[2.0], [0.0], [1.0]]


def test_a_processor_that_raises_ends_its_request_and_no_other(runner):
    expected = generate(runner, new("plain", PROMPT[:9], range(2)), [9], 3)
    broken = new("broken", PROMPT[:9], range(2, 4), logits_processors=[EXPLOSIVE], extra_args={"at": 1})
    other = new("other", PROMPT[:9], range(4, 6), logits_processors=[EXPLOSIVE], extra_args={"at": 99})
    output = run(runner, {"broken": (0, 9), "other": (0, 9)}, new_requests=[broken, other])
    assert output.failed == {}
    assert output.sampled_token_ids == [[expected[0][0]]] * 2
    output = run(runner, {"broken": (9, 1), "other": (9, 1)})
    assert list(output.failed) == ["broken"]
    assert "RuntimeError: boom" in output.failed["broken"]
    assert output.sampled_token_ids == [[], [expected[1][0]]]
    assert "broken" not in output.logprobs
    output = run(runner, {"other": (10, 1)}, released_request_ids=["broken"])
    assert output.sampled_token_ids == [[expected[2][0]]]
    assert output.failed == {}


@pytest.mark.parametrize("path", [EXPLOSIVE, "no_such_package_anywhere:X"])
def test_a_processor_that_cannot_be_built_fails_in_its_first_step_even_if_no_token_is_due(runner, path):
    broken = new("broken", PROMPT[:20], range(3), logits_processors=[path], extra_args={"at": "init"})
    whole = new("whole", PROMPT[:20], range(3, 6), logits_processors=[path], extra_args={"at": "init"})
    other = new("other", PROMPT[:9], range(6, 8))
    output = run(runner, {"broken": (0, 5), "whole": (0, 20), "other": (0, 9)}, new_requests=[broken, whole, other])
    assert set(output.failed) == {"broken", "whole"}
    assert [len(tokens) for tokens in output.sampled_token_ids] == [0, 0, 1]
    assert list(output.logprobs) == ["other"]
    again = new("broken", PROMPT[:20], range(3))
    output = run(runner, {"broken": (0, 20)}, new_requests=[again], released_request_ids=["broken", "whole"])
    assert output.failed == {}
    assert len(output.sampled_token_ids[0]) == 1


def test_masks_that_leave_no_token_end_the_request_and_no_other(runner):
    stuck = new("stuck", PROMPT[:9], range(2), allowed_token_ids=[7])
    stuck.bad_words_token_ids = [[7, 7]]
    output = run(
        runner, {"stuck": (0, 9), "other": (0, 9)}, new_requests=[stuck, new("other", PROMPT[:9], range(2, 4))]
    )
    assert output.sampled_token_ids[0] == [7]
    output = run(runner, {"stuck": (9, 1), "other": (9, 1)})
    assert "no token is left" in output.failed["stuck"]
    assert [len(tokens) for tokens in output.sampled_token_ids] == [0, 1]
