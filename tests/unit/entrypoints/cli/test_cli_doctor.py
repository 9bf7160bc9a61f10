"""`octavo doctor`: each finding on made-up facts, and the report."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from octavo.entrypoints.cli import doctor, doctor_facts
from octavo.entrypoints.cli.doctor_checks import Facts, find_problems
from octavo.entrypoints.cli.main import main

GIB = 2**30
SOUND = Facts(
    system="Linux 6.1 x86_64, glibc 2.36",
    cpu_model="A CPU",
    cpu_features=("fma", "avx2"),
    cores_online=8,
    cores_used=4,
    cores_source="affinity",
    cores_quota=None,
    memory_limit=8 * GIB,
    memory_source="available RAM",
    isas=("avx2", "baseline"),
    openmp=("/x/libgomp.so.1",),
    versions={"octavo": "0.1", "torch": "2.6", "numpy": "2.0"},
    required=("torch", "numpy"),
    compilers={"g++": "g++ 12", "clang++": None},
    cache_dir="/home/a/.cache/octavo",
    cache_free=50 * GIB,
)


def problems_with(**changes):
    return find_problems(replace(SOUND, **changes))


def test_nothing_is_wrong_with_a_sound_installation():
    assert problems_with() == []


@pytest.mark.parametrize(
    ("changes", "what", "way_out"),
    [
        ({"native_installed": False, "isas": ()}, "no native kernels", "without OCTAVO_NATIVE=0"),
        (
            {"native_installed": False, "isas": (), "compilers": {"g++": None}},
            "no native kernels",
            "no C++ compiler either: install g++",
        ),
        ({"native_error": "ImportError: undefined symbol", "isas": ()}, "undefined symbol", "--platform reference"),
        ({"openmp": ("/x/libgomp.so.1", "/y/libiomp5.so")}, "/x/libgomp.so.1, /y/libiomp5.so", "keep one"),
        ({"environment": {"OMP_NUM_THREADS": "5"}}, "more threads than the 4 cores", "set it to 4"),
        ({"environment": {"OMP_NUM_THREADS": "many"}}, "no number of threads", "unset"),
        ({"environment": {"OMP_NUM_THREADS": "0"}}, "no number of threads", "unset"),
        ({"environment": {"OCTAVO_CPU_ISA": "avx512"}}, "avx512 cannot run here", "unset OCTAVO_CPU_ISA"),
        ({"isas": ("baseline",)}, "built without it", "knows AVX2"),
        ({"driver_cuda": "11.4", "torch_cuda": "12.8"}, "supports CUDA 11.4, torch is built for 12.8", "CUDA 11"),
        ({"cores_quota": 0.5}, "0.5 of one core", "raise the CPU quota"),
        ({"memory_limit": GIB - 1}, "of memory are left", "octavo plan"),
        ({"cache_writable": False}, "cannot be written", "OCTAVO_CACHE"),
        ({"cache_free": 100}, "only 100 B are free", "free some space"),
        ({"versions": {"torch": "2.6", "numpy": None}}, "not installed: numpy", "pip install numpy"),
        ({"torch_error": "OSError: libc10.so"}, "cannot be imported: OSError: libc10.so", "install torch again"),
        ({"probe_error": "is ended by signal 4"}, "is ended by signal 4", "import torch"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_wrong_is_found_alone_and_with_a_way_out(changes, what, way_out):
    (problem,) = problems_with(**changes)
    assert what in problem.what
    assert way_out in problem.way_out


@pytest.mark.parametrize(
    "changes",
    [
        {"environment": {"OMP_NUM_THREADS": "4"}},
        {"environment": {"OMP_NUM_THREADS": "2,1"}},
        {"environment": {"OCTAVO_CPU_ISA": "baseline"}},
        {"driver_cuda": "12.2", "torch_cuda": "12.8"},
        {"driver_cuda": "13.0", "torch_cuda": "12.8"},
        {"driver_cuda": "12.2", "torch_cuda": None},
        {"driver_cuda": None, "torch_cuda": "12.8"},
        {"cores_quota": 1.0},
        {"memory_limit": GIB},
        {"openmp": ()},
        {"isas": ("baseline",), "cpu_features": ("sse4_2",)},
        {"compilers": {"g++": None}},
        {"cache_free": None},
    ],
    ids=str,
)
def test_what_is_not_wrong_is_not_told(changes):
    assert problems_with(**changes) == []


def test_the_name_of_the_cpu_is_read_where_there_is_one():
    assert doctor_facts.cpu_model("processor : 0\nmodel name\t: Some CPU @ 2 GHz\n") == "Some CPU @ 2 GHz"
    assert doctor_facts.cpu_model("processor : 0\nCPU part : 0xd0c\n") == ""


def test_openmp_runtimes_are_told_from_other_libraries_and_links_count_once(tmp_path):
    real = tmp_path / "libgomp-a34b3233.so.1.0.0"
    real.touch()
    (tmp_path / "libgomp.so.1").symlink_to(real)
    others = ["/x/libomptarget.so", "/x/libc.so.6", "/x/libompi.so", "[heap]", "/x/libgomp.txt"]
    mapped = [str(real), str(tmp_path / "libgomp.so.1"), *others, "/y/libiomp5.so", "/z/libomp.so.5"]
    assert doctor_facts.openmp_runtimes(mapped) == tuple(sorted((str(real), "/y/libiomp5.so", "/z/libomp.so.5")))


def test_the_home_folder_is_shortened_and_only_that():
    text = "/home/a/x /home/a, /home/ab /mnt/home/a /home/a.old"
    assert doctor.without_home(text, "/home/a") == "~/x ~, /home/ab /mnt/home/a /home/a.old"
    assert doctor.without_home("/x", "/") == "/x"


def test_a_process_that_dies_or_hangs_is_a_finding_and_no_crash(monkeypatch):
    def run(code, **options):
        return subprocess.CompletedProcess([], code, stdout="", stderr="")

    monkeypatch.setattr(doctor_facts.subprocess, "run", lambda *a, **k: run(-4))
    assert doctor_facts._probe() == ({}, "is ended by signal 4")
    monkeypatch.setattr(doctor_facts.subprocess, "run", lambda *a, **k: run(1))
    assert doctor_facts._probe()[1] == "ends with status 1 and no answer"

    def hang(*args, **options):
        raise subprocess.TimeoutExpired("python", 1)

    monkeypatch.setattr(doctor_facts.subprocess, "run", hang)
    assert "has not ended" in doctor_facts._probe()[1]


def test_a_cache_folder_that_cannot_be_made_is_not_writable(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "file"))
    assert doctor_facts._cache()[1:] == (False, None)
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "new" / "folder"))
    assert doctor_facts._cache()[1]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("facts", "status"), [(SOUND, 0), (replace(SOUND, cores_quota=0.2), 1)])
def test_the_report_says_everything_and_the_status_whether_something_is_wrong(facts, status, monkeypatch, capsys):
    monkeypatch.setattr(doctor_facts, "gather", lambda: facts)
    assert main(["doctor"]) == status
    out = capsys.readouterr().out
    assert "A CPU" in out
    assert "cpu (avx2)" in out
    assert ("Nothing is wrong." in out) == (status == 0)
    assert main(["doctor", "--json"]) == status
    report = json.loads(capsys.readouterr().out)
    assert report["facts"]["cores_used"] == 4
    assert len(report["problems"]) == status


def test_only_variables_without_secrets_are_read(monkeypatch):
    secret = "s3cr3t-value"
    for name in ("HF_TOKEN", "OPENAI_API_KEY", "OCTAVO_API_KEY"):
        monkeypatch.setenv(name, secret)
    monkeypatch.setattr(doctor_facts, "_probe", lambda: ({}, None))
    monkeypatch.setattr(doctor_facts, "_output", lambda command: None)
    facts = doctor_facts.gather()
    assert secret not in doctor.to_text(facts, []) + json.dumps(doctor.to_json(facts, []))


def test_this_machine_can_be_looked_at():
    result = subprocess.run(
        [sys.executable, "-m", "octavo.entrypoints.cli.main", "doctor", "--json"], capture_output=True, text=True
    )
    assert result.returncode in (0, 1), result.stderr
    facts = json.loads(result.stdout)["facts"]
    assert facts["torch_error"] is None
    assert facts["probe_error"] is None
    assert facts["cores_used"] >= 1
