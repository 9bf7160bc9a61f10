"""transformers in its best static batches: sorted by output length so that a batch wastes little, left-padded, KV
cache on. KV utilisation is used tokens over the slots of the padded rectangle at a batch's end.

It imports nothing of this package: it may run in another environment. The library is a rival here and no part of the
engine, which is why it is imported by name.
"""

import json
import os
import resource
import sys
import time
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any


class Clock:
    """A logits processor that notes when each step's logits are there, and changes nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.times.append(time.perf_counter())
        return scores


def load(options: dict[str, Any]) -> tuple[Any, str]:
    """(the model, the library's version) for {model, dtype, num_threads}; the model is a folder or a .gguf file."""
    torch, transformers = import_module("torch"), import_module("transformers")
    if options["num_threads"]:
        torch.set_num_threads(options["num_threads"])
    path = Path(options["model"])
    where = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    folder = path.parent if where else path
    dtype = getattr(torch, options["dtype"])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **where).eval()
    return model, transformers.__version__


def run(model: Any, requests: list[tuple[list[int], int]], batch_size: int) -> dict[str, Any]:
    """Compute all requests; a request has its whole answer when its batch ends."""
    ordered = sorted(requests, key=lambda request: (request[1], len(request[0])))
    used, allocated = 0, 0
    latencies: list[float] = []
    between: list[float] = []
    start = time.perf_counter()
    for first in range(0, len(ordered), batch_size):
        batch = ordered[first : first + batch_size]
        times = _generate(model, batch)
        latencies += [time.perf_counter() - start] * len(batch)
        for _, wanted in batch:
            between += [after - before for before, after in pairwise(times[:wanted])]
        used += sum(len(ids) + wanted for ids, wanted in batch)
        allocated += len(batch) * (max(len(ids) for ids, _ in batch) + max(wanted for _, wanted in batch))
    return {
        "seconds": time.perf_counter() - start,
        "output_tokens": sum(wanted for _, wanted in requests),
        "latencies": latencies,
        "between_tokens": between,
        "kv_utilization": used / allocated,
        "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    }


def _generate(model: Any, batch: list[tuple[list[int], int]]) -> list[float]:
    """The moments at which a batch's tokens were there."""
    torch = import_module("torch")
    clock = Clock()
    width, length = max(len(ids) for ids, _ in batch), max(wanted for _, wanted in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (prompt, _) in enumerate(batch):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    with torch.inference_mode():
        model.generate(
            input_ids=ids, attention_mask=mask, do_sample=False, use_cache=True, pad_token_id=0,
            max_new_tokens=length, min_new_tokens=length, logits_processor=[clock],
        )  # fmt: skip
    return clock.times


def main(options: str) -> None:
    """Serve the lines of stdin until they end."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    begun = time.perf_counter()
    model, version = load(json.loads(options))
    print(json.dumps({"version": version, "load": time.perf_counter() - begun}), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(run(model, asked["requests"], asked["batch_size"])), file=answers)


if __name__ == "__main__":
    main(sys.argv[1])
