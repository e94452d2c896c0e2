"""The state of a handle or an exchange: a flat dictionary of tensors, which any number of ranks can load.

Keys are `rank{r}/{field}`, r being a global rank. Fields: `version`, `step`, `order` (of gradients, from which a policy
makes its plan), `plan` (the digest), `ranks` (those of the group that saved) and what compressors remember:
`{what}/{encode}/{tensor}`, as `residual/0/fc.weight`; see `gradwire.exchange.residual_store`. Of the `delayed` and the `local`
schedule also the rank's own weights, `local/0/{tensor}`, and `weights`, checksums of the global ones that they belong to. Of
`delayed` what compressors of corrections remember, `correction_{what}/..`; of `local` the outer optimizer's momentum, the same
on all ranks, `outer/0/{tensor}`, `local_steps`, how many the rank made, and `landed` where the last exchange landed earlier than
the schedule says, as in `join()`. Where gradwire chose the plan itself also `decided`, its JSON in bytes, and `searching` where
it was only being tried; or `chosen`, the plan that was chosen before and that goes on. Where scripts give batches weights also
`samples`, float64 numbers in bytes. Where it is measuring something over several steps also `measuring`, JSON in bytes, and what
it has added up so far, `measured/0/{tensor}` and `measured/1/{tensor}`.

In a group of the same ranks each takes its own. In another group the rank at position q of Q takes the residuals of all
whose position in the group that saved was q, q + Q, q + 2Q, .. : each is a part of the mean that was not sent, so their
sum is kept. What is shared, the same on all ranks, it takes of the first rank there is.

A plan that gradwire chose and that pairs the ranks of nodes cannot run where nodes have different numbers of ranks. It is left
out there, and ranks take what they take of another group.
"""

import re
import struct
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from gradwire.core import Plan, pairs_ranks, printable
from gradwire.errors import GradwireError
from gradwire.transport import Group

CORRECTION, LOCAL, OUTER = "correction_", "local/", "outer/"
"""How keys of schedules begin: what compressors of corrections remember, a rank's own weights, and the outer momentum."""
MEASURED = "measured/"
"""How keys of a measurement begin that takes several steps."""

_ALIKE = ("shared/", "energy/", OUTER)
"""How keys begin of what is the same on all ranks."""
VERSION = 1
_KEY = re.compile(r"rank(0|[1-9]\d{0,8})/(.+)", re.DOTALL)
_MEMORY = re.compile(r"\w+/([0-3]|left)/.+", re.DOTALL)
_FIELDS = {"version", "step", "order", "plan", "ranks", "weights", "local_steps", "landed"}
_FIELDS |= {"decided", "searching", "chosen", "measuring", "samples"}
_DIGEST_BYTES = 32
_DOUBLE = struct.Struct("<d")
_CURE = "Pass what handle.state_dict() returned."


class Saved(NamedTuple):
    """The part of a state that one rank takes."""

    step: int
    order: list[int]
    plan: str
    """The digest of the plan that was run, hexadecimal."""
    own: bool
    """Whether memory is this rank's own, from a group of the same ranks."""
    ranks: int
    """The number of ranks of the group that saved."""
    memory: list[dict[str, torch.Tensor]]
    """`{what}/{encode}/{tensor}`, of each rank whose memory this rank takes."""
    missing: list[int]
    """Ranks whose memory this rank should take and that are not in the state."""
    weights: list[int]
    """A checksum of each global weight, below 2**64, for schedules with local weights if memory is this rank's own."""
    local_steps: int | None
    """The number of steps that a rank has made in the `local` schedule."""
    landed: bool
    """Whether the last exchange of the `local` schedule ended earlier than the schedule says."""
    samples: list[float]
    """The weights of batches that were not part of a mean yet; of another rank if memory is not this rank's own."""
    decided: Plan | None
    """The plan itself, where gradwire chose it."""
    searching: bool
    """Whether it was only being tried, and nothing was chosen yet."""
    chosen: Plan | None
    """The plan that goes on, where another one, `decided`, was only being compared with it."""
    measuring: bytes
    """How far a measurement is that takes several steps, if it is this rank's own; empty where there is none."""
    measured: dict[str, torch.Tensor]
    """`measured/{which}/{tensor}`: what it has added up."""


def split(memory: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The memory of compressors, and the memory of the schedule."""
    own = {key: value for key, value in memory.items() if key.startswith((CORRECTION, LOCAL, OUTER))}
    return {key: value for key, value in memory.items() if key not in own}, own


def divided(state: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The memory of the compressors of corrections, and local weights by tensor."""
    corrections = {key.removeprefix(CORRECTION): value for key, value in state.items() if key.startswith(CORRECTION)}
    return corrections, by_tensor(state, LOCAL)


def by_tensor(state: Mapping[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """The values whose keys begin with `kind`, by tensor."""
    return {key.split("/", 2)[2]: value for key, value in state.items() if key.startswith(kind)}


def write_state(
    group: Group, step: int, order: Iterable[int], plan: str, memory: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    fields = {
        "version": torch.tensor(VERSION),
        "step": torch.tensor(step),
        "order": torch.tensor(list(order)),
        "plan": torch.tensor(list(bytes.fromhex(plan)), dtype=torch.uint8),
        "ranks": torch.tensor(group.global_ranks),
    }
    prefix = f"rank{group.global_ranks[group.rank]}"
    return {f"{prefix}/{field}": value for field, value in {**fields, **memory}.items()}


def packed_samples(numbers: Iterable[float]) -> dict[str, torch.Tensor]:
    """The field `samples` of these numbers; nothing if there are none."""
    packed = b"".join(map(_DOUBLE.pack, numbers))
    return {"samples": torch.tensor(list(packed), dtype=torch.uint8)} if packed else {}


def read_state(state: Mapping[str, Any], group: Group) -> Saved:
    """The part of a state that this rank takes. Raises ValueError naming the key that is missing or not as it should be."""
    saved = _taken(state, group)
    options = (bucket.option for plan in (saved.decided, saved.chosen) if plan is not None for bucket in plan.buckets)
    if group.grid.ranks_per_node_if_even is not None or not any(map(pairs_ranks, options)):
        return saved
    return _of_others(saved._replace(decided=None, chosen=None, searching=True))


def _taken(state: Mapping[str, Any], group: Group) -> Saved:
    if not isinstance(state, Mapping):
        raise ValueError(f"the state is of type {type(state).__name__}: a state is a dictionary of tensors. {_CURE}")
    by_rank: dict[int, dict[str, Any]] = {}
    for key, value in state.items():
        if isinstance(key, str) and (match := _KEY.fullmatch(key)):
            by_rank.setdefault(int(match[1]), {})[match[2]] = value
    if not by_rank:
        shown = ", ".join(repr(key) for key in list(state)[:3]) or "nothing"
        raise ValueError(
            f"the state has no key that begins with rank0/ or another rank: it holds {shown}. It is not a handle's. {_CURE}"
        )
    rank = group.global_ranks[group.rank]
    if rank in by_rank:
        own = _Fields(rank, by_rank[rank])
        if own.ranks == group.global_ranks:
            return own.saved
    entries = {other: _Fields(other, fields) for other, fields in sorted(by_rank.items())}
    first = next(iter(entries.values()))
    for other in entries.values():
        for field in ("ranks", "step", "plan", "order"):
            a, b = (getattr(each if field == "ranks" else each.saved, field) for each in (first, other))
            if a != b:
                raise ValueError(
                    f"rank{first.rank}/{field} is {_short(a)} and rank{other.rank}/{field} is {_short(b)}: these were not "
                    "saved together. Pass the state of one group at one step."
                )
    same = first.ranks == group.global_ranks
    taken = [rank] if same else list(first.ranks[group.rank :: group.world_size])
    memory = [entries[each].saved.memory[0] for each in taken if each in entries]
    shared = {key: value for key, value in first.saved.memory[0].items() if key.removeprefix(CORRECTION).startswith(_ALIKE)}
    missing = [each for each in taken if each not in entries]
    others = [*memory, shared]
    return _of_others(first.saved._replace(memory=others, missing=missing))


def _of_others(saved: Saved) -> Saved:
    """The state without what only the ranks that saved it can go on with."""
    return saved._replace(own=False, weights=[], measuring=b"", measured={})


def warn_of_lost(ranks: list[int], names: list[str]) -> None:
    """Tell that these ranks' residuals of these tensors are not in a state."""
    if ranks and names:
        more = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
        warnings.warn(
            f"the state holds nothing of rank {', '.join(map(str, ranks))}: what it had not sent yet of {names[0]!r}{more} is "
            "lost, and its residuals begin at zero. Pass the states of all ranks to keep them.",
            stacklevel=3,
        )


class _Fields:
    """The fields that one rank saved, checked."""

    def __init__(self, rank: int, fields: dict[str, Any]) -> None:
        self.rank, self._fields = rank, fields
        if (version := self._number("version")) != VERSION:
            raise ValueError(
                f"rank{rank}/version is {version}: this gradwire reads states of version {VERSION}. "
                + ("Update gradwire." if version > VERSION else "Load it with the gradwire that saved it.")
            )
        step, order = self._number("step"), self._numbers("order", torch.int64)
        self.ranks = tuple(self._numbers("ranks", torch.int64))
        if rank not in self.ranks or len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"rank{rank}/ranks is {_short(self.ranks)}: it must hold {rank} and each rank once. {_CURE}")
        digest = self._numbers("plan", torch.uint8)
        if len(digest) != _DIGEST_BYTES:
            raise ValueError(f"rank{rank}/plan has {len(digest)} bytes: a plan's digest has {_DIGEST_BYTES}. {_CURE}")
        packed = bytes(self._numbers("samples", torch.uint8)) if "samples" in fields else b""
        if len(packed) % _DOUBLE.size:
            raise ValueError(f"rank{rank}/samples has {len(packed)} bytes, not whole numbers of {_DOUBLE.size} bytes. {_CURE}")
        memory = {field: value for field, value in fields.items() if _MEMORY.fullmatch(field)}
        self.saved = Saved(
            step=step,
            order=order,
            plan=bytes(digest).hex(),
            own=True,
            ranks=len(self.ranks),
            memory=[memory],
            missing=[],
            decided=self._plan("decided"),
            chosen=self._plan("chosen"),
            searching="searching" in fields and bool(self._number("searching")),
            weights=[n % 2**64 for n in self._numbers("weights", torch.int64)] if "weights" in fields else [],
            local_steps=self._number("local_steps") if "local_steps" in fields else None,
            landed="landed" in fields and bool(self._number("landed")),
            samples=[number for (number,) in _DOUBLE.iter_unpack(packed)],
            measuring=bytes(self._numbers("measuring", torch.uint8)) if "measuring" in fields else b"",
            measured={},
        )
        """The part that this rank itself takes in a group of the same ranks."""
        if unknown := sorted(fields.keys() - _FIELDS - memory.keys()):
            raise ValueError(f"rank{rank}/{printable(unknown[0])} is not a field of a handle's state. {_CURE}")
        for field, value in memory.items():
            of_weights = field.startswith((LOCAL, OUTER)) and isinstance(value, torch.Tensor) and value.is_floating_point()
            if not _is_whole(value, value.dtype if of_weights else torch.float32):
                raise ValueError(f"rank{rank}/{printable(field)} is {_kind(value)}: it must be a float32 tensor. {_CURE}")
            memory[field] = value.detach()
        self.saved.measured.update((field, memory.pop(field)) for field in list(memory) if field.startswith(MEASURED))

    def _plan(self, field: str) -> Plan | None:
        if field not in self._fields:
            return None
        try:
            return Plan.from_json(bytes(self._numbers(field, torch.uint8)))
        except GradwireError as error:
            raise ValueError(f"rank{self.rank}/{field} is no plan: {error} {_CURE}") from error

    def _numbers(self, field: str, dtype: torch.dtype, dimensions: int = 1) -> list[int]:
        key = f"rank{self.rank}/{field}"
        if field not in self._fields:
            cure = "It was saved by an older gradwire, by other ranks, or is not a handle's. " + _CURE
            raise ValueError(f"the state has no {key}. {cure}")
        value = self._fields[field]
        if not _is_whole(value, dtype) or value.dim() != dimensions:
            wanted = f"a {dimensions}-dimensional tensor of {str(dtype).removeprefix('torch.')}"
            raise ValueError(f"{key} is {_kind(value)}: it must be {wanted}. {_CURE}")
        return [int(number) for number in value.reshape(-1).tolist()]

    def _number(self, field: str) -> int:
        (number,) = self._numbers(field, torch.int64, dimensions=0)
        if not 0 <= number < 2**62:
            raise ValueError(f"rank{self.rank}/{field} is {number}: it must be at least 0 and below 2**62. {_CURE}")
        return number


def _is_whole(value: Any, dtype: torch.dtype) -> bool:
    """Whether it is a dense tensor that has all its elements in memory."""
    if not isinstance(value, torch.Tensor) or value.dtype != dtype or value.layout != torch.strided or value.is_meta:
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor) and (value.is_meta or value.layout != torch.strided):
        return f"a tensor on {value.device} with layout {value.layout}"
    if isinstance(value, torch.Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} and shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
