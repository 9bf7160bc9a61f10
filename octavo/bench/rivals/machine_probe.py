"""What the machine gives at the moment: bytes/s that are read from memory, and FLOP/s of matrix products.

Reading is the faster of torch's sum and of this engine's product with one row; products are torch's.

Asked like a rival (see this package), whatever the requests: {read, float32, and the dtype that is compared}. A process
of its own, because its memory is no engine's.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from octavo.ops.registry import get_platform

SIDES = (8192, 8192)
"""Of the matrix that is read: 256 MiB, larger than caches."""
SIDE = 1024
_REPEATS = 5


def best(call: Callable[[], object]) -> float:
    """Fewest seconds of a few calls."""
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def main(text: str) -> None:
    """Serve the lines of stdin until they end."""
    options = json.loads(text)
    torch.set_num_threads(options["num_threads"])
    memory = torch.ones(SIDES[0], SIDES[1])
    platform = get_platform(options["platform"])
    weight, x = platform.pack_linear(memory, None), torch.ones(1, SIDES[1])
    matrices = {name: torch.randn(SIDE, SIDE).to(getattr(torch, name)) for name in {"float32", options["dtype"]}}
    print(json.dumps({"version": torch.__version__}), flush=True)
    for _ in sys.stdin:
        torch.set_num_threads(options["num_threads"])
        seconds = best(memory.sum)
        answer = {}
        for name, matrix in matrices.items():
            answer[name] = 2 * SIDE**3 / best(partial(torch.mm, matrix, matrix))
        platform.set_num_threads(options["num_threads"])
        answer["read"] = memory.nbytes / min(seconds, best(partial(platform.linear, x, weight)))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
