"""The scripts that run other engines: what they ask of the library, and what they make of its answers."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from octavo.bench import rivals
from octavo.bench.rivals import RIVALS, llama_cpp_slots, openvino_blocks


class FakeLlama:
    """Keeps what each sequence has in its cache, and notes each batch as {sequence: number of tokens}."""

    def __init__(self):
        self.cache, self.batches, self.shared = {}, [], []

    def __getattr__(self, name):
        return lambda *_: SimpleNamespace()

    def llama_batch_init(self, size, *_):
        rows = [[0] for _ in range(size)]
        return SimpleNamespace(token=[0] * size, pos=[0] * size, n_seq_id=[0] * size, seq_id=rows, logits=[0] * size)

    def llama_memory_seq_rm(self, _, sequence, start, end):
        del self.cache.setdefault(sequence, [])[max(0, start) :]

    def llama_memory_seq_cp(self, _, source, target, start, end):
        self.shared.append((source, target, end))
        self.cache[target] = self.cache[source][start:end]

    def llama_decode(self, _, batch):
        counts = {}
        for row in range(batch.n_tokens):
            sequence = batch.seq_id[row][0]
            cached = self.cache.setdefault(sequence, [])
            assert batch.pos[row] == len(cached)
            cached.append(batch.token[row])
            counts[sequence] = counts.get(sequence, 0) + 1
        self.batches.append(counts)
        return 0


@pytest.fixture
def llama(monkeypatch):
    lib = FakeLlama()
    monkeypatch.setattr(llama_cpp_slots.Engine, "_argmax", lambda *_: 7)
    options = {"model": "m", "max_num_seqs": 3, "max_len": 600, "num_threads": 1}
    return lib, llama_cpp_slots.Engine(lib, options)


def test_slots_decode_beside_prompts_and_are_given_on(llama):
    lib, engine = llama
    found = llama_cpp_slots.run(engine, [([1, 2, 3], 4), ([4] * 600, 2), ([5, 6], 2), ([8, 9], 3)])
    assert found["output_tokens"] == 11 and len(found["latencies"]) == 4
    assert len(found["between_tokens"]) == 3 + 1 + 1 + 2
    first, second, *_ = lib.batches
    assert sum(first.values()) == llama_cpp_slots.CHUNK  # the long prompt fills it up
    assert sorted(second.values()) == [1, 1, 600 - (512 - 3)] or sorted(second.values())[:1] == [1]
    assert sum(sum(batch.values()) for batch in lib.batches) == 3 + 600 + 2 + 2 + 11 - 4
    assert 0 < found["kv_utilization"] < 1


def test_a_prefix_in_another_slot_is_shared_and_the_last_token_computed(llama):
    lib, engine = llama
    prefix = list(range(100, 164))
    llama_cpp_slots.run(engine, [([*prefix, 1], 2), ([*prefix, 2], 2)])
    assert lib.shared == [(0, 1, 64)]
    lib.batches.clear()
    llama_cpp_slots.run(engine, [([*prefix, 1], 1)])
    assert [sum(batch.values()) for batch in lib.batches] == [1]


@pytest.mark.parametrize(
    ("one", "other", "wanted"), [([1, 2], [1, 2], 2), ([1, 2], [1, 3], 1), ([], [1], 0), ([1], [1, 2], 1)]
)
def test_what_two_sequences_begin_with(one, other, wanted):
    assert llama_cpp_slots._alike(one, other) == wanted


class FakeOpenVino:
    """A token a step for each request; blocks of 32 tokens in use by all that run."""

    num_blocks = 100

    def __init__(self, ends_early=False):
        self.left, self.lengths, self.ends_early = [], [], ends_early

    def add(self, prompt, wanted):
        request = SimpleNamespace(left=wanted - self.ends_early, new=0, length=len(prompt))
        self.left.append(request)
        handle = SimpleNamespace(can_read=lambda: request.new > 0)

        def read():
            count, request.new = request.new, 0
            return {0: SimpleNamespace(generated_ids=[1] * count)}

        handle.read = read
        return handle

    def step(self):
        for request in self.left:
            request.left -= 1
            request.new += 1
            request.length += 1
        self.left = [request for request in self.left if request.left > 0]

    def is_busy(self):
        return bool(self.left)

    def slots_in_use(self):
        return sum(-(-request.length // 32) * 32 for request in self.left)


def test_openvino_has_the_times_of_every_token():
    found = openvino_blocks.run(FakeOpenVino(), [([1] * 40, 3), ([2] * 20, 5)])
    assert found["output_tokens"] == 8 and len(found["between_tokens"]) == 2 + 4
    assert found["latencies"][0] < found["latencies"][1] <= found["seconds"]
    assert 0.5 < found["kv_utilization"] < 1


def test_openvino_that_stops_early_is_not_compared():
    with pytest.raises(SystemExit, match="1 of 1 requests early"):
        openvino_blocks.run(FakeOpenVino(ends_early=True), [([1] * 4, 3)])


@pytest.mark.parametrize("name", RIVALS)
def test_a_rival_imports_nothing_of_this_package(name):
    path = Path(rivals.__file__).with_name(f"{RIVALS[name].script}.py")
    code = (
        "import runpy, sys; sys.path = [p for p in sys.path if 'site-packages' not in p]\n"
        f"runpy.run_path({str(path)!r})\n"
        "assert not [name for name in sys.modules if name.startswith('octavo')]"
    )
    subprocess.run([sys.executable, "-I", "-c", code], check=True)


@pytest.mark.parametrize(("status", "wanted"), [(0, True), (1, True), (-11, False)])
def test_llama_cpp_does_without_repacked_weights_where_they_kill_it(monkeypatch, status, wanted):
    asked = []

    def run(command, **_):
        asked.append(command)
        return SimpleNamespace(returncode=status)

    monkeypatch.setattr(subprocess, "run", run)
    assert llama_cpp_slots._survives({"model": "m", "max_num_seqs": 200, "max_len": 9}) is wanted
    assert asked[0][-1] == "trial" and '"max_num_seqs": 1' in asked[0][-2]
