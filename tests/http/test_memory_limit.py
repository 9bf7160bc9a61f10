"""A server in a container with little memory, on a machine that has more: the container's limit is what counts.

Needs the right to make cgroups (root); made-up trees of cgroup files, read without it, are tests/unit/config's.
"""

from collections.abc import Iterator

import pytest
from cgroups import Cgroup, NoCgroup, memory_cgroup
from fault_clients import ask_all
from tiny_models import write_model

MIB = 2**20
LIMIT = 1024 * MIB


@pytest.fixture
def cgroup() -> Iterator[Cgroup]:
    try:
        with memory_cgroup(LIMIT) as made:
            yield made
    except NoCgroup as error:
        pytest.skip(f"no cgroup can be made here: {error}")


@pytest.fixture(scope="module")
def large_cache_model(tmp_path_factory) -> str:
    """Small weights, and 128 KiB of KV cache a token: it is soon full."""
    heads = {"num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 64, "num_hidden_layers": 4}
    return str(write_model(tmp_path_factory.mktemp("large-cache"), **heads))


@pytest.mark.slow
def test_sizes_come_from_the_limit_and_hold_when_the_cache_is_full(cgroup, large_cache_model, start_server):
    flags = ("--num-kv-blocks", "None", "--max-num-batched-tokens", "256", "--max-num-seqs", "16", "--dev-endpoints")
    server = start_server(*flags, model=large_cache_model, launcher=cgroup.launcher)
    (line,) = [line for line in server.log().splitlines() if "memory: weights" in line]
    assert all(part in line for part in ("KV cache", "workspace", " = ", "(cgroup)"))

    info = server.client.get("/server_info").json()
    memory, blocks = info["engine"]["memory"], info["stats"]["kv_blocks_total"]
    assert memory["limit_source"] == "cgroup"
    assert LIMIT - memory["limit"] > 280 * MIB, "the libraries are there twice"
    assert memory["kv_cache"] > 200 * MIB, "the limit leaves room for more"

    body = {"max_tokens": 10, "ignore_eos": True, "temperature": 0}
    bodies = [{**body, "prompt": chr(97 + number) * 500} for number in range(blocks * 16 // 510 + 2)]
    assert all(answer.is_complete for answer in ask_all(server, bodies))
    assert server.client.get("/server_info").json()["stats"]["kv_blocks_cached"] >= blocks * 0.9
    assert cgroup.num_killed == 0
    assert cgroup.peak is None or cgroup.peak <= LIMIT
    server.close()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--num-kv-blocks", "None", "--kv-cache-memory", "4GiB"), "the engine does not fit the memory: weights"),
        (("--num-kv-blocks", "None", "--max-num-batched-tokens", "100000"), "no room for a KV cache: weights"),
    ],
)
def test_what_the_limit_does_not_hold_is_refused_in_one_sentence(cgroup, large_cache_model, start_server, flags, said):
    server = start_server(*flags, model=large_cache_model, launcher=cgroup.launcher, wait=False)
    assert server.wait() == 2
    (line,) = [line for line in server.log().splitlines() if line]
    assert line.startswith(f"octavo: {said}")
    assert "(cgroup)" in line
    assert "raise the limit" in line
    assert cgroup.num_killed == 0
