"""OpenVINO GenAI with its continuous batching: a paged KV cache, chunked prompts and prefix caching, step by step.

It imports nothing of the engine it is compared with: it may run in another environment. It reads GGUF files with
weights of 16 bits or fewer, no float32. KV utilisation is the tokens of running requests over the slots of the
blocks in use; not known where requests share blocks.
"""

import json
import os
import resource
import sys
import time
from importlib import import_module
from typing import Any

CHUNK = 512
"""Tokens of a step at most."""
BLOCK_SIZE = 32
"""Tokens of a KV block on a CPU."""
KV_PRECISION = "f16"
"""As fast as float32 and as its own choice, 8 bits, which would compute something else."""
KV_PRECISIONS = {"int8": "u8"}
"""For the dtypes in which another one is the same."""
PRECISIONS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


class Engine:
    """A loaded model."""

    def __init__(self, genai: Any, options: dict[str, Any]) -> None:
        config = genai.SchedulerConfig()
        config.max_num_seqs = options["max_num_seqs"]
        config.max_num_batched_tokens = max(CHUNK, options["max_num_seqs"])
        self.num_blocks: int = options["max_num_seqs"] * (-(-options["max_len"] // BLOCK_SIZE) + 1)
        config.num_kv_blocks = self.num_blocks
        config.enable_prefix_caching = True
        config.dynamic_split_fuse = True
        self.kv_precision = KV_PRECISIONS.get(options["kv_cache_dtype"], KV_PRECISION)
        properties = {
            "INFERENCE_PRECISION_HINT": PRECISIONS[options["dtype"]],
            "KV_CACHE_PRECISION": self.kv_precision,
            "INFERENCE_NUM_THREADS": options["num_threads"],
        }
        self._genai = genai
        self._pipeline = genai.ContinuousBatchingPipeline(options["model"], config, "CPU", properties)
        self._number = 0

    def add(self, prompt: list[int], wanted: int) -> Any:
        """Queue a request; what comes back gives its tokens."""
        numpy, openvino = import_module("numpy"), import_module("openvino")
        config = self._genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = wanted
        config.ignore_eos, config.do_sample = True, False
        self._number += 1
        return self._pipeline.add_request(self._number, openvino.Tensor(numpy.array([prompt], numpy.int64)), config)

    def step(self) -> None:
        self._pipeline.step()

    def is_busy(self) -> bool:
        return bool(self._pipeline.has_non_finished_requests())

    def slots_in_use(self) -> float:
        """Tokens for which blocks are held by running requests."""
        usage: float = self._pipeline.get_metrics().cache_usage
        return usage / 100 * self.num_blocks * BLOCK_SIZE


class Request:
    """One of those that are computed."""

    def __init__(self, engine: Engine, prompt: list[int], wanted: int) -> None:
        self.prompt_len, self.wanted = len(prompt), wanted
        self.times: list[float] = []
        self._handle = engine.add(prompt, wanted)

    def read(self, now: float) -> None:
        """Take what a step has added."""
        if self._handle.can_read():
            (output,) = self._handle.read().values()
            self.times += [now] * len(output.generated_ids)

    @property
    def is_done(self) -> bool:
        return len(self.times) >= self.wanted

    @property
    def num_tokens(self) -> int:
        """In the KV cache; of a prompt that has no token yet nothing is known."""
        return self.prompt_len + len(self.times) - 1 if self.times else 0


def run(engine: Engine, work: list[tuple[list[int], int]]) -> dict[str, Any]:
    """Compute all requests, all there at once."""
    used: list[float] = []
    start = time.perf_counter()
    requests = [Request(engine, prompt, wanted) for prompt, wanted in work]
    running = list(requests)
    while engine.is_busy():
        engine.step()
        now = time.perf_counter()
        for request in running:
            request.read(now)
        running = [request for request in running if not request.is_done]
        # while some prompts are not whole nobody says how much of them is there
        if running and all(request.times for request in running) and (slots := engine.slots_in_use()):
            used.append(sum(request.num_tokens for request in running) / slots)
    seconds = time.perf_counter() - start
    missing = [request for request in requests if not request.is_done]
    if missing:
        raise SystemExit(f"OpenVINO ended {len(missing)} of {len(requests)} requests early")
    return {
        "seconds": seconds,
        "output_tokens": sum(wanted for _, wanted in work),
        "latencies": [request.times[-1] - start for request in requests],
        "between_tokens": [
            after - before
            for request in requests
            for before, after in zip(request.times, request.times[1:], strict=False)
        ],
        "kv_utilization": sum(used) / len(used) if used and max(used) <= 1 else None,
        "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    }


def main(text: str) -> None:
    """Serve the lines of stdin until they end."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    begun = time.perf_counter()
    options = json.loads(text)
    genai = import_module("openvino_genai")
    engine = Engine(genai, options)
    hello = {"version": genai.__version__, "load": time.perf_counter() - begun}
    print(json.dumps({**hello, "kv_dtype": engine.kv_precision, "block_size": BLOCK_SIZE}), file=answers)
    for line in sys.stdin:
        print(json.dumps(run(engine, json.loads(line)["requests"])), file=answers)


if __name__ == "__main__":
    main(sys.argv[1])
