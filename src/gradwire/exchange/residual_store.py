"""The residuals and factors that compressors keep, by tensor name: saved, loaded, and carried over to other buckets.

Each encode of a scheme covers a range of elements and keeps a residual for it. Gradients are divided by the number of ranks
first, so every residual is a part of the mean gradient: of a rank's own gradient, of a node's sum, or of the sum of all. When a
range moves to another encode, its residual is added to the residual there, and nothing is lost.

Keys are `{what}/{encode}/{tensor}`. Two kinds of key are special:

- The encode 'left' is a residual of another plan that no encode of this rank has adopted. It is added to the next gradient.
- `{what}_copy` is a residual that several ranks keep alike, since one rank of each node encodes the same sum. The lowest rank's
  is the original. A resumed run needs the copies; a sum over ranks leaves them out.

Plans without error feedback keep no residuals, and plans without weights of elements no energies. Those of another plan are then
kept by the tensor's slot, and saved as 'left': a residual until it is sent, energies until a plan with weights takes them up.
Shared values (PowerSGD's factors) are the same on all ranks, and of another size than the tensor. Energies, which the weights of
elements follow from, are the same on all ranks too.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from gradwire.collectives import Memory
from gradwire.core import printable
from gradwire.exchange.layout import BucketBuffers, Slot
from gradwire.kernels.reference.weights import scale_energy

SHARED, ENERGY, COPY, LEFT = "shared", "energy", "_copy", "left"
_KEY = re.compile(rf"\w+/([0-3]|{LEFT})/.+", re.DOTALL)

State = Mapping[str, torch.Tensor]


class _KeptRun(NamedTuple):
    """A part of the memory of one tensor."""

    key: str
    """`{what}/{encode}/{tensor}`."""
    first: int
    """The first element of the part, within the tensor."""
    numel: int
    """Elements of the whole tensor."""
    part: torch.Tensor


class Remembered:
    """The memory of the compressors of one set of buckets, by tensor."""

    def __init__(self, buckets: list[BucketBuffers]) -> None:
        self._buckets = buckets

    def _runs(self, change: bool = False) -> Iterator[_KeptRun]:
        """All parts. With `change`, values that the caller writes into a part are stored."""
        for buffers in self._buckets:
            for chunk, start in zip(buffers.chunks, buffers.bounds, strict=False):
                for name, value in chunk.shared.items():
                    yield _KeptRun(f"{SHARED}/0/{name}", 0, value.numel(), value)
                for memory in chunk.memory:
                    values = memory.read()
                    yield from _parts(values, memory, start, buffers)
                    if change:
                        memory.write(values)
            for slot, energy in _energies(buffers):
                yield _KeptRun(f"{ENERGY}/0/{slot.name}", 0, energy.numel(), energy)

    def _carried_sizes(self) -> dict[str, int]:
        """The keys that `take_over` accepts, with their numbers of elements, without the residuals that slots keep."""
        sizes: dict[str, int] = {}
        for buffers in self._buckets:
            sizes |= {f"{ENERGY}/{slot.name}": energy.numel() for slot, energy in _energies(buffers)}
            for chunk in buffers.chunks:
                sizes |= {f"{SHARED}/{name}": value.numel() for name, value in chunk.shared.items()}
                sizes |= {f"{what}/{slot.name}": slot.view.numel() for what in chunk.remembers for slot in buffers.compressed}
        return sizes

    def _taken_sizes(self) -> dict[str, int]:
        """The keys that `take_over` accepts, with their numbers of elements."""
        return self._carried_sizes() | {_carried(key): slot.view.numel() for key, slot, _ in self._left()}

    def state(self) -> dict[str, torch.Tensor]:
        """`{what}/{encode}/{tensor}`: one-dimensional float32, element by element whatever the tensor's strides are, zero where
        nothing is kept."""
        state: dict[str, torch.Tensor] = {}
        for run in self._runs():
            if _is_left(run.key) and not run.part.any():
                continue  # it was sent
            if run.key not in state:
                state[run.key] = torch.zeros(run.numel, dtype=run.part.dtype, device=run.part.device)
            state[run.key][run.first : run.first + run.part.numel()] = run.part
        slots = self._slots(state)
        state = {key: slots[key].by_element(value) if key in slots else value for key, value in state.items()}
        return state | self._kept_by_slots()

    def _slots(self, keys: Iterable[str]) -> dict[str, Slot]:
        """The slot of each key that stands for the elements of a tensor."""
        by_name = {slot.name: slot for buffers in self._buckets for slot in buffers.slots}
        return {key: by_name[key.split("/", 2)[2]] for key in keys if not key.startswith(f"{SHARED}/")}

    def _left(self) -> Iterator[tuple[str, Slot, str]]:
        """All that the schemes of a tensor do not take: its key, the tensor's slot, and the field of the slot that keeps it."""
        for buffers in self._buckets:
            compressed = {slot.name for slot in buffers.compressed}
            residuals = any("residual" in chunk.remembers for chunk in buffers.chunks)
            for slot in buffers.slots:
                for what, field, taken in (("residual", "owed", residuals), (ENERGY, "energy", buffers.energies is not None)):
                    if not taken or slot.name not in compressed:
                        yield f"{what}/{LEFT}/{slot.name}", slot, field

    def _kept_by_slots(self) -> dict[str, torch.Tensor]:
        """Copies of what slots keep, by key."""
        kept = ((key, slot, getattr(slot, field)) for key, slot, field in self._left())
        return {key: slot.by_element(own).clone() for key, slot, own in kept if own is not None}

    def check(self, state: State) -> None:
        """Raises ValueError unless `state` has exactly what `load` takes."""
        expected = {run.key: run.numel for run in self._runs() if not _is_left(run.key)}
        sizes = self._taken_sizes()
        left = {key: numel for key in state if _is_left(key) and (numel := sizes.get(_carried(key))) is not None}
        for key in sorted(expected.keys() ^ (state.keys() - left.keys())):
            where = "the state has no" if key in expected else "this plan keeps no"
            raise ValueError(f"{where} {printable(key)}: it was saved under another plan. Use the plan it was saved with.")
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
        """All that this rank has not sent yet, by `{what}/{tensor}`: the encodes added up. What `added_up` makes of `state`, in
        one pass: between the first two steps of a run it is on every rank's way."""
        total: dict[str, torch.Tensor] = {}
        for run in self._runs():
            name = _carried(run.key)
            if run.key.startswith(f"{SHARED}/"):
                total.setdefault(name, run.part.reshape(-1).clone())
            elif not run.key.partition("/")[0].endswith(COPY) and not (_is_left(run.key) and not run.part.any()):
                if name not in total:
                    total[name] = torch.zeros(run.numel, dtype=run.part.dtype, device=run.part.device)
                total[name][run.first : run.first + run.part.numel()] += run.part
        slots = {slot.name: slot for buffers in self._buckets for slot in buffers.slots}
        for name, value in total.items():
            if not name.startswith(f"{SHARED}/"):
                total[name] = slots[name.partition("/")[2]].by_element(value)
        return total | {_carried(key): value for key, value in self._kept_by_slots().items()}

    def names(self) -> list[str]:
        """The tensors that have a memory."""
        return list(dict.fromkeys(key.partition("/")[2] for key in self._carried_sizes()))

    def check_carried(self, carried: State) -> None:
        """Raises ValueError where `take_over` would lose something."""
        expected = self._taken_sizes()
        for key in carried:
            what, _, name = key.partition("/")
            if key not in expected and what not in (SHARED, ENERGY):
                raise ValueError(
                    f"the state has a {what} of {name!r}, of which this plan keeps none: what was not sent would be lost. "
                    "Use the model, and the policy with error feedback, of the run that saved it."
                )
        owed = {key: value.numel() for key, value in carried.items() if key in expected and not key.startswith(f"{SHARED}/")}
        _check_sizes(owed, expected)

    def fitting(self, carried: State) -> dict[str, torch.Tensor]:
        """The part of `carried` that `take_over` accepts."""
        expected = self._taken_sizes()
        return {key: value for key, value in carried.items() if expected.get(key) == value.numel()}

    def take_over(self, carried: State) -> None:
        """Begin with the residuals of another set of buckets, and with zeros for the other tensors. Shared factors that
        are not in `carried`, or of another rank there, stay as they are."""
        for buffers in self._buckets:
            for slot, energy in _energies(buffers):
                own = carried.get(f"{ENERGY}/{slot.name}")
                energy.copy_(slot.in_memory(own)) if own is not None else energy.zero_()
            for chunk in buffers.chunks:
                for name, value in chunk.shared.items():
                    own = carried.get(f"{SHARED}/{name}")
                    if own is not None and own.numel() == value.numel():
                        value.copy_(own.reshape(value.shape))
                for memory in chunk.memory:
                    memory.clear()
        self._give(carried)

    def _give(self, carried: State) -> None:
        """Give each scheme the residuals of its elements; narrow ones in one call, so that they are rounded once. The slots keep
        what no scheme takes."""
        for key, slot, field in self._left():
            own = carried.get(_carried(key))
            setattr(slot, field, slot.in_memory(own) if own is not None else None)
        for buffers in self._buckets:
            for chunk, (start, end) in zip(buffers.chunks, pairwise(buffers.bounds), strict=True):
                for what in chunk.remembers:
                    values = [*_carried_parts(carried, what, buffers, start, end)]
                    if values and any(memory.narrow for memory in chunk.memory):
                        values = [(0, _joined(values, end - start, buffers.flat.device))]
                    for at, part in values:
                        chunk.take_over(what, at, part)

    def scale(self, factor: float) -> None:
        """Multiply all that was not sent yet, and momentum."""
        for run in self._runs(change=True):
            _scale(run.key, run.part, factor)
        for key, slot, field in self._left():
            if (kept := getattr(slot, field)) is not None:
                setattr(slot, field, scaled({key: kept}, factor)[key])

    def drop(self) -> None:
        """Forget what was not sent yet, since the script left out the last update. Momentum and values that all ranks have alike
        stay."""
        for run in self._runs(change=True):
            if _is_residual(run.key):
                run.part.zero_()
        for key, slot, field in self._left():
            if _is_residual(key):
                setattr(slot, field, None)

    def follow(self, factor: float, left_out: bool) -> None:
        """A scaler multiplied the scale of the loss by this factor. left_out: and left out the update of the last step."""
        if left_out:
            self.drop()
        self.scale(factor)

    def held(self) -> Iterator[torch.Tensor]:
        """The memory itself."""
        for buffers in self._buckets:
            if buffers.energies is not None:
                yield buffers.energies.energy
            for chunk in buffers.chunks:
                yield from chunk.shared.values()
                for memory in chunk.memory:
                    yield from memory.held


def _energies(buffers: BucketBuffers) -> list[tuple[Slot, torch.Tensor]]:
    """The energies of each compressed tensor, if the bucket's elements have weights."""
    if buffers.energies is None:
        return []
    energy = buffers.energies.energy
    return [(slot, energy[slot.offset : slot.offset + slot.view.numel()]) for slot in buffers.compressed]


def _carried_parts(carried: State, what: str, buffers: BucketBuffers, start: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
    """The carried values of a chunk that covers the bucket's elements from `start` to `end`, each with its place in the chunk."""
    for slot in buffers.compressed:
        low, high = max(start, slot.offset), min(end, slot.offset + slot.view.numel())
        if low < high and (own := carried.get(f"{what}/{slot.name}")) is not None:
            yield low - start, slot.in_memory(own)[low - slot.offset : high - slot.offset]


def _joined(values: Sequence[tuple[int, torch.Tensor]], numel: int, device: torch.device) -> torch.Tensor:
    """One tensor of `numel` elements with the parts at their places, and zeros elsewhere."""
    whole = torch.zeros(numel, dtype=torch.float32, device=device)
    for at, part in values:
        whole[at : at + part.numel()] = part
    return whole


def _parts(values: State, memory: Memory, begin: int, buffers: BucketBuffers) -> Iterator[_KeptRun]:
    """The values of a memory, by tensor, for a chunk that begins at the bucket's element `begin`."""
    start, end = begin + memory.start, begin + memory.end
    for what, whole in values.items():
        for slot in buffers.compressed:
            low, high = max(slot.offset, start), min(slot.offset + slot.view.numel(), end)
            if low < high:
                key = f"{what}{COPY if memory.copy else ''}/{memory.encode}/{slot.name}"
                yield _KeptRun(key, low - slot.offset, slot.view.numel(), whole[low - start : high - start])


def added_up(states: Iterable[State]) -> dict[str, torch.Tensor]:
    """`{what}/{tensor}` from what `Remembered.state` of several ranks returned: all their encodes added up without copies, but
    of what is shared the first. Values of a tensor end on the device of the first state that has it.

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
                raise ValueError(f"{printable(key)} has {flat.numel()} elements, and another rank's {total[name].numel()}.")
            if what not in (SHARED, ENERGY):
                total[name] = total[name] + flat.to(total[name].device)
    return total


def for_other_ranks(state: State, factor: float) -> dict[str, torch.Tensor]:
    """Return `added_up` of this state, for ranks of another number. Parts of the rank's own gradient, which it divided by the
    number of ranks, are multiplied by `factor`. What a later encode left of a sum stays as it is: a part of the mean."""
    own = {key: value * factor for key, value in state.items() if not is_alike(key) and key.split("/", 2)[1] in ("0", LEFT)}
    return added_up([{**state, **own}])


def scaled(carried: State, factor: float) -> dict[str, torch.Tensor]:
    """Return copies of these values after `Remembered.scale`. Keys begin as those of `Remembered.carried`."""
    made = {key: value.clone() for key, value in carried.items()}
    for key, value in made.items():
        _scale(key, value, factor)
    return made


def followed(carried: State, factor: float, left_out: bool) -> dict[str, torch.Tensor]:
    """Return copies of these values after `Remembered.follow`."""
    return scaled({key: value for key, value in carried.items() if not (left_out and _is_residual(key))}, factor)


def is_alike(key: str) -> bool:
    """Whether the values of this key of `Remembered.state` or `carried` are the same on all ranks."""
    return key.partition("/")[0] in (SHARED, ENERGY)


def _is_residual(key: str) -> bool:
    """Whether the values of this key of `Remembered.state` or `carried` were not sent yet."""
    return key.partition("/")[0].removesuffix(COPY) == "residual"


def _scale(key: str, values: torch.Tensor, factor: float) -> None:
    """Multiply values that were not sent yet, or momentum, in place."""
    what = key.partition("/")[0]
    if what == ENERGY:
        scale_energy(values, factor)
    elif what != SHARED:
        values.mul_(factor)


def _is_left(key: str) -> bool:
    return key.split("/", 2)[1] == LEFT


def _carried(key: str) -> str:
    what, _, name = key.split("/", 2)
    return f"{what}/{name}"


def _check_sizes(found: Mapping[str, int], expected: Mapping[str, int]) -> None:
    for key, numel in found.items():
        if numel != expected[key]:
            raise ValueError(f"{printable(key)} has {numel} elements where the model's tensor has {expected[key]}.")
