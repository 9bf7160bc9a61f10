"""llama.cpp through llama-cpp-python, with as many sequences at once as there may be requests, as its server has slots:
prompts are computed in chunks beside those that decode, and a slot whose KV begins alike is continued or shared.

The package's own `Llama` class computes one sequence at a time; this uses the C functions it brings. It imports nothing
of the engine it is compared with: it may run in another environment. Its KV cache is reserved when it loads, so KV
utilisation is the tokens of running requests over all of it.
"""

import ctypes
import json
import os
import resource
import subprocess
import sys
import time
from collections import deque
from importlib import import_module
from typing import Any

CHUNK = 512
"""Tokens of a batch at most: its default for one computation."""
WORTH_WAITING = 32
"""Tokens more that are shared when another prompt has been computed."""
KV_DTYPE = "float16"
"""Its default, and its fastest."""


class Slot:
    """One sequence: what of it is in the KV cache, and the request it computes, if any."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.cached: list[int] = []
        self.tokens: list[int] = []
        self.end = 0
        self.times: list[float] = []
        self.is_started = False
        self.is_running = False

    def begin(self, prompt: list[int], wanted: int) -> None:
        self.tokens, self.end, self.times = list(prompt), len(prompt) + wanted, []
        self.is_started, self.is_running = False, True

    @property
    def to_compute(self) -> int:
        return len(self.tokens) - len(self.cached) if self.is_started else len(self.tokens)


class Engine:
    """A loaded model and its slots."""

    def __init__(self, lib: Any, options: dict[str, Any]) -> None:
        self.lib = lib
        model_params = lib.llama_model_default_params()
        model_params.n_gpu_layers = 0
        model_params.use_extra_bufts = options.get("repack", True)
        self._model = lib.llama_model_load_from_file(options["model"].encode(), model_params)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {options['model']}")
        self.num_cells = options["max_num_seqs"] * -(-options["max_len"] // 256) * 256
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = self.num_cells, options["max_num_seqs"]
        params.n_batch = params.n_ubatch = max(CHUNK, options["max_num_seqs"])
        params.n_threads = params.n_threads_batch = options["num_threads"]
        params.kv_unified = True  # slots share the cells of a common beginning, and many decode faster
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise SystemExit(f"llama.cpp cannot reserve a KV cache of {self.num_cells} tokens")
        self._memory = lib.llama_get_memory(self._context)
        self._batch = lib.llama_batch_init(params.n_batch, 0, 1)
        self._budget = params.n_batch
        self._vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self.slots = [Slot(number) for number in range(options["max_num_seqs"])]

    def admit(self, prompt: list[int], wanted: int) -> bool:
        """Give a request to the free slot whose KV begins most like it; False: there is none."""
        free = [slot for slot in self.slots if not slot.is_running]
        if not free:
            return False
        max(free, key=lambda slot: (_alike(slot.cached, prompt), -len(slot.cached))).begin(prompt, wanted)
        return True

    def step(self) -> None:
        """One token for each that decodes, and prompts up to a whole batch."""
        running = sorted((slot for slot in self.slots if slot.is_running), key=lambda slot: slot.to_compute > 1)
        self._batch.n_tokens = 0
        asked: list[tuple[Slot, int]] = []
        added: list[tuple[Slot, int]] = []
        for slot in running:
            room = self._budget - self._batch.n_tokens
            if room == 0:
                break
            if not slot.is_started and not self._start(slot):
                continue
            count = min(room, slot.to_compute)
            if self._add(slot, count):
                asked.append((slot, self._batch.n_tokens - 1))
            added.append((slot, len(slot.cached) + count))
        status = self.lib.llama_decode(self._context, self._batch)
        if status:
            raise SystemExit(f"llama_decode answers {status}")
        for slot, length in added:
            slot.cached = slot.tokens[:length]
        picked = [(slot, self._argmax(row)) for slot, row in asked]
        now = time.perf_counter()
        for slot, token in picked:
            slot.tokens.append(token)
            slot.times.append(now)
            slot.is_running = len(slot.tokens) < slot.end

    def _start(self, slot: Slot) -> bool:
        """Keep or share what is in the cache already of a prompt whose turn has come; False: it is worth waiting for
        another that computes the same."""
        best = max(self.slots, key=lambda other: (_alike(other.cached, slot.tokens), other is slot))
        common = min(_alike(best.cached, slot.tokens), len(slot.tokens) - 1)
        for other in self.slots:
            if other.is_running and other.is_started and _alike(other.tokens, slot.tokens) >= common + WORTH_WAITING:
                return False
        if best is not slot:
            self.lib.llama_memory_seq_rm(self._memory, slot.number, -1, -1)
            self.lib.llama_memory_seq_cp(self._memory, best.number, slot.number, 0, common)
        self.lib.llama_memory_seq_rm(self._memory, slot.number, common, -1)
        slot.cached = slot.tokens[:common]
        slot.is_started = True
        return True

    def _add(self, slot: Slot, count: int) -> bool:
        """Put the slot's next tokens into the batch; True: the last of them asks for logits."""
        batch, first = self._batch, len(slot.cached)
        is_last = first + count == len(slot.tokens)
        for position in range(first, first + count):
            row = batch.n_tokens
            batch.token[row], batch.pos[row] = slot.tokens[position], position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, slot.number
            batch.logits[row] = is_last and position == first + count - 1
            batch.n_tokens += 1
        return is_last

    def _argmax(self, row: int) -> int:
        numpy = import_module("numpy")
        logits = self.lib.llama_get_logits_ith(self._context, row)
        return int(numpy.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())


def _alike(one: list[int], other: list[int]) -> int:
    """How many tokens both begin with."""
    limit = min(len(one), len(other))
    if one[:limit] == other[:limit]:
        return limit
    return next(place for place in range(limit) if one[place] != other[place])


def run(engine: Engine, requests: list[tuple[list[int], int]]) -> dict[str, Any]:
    """Compute all requests, all there at once."""
    waiting = deque(requests)
    used: list[float] = []
    latencies: list[float] = []
    between: list[float] = []
    running: list[Slot] = []
    start = time.perf_counter()
    while waiting or running:
        while waiting and engine.admit(*waiting[0]):
            waiting.popleft()
        running = [slot for slot in engine.slots if slot.is_running]
        engine.step()
        used.append(sum(len(slot.cached) for slot in running) / engine.num_cells)
        for slot in running:
            if not slot.is_running:
                latencies.append(slot.times[-1] - start)
                between += [after - before for before, after in zip(slot.times, slot.times[1:], strict=False)]
        running = [slot for slot in running if slot.is_running]
    return {
        "seconds": time.perf_counter() - start,
        "output_tokens": sum(wanted for _, wanted in requests),
        "latencies": latencies,
        "between_tokens": between,
        "kv_utilization": sum(used) / len(used),
        "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024),
    }


def main(text: str, *trial: str) -> None:
    """Serve the lines of stdin until they end; as a trial, compute something small and end."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    options = json.loads(text)
    if not trial:
        options["repack"] = _survives(options)
    begun = time.perf_counter()
    lib = import_module("llama_cpp")
    silent = lib.llama_log_callback(_print_errors)
    lib.llama_log_set(silent, ctypes.c_void_p(0))
    lib.llama_backend_init()
    engine = Engine(lib, options)
    if trial:
        run(engine, [([1, 2, 3], 2)])
        return
    hello = {"version": lib.__version__, "load": time.perf_counter() - begun, "slots": options["max_num_seqs"]}
    print(json.dumps({**hello, "kv_dtype": KV_DTYPE, "repacked_weights": options["repack"]}), file=answers)
    for line in sys.stdin:
        print(json.dumps(run(engine, json.loads(line)["requests"])), file=answers)


def _survives(options: dict[str, Any]) -> bool:
    """Whether it computes with weights repacked for this processor (AMX among others) and is not killed by a signal,
    as it is on some virtual machines."""
    small = json.dumps({**options, "max_num_seqs": 1, "max_len": 256})
    tried = subprocess.run([sys.executable, __file__, small, "trial"], stdin=subprocess.DEVNULL, capture_output=True)
    return tried.returncode >= 0


def _print_errors(level: int, text: bytes, _: Any) -> None:
    if level == 4:  # GGML_LOG_LEVEL_ERROR
        sys.stderr.write(text.decode(errors="replace"))


if __name__ == "__main__":
    main(*sys.argv[1:])
