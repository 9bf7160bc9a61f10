"""A forward pass as one native call: what it does is recorded once and then replayed.

The forward runs twice, for different numbers of tokens T, while the native side notes every call with its operands
(csrc/cpu/program.h). An operand that is equal in both is a constant; one that lies in a tensor made for the step is
that tensor's place and an offset; one that is a multiple of T is that. Everything else, and every torch operator that
is no view and no allocation, means that this forward cannot be replayed. Then the replay of the second run must give
that run's bits in memory full of NaN, or there is none: whoever changes a model finds out here and not in an answer.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.ops.cpu import _native, attention, memory
from octavo.ops.interface import AttentionMetadata, Forward

_ALIGNMENT = 64  # bytes: a cache line
_ALLOCATIONS = ("aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided")

Call = tuple[str, list[int | float | str]]


class NotReplayable(Exception):
    """The forward does something that a program of native calls does not say."""


@dataclass(frozen=True, slots=True)
class _Run:
    """One traced run: T, what it was given and what it made."""

    num_tokens: int
    inputs: list[Tensor]
    made: list[Tensor]
    metadata: AttentionMetadata
    output: Tensor
    calls: list[Call]
    _places: list[tuple[int, int, int]] = field(init=False)
    """(address, bytes, index) of the step's tensors by address; index: inputs first."""

    def __post_init__(self) -> None:
        tensors = (*self.inputs, *self.made)
        places = sorted((tensor.data_ptr(), tensor.nbytes, index) for index, tensor in enumerate(tensors))
        object.__setattr__(self, "_places", places)

    def place(self, address: int) -> tuple[int, int] | None:
        """(which tensor of the step, how many bytes behind its start) an address lies in."""
        at = bisect_right(self._places, address, key=lambda place: place[0]) - 1
        if at < 0:
            return None
        start, size, index = self._places[at]
        return (index, address - start) if address < start + size else None


@dataclass(frozen=True, slots=True)
class _Operand:
    """Where an operand that is no constant comes from: value = slot * factor + offset."""

    slot: int
    factor: int
    offset: int


class RecordedForward:
    """Slots of the program: T, then the inputs, the attention plans, and the memory of tensors made on the way."""

    def __init__(self, first: _Run, second: _Run) -> None:
        self._program = _native.Program()
        self._memory = memory.empty(0)
        self._plans = list(second.metadata.plans)
        operands = _compare(first, second)
        self._lanes = _share_memory(first, second, operands)
        num_inputs = len(first.inputs)
        first_lane = 1 + num_inputs + len(self._plans)
        where = {0: 0} | {1 + i: 1 + i for i in range(num_inputs + len(self._plans))}
        for made, lane in self._lanes.of.items():
            where[first_lane + made] = first_lane + lane
        for (name, values), patched in zip(second.calls, operands, strict=True):
            patches = [(i, where[o.slot], o.factor, o.offset) for i, o in patched.items()]
            self._program.add(name, values, patches)
        place = second.place(second.output.data_ptr())
        if place is None or place[0] < num_inputs or place[1] or not second.output.is_contiguous():
            raise NotReplayable("its result is not a tensor of its own")
        self._output_lane = self._lanes.of[place[0] - num_inputs]
        self._output_width = second.output.shape[1]

    def __call__(self, x: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        """The result is overwritten by the next call."""
        wanted = self.num_bytes(len(x))
        if len(self._memory) < wanted:
            self._memory = memory.empty(0)  # gone before there is more
            self._memory = memory.empty(wanted, alone=True)
        return self.run_in(self._memory, x, positions, metadata)

    def num_bytes(self, num_tokens: int) -> int:
        """Of the memory that a run needs."""
        return self._lanes.offsets(num_tokens)[-1]

    def run_in(self, space: Tensor, x: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        """The same in `space` uint8, of which the result is a part."""
        num_tokens = len(x)
        inputs = _inputs(x, positions, metadata)
        plans = [attention.plan_like(metadata, key, num_tokens).address for key in self._plans]
        offsets = self._lanes.offsets(num_tokens)
        start = space.data_ptr()
        lanes = [start + offset for offset in offsets]
        self._program.run([num_tokens, *(tensor.data_ptr() for tensor in inputs), *plans, *lanes])
        begin = offsets[self._output_lane]
        size = num_tokens * self._output_width * 4
        return space[begin : begin + size].view(torch.float32).view(num_tokens, self._output_width)


def record(forward: Forward, examples: Sequence[tuple[Tensor, Tensor, AttentionMetadata]]) -> RecordedForward:
    """forward: see `Platform.replayable`. examples: two inputs of different T.

    Raises:
        NotReplayable: with the reason.
    """
    first, second = (_run(forward, *example) for example in examples)
    recorded = RecordedForward(first, second)
    x, positions, metadata = examples[1]
    space = torch.full((recorded.num_bytes(len(x)),), 255, dtype=torch.uint8)
    replayed = recorded.run_in(space, x, positions, metadata)
    if not torch.equal(replayed.view(torch.int32), second.output.view(torch.int32)):
        raise NotReplayable("its replay gives other values")
    return recorded


def _inputs(x: Tensor, positions: Tensor, metadata: AttentionMetadata) -> list[Tensor]:
    for tensor in (x, positions, metadata.slot_mapping):
        if not tensor.is_contiguous():
            raise ValueError(f"inputs of a forward are contiguous, not {list(tensor.shape)} with {tensor.stride()}")
    return [x, positions, metadata.slot_mapping]


class _Watch(TorchDispatchMode):
    """Keeps what is allocated, so that no two tensors of a run share an address, and refuses what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch's own wrapper would import torch._dynamo and sympy with it: 60 MB and a second, for nothing here
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in _ALLOCATIONS:
            self.made.append(result)
        elif func._schema.is_mutable or not _is_view(result, args):
            raise NotReplayable(f"it computes {name} with torch")
        return result


def _is_view(result: object, args: Sequence[object]) -> bool:
    storages = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
    results = result if isinstance(result, (list, tuple)) else [result]
    return all(isinstance(part, Tensor) and part.untyped_storage().data_ptr() in storages for part in results)


def _run(forward: Forward, x: Tensor, positions: Tensor, metadata: AttentionMetadata) -> _Run:
    inputs = _inputs(x, positions, metadata)
    with _Watch() as watch:
        _native.begin_trace()
        try:
            output = forward(x, positions, metadata)
        finally:
            calls = _native.end_trace()
    return _Run(len(x), inputs, watch.made, metadata, output, calls)


def _compare(first: _Run, second: _Run) -> list[dict[int, _Operand]]:
    """For each call its operands that are no constants; slots as if every tensor made had its own."""
    if [name for name, _ in first.calls] != [name for name, _ in second.calls] or not first.calls:
        raise NotReplayable("its calls depend on the number of tokens")
    if len(first.metadata.plans) != len(second.metadata.plans):
        raise NotReplayable("its attention plans depend on the number of tokens")
    plans = {plan.address: i for i, (plan, _) in enumerate(first.metadata.plans.values())}
    return [
        {
            i: found
            for i, (value, other) in enumerate(zip(values, others, strict=True))
            if (found := _operand(first, second, plans, name, value, other)) is not None
        }
        for (name, values), (_, others) in zip(first.calls, second.calls, strict=True)
    ]


def _operand(
    first: _Run, second: _Run, plans: dict[int, int], name: str, value: int | float | str, other: int | float | str
) -> _Operand | None:
    if not isinstance(value, int) or not isinstance(other, int):
        if value != other:
            raise NotReplayable(f"{name} takes {value!r} or {other!r} by the number of tokens")
        return None
    num_inputs = len(first.inputs)
    if value in plans:
        return _Operand(1 + num_inputs + plans[value], 1, 0)
    place = first.place(value)
    if place is not None and place == second.place(other):
        index, offset = place
        return _Operand(1 + index if index < num_inputs else 1 + index + len(plans), 1, offset)
    if value == other:
        return None
    factor, rest = divmod(value, first.num_tokens)
    if rest or other != factor * second.num_tokens:
        raise NotReplayable(f"{name} takes {value} for {first.num_tokens} tokens and {other} for {second.num_tokens}")
    return _Operand(0, factor, 0)


@dataclass(frozen=True, slots=True)
class _Lanes:
    """Memory that tensors made on the way share, one after the other."""

    of: dict[int, int]
    """Index of a tensor made -> its lane."""
    widths: list[int]
    """Bytes of a lane for one token."""

    def offsets(self, num_tokens: int) -> list[int]:
        """Where each lane begins; one more for the end."""
        offsets, end = [], 0
        for width in self.widths:
            offsets.append(end)
            end += -(-width * num_tokens // _ALIGNMENT) * _ALIGNMENT
        return [*offsets, end]


def _share_memory(run: _Run, other: _Run, operands: list[dict[int, _Operand]]) -> _Lanes:
    """A tensor takes the lane of one that no later call uses; the result keeps its lane to the end."""
    first_made = 1 + len(run.inputs) + len(run.metadata.plans)
    last_use: dict[int, int] = {}
    for index, patched in enumerate(operands):
        for operand in patched.values():
            if operand.slot >= first_made:
                last_use[operand.slot - first_made] = index
    result = run.place(run.output.data_ptr())
    if result is not None:
        last_use[result[0] - len(run.inputs)] = len(operands)
    of: dict[int, int] = {}
    widths: list[int] = []
    free_after: list[int] = []
    for index, patched in enumerate(operands):
        for made in sorted({o.slot - first_made for o in patched.values() if o.slot >= first_made} - set(of)):
            width, rest = divmod(run.made[made].nbytes, run.num_tokens)
            if rest or made >= len(other.made) or other.made[made].nbytes != width * other.num_tokens:
                raise NotReplayable(f"it makes a tensor of {list(run.made[made].shape)}")
            free = [lane for lane, after in enumerate(free_after) if after < index]
            if free:
                lane = min(free, key=lambda lane: abs(widths[lane] - width))
            else:
                lane = len(widths)
                widths.append(0)
                free_after.append(0)
            widths[lane] = max(widths[lane], width)
            free_after[lane] = last_use[made]
            of[made] = lane
    return _Lanes(of, widths)
