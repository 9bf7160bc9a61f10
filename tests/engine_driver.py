"""Drives an LLM step by step through a script, over hostile memory: shuffled block ids, NaN in free blocks."""

import random
from dataclasses import dataclass, field

import torch

from octavo import LLM, RequestOutput, SamplingParams
from octavo.scheduler.scheduler import Scheduler
from octavo.worker.model_runner import ModelRunner


@dataclass(frozen=True)
class ScriptedRequest:
    """A request, the step before which it arrives, and the step before which it is aborted (None: never)."""

    prompt: tuple[int, ...]
    params: SamplingParams
    arrival: int = 0
    abort: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    tenant: str | None = None


@dataclass
class Run:
    """What came of a script: the last output of each request, and what the scheduler did."""

    outputs: list[RequestOutput]
    num_preemptions: int
    chunks: list[int] = field(default_factory=list)
    """For each request, in how many steps tokens of its prompt were computed."""


def shuffle_blocks(llm: LLM, seed: int) -> None:
    """Hand out physical blocks in a random order from now on. Only before the first request."""
    engine = llm.llm_engine
    order = list(range(engine.config.cache.num_blocks))
    random.Random(seed).shuffle(order)
    engine.client.core.scheduler = Scheduler(engine.config.scheduler, engine.config.cache, free_order=order)


def free_block_ids(scheduler: Scheduler) -> list[int]:
    """Blocks that nobody holds and that are not cached."""
    return [block.block_id for block in scheduler._kv.pool.blocks if block.ref_count == 0 and block.content is None]


def model_runner_of(llm: LLM) -> ModelRunner:
    """What runs the steps of an engine in this process."""
    return llm.llm_engine.client.core.executor.worker.runner


def poison_free_blocks(llm: LLM) -> None:
    """Overwrite every block that nobody holds and that is not cached with NaN."""
    core = llm.llm_engine.client.core
    free = torch.tensor(free_block_ids(core.scheduler), dtype=torch.int64)
    with torch.inference_mode():
        for cache in model_runner_of(llm).kv_caches:
            _fill_with_nan(cache.k, free)
            _fill_with_nan(cache.v, free)


def run_script(llm: LLM, script: list[ScriptedRequest], *, max_steps: int = 20_000) -> Run:
    """Play the script to its end; the audit must hold after every step."""
    engine = llm.llm_engine
    before = llm.get_metrics()["num_preemptions"]
    last: dict[str, RequestOutput] = {}
    chunks = [0] * len(script)
    original = engine.client.core.executor.execute_model

    def count_chunks(step):
        for request_id, computed in zip(step.request_ids, step.num_computed_tokens, strict=True):
            index = int(request_id.rpartition("_")[2])  # with n > 1 the id of a sample is "{sample}_{request}"
            chunks[index] += computed < len(script[index].prompt)
        return original(step)

    engine.client.core.executor.execute_model = count_chunks
    for number in range(max_steps):
        for index, request in enumerate(script):
            if request.arrival == number:
                prompt = {"prompt_token_ids": list(request.prompt), "cache_salt": request.cache_salt}
                message, text = engine.prepare(str(index), prompt, request.params, request.priority)
                message.tenant = request.tenant
                engine.submit(message, text)
            if request.abort == number:
                engine.abort_request([str(index)])
        if number > max(request.arrival for request in script) and not engine.has_unfinished_requests():
            break
        poison_free_blocks(llm)
        last.update({output.request_id: output for output in engine.step()})
        llm.audit()
    else:
        raise AssertionError(f"not done after {max_steps} steps")
    engine.client.core.executor.execute_model = original
    last.update({output.request_id: output for output in engine.collect()})
    preemptions = int(llm.get_metrics()["num_preemptions"]) - int(before)
    return Run([last[str(index)] for index in range(len(script))], preemptions, chunks)


def _fill_with_nan(part: torch.Tensor, blocks: torch.Tensor) -> None:
    """Every float type reads these bytes as NaN; the scales of an int8 cache are among them."""
    part.view(torch.uint8)[blocks] = 0xFF
