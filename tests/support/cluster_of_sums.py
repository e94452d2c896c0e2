"""A cluster in miniature: which gradients each rank holds after each task of an option, added or still as a list.

Written apart from the planner's grammar, from what the collectives do, so that it can judge it: an option is right if all
ranks end with the whole sum, uncompressed, every gradient in it once.
"""

from collections.abc import Iterator, Sequence
from itertools import product

NODES, RANKS_PER_NODE = 2, 3
WORLD = NODES * RANKS_PER_NODE
EVERYBODY = frozenset(range(WORLD))

Held = dict[int, list[frozenset[int]]]
"""The values of one rank: chunk -> parts. A part is the set of ranks with gradients in the sum. A raw value is one
part; payloads may be several."""

WORDS = ("allreduce", "reducescatter", "reduce", "allgather", "broadcast", "alltoall", "gather")
LINKS = (("inter",), ("inter", "inter"), ("intra", "inter", "intra"), ("intra", "inter", "inter", "intra"))
"""Links in the order in which ByteComp uses them: flat (written as inter) or nested, one or two exchanges between nodes."""
CODECS = ((), ("comp",), ("decomp",), ("decomp", "comp"))
"""The codec tasks that make sense between two exchanges."""


class Impossible(Exception):
    """The task cannot be done with what the ranks hold."""


class Cluster:
    """The values of all ranks, and whether they are payloads. Each task gives a new cluster."""

    def __init__(self, held: list[Held] | None = None, coded: bool = False, flat: bool = False) -> None:
        # one chunk for each rank, so that shards of shards are still whole chunks
        self.held = held or [{chunk: [frozenset({rank})] for chunk in range(WORLD)} for rank in range(WORLD)]
        self.coded, self.flat = coded, flat

    def after(self, task: str) -> "Cluster":
        word, _, where = task.partition(":")
        if word == "comp":
            need(not self.coded)
            return Cluster(self.held, True, self.flat)
        if word == "decomp":
            need(self.coded)
            added = [{chunk: add(parts) for chunk, parts in held.items()} for held in self.held]
            return Cluster(added, False, self.flat)
        held = list(self.held)
        for group in self.groups(where):
            for rank, now in zip(group, exchange(word, self.coded, [held[rank] for rank in group]), strict=True):
                held[rank] = now
        return Cluster(held, self.coded, self.flat)

    def groups(self, link: str) -> list[list[int]]:
        if self.flat:
            return [list(range(WORLD))]
        if link == "intra":
            return [list(range(first, first + RANKS_PER_NODE)) for first in range(0, WORLD, RANKS_PER_NODE)]
        return [list(range(first, WORLD, RANKS_PER_NODE)) for first in range(RANKS_PER_NODE)]

    @property
    def done(self) -> bool:
        complete = {chunk: [EVERYBODY] for chunk in range(WORLD)}
        return not self.coded and all(held == complete for held in self.held)

    @property
    def most_parts(self) -> int:
        """Return the largest number of payloads of one chunk on a rank."""
        return max(len(parts) for held in self.held for parts in held.values())


def need(condition: bool) -> None:
    if not condition:
        raise Impossible


def add(parts: list[frozenset[int]]) -> list[frozenset[int]]:
    total = frozenset().union(*parts)
    need(sum(map(len, parts)) == len(total))  # else a gradient would be in the sum twice
    return [total]


def exchange(word: str, coded: bool, group: list[Held]) -> list[Held]:
    """Return the values of each rank of a group after a collective. Ranks without values, behind a root, only
    receive."""
    holders = [index for index, held in enumerate(group) if held]
    if not holders:
        return group
    chunks = sorted(set().union(*group))
    together = {chunk: [part for held in group for part in held.get(chunk, [])] for chunk in chunks}
    same = len(holders) > 1 and all(sorted(group[index]) == chunks for index in holders)
    nothing: list[Held] = [{} for _ in group]
    if word == "broadcast":
        need(len(holders) == 1)
        return [together for _ in group]
    if word == "allgather" and not same:  # the second step: everybody has a shard of its own
        need(len(holders) == len(group) and sum(map(len, group)) == len(chunks))
        return [together for _ in group]
    need(same)  # all others begin with the same chunks of several ranks
    if word in ("allreduce", "reducescatter", "reduce"):
        need(not coded)
        together = {chunk: add(parts) for chunk, parts in together.items()}
    else:
        need(coded)
    if word in ("allreduce", "allgather"):
        return [together if held else {} for held in group]
    if word in ("reduce", "gather"):
        nothing[holders[0]] = together
        return nothing
    need(word in ("reducescatter", "alltoall"))
    shard = len(chunks) // len(holders)
    for place, index in enumerate(holders):
        nothing[index] = {chunk: together[chunk] for chunk in chunks[place * shard : (place + 1) * shard]}
    return nothing


def everything_right(devices: Sequence[str]) -> set[tuple[str, ...]]:
    """Every sequence of tasks over LINKS, with CODECS between, after which all ranks have the sum: found by trying all."""
    found = set()
    for links in LINKS:
        for tasks in _right(Cluster(flat="intra" not in links), links):
            places = [devices if task in ("comp", "decomp") else ("",) for task in tasks]
            for choice in product(*places):
                found.add(tuple(f"{task}:{where}" if where else task for task, where in zip(tasks, choice, strict=True)))
    return found


def _right(cluster: Cluster, links: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for codecs in CODECS:
        words = [f"{word}:{links[0]}" for word in WORDS] if links else [""]
        for word in words:
            tasks = (*codecs, word) if word else codecs
            after = cluster
            try:
                for task in tasks:
                    after = after.after(task)
            except Impossible:
                continue
            if links:
                yield from ((*tasks, *rest) for rest in _right(after, links[1:]))
            elif after.done:
                yield tasks
