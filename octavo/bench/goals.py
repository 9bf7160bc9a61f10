"""What a comparison is meant to reach, and where it does not, what limits it: worked out from what was measured.

No engine can be faster than the machine: every output token takes the products of all weights, and every step reads
them. Both limits are of this run, from `octavo.bench.rivals.machine_probe`, so that they hold for the machine as it
was. Attention is left out, which makes the limits a little too generous.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from octavo.bench.contenders import SERVER
from octavo.bench.scenarios import FIRST_TOKEN, METRICS, MIXED, SHARED, Load

OURS = "octavo"
GOALS = {"throughput": 10.0, "ttft": 1.2, "ttft_cached": 7.0, "p99_latency": 5.8, "kv_utilization": 0.85 / 0.20}
"""Ratio by metric. KV utilisation: 85% against 20%."""
BATCH_GOALS = {"1": 1.1, "8": 4.0, "32": 4.0, "128": 8.0}
"""Ratio of the throughput by requests at once."""
_LOADS = {"throughput": (MIXED, "all"), "p99_latency": (MIXED, "all"), "shared_prefix": (SHARED, "all"),
          "ttft": (FIRST_TOKEN, "cold"), "ttft_cached": (FIRST_TOKEN, "cached")}  # fmt: skip
"""Of which load the seconds are."""


@dataclass(frozen=True)
class ModelSize:
    """What computing a token takes."""

    body: int
    """Weights that every token is multiplied with."""
    head: int
    """Weights that only tokens with an output are multiplied with."""
    item_size: float
    """Bytes of a weight."""


@dataclass(frozen=True)
class Machine:
    """What it gave in the best of the rounds."""

    read: float
    """Bytes/s."""
    arithmetic: float
    """FLOP/s of the faster of the dtypes probed."""
    dtype: str
    """Which one that was."""


@dataclass(frozen=True)
class Least:
    """Seconds that a load takes at least."""

    seconds: float
    is_memory: bool
    """Reading the weights takes longest, not multiplying."""


def machine_of(probes: Sequence[Mapping[str, float]]) -> Machine:
    """Of one probe a round."""
    most = {name: max(one[name] for one in probes) for name in probes[0]}
    dtype = max((name for name in most if name != "read"), key=most.__getitem__)
    return Machine(most["read"], most[dtype], dtype)


def least_seconds(load: Load, model: ModelSize, machine: Machine) -> Least:
    """No engine is faster, if each step reads all weights once."""
    outputs = sum(wanted for _, wanted in load.work)
    tokens = sum(len(prompt) + wanted - 1 for prompt, wanted in load.work) - load.num_cached
    arithmetic = 2 * (tokens * model.body + outputs * model.head) / machine.arithmetic
    memory = load.most_output * (model.body + model.head) * model.item_size / machine.read
    return Least(max(arithmetic, memory), memory > arithmetic)


def limits(
    document: Mapping[str, Any], loads: Sequence[Load], model: ModelSize, machine: Machine, kinds: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Each goal that is missed against the best of each kind of rival, with a sentence that says what limits it.

    Args:
        document: as `octavo.bench.compare.summarise` makes it.
        loads: of one round.
        kinds: of each engine; this engine's own are left out, and servers, whose weights are not known.
    """
    by_name = {(load.measure, load.name): load for load in loads}
    found: list[dict[str, Any]] = []
    for metric, goal in GOALS.items():
        for name, cell in _missed(document["metrics"][metric], goal, kinds):
            ours = document["metrics"][metric][OURS]["value"]["median"]
            if metric == "kv_utilization":
                text = _of_slots(ours, cell["value"]["median"], name)
            else:
                load = by_name[_LOADS[metric]]
                mine, other = (_seconds(metric, one, load) for one in (ours, cell["value"]["median"]))
                text = _of_speed(name, goal, mine, other, least_seconds(load, model, machine), machine)
            found.append(_missed_goal(METRICS[metric][0], name, cell["ratio"]["median"], goal, text))
    for row, goal in BATCH_GOALS.items():
        cells = document["throughput_by_requests"].get(row, {})
        for name, cell in _missed(cells, goal, kinds):
            load = by_name[(MIXED, row)]
            mine, other = (_seconds("throughput", one["value"]["median"], load) for one in (cells[OURS], cell))
            text = _of_speed(name, goal, mine, other, least_seconds(load, model, machine), machine)
            title = f"output tokens/s of {row} at once"
            found.append(_missed_goal(title, name, cell["ratio"]["median"], goal, text))
    return found


def as_numbers(machine: Machine) -> dict[str, Any]:
    """For the record."""
    return asdict(machine)


def _missed(cells: Mapping[str, Any], goal: float, kinds: Mapping[str, str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Of each kind the rival that is nearest to this engine, where even that is too near."""
    nearest: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for name, cell in cells.items():
        kind = kinds[name]
        if kind in (OURS, SERVER) or not cell["ratio"]:
            continue
        if kind not in nearest or cell["ratio"]["median"] < nearest[kind][1]["ratio"]["median"]:
            nearest[kind] = (name, cell)
    return iter([(name, cell) for name, cell in nearest.values() if cell["ratio"]["median"] < goal])


def _missed_goal(title: str, name: str, ratio: float, goal: float, text: str) -> dict[str, Any]:
    sentence = f"{title}: {ratio:.2f} times {name}, the goal is {goal:.3g}; {text}"
    return {"metric": title, "rival": name, "ratio": ratio, "goal": goal, "sentence": sentence}


def _seconds(metric: str, value: float, load: Load) -> float:
    if metric == "throughput":
        return sum(wanted for _, wanted in load.work) / value
    return value / 1000 if metric.startswith("ttft") else value


def _of_speed(name: str, goal: float, ours: float, theirs: float, least: Least, machine: Machine) -> str:
    amount = (
        f"memory ({machine.read / 1e9:.0f} GB/s measured)"
        if least.is_memory
        else f"arithmetic ({machine.arithmetic / 1e9:.0f} GFLOP/s measured, {machine.dtype})"
    )
    shares = f"{name} reaches {least.seconds / theirs:.0%} and this engine {least.seconds / ours:.0%} of what the"
    most = max(1.0, theirs / least.seconds)
    if most < goal:
        return f"{shares} machine's {amount} allows, so no engine can be more than {most:.1f} times as fast here."
    return f"{shares} machine's {amount} allows, which would be {most:.1f} times: the rest is this engine's to gain."


def _of_slots(ours: float, theirs: float, name: str) -> str:
    return (
        f"{ours:.0%} of this engine's allocated slots hold tokens and {theirs:.0%} of those of {name}, so that no "
        f"engine can be more than {1 / theirs:.1f} times as good."
    )
