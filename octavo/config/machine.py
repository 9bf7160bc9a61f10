"""What this process may use of the machine: cores, memory, CPU features. Reads /proc and /sys, changes nothing.

A container's limits count, not the machine behind them: affinity masks, cgroup CPU quotas and cgroup memory limits, of
version 1 and 2, on every level of the hierarchy that is visible from here.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from octavo import envs

_NO_LIMIT = 2**60
"""cgroup v1 writes a number near 2**63 where there is no limit."""


@dataclass(frozen=True, kw_only=True)
class MachineInfo:
    """The machine as far as this process may use it."""

    cpu_flags: frozenset[str]
    """Features of the CPU, as /proc/cpuinfo names them (avx2, avx512f, asimd, ...)."""
    num_cores: int
    """Logical cores this process may compute on at once; at least 1."""
    num_cores_source: str
    """What set it: "affinity", "cgroup CPU quota" or "OMP_NUM_THREADS"."""
    memory_limit: int
    """Bytes this process can still take."""
    memory_source: str
    """What set it: "available RAM", "cgroup", "ulimit -v" (address space) or "ulimit -d" (data)."""
    process_memory: int = 0
    """Bytes of RAM this process holds already: Python and the libraries. 0: unknown."""
    cpu_quota: float | None = None
    """Cores' worth of CPU time that the tightest cgroup allows; None: no such limit."""
    process_anonymous: int = 0
    """Those of them that are no pages of a file, which only the process itself can give back."""


def detect(root: str | Path = "/") -> MachineInfo:
    """Look at the machine. `root` is where proc/ and sys/ are found; tests put a made-up tree there."""
    root = Path(root)
    num_cores, num_cores_source = _usable_cores(root)
    memory_limit, memory_source = _usable_memory(root)
    return MachineInfo(
        cpu_flags=_cpu_flags(root),
        num_cores=num_cores,
        num_cores_source=num_cores_source,
        memory_limit=memory_limit,
        memory_source=memory_source,
        process_memory=_process_memory(root, "VmRSS"),
        cpu_quota=_cpu_quota(root),
        process_anonymous=_process_memory(root, "RssAnon"),
    )


def _cpu_flags(root: Path) -> frozenset[str]:
    for line in _read(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):  # x86, Arm
            return frozenset(value.split())
    return frozenset()


def _usable_cores(root: Path) -> tuple[int, str]:
    """The smallest of what may be used, and what set it. Threads beyond a quota would only be throttled together."""
    cores, source = _allowed_cores(root), "affinity"
    quota = _cpu_quota(root)
    if quota is not None and int(quota) < cores:
        cores, source = max(1, int(quota)), "cgroup CPU quota"
    wanted = envs.omp_num_threads()
    if wanted is not None and wanted < cores:
        cores, source = wanted, "OMP_NUM_THREADS"
    return cores, source


def _allowed_cores(root: Path) -> int:
    """Cores of the affinity mask (what taskset and cpusets set)."""
    for line in _read(root / "proc/self/status").splitlines():
        key, _, value = line.partition(":")
        if key == "Cpus_allowed_list":
            return max(1, sum(_range_length(part) for part in value.strip().split(",") if part))
    return os.cpu_count() or 1


def _range_length(part: str) -> int:
    first, _, last = part.partition("-")
    return int(last or first) - int(first) + 1


def _process_memory(root: Path, field: str) -> int:
    for line in _read(root / "proc/self/status").splitlines():
        key, _, value = line.partition(":")
        if key == field:
            return int(value.split()[0]) * 1024
    return 0


def _usable_memory(root: Path) -> tuple[int, str]:
    """The smallest of what may be taken, and what set it; the first of equals."""
    rooms = {
        "available RAM": _available_ram(root),
        "cgroup": _cgroup_memory_room(root),
        "ulimit -v": _ulimit_room(root, "Max address space", "VmSize"),
        "ulimit -d": _ulimit_room(root, "Max data size", "VmData"),
    }
    room, source = min(((room, source) for source, room in rooms.items() if room is not None), key=lambda pair: pair[0])
    return room, source


def _ulimit_room(root: Path, limit: str, used: str) -> int | None:
    """Bytes that this process may still take below a limit of its own; None without one."""
    for line in _read(root / "proc/self/limits").splitlines():
        if line.startswith(limit):
            soft = line[len(limit) :].split()[0]
            return max(0, int(soft) - _process_memory(root, used)) if soft.isdecimal() else None
    return None


def _available_ram(root: Path) -> int:
    """Bytes the kernel can give without swapping; where it does not say, the RAM there is."""
    for line in _read(root / "proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        if key == "MemAvailable":
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup_memory_room(root: Path) -> int | None:
    """Bytes left below the tightest cgroup limit; None without a limit."""
    rooms = [
        *(
            _room(level, "memory.max", "memory.current", "memory.stat", ("inactive_file", "active_file"))
            for level in _levels(root, "")
        ),
        *(
            _room(
                level,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "memory.stat",
                ("total_inactive_file", "total_active_file"),
            )
            for level in _levels(root, "memory")
        ),
    ]
    return min((room for room in rooms if room is not None), default=None)


def _room(level: Path, limit_file: str, usage_file: str, stat_file: str, page_cache: tuple[str, str]) -> int | None:
    """Limit minus usage of one cgroup. File pages count as free: the kernel drops them before it refuses memory."""
    limit = _read(level / limit_file).strip()
    if not limit.isdecimal() or int(limit) >= _NO_LIMIT:
        return None
    stat = dict(line.split()[:2] for line in _read(level / stat_file).splitlines() if len(line.split()) >= 2)
    usage = int(_read(level / usage_file).strip() or 0)
    reclaimable = sum(int(stat.get(key, 0)) for key in page_cache)
    return max(0, int(limit) - max(0, usage - reclaimable))


def _cpu_quota(root: Path) -> float | None:
    """Cores' worth of CPU time the tightest cgroup quota allows; None without one."""
    quotas = []
    for level in _levels(root, ""):
        quota, _, period = _read(level / "cpu.max").strip().partition(" ")
        if quota.isdecimal() and period.isdecimal():
            quotas.append(int(quota) / int(period))
    for level in _levels(root, "cpu"):
        quota = _read(level / "cpu.cfs_quota_us").strip()  # -1: none
        period = _read(level / "cpu.cfs_period_us").strip()
        if quota.isdecimal() and period.isdecimal():
            quotas.append(int(quota) / int(period))
    return min((quota for quota in quotas if quota > 0), default=None)


def _levels(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's cgroup and of everything above it. controller "": version 2, else a version 1 name.

    In a container without a cgroup namespace the path of /proc/self/cgroup is the host's and does not exist here; the
    levels that do exist, the mount point at least, are then the container's own.
    """
    path = _cgroup_path(root, controller)
    if path is None:
        return
    for mount in _mounts(root, controller):
        for part in (path, *path.parents):
            level = mount / part.relative_to("/")
            if level.is_dir():
                yield level


def _cgroup_path(root: Path, controller: str) -> PurePosixPath | None:
    """This process's place in a hierarchy, from lines such as `0::/a/b` (version 2) and `4:cpu,cpuacct:/a/b`."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        found = number == "0" and not controllers if not controller else controller in controllers.split(",")
        if found and path.startswith("/"):
            # a process outside its cgroup namespace's root is shown with "..": only the mount point is known then
            return PurePosixPath("/") if ".." in path.split("/") else PurePosixPath(path)
    return None


def _mounts(root: Path, controller: str) -> list[Path]:
    """Where a hierarchy is mounted: the places every distribution uses."""
    base = root / "sys/fs/cgroup"
    if not controller:
        return [mount for mount in (base, base / "unified") if (mount / "cgroup.controllers").exists()]
    return [mount for mount in sorted(base.glob("*")) if mount.is_dir() and controller in mount.name.split(",")]


def _read(path: Path) -> str:
    """The file's text; empty if it is not there or may not be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
