"""What the built extension must not bring along, and what must not leak between its instruction sets."""

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OBJECTS = ROOT / "build" / "native" / "CMakeFiles"
FAMILIES = {"linear", "attention", "elementwise", "sampling", "quantized"}


def run(tool: str, *arguments: object) -> str:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not on this machine")
    return subprocess.run([tool, *map(str, arguments)], check=True, capture_output=True, text=True).stdout


def objects_of(pattern: str) -> list[Path]:
    found = sorted(OBJECTS.glob(f"{pattern}/csrc/**/*.o"))
    if not found:
        pytest.skip("there is no build tree: make native")
    return found


@pytest.fixture(scope="module")
def extension() -> Path:
    native = pytest.importorskip("octavo.ops.cpu._native", reason="this installation has no native kernels")
    return Path(native.__file__)


def test_the_extension_brings_no_openmp_runtime(extension):
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", run("readelf", "-d", extension))
    assert needed
    assert not [library for library in needed if re.search(r"omp|tbb|torch|python", library)]


def test_the_extension_exports_none_of_its_own_functions(extension):
    symbols = run("nm", "-D", "-C", "--defined-only", extension)
    assert "PyInit__native" in symbols
    assert "octavo" not in symbols


def test_each_instruction_set_gives_its_tables_and_nothing_that_the_linker_could_take_for_another():
    """A weak or global function of an AVX-512 object could replace the baseline's own copy at link time."""
    for path in objects_of("octavo_*.dir"):
        isa = re.search(r"octavo_(\w+)\.dir", str(path)).group(1)
        symbols = run("nm", "-C", "--extern-only", "--defined-only", path).splitlines()
        names = {line.split(maxsplit=2)[2] for line in symbols}
        assert names == {f"octavo::{isa}::{path.parent.name}_kernels"}, path
        assert path.parent.name in FAMILIES
        weak = run("nm", "-C", path).splitlines()
        assert not [line for line in weak if re.match(r"[0-9a-f ]{16} [wWvVu] ", line)], path


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="AVX is of x86-64")
def test_only_the_kernels_of_avx_have_avx_instructions():
    """Everything else runs on any x86-64. Each AVX instruction is encoded with VEX or EVEX: its name begins with v."""
    for path in [*objects_of("octavo_baseline.dir"), *objects_of("_native.dir")]:
        code = run("objdump", "-d", "--no-show-raw-insn", path)
        assert not re.findall(r"\tv\w+ .*%[xyz]mm.*", code)[:3], path
    for isa, register in (("avx2", "%ymm"), ("avx512", "%zmm")):
        code = "".join(run("objdump", "-d", path) for path in objects_of(f"octavo_{isa}.dir"))
        assert register in code, f"the {isa} kernels use no {register} register: the test above sees nothing"
