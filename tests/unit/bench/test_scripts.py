"""The scripts under benchmarks/ run, on a tiny model, and write what they measured on what."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import write_model

from octavo.ops.registry import choose_platform

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "benchmarks"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="the scripts are in a checkout only"),
]
needs_kernels = pytest.mark.skipif(choose_platform()[0] != "cpu", reason="they compare native kernels")


def run(*command, **environment):
    paths = os.pathsep.join(filter(None, [str(ROOT), *sys.path]))
    return subprocess.run(
        [*command], capture_output=True, text=True, timeout=300, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=2048))


@needs_kernels
@pytest.mark.parametrize(
    ("script", "argv"),
    [
        (
            "cpu_decode",
            ["--streams", "1", "2", "--torch-streams", "1", "--steps", "8", "--turns", "1", "--threads", "1"],
        ),
        ("cpu_scaling", ["--contexts", "32", "48", "64", "--streams", "1", "2", "3", "--steps", "4", "--threads", "1"]),
        ("cpu_scaling", ["--contexts", "32", "48", "--streams", "--steps", "4", "--threads", "1"]),
    ],
)
def test_a_script_measures_and_draws(tmp_path, model, script, argv):
    path, picture = tmp_path / "r.json", tmp_path / "p.png"
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        plot = []
    else:
        plot = ["--plot", str(picture)]
    result = run(sys.executable, str(FOLDER / f"{script}.py"), "--model", model, *argv, "--json", str(path), *plot)
    assert result.returncode == 0, result.stderr
    found = json.loads(path.read_text())
    assert found["benchmark"] == script and f"{script}.py" in found["command"]
    assert found["machine"]["cores"] >= 1 and found["versions"]["octavo"] and found["machine_load"]["before"]
    assert not plot or 0 < picture.stat().st_size < 100_000


@pytest.mark.parametrize("script", sorted(path.name for path in FOLDER.glob("*.py")))
def test_a_script_can_be_imported_as_it_is_now(script):
    result = run(sys.executable, "-c", f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import {script[:-3]}")
    assert result.returncode == 0, result.stderr


def test_the_steps_of_all_results_are_listed_and_others_refused():
    listed = run("sh", str(FOLDER / "make_results.sh"), PYTHON=sys.executable)
    assert listed.returncode == 0 and {"envs", "compare", "sweep", "blocks"} <= set(listed.stdout.split())
    refused = run("sh", str(FOLDER / "make_results.sh"), "nope", PYTHON=sys.executable)
    assert refused.returncode == 2 and "no step nope" in refused.stderr
