"""Made-up proc and sys trees: each test writes only what its machine shows."""

import os
import subprocess
import sys

import pytest

from octavo.config.machine import detect

GIB = 2**30
V1_UNLIMITED = "9223372036854771712\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Call it with files to add to a machine of 64 cores and 256 GiB, of which 200 GiB are available."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def build(files: dict[str, str] | None = None):
        base = {
            "proc/cpuinfo": "processor\t: 0\nflags\t\t: fpu sse2 avx2 avx512f\n\nprocessor\t: 1\nflags\t\t: fpu\n",
            "proc/meminfo": f"MemTotal:  {256 * 2**20} kB\nMemFree: 5 kB\nMemAvailable:  {200 * 2**20} kB\n",
            "proc/self/status": "Name:\tpython\nCpus_allowed:\tff\nCpus_allowed_list:\t0-63\n",
            "proc/self/cgroup": "0::/\n",
        }
        for name, text in {**base, **(files or {})}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return detect(tmp_path)

    return build


def v2(level: str, **files: str) -> dict[str, str]:
    """Files of one version 2 cgroup; `__` in a name is a dot."""
    folder = f"sys/fs/cgroup/{level}".rstrip("/")
    return {
        "sys/fs/cgroup/cgroup.controllers": "cpu memory\n",
        **{f"{folder}/{name.replace('__', '.')}": text for name, text in files.items()},
    }


def test_without_limits_the_machine_counts(machine):
    info = machine()
    assert info.num_cores == 64
    assert info.num_cores_source == "affinity"
    assert info.memory_limit == 200 * GIB
    assert info.memory_source == "available RAM"
    assert info.cpu_flags == {"fpu", "sse2", "avx2", "avx512f"}


def test_arm_features_are_cpu_flags(machine):
    assert machine({"proc/cpuinfo": "processor\t: 0\nFeatures\t: fp asimd bf16\n"}).cpu_flags == {"fp", "asimd", "bf16"}


@pytest.mark.parametrize(("allowed", "cores"), [("3", 1), ("0-1", 2), ("0,2,5-7", 5), ("0-3,64-67", 8)])
def test_cores_follow_the_affinity_mask(machine, allowed, cores):
    assert machine({"proc/self/status": f"Cpus_allowed_list:\t{allowed}\n"}).num_cores == cores


@pytest.mark.parametrize(
    ("quota", "cores", "source"),
    [
        ("max 100000", 64, "affinity"),
        ("200000 100000", 2, "cgroup CPU quota"),
        ("350000 100000", 3, "cgroup CPU quota"),
        ("50000 100000", 1, "cgroup CPU quota"),
        ("6400000 100000", 64, "affinity"),
    ],
)
def test_a_v2_cpu_quota_bounds_the_cores(machine, quota, cores, source):
    info = machine(v2("", cpu__max=quota + "\n"))
    assert (info.num_cores, info.num_cores_source) == (cores, source)


@pytest.mark.parametrize(("quota", "cores"), [("-1", 64), ("400000", 4), ("10000", 1)])
@pytest.mark.parametrize("mount", ["cpu", "cpu,cpuacct"])
def test_a_v1_cpu_quota_bounds_the_cores(machine, mount, quota, cores):
    folder = f"sys/fs/cgroup/{mount}/job"
    files = {
        "proc/self/cgroup": f"3:{mount}:/job\n",
        f"{folder}/cpu.cfs_quota_us": quota + "\n",
        f"{folder}/cpu.cfs_period_us": "100000\n",
    }
    assert machine(files).num_cores == cores


@pytest.mark.parametrize(("value", "cores"), [("3", 3), ("4,2", 4), ("100", 64), ("0", 64), ("many", 64), ("", 64)])
def test_omp_num_threads_can_only_lower_the_number(machine, monkeypatch, value, cores):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    build = machine
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert build().num_cores == cores


def test_a_v2_memory_limit_is_what_is_left_of_it(machine):
    info = machine(v2("", memory__max=str(2 * GIB), memory__current=str(GIB // 2), memory__stat="anon 5\n"))
    assert info.memory_limit == 2 * GIB - GIB // 2
    assert info.memory_source == "cgroup"


def test_page_cache_counts_as_free(machine):
    stat = f"anon 1\ninactive_file {GIB}\nactive_file {GIB // 4}\nslab 3\n"
    info = machine(v2("", memory__max=str(2 * GIB), memory__current=str(3 * GIB // 2), memory__stat=stat))
    assert info.memory_limit == 2 * GIB - GIB // 4


def test_the_tightest_level_of_the_hierarchy_counts(machine):
    files = {
        "proc/self/cgroup": "0::/outer/inner\n",
        **v2("outer/inner", memory__max="max\n", memory__current="7\n"),
        **v2("outer", memory__max=str(4 * GIB), memory__current=str(3 * GIB), cpu__max="300000 100000\n"),
        **v2("", cpu__max="max 100000\n"),
    }
    info = machine(files)
    assert info.memory_limit == GIB
    assert info.num_cores == 3


def test_ram_counts_when_it_is_less_than_the_cgroup_leaves(machine):
    info = machine(v2("", memory__max=str(512 * GIB), memory__current="0"))
    assert info.memory_limit == 200 * GIB
    assert info.memory_source == "available RAM"


def test_usage_above_the_limit_leaves_nothing(machine):
    assert machine(v2("", memory__max=str(GIB), memory__current=str(2 * GIB))).memory_limit == 0


def test_a_v1_memory_limit_counts_with_the_hierarchy_above_it(machine):
    base = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "5:memory:/a/b\n4:cpu,cpuacct:/a\n0::/\n",
        f"{base}/memory.limit_in_bytes": V1_UNLIMITED,
        f"{base}/a/memory.limit_in_bytes": str(3 * GIB),
        f"{base}/a/memory.usage_in_bytes": str(2 * GIB),
        f"{base}/a/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file {GIB // 2}\n",
        f"{base}/a/b/memory.limit_in_bytes": V1_UNLIMITED,
        f"{base}/a/b/memory.usage_in_bytes": str(GIB),
    }
    info = machine(files)
    assert info.memory_limit == 3 * GIB - GIB // 2
    assert info.memory_source == "cgroup"


def test_in_a_container_without_cgroup_namespace_the_mount_point_counts(machine):
    files = {
        "proc/self/cgroup": "5:memory:/docker/0123abcd\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
    }
    assert machine(files).memory_limit == GIB


def test_a_path_outside_the_cgroup_namespace_does_not_lead_out_of_the_tree(machine):
    files = {"proc/self/cgroup": "0::/../../other\n", **v2("", memory__max=str(GIB), memory__current="0")}
    assert machine(files).memory_limit == GIB


def test_hybrid_hierarchies_are_both_read(machine):
    files = {
        "proc/self/cgroup": "4:memory:/job\n0::/job\n",
        "sys/fs/cgroup/unified/cgroup.controllers": "",
        "sys/fs/cgroup/unified/job/cpu.max": "200000 100000\n",
        "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(GIB),
        "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "0\n",
    }
    info = machine(files)
    assert (info.num_cores, info.memory_limit) == (2, GIB)


def test_a_system_without_proc_still_has_an_answer(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    info = detect(tmp_path)
    assert info.num_cores == os.cpu_count()
    assert info.memory_limit > 0
    assert info.cpu_flags == frozenset()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="affinity masks are Linux's")
def test_a_process_bound_to_one_core_sees_one_core():
    script = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
        "from octavo.config.machine import detect; print(detect().num_cores)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "1"


def test_what_the_process_holds_already_is_known_where_the_system_tells(machine):
    assert machine().process_memory == 0
    assert machine({"proc/self/status": "VmRSS:\t  2048 kB\nCpus_allowed_list:\t0-1\n"}).process_memory == 2 * 2**20


LIMITS = "Limit                     Soft Limit           Hard Limit           Units\n"


@pytest.mark.parametrize(
    ("limit", "used", "source"),
    [("Max address space", "VmSize", "ulimit -v"), ("Max data size", "VmData", "ulimit -d")],
)
def test_a_ulimit_on_memory_is_what_is_left_of_it(machine, limit, used, source):
    status = f"Cpus_allowed_list:\t0-63\n{used}:\t  {2**20} kB\n"
    limits = f"{LIMITS}{limit:26}{4 * GIB:<21}{'unlimited':21}bytes\n"
    info = machine({"proc/self/limits": limits, "proc/self/status": status})
    assert (info.memory_limit, info.memory_source) == (3 * GIB, source)
    spent = status.replace(str(2**20), str(5 * 2**20))
    assert machine({"proc/self/limits": limits, "proc/self/status": spent}).memory_limit == 0


def test_no_ulimit_leaves_the_memory_as_it_is(machine):
    limits = f"{LIMITS}{'Max address space':26}{'unlimited':21}{'unlimited':21}bytes\n"
    assert machine({"proc/self/limits": limits}).memory_source == "available RAM"


@pytest.mark.skipif(sys.platform != "linux", reason="ulimit -v is Linux's")
def test_a_process_under_a_ulimit_sees_it():
    code = "from octavo.config.machine import detect; machine = detect(); print(machine.memory_source)"
    command = f"ulimit -v {2**20}; exec {sys.executable} -c '{code}'"
    shown = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60)
    assert shown.stdout.strip() == "ulimit -v"
