"""Memory limits of the kernel (cgroups of version 1 or 2) around a process, where this user may make them."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_HIERARCHIES = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.oom_control", "memory.max_usage_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max", "memory.events", "memory.peak"),
)
"""Where cgroups are made, and the files of the limit, of the kills, and of the peak."""


class NoCgroup(Exception):
    """None can be made here; says why."""


@dataclass(frozen=True)
class Cgroup:
    """A folder of the kernel's."""

    folder: Path
    kills_file: str
    peak_file: str

    @property
    def launcher(self) -> list[str]:
        """Words before a command that is to run inside."""
        return ["/bin/sh", "-c", f'echo $$ > {self.folder}/cgroup.procs && exec "$@"', "sh"]

    @property
    def num_killed(self) -> int:
        """Processes that the kernel killed for want of memory."""
        lines = (self.folder / self.kills_file).read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.split()[0] == "oom_kill")

    @property
    def peak(self) -> int | None:
        """Bytes; None where the kernel does not say."""
        file = self.folder / self.peak_file
        return int(file.read_text()) if file.exists() else None


@contextmanager
def memory_cgroup(limit: int) -> Iterator[Cgroup]:
    """A cgroup whose processes may hold `limit` bytes together; they must have ended at the end.

    Raises:
        NoCgroup: this user or this machine can make none.
    """
    reason = "no memory cgroups are mounted"
    for mount, limit_file, kills_file, peak_file in _HIERARCHIES:
        folder = mount / f"octavo-test-{os.getpid()}-{time.monotonic_ns()}"
        try:
            folder.mkdir()
        except OSError as error:
            reason = str(error)
            continue
        try:
            try:
                (folder / limit_file).write_text(str(limit))
            except OSError as error:
                reason = str(error)
                continue
            yield Cgroup(folder, kills_file, peak_file)
            return
        finally:
            _remove(folder)
    raise NoCgroup(reason)


def _remove(folder: Path) -> None:
    for _ in range(100):
        try:
            folder.rmdir()
            return
        except OSError:  # the last process is still on its way out
            time.sleep(0.1)
