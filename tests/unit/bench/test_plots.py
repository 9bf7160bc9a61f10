"""Every tool's picture is drawn from its document, and is small enough to be kept."""

import pytest

from octavo.bench.goals import OURS
from octavo.bench.plots import _DRAWINGS, draw
from octavo.entrypoints.cli.bench import TOOLS

pytest.importorskip("matplotlib")
SPREAD = {"median": 2.0, "min": 1.0, "max": 3.0}
SUMMARY = {"mean": 0.1, "p50": 0.1, "p90": 0.2, "p99": 0.3, "max": 0.4}
NOTHING = {"value": None, "ratio": None}


def compare(names, loads):
    cells = {name: {"value": SPREAD, "ratio": SPREAD} for name in names}
    metrics = {"throughput": cells, "ttft": cells, "kv_utilization": {**cells, names[-1]: NOTHING}, "one_stream": cells}
    kinds = {name: OURS if name.startswith(OURS) else name for name in names}
    rows = {str(load): cells for load in loads}
    return {
        "engines": dict.fromkeys(names),
        "kinds": kinds,
        "metrics": metrics,
        "throughput_by_requests": rows,
        "options": {"block_size": 16},
    }


DOCUMENTS = {
    "throughput": {"samples": [{"time": t, "kv_utilization": 0.5, "running": 1, "waiting": 2} for t in (0.1, 0.2)]},
    "latency": {
        "batches": [
            {"batch_size": n, "output_tokens_per_second": 5.0 * n, "ttft_cold": SUMMARY, "ttft_cached": SUMMARY,
             "itl": SUMMARY} for n in (1, 8, 32)
        ]
    },
    "serve": {"ttfts": [0.1, 0.2], "itls": [0.01, 0.02]},
    "sweep": {
        "settings": [
            {"setting": {"max_num_seqs": n}, "output_tokens_per_second": SPREAD, "p50_itl_ms": SPREAD,
             "p99_itl_ms": SPREAD, "p50_ttft_ms": SPREAD, "p99_ttft_ms": None} for n in (1, 8)
        ]
    },
    "startup": {"runs": [{"import": 1.0, "load": 2.0, "first_token": 0.1}] * 2},
    "compare": compare((OURS, f"{OURS}, blocks of 8", "a", "b"), (1, 8)),
}  # fmt: skip


@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize("tool", DOCUMENTS)
def test_a_picture_is_drawn_and_small(tmp_path, tool, suffix):
    path = tmp_path / f"p.{suffix}"
    draw({"benchmark": tool, "machine": {"cpu": "a processor"}, **DOCUMENTS[tool]}, str(path))
    assert 5_000 < path.stat().st_size < 100_000


@pytest.mark.parametrize("names", [(OURS, f"{OURS}, blocks of 8"), (OURS, "a")])
def test_a_comparison_without_rows_of_requests_is_drawn(tmp_path, names):
    draw({"benchmark": "compare", "machine": {"cpu": "x"}, **compare(names, ())}, str(tmp_path / "p.png"))
    assert (tmp_path / "p.png").exists()


def test_every_tool_that_measures_has_a_picture():
    assert set(DOCUMENTS) == set(_DRAWINGS) == set(TOOLS) - {"rival-env"}
