"""What compressors remember of all buckets, by tensor name: to save, to load, and to carry over to another set of buckets.

Each encode of a scheme covers a range of elements. What it lost is a part of the mean gradient, whatever it encoded: a rank's
own gradient, a node's sum or the sum of all, since gradients are divided by the number of ranks first. So when ranges change
hands, adding one to the other loses nothing. Keys are `{what}/{encode}/{tensor}`. Two are special. The encode 'left' is what no
encode of this rank took over from another plan; it goes into the next gradient. `{what}_copy` is what several ranks remember
alike, because they encode the very same sum, one on each node: it is lost once, so all but the lowest rank's are copies, which a
resumed run needs and a sum over ranks leaves out.

Where a plan remembers no residual of a tensor at all, as under plain all-reduce, what another one left is owed by the tensor's
slot, and saved as 'left' too.

What is shared (PowerSGD's factors) is the same on all ranks, and of another size than the tensor.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import torch

from gradwire.collectives import Memory
from gradwire.core.checks import printable
from gradwire.exchange.layout import BucketBuffers, Slot

__all__ = ["Remembered", "added_up"]

SHARED, COPY, LEFT = "shared", "_copy", "left"
_KEY = re.compile(rf"\w+/([0-3]|{LEFT})/.+", re.DOTALL)

State = Mapping[str, torch.Tensor]


class _KeptRun(NamedTuple):
    """A part of what is remembered of a tensor."""

    key: str
    """Of the whole, `{what}/{encode}/{tensor}`."""
    first: int
    """The part's first element."""
    numel: int
    """Of the whole."""
    part: torch.Tensor


class Remembered:
    """Views of what one set of buckets remembers."""

    def __init__(self, buckets: list[BucketBuffers]) -> None:
        self._buckets = buckets

    def _runs(self, change: bool = False) -> Iterator[_KeptRun]:
        """With `change` what is written to the parts is remembered."""
        for buffers in self._buckets:
            for chunk, start in zip(buffers.chunks, buffers.bounds, strict=False):
                for name, value in chunk.shared.items():
                    yield _KeptRun(f"{SHARED}/0/{name}", 0, value.numel(), value)
                for memory in chunk.memory:
                    values = memory.read()
                    yield from _parts(values, memory, start, buffers)
                    if change:
                        memory.write(values)

    def _carried_sizes(self) -> dict[str, int]:
        """What can be taken over, and of how many elements it is."""
        sizes: dict[str, int] = {}
        for buffers in self._buckets:
            for chunk in buffers.chunks:
                sizes |= {f"{SHARED}/{name}": value.numel() for name, value in chunk.shared.items()}
                sizes |= {
                    f"{what}/{slot.name}": slot.view.numel() for what in chunk.remembers for slot in buffers.slots
                }
        return sizes

    def _taken_sizes(self) -> dict[str, int]:
        """The same, and what slots can owe."""
        return self._carried_sizes() | {_carried(key): slot.view.numel() for key, slot in self._owing()}

    def state(self) -> dict[str, torch.Tensor]:
        """`{what}/{encode}/{tensor}`: one-dimensional float32, element by element whatever the tensor's strides are, zero where
        nothing is kept."""
        state: dict[str, torch.Tensor] = {}
        for run in self._runs():
            if run.key not in state:
                state[run.key] = torch.zeros(run.numel, dtype=run.part.dtype, device=run.part.device)
            state[run.key][run.first : run.first + run.part.numel()] = run.part
        slots = self._slots(state)
        state = {key: slots[key].by_element(value) if key in slots else value for key, value in state.items()}
        return state | {key: slot.by_element(slot.owed).clone() for key, slot in self._owing() if slot.owed is not None}

    def _slots(self, keys: Iterable[str]) -> dict[str, Slot]:
        """Of those of these keys that are of a tensor's elements."""
        by_name = {slot.name: slot for buffers in self._buckets for slot in buffers.slots}
        return {key: by_name[key.split("/", 2)[2]] for key in keys if not key.startswith(f"{SHARED}/")}

    def _owing(self) -> Iterator[tuple[str, Slot]]:
        """The slots of which no residual is remembered, with their keys."""
        for buffers in self._buckets:
            if not any("residual" in chunk.remembers for chunk in buffers.chunks):
                yield from ((f"residual/{LEFT}/{slot.name}", slot) for slot in buffers.slots)

    def check(self, state: State) -> None:
        """Raises ValueError unless `state` has exactly what `load` takes."""
        expected = {run.key: run.numel for run in self._runs() if not _is_left(run.key)}
        sizes = self._taken_sizes()
        left = {key: numel for key in state if _is_left(key) and (numel := sizes.get(_carried(key)))}
        for key in sorted(expected.keys() ^ (state.keys() - left.keys())):
            where = "the state has no" if key in expected else "this plan keeps no"
            raise ValueError(
                f"{where} {printable(key)}: it was saved under another plan. Use the plan it was saved with."
            )
        _check_sizes({key: value.numel() for key, value in state.items()}, expected | left)

    def load(self, state: State) -> None:
        """Take what `state` of the same rank and plan returned, when `check` finds nothing wrong with it."""
        placed = {key: slot.in_memory(state[key]) for key, slot in self._slots(state).items() if not _is_left(key)}
        for run in self._runs(change=True):
            if _is_left(run.key):
                run.part.zero_()
            else:
                whole = placed[run.key] if run.key in placed else state[run.key].reshape(-1)
                run.part.copy_(whole[run.first : run.first + run.part.numel()])
        self._give({_carried(key): value.reshape(-1) for key, value in state.items() if _is_left(key)})

    def carried(self) -> dict[str, torch.Tensor]:
        """What this rank has not sent yet of each tensor, and else remembers, all encodes added up: `{what}/{tensor}`."""
        return added_up([self.state()])

    def names(self) -> list[str]:
        """Tensors of which something is remembered."""
        return list(dict.fromkeys(key.partition("/")[2] for key in self._carried_sizes()))

    def check_carried(self, carried: State) -> None:
        """Raises ValueError where `take_over` would lose something."""
        expected = self._taken_sizes()
        for key in carried:
            if key not in expected:
                what, _, name = key.partition("/")
                raise ValueError(
                    f"the state has a {what} of {name!r}, of which this plan keeps none: what was not sent would be lost. "
                    "Use the model, and the policy with error feedback, of the run that saved it."
                )
        _check_sizes({key: value.numel() for key, value in carried.items()}, expected)

    def fitting(self, carried: State) -> dict[str, torch.Tensor]:
        """What `take_over` can take of it."""
        expected = self._taken_sizes()
        return {key: value for key, value in carried.items() if expected.get(key) == value.numel()}

    def take_over(self, carried: State) -> None:
        """Begin with what another set of buckets left, and with zeros where it left nothing (with the first factors, where
        no shared ones)."""
        for buffers in self._buckets:
            for chunk in buffers.chunks:
                for name, value in chunk.shared.items():
                    value.copy_(carried.get(f"{SHARED}/{name}", value))
                for memory in chunk.memory:
                    memory.clear()
        self._give(carried)

    def _give(self, carried: State) -> None:
        """Hand to each scheme what is carried of its elements, all at once: what is stored narrow is rounded once then. What
        no scheme takes, the slots owe."""
        for key, slot in self._owing():
            owed = carried.get(_carried(key))
            slot.owed = slot.in_memory(owed) if owed is not None else None
        for buffers in self._buckets:
            for chunk, (start, end) in zip(buffers.chunks, pairwise(buffers.bounds), strict=True):
                for what in chunk.remembers:
                    if not any(f"{what}/{slot.name}" in carried for slot in buffers.slots):
                        continue
                    values = torch.zeros(end - start, dtype=torch.float32, device=buffers.flat.device)
                    for slot in buffers.slots:
                        low, high = max(start, slot.offset), min(end, slot.offset + slot.view.numel())
                        if low < high and (own := carried.get(f"{what}/{slot.name}")) is not None:
                            placed = slot.in_memory(own)
                            values[low - start : high - start] = placed[low - slot.offset : high - slot.offset]
                    chunk.take_over(what, 0, values)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What happens inside leaves no trace in what is remembered."""
        copies = [(held, held.clone()) for held in self.held()]
        try:
            yield
        finally:
            for held, copy in copies:
                held.copy_(copy)

    def held(self) -> Iterator[torch.Tensor]:
        """The memory itself."""
        for buffers in self._buckets:
            for chunk in buffers.chunks:
                yield from chunk.shared.values()
                for memory in chunk.memory:
                    yield from memory.held


def _parts(values: State, memory: Memory, begin: int, buffers: BucketBuffers) -> Iterator[_KeptRun]:
    """By tensor, the values of a memory of a chunk that begins at the bucket's element `begin`."""
    start, end = begin + memory.start, begin + memory.end
    for what, whole in values.items():
        for slot in buffers.slots:
            low, high = max(slot.offset, start), min(slot.offset + slot.view.numel(), end)
            if low < high:
                key = f"{what}{COPY if memory.copy else ''}/{memory.encode}/{slot.name}"
                yield _KeptRun(key, low - slot.offset, slot.view.numel(), whole[low - start : high - start])


def added_up(states: Iterable[State]) -> dict[str, torch.Tensor]:
    """`{what}/{tensor}` from what `Remembered.state` of several ranks returned: all their encodes added up without copies, but
    of what is shared the first.

    Raises ValueError for a key that names no tensor, and where sizes differ.
    """
    total: dict[str, torch.Tensor] = {}
    for state in states:
        for key, value in state.items():
            what = key.partition("/")[0]
            if not _KEY.fullmatch(key):
                raise ValueError(
                    f"{printable(key)} is not WHAT/ENCODE/NAME with an encode from 0 to 3 or {LEFT!r}. Pass "
                    "what handle.state_dict() returned."
                )
            if what.endswith(COPY):
                continue
            name, flat = _carried(key), value.reshape(-1)
            if name not in total:
                total[name] = flat
                continue
            if total[name].numel() != flat.numel():
                raise ValueError(
                    f"{printable(key)} has {flat.numel()} elements, and another rank's {total[name].numel()}."
                )
            if what != SHARED:
                total[name] = total[name] + flat
    return total


def _is_left(key: str) -> bool:
    return key.split("/", 2)[1] == LEFT


def _carried(key: str) -> str:
    what, _, name = key.split("/", 2)
    return f"{what}/{name}"


def _check_sizes(found: Mapping[str, int], expected: Mapping[str, int]) -> None:
    for key, numel in found.items():
        if numel != expected[key]:
            raise ValueError(f"{printable(key)} has {numel} elements where the model's tensor has {expected[key]}.")
