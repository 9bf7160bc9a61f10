"""`octavo doctor`: what this machine and this installation have, what would compute, and what is wrong.

The report can be pasted into a bug report: it names no user, no host and no secret, and paths of the home folder are
shortened.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from octavo.config.command_line import parse_arguments
from octavo.config.memory import format_bytes
from octavo.entrypoints.cli.doctor_checks import Facts, Problem, find_problems

EXIT_PROBLEMS = 1


@dataclass(frozen=True, kw_only=True)
class DoctorArgs:
    """Look at this machine and this installation, and say what is wrong and what to do about it.

    The report may be pasted into a bug report. The exit status is 0 if nothing is wrong, 1 otherwise.
    """

    json: bool = False
    """Print one JSON object: facts, and problems [{what, way_out}]. Sizes are in bytes."""


def run(argv: Sequence[str]) -> int:
    """Print the report.

    Returns:
        The exit status: 1 if something is wrong.
    """
    args = parse_arguments(DoctorArgs, "octavo doctor", argv, pairs=False)

    from octavo.entrypoints.cli.doctor_facts import gather

    facts = gather()
    problems = find_problems(facts)
    report = json.dumps(to_json(facts, problems), indent=2) if args.json else to_text(facts, problems)
    print(without_home(report))
    return EXIT_PROBLEMS if problems else 0


def to_json(facts: Facts, problems: list[Problem]) -> dict[str, Any]:
    """Plain values."""
    return {"facts": asdict(facts), "problems": [asdict(problem) for problem in problems]}


def to_text(facts: Facts, problems: list[Problem]) -> str:
    """For people."""
    rows = _rows(facts)
    width = max(len(name) for name, _ in rows)
    table = "\n".join(f"{name:{width}}  {text}" for name, text in rows)
    if not problems:
        return f"{table}\n\nNothing is wrong."
    found = "\n".join(f"- {problem.what}\n  way out: {problem.way_out}" for problem in problems)
    return f"{table}\n\nWrong:\n{found}"


def without_home(text: str, home: str | None = None) -> str:
    """`text` with ~ for the home folder."""
    home = str(Path.home()) if home is None else home
    return text if home in ("", "/") else re.sub(rf"(?<![\w/]){re.escape(home)}(?![\w.-])", "~", text)


def _rows(facts: Facts) -> list[tuple[str, str]]:
    versions = [f"{name} {found or 'not installed'}" for name, found in facts.versions.items()]
    kernels = f"cpu ({facts.isas[0]}); this build and machine have {', '.join(facts.isas)}" if facts.isas else "torch"
    quota = f", quota {facts.cores_quota:g}" if facts.cores_quota is not None else ""
    free = f" ({format_bytes(facts.cache_free)} free)" if facts.cache_free is not None else ""
    return [
        ("system", facts.system),
        ("CPU", facts.cpu_model),
        ("CPU features", " ".join(facts.cpu_features) or "unknown"),
        ("cores", f"{facts.cores_used} used of {facts.cores_online} (set by {facts.cores_source}{quota})"),
        ("memory left", f"{format_bytes(facts.memory_limit)} ({facts.memory_source})"),
        ("GPU", "; ".join(facts.gpus) or "none found"),
        ("CUDA", f"driver {facts.driver_cuda or 'none'}, torch {facts.torch_cuda or 'built for the CPU'}"),
        ("platform", f"{facts.platform} ({facts.platform_reason})"),
        ("kernels", kernels),
        ("OpenMP", ", ".join(facts.openmp) or "none loaded"),
        ("compilers", "; ".join(f"{name}: {line}" for name, line in facts.compilers.items() if line) or "none found"),
        ("models", facts.cache_dir + free),
        ("environment", " ".join(f"{name}={value}" for name, value in facts.environment.items()) or "nothing set"),
        ("versions", ", ".join(versions)),
    ]
