"""The steps of an option in parts of the bucket, for any bucket size.

A walk over the tasks follows the busiest rank: the part of the bucket that the rank holds, as gradients or as payloads, and the
number of payloads of each element that no rank has added yet (ByteComp's footnote 2).

CGX's ring and tree add payloads by decoding and encoding again at every hop (docs/papers/cgx.md). Hops follow each other, so all
encodes of the busiest rank count at the first task and all decodes at the last.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from gradwire.core import ALL_REDUCE, COLLECTIVES, ROUTINES, collective_of, named, rows_of
from gradwire.costs.collectives import Flows, Load, Traffic, flat_traffic, group_traffic, sum_traffic
from gradwire.errors import PlanError


class Step(NamedTuple):
    """One task of an option."""

    task: str
    """word:where, as in the plan."""
    share: float
    """The part of the bucket that the busiest rank encodes, decodes, or holds before the exchange."""
    parts: int
    """Payloads of each element that a decode decodes or an exchange carries. Calls of a Comp: 1, or one for each hop."""
    payload: int
    """An exchange carries 0: gradients, 1: payloads of the first Comp, 2: payloads of a later Comp."""
    traffic: Traffic | None
    """The traffic of an exchange; None for a codec task."""
    gathers: bool
    """Whether the task belongs to the gather phase, which begins with the first second step of a scheme."""
    large: Traffic | None = None
    """The traffic of pieces that go around a ring (`gradwire.core.goes_around`); None: `traffic`, as for other pieces."""
    sums: bool = False
    """Whether a decode adds payloads of others to the own part: one launch on a GPU where the spec takes batches."""


@lru_cache(maxsize=20_000)
def steps_of(
    option: tuple[str, ...], nodes: int, ranks_per_node: int, rounds: int = 0, routing: str = "ring"
) -> tuple[Step, ...]:
    """The tasks of an option on a cluster of this shape.

    rounds: the number of sums of the spec's payloads on the wire (`Spec.rounds`). routing: one of ROUTINGS.
    Raises PlanError if the option does not give every rank the whole sum.

    >>> steps = steps_of(("comp:gpu", "allgather:inter", "decomp:gpu"), nodes=4, ranks_per_node=1)
    >>> [(step.task, step.share, step.parts) for step in steps]
    [('comp:gpu', 1.0, 1), ('allgather:inter', 1.0, 1), ('decomp:gpu', 1.0, 4)]
    """
    collective = collective_of(option)
    if collective is not None and collective.steps:
        own = tuple(named(collective.steps)(option, nodes, ranks_per_node, routing))
        if [step.task for step in own] != list(option):
            raise PlanError(
                f"the steps of collective {collective.name!r} are {[step.task for step in own]}, but its option is "
                f"{list(option)}. Return one step for each task, in this order."
            )
        return own
    walk = _Walk(option, nodes, ranks_per_node, rounds, routing)
    steps = tuple(walk.step(index) for index in range(len(option)))
    if walk.coded or walk.opened:
        raise PlanError(f"option {list(option)} ends before all ranks have the whole sum. {_CURE}")
    return steps


_ON_WIRES = (ALL_REDUCE, COLLECTIVES["alltoall"].uncompressed)
"""The options that `gradwire.collectives.WireSum` runs between CPUs. It runs sums of payloads over all ranks too."""
_CURE = "`gradwire options` lists the options there are."


class _Walk:
    """The data that the busiest rank holds, from task to task."""

    def __init__(self, option: Sequence[str], nodes: int, ranks_per_node: int, rounds: int, routing: str) -> None:
        self.option, self.nodes, self.local = option, nodes, ranks_per_node
        self.rounds, self.routing = rounds, routing
        self.words = [task.partition(":")[0] for task in option]
        self.flat = not any(task.endswith(":intra") for task in option)
        self.cut, self.parts, self.payload = 1, 1, 0
        """The rank holds 1/cut of the bucket; payloads of each element; the encode that made them."""
        self.coded = self.own_apart = self.gathering = False
        self.holders = 1 if self.flat else ranks_per_node
        """Ranks of a node that hold data between the steps inside the node."""
        self.opened: dict[str, str] = {}
        """First steps whose second is still to come, by link."""

    def step(self, index: int) -> Step:
        word = self.words[index]
        if word == "comp":
            return self._encode(index)
        return self._decode(index) if word == "decomp" else self._exchange(index)

    def _encode(self, index: int) -> Step:
        if self.coded and not self.rounds:
            raise self._refusal(index, "data that are encoded already")
        following = self.words[index + 1 : index + 3]
        self.own_apart = following in (["alltoall", "decomp"], ["gather", "decomp"])
        kept = 1 / self._ranks(self.option[index + 1]) if following == ["alltoall", "decomp"] else 0.0
        self.coded, self.parts, self.payload = True, 1, min(2, self.payload + 1)
        return Step(self.option[index], (1 - kept) / self.cut, 1, 0, None, self.gathering)

    def _decode(self, index: int) -> Step:
        if not self.coded:
            raise self._refusal(index, "data that are not encoded")
        # the owner of a part adds its own gradient without encoding
        step = Step(self.option[index], 1 / self.cut, self.parts - self.own_apart, 0, None, self.gathering, sums=self.own_apart)
        self.coded, self.own_apart, self.parts = False, False, 1
        return step

    def _exchange(self, index: int) -> Step:
        task, word = self.option[index], self.words[index]
        if word not in ROUTINES:
            raise PlanError(f"option {list(self.option)} has {word!r}, which is no task. {_CURE}")
        link, routine = task.partition(":")[2], ROUTINES[word]
        ranks = self._ranks(task)
        if self.coded and routine.adds and not (self.rounds and word == "allreduce"):
            raise self._refusal(index, "payloads, which cannot be added on the wire")
        second = "second" in routine.gradients and link in self.opened
        if word == "broadcast" and not second:
            raise self._refusal(index, "data that no first step has sent to a root")
        opened = self.opened.get(link)
        if opened is not None and word != ROUTINES[opened].second:
            raise self._refusal(index, f"data that wait for {ROUTINES[opened].second}, the second step of {opened}")
        self.gathering = self.gathering or second
        large = None
        payloads = bool(self.rounds) and word == "allreduce" and self.flat
        if self.routing == "wires" and (payloads or tuple(self.option) in _ON_WIRES):
            traffic, large = sum_traffic(word, self.nodes, self.local)
        elif self.flat:
            traffic = flat_traffic(word, self.nodes, self.local, self.routing)
        else:
            traffic = group_traffic(word, ranks, link, self.routing, 1 if link == "intra" else self.holders)
        step = Step(task, 1 / self.cut, self.parts, self.payload * self.coded, traffic, self.gathering, large=large)
        if second:
            del self.opened[link]
            self.cut //= ranks if word == "allgather" else 1
        elif routine.second:
            self.opened[link] = word
            self.cut *= ranks if routine.gets == "owners" else 1
            if link == "intra" and routine.gets == "root":
                self.holders = 1
        if self.coded and not second and not routine.adds:
            self.parts *= ranks
        return step

    def _ranks(self, task: str) -> int:
        """Number of ranks in a task's collective."""
        if self.flat:
            return self.nodes * self.local
        return self.local if task.endswith(":intra") else self.nodes

    def _refusal(self, index: int, what: str) -> PlanError:
        return PlanError(
            f"option[{index}] is {self.option[index]!r} on {what}, in {list(self.option)}: that is impossible. {_CURE}"
        )


def ring_steps(option: tuple[str, ...], nodes: int, ranks_per_node: int, routing: str) -> tuple[Step, ...]:
    """The steps of a ring: for each shard an encode, a decode on the way up, and, unless it is the rank's own, one down."""
    comp, up, down, decomp = option
    ranks = nodes * ranks_per_node
    first, second = (flat_traffic(word, nodes, ranks_per_node, "ring") for word in ("reducescatter", "allgather"))
    return (
        Step(comp, 1 / ranks, ranks, 0, None, False),
        Step(up, 1.0, 1, 1, first, False),
        Step(down, 1 / ranks, 1, 1, second, True),
        Step(decomp, 1 / ranks, 2 * (ranks - 1), 0, None, True),
    )


def tree_steps(option: tuple[str, ...], nodes: int, ranks_per_node: int, routing: str) -> tuple[Step, ...]:
    """The steps of a tree: one encode and one decode a hop up to the root, then one encode and one decode of the root's sum."""
    comp, up, down, decomp = option
    inside, hops = (ranks_per_node - 1).bit_length(), (nodes * ranks_per_node - 1).bit_length()
    sends = ranks_per_node - 1.0
    traffic = Traffic(Load(inside, float(inside)), Load(hops - inside, float(hops - inside)), float(hops), sends)
    if nodes == 1:
        traffic = Traffic(Load(hops, float(hops)), Load(0, 0.0), float(hops), sends)
    exchange = Step(up, 1.0, 1, 1, traffic, False)
    return (
        Step(comp, 1.0, hops + 1, 0, None, False),
        exchange,
        exchange._replace(task=down, gathers=True),
        Step(decomp, 1.0, hops + 1, 0, None, True),
    )


def grid_steps(option: tuple[str, ...], nodes: int, ranks_per_node: int, routing: str) -> tuple[Step, ...]:
    """The steps of a grid: parts go along rows and shards to their owners, and sums go back. The ranks of a shorter last row hold
    larger parts and own no shards. The parts of a row count as equal."""
    rows = rows_of(nodes * ranks_per_node)
    columns, whole, last = rows[0], rows.count(rows[0]), rows[-1]
    shards, short, held = columns * whole, last < columns, 1 / last  # held by the busiest rank between the steps along rows
    along_row = [
        ((range(at * columns, at * columns + length),), 1 / length) for at, length in enumerate(rows) for _ in range(length)
    ]
    of_columns = [range(column, shards, columns) for column in range(columns)]
    along_column: list[_Sends] = []
    if short:
        edges = [shards * at // last for at in range(last + 1)]
        owned = [
            (shard % whole * columns + shard // whole, shards + at) for at in range(last) for shard in range(*edges[at : at + 2])
        ]
        sender = dict(owned)
        along_column += [((of_columns[rank % columns], (sender[rank],)), 1 / shards) for rank in range(shards)]
        for at, (first, end) in enumerate(pairwise(edges)):
            owners = sorted(owner for owner, _ in owned[first:end])
            along_column.append((((*owners, shards + at),), held / len(owners)))
    else:
        along_column += [((of_columns[rank % columns],), 1 / shards) for rank in range(shards)]
    steps = (
        (1 - 1 / columns, 1, 0, None),
        (1.0, 1, 1, _direct_traffic(along_row, ranks_per_node, 1.0)),
        (1 / columns, columns - 1, 0, None),
        (held if short else held * (1 - 1 / whole), 1, 0, None),
        (held, 1, 2, _direct_traffic(along_column, ranks_per_node, held)),
        (1 / shards, len(rows) - 1, 0, None),
        (1 / shards, 1, 0, None),
        (1 / shards, 1, 2, _direct_traffic(along_column, ranks_per_node, 1 / shards)),
        (held, 1, 2, _direct_traffic(along_row, ranks_per_node, held)),
        (1.0, 1, 0, None),
    )
    tasks = enumerate(zip(option, steps, strict=True))
    return tuple(Step(task, *each, number > 5, sums=number in (2, 5)) for number, (task, each) in tasks)


_Sends = tuple[tuple[Sequence[int], ...], float]
"""The ranks to which a rank sends, itself among them, in sorted sequences; the part of the bucket that goes to each."""


def _direct_traffic(sends: Sequence[_Sends], ranks_per_node: int, held: float) -> Traffic:
    """Traffic in which ranks exchange directly. held: the part of the bucket that a rank holds."""
    loads, of_node = list[tuple[int, int, float]](), list[tuple[float, int]]()
    within = 0.0
    for first in range(0, len(sends), ranks_per_node):
        end, own = first + ranks_per_node, list[tuple[int, int, float]]()
        for peers, part in sends[first:end]:
            inside = 0
            if ranks_per_node > 1:
                inside = sum(bisect_left(each, end) - bisect_left(each, first) for each in peers) - 1
            own.append((inside, sum(map(len, peers)) - 1 - inside, part / held))
        loads += own
        of_node.append((sum(outside * part for _, outside, part in own), sum(outside for _, outside, _ in own)))
        within = max(within, sum(inside * part for inside, _, part in own))
    near, far = (max(load[way] for load in loads) for way in (0, 1))
    intra = Load(near, max(inside * part for inside, _, part in loads))
    sent = max((inside + outside) * part for inside, outside, part in loads)
    if ranks_per_node == len(sends):
        return Traffic(intra, Load(0, 0.0), sent, within, rounds=(1, 0))
    flows = Flows(*max(of_node))
    return Traffic(intra, Load(far, flows.factor), sent, within, flows, flows, rounds=(min(1, near), min(1, far)))
