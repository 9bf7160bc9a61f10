"""The Python examples of the README run as they are printed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
EXAMPLES = [
    example
    for example in re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    if "from openai" not in example  # needs a server
]


def test_the_readme_has_examples():
    assert len(EXAMPLES) >= 6


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_runs(number, model_path, tmp_path):
    model_path("smollm2")  # in the cache, where the alias is looked up
    script = tmp_path / "example.py"
    script.write_text(EXAMPLES[number], encoding="utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=400, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
