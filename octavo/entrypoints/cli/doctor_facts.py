"""Looks at the machine and the installation for `octavo doctor`. Changes nothing, and survives whatever is broken:
torch and the extension are imported in a process of their own.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from octavo import __version__, envs
from octavo.config.machine import detect
from octavo.entrypoints.cli.doctor_checks import Facts
from octavo.errors import describe, printable

REQUIRED = (
    "torch", "numpy", "safetensors", "tokenizers", "huggingface_hub", "gguf", "jinja2", "msgspec", "pyzmq", "regex",
    "tqdm", "tyro", "fastapi", "httptools", "prometheus-client", "pydantic", "uvicorn", "uvloop",
)  # fmt: skip
FEATURES = (
    "sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni",
    "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8", "asimd", "asimddp", "asimdhp", "bf16", "i8mm", "sve",
)  # fmt: skip
"""Of the CPU's features those that kernels of engines like this one ask for."""
TOOLS = ("g++", "clang++", "c++", "cmake", "ninja")
VARIABLES = (
    "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "LD_PRELOAD", "OCTAVO_CPU_ISA",
    "OCTAVO_CACHE", "OCTAVO_LOGGING_LEVEL", "OCTAVO_LOG_INTERVAL", "OCTAVO_NATIVE", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
"""None of them holds a secret."""
_PROBE_SECONDS = 120
_TOOL_SECONDS = 20
_LONGEST_LINE = 200
_PROBE = """
import json
facts = {}
try:
    import torch
    facts["torch_cuda"] = torch.version.cuda
except BaseException as error:
    facts["torch_error"] = f"{type(error).__name__}: {error}"
try:
    from octavo.ops.cpu import _native
    facts["isas"] = _native.supported_isas()
except BaseException as error:
    facts["native_error"] = f"{type(error).__name__}: {error}"
try:
    with open("/proc/self/maps") as maps:
        facts["mapped"] = sorted({line.split(maxsplit=5)[5].strip() for line in maps if line.count("/")})
except OSError:
    pass
print(json.dumps(facts))
"""
_OPENMP = re.compile(r"/lib(gomp|iomp\d*|omp\d*)(-[0-9a-f]+)?\.so[.\d]*$")


def gather() -> Facts:
    """Look. Takes a few seconds, for the import of torch."""
    from octavo.ops.registry import choose_platform

    machine = detect()
    platform_name, platform_reason = choose_platform()
    probe, probe_error = _probe()
    gpus, driver_cuda = _gpus()
    cache, writable, free = _cache()
    features = machine.cpu_flags
    return Facts(
        system=_system(),
        cpu_model=cpu_model(_read("/proc/cpuinfo")) or platform.processor() or platform.machine(),
        cpu_features=tuple(name for name in FEATURES if name in features),
        cores_online=os.cpu_count() or 1,
        cores_used=machine.num_cores,
        cores_source=machine.num_cores_source,
        cores_quota=machine.cpu_quota,
        memory_limit=machine.memory_limit,
        memory_source=machine.memory_source,
        gpus=gpus,
        driver_cuda=driver_cuda,
        torch_cuda=probe.get("torch_cuda"),
        platform=platform_name,
        platform_reason=platform_reason,
        native_installed=platform_name == "cpu",
        native_error=_line(probe.get("native_error")),
        isas=tuple(probe.get("isas", ())),
        torch_error=_line(probe.get("torch_error")),
        openmp=openmp_runtimes(probe.get("mapped", [])),
        probe_error=probe_error,
        versions={"octavo": __version__, "python": platform.python_version(), **{n: _installed(n) for n in REQUIRED}},
        required=REQUIRED,
        compilers={name: _tool_version(name) for name in TOOLS},
        environment={name: os.environ[name] for name in VARIABLES if name in os.environ},
        cache_dir=str(cache),
        cache_writable=writable,
        cache_free=free,
    )


def cpu_model(cpuinfo: str) -> str:
    """The name of the CPU in the text of /proc/cpuinfo; empty if it has none (as on Arm)."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu model") and value.strip():
            return value.strip()
    return ""


def openmp_runtimes(mapped: list[str]) -> tuple[str, ...]:
    """Those of the mapped files that are OpenMP runtimes; a file and a link to it count once."""
    return tuple(sorted({os.path.realpath(path) for path in mapped if _OPENMP.search(path)}))


def _probe() -> tuple[dict[str, Any], str | None]:
    """What a process sees that imports torch and the extension, and why it could not tell, if so."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        result = subprocess.run(
            [sys.executable, "-c", _PROBE], env=environment, capture_output=True, text=True, timeout=_PROBE_SECONDS
        )
    except subprocess.TimeoutExpired:
        return {}, f"has not ended after {_PROBE_SECONDS} s"
    except OSError as error:
        return {}, f"cannot be started: {describe(error)}"
    if result.returncode < 0:
        return {}, f"is ended by signal {-result.returncode}"
    try:
        facts: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
        return facts, None
    except (IndexError, ValueError):
        return {}, f"ends with status {result.returncode} and no answer"


def _gpus() -> tuple[tuple[str, ...], str | None]:
    """A line for each GPU (name, driver, memory), and the newest CUDA version of the driver."""
    query = _output(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"])
    if query is None:
        return (), None
    match = re.search(r"CUDA Version: *(\d+\.\d+)", _output(["nvidia-smi"]) or "")
    return tuple(line.strip() for line in query.splitlines() if line.strip()), match[1] if match else None


def _cache() -> tuple[Path, bool, int | None]:
    """The folder for models, whether something can be written there, and the bytes that are free."""
    cache = envs.cache_dir()
    existing = next((folder for folder in (cache, *cache.parents) if folder.exists()), Path("/"))
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
        return cache, True, shutil.disk_usage(existing).free
    except OSError:
        return cache, False, None


def _system() -> str:
    libc, libc_version = platform.libc_ver()
    return f"{platform.system()} {platform.release()} {platform.machine()}, {libc or 'libc'} {libc_version}".strip()


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _tool_version(name: str) -> str | None:
    output = _output([name, "--version"])
    return output.splitlines()[0].strip() if output and output.strip() else None


def _output(command: list[str]) -> str | None:
    """stdout of a tool; None if it is not there or fails."""
    if shutil.which(command[0]) is None:
        return None
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_SECONDS, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout if result.returncode == 0 else None


def _line(text: object) -> str | None:
    return None if text is None else printable(" ".join(str(text).split()), _LONGEST_LINE)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
