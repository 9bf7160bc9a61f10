"""The files that these scripts write: what was measured, and on what."""

import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from octavo.bench.report import machine, versions

_LOAD_BEFORE = os.getloadavg()


def write(path: str | Path, benchmark: str, result: dict[str, Any]) -> None:
    """Write `result` to a JSON file, with the command, the machine, the versions and the load."""
    document = {
        "benchmark": benchmark,
        "command": shlex.join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **result,
        "machine_load": {"before": _LOAD_BEFORE, "after": os.getloadavg()},
        "machine": machine(),
        "versions": versions(),
    }
    Path(path).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"written: {path}", file=sys.stderr)
