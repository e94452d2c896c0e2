"""ByteComp's Algorithm 1 (section 4.4.2): which option each tensor gets, tensor by tensor, by what the whole step gains.

Tensors are visited from the largest to the smallest, of equal ones first the latest in gradient-ready order. Each
gets the option with the shortest step while all others keep theirs. Before the first and after every decision, uncompressed
tensors that were sent before a bubble are ruled out for good: to send them faster only widens the bubble. All begin with
the one uncompressed option that is best for all; on a tie the option that a tensor has stays, then the one with fewer codec
tasks (docs/papers/bytecomp.md).

**Exact** is the timeline of every candidate that is chosen or could be: that of `gradwire.sim.replay`, from the tensor on.

**Pruned** are candidates whose step is certain not to be shorter than the best one found, so nothing is lost. Every encode that
begins an option on compute runs before the next gradient's backward, so gradients are ready no earlier than backward and these
encodes allow. From then on each link has to carry all that later tensors put on it. The greatest such sum over all tensors, for
either link, and all work of compute, are below the step, and change with one tensor's option by a few additions. What is left is
simulated by ascending bound, each until what is done and what each resource still has to do exceed the best.

**Cut short** is the search by `looks`: then only so many candidates of a tensor are simulated, those with the least bounds,
and the one that was best for the last tensor of that size; a better one may be missed. Without it, hundreds of tensors take
many seconds where no single resource decides.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import add
from typing import NamedTuple

from gradwire.errors import PlanError
from gradwire.sim.events import COMPUTE, INTER, INTRA
from gradwire.sim.native import TooLongError
from gradwire.sim.replay import NEVER, Replayed, Replayer, ReplayProgram, launch_key

__all__ = ["Selection", "by_own_times", "select_options"]


_OVERTAKEN = 4
"""Of so many last tensors, some exchange may be launched behind the last tensor's."""


class Selection(NamedTuple):
    """What was chosen."""

    chosen: tuple[int, ...]
    """The option of each tensor, as an index into its table."""
    replayed: Replayed
    """The step."""
    candidates: int
    """How many steps were compared."""
    simulated: int
    """How many of them were simulated, to the end or until they could not win."""
    ruled_out: int
    """Tensors that stayed as they were because a bubble follows them."""


class _Row(NamedTuple):
    """What the bounds need to know of a program."""

    first_encode: int
    """Femtoseconds of compute before anything is exchanged."""
    inter: int
    intra: int
    compute: int
    chain: int
    """Of all tasks, one after the other."""
    codecs: int
    option: int
    program: ReplayProgram


def select_options(
    line: Replayer,
    tables: Sequence[Sequence[ReplayProgram]],
    sizes: Sequence[float],
    skew: int = 1,
    prune: bool = True,
    looks: int | None = None,
) -> Selection:
    """Algorithm 1 over tables[tensor][option], in gradient-ready order; tensors of equal size may share one table.

    All tables have the same options in the same order; that of a tensor that must not be compressed ends before the first one
    that does. Options without codec tasks are the uncompressed ones; without any, all begin with the best of all. skew: see
    `gradwire.sim.replay`. prune: False simulates every candidate to its end, with the same result. looks: how many candidates
    of a tensor are simulated at most; None: all that could win. Raises PlanError if there are no options.
    """
    if not tables or not tables[0]:
        raise PlanError("tables have 0 options: no tensor could be synchronised. Allow at least one option.")
    if line.native is not None:
        order = _order(range(len(tables)), sizes)
        place = {size: index for index, size in enumerate(dict.fromkeys(sizes))}
        try:
            found = line.native.select(tables, [place[size] for size in sizes], order, skew, prune, looks)
        except TooLongError:
            pass  # Python's whole numbers have no end
        else:
            replayed = Replayed(found.step, [], found.begins, found.ends)
            return Selection(tuple(found.chosen), replayed, found.candidates, found.simulated, found.ruled_out)
    return _Search(line, tables, sizes, skew, prune, looks).run()


def _order(tensors: Iterable[int], sizes: Sequence[float]) -> list[int]:
    """Of the visits: the largest first, of equal ones the latest."""
    return sorted(tensors, key=lambda tensor: (-sizes[tensor], -tensor))


def by_own_times(tables: Sequence[Sequence[ReplayProgram]]) -> tuple[int, ...]:
    """ByteComp's myopic search (section 5.3): each tensor gets the option whose own tasks take least, one after the
    other."""
    chosen = {
        id(table): min(range(len(table)), key=lambda i: (sum(table[i].busy), table[i].codecs)) for table in tables
    }
    return tuple(chosen[id(table)] for table in tables)


class _Search:
    def __init__(
        self,
        line: Replayer,
        tables: Sequence[Sequence[ReplayProgram]],
        sizes: Sequence[float],
        skew: int,
        prune: bool,
        looks: int | None,
    ) -> None:
        self.line, self.tables, self.sizes, self.skew, self.prune = line, tables, sizes, skew, prune
        self.looks = looks
        self.winners: dict[float, int] = {}
        self.releases = range(1, len(tables) + 1)
        plain = [index for index, program in enumerate(tables[0]) if not program.codecs]
        self.candidates = self.simulated = 0
        starts = []
        for option in plain or range(len(tables[0])):
            replayed = self._replay([table[option] for table in tables], NEVER)
            if replayed is None:
                raise PlanError(
                    "a step would take more than 30 years: a rate of the cluster or a time of the profile is wrong by many "
                    "powers of ten. Measure or write it again."
                )
            starts.append((replayed.step, option, replayed))
        _, option, self.best = min(starts, key=lambda start: start[:2])
        self.chosen = [option] * len(tables)
        self.programs = [table[option] for table in tables]
        rows = {id(table): _rows(table) for table in tables}
        self.rows = [rows[id(table)] for table in tables]
        self.first_encodes = [_first_encode(program) for program in self.programs]
        self.on_inter = [program.busy[INTER] for program in self.programs]
        self.on_intra = [program.busy[INTRA] for program in self.programs]
        self.after_encode = [sum(p.busy) - _first_encode(p) for p in self.programs]

    def run(self) -> Selection:
        left = set(range(len(self.tables)))
        ruled_out = self._rule_out(left)
        for tensor in _order(left, self.sizes):
            if tensor not in left:
                continue
            left.remove(tensor)
            if self._decide(tensor):
                ruled_out += self._rule_out(left)
        return Selection(tuple(self.chosen), self.best, self.candidates, self.simulated, ruled_out)

    def _rule_out(self, left: set[int]) -> int:
        """Remove(): uncompressed tensors whose exchange was over when the last bubble began."""
        bubble = self.best.last_bubble()
        found = {tensor for tensor in left if self.best.ends[tensor] <= bubble and not self.programs[tensor].codecs}
        left -= found
        return len(found)

    def _decide(self, tensor: int) -> bool:
        """GetBestOption(): give a tensor its best option; whether that is another one than before."""
        below = self.best.step
        codecs = 0  # of the best so far; on a tie with the current option that one stays
        found = None
        self.candidates += len(self.tables[tensor])
        promising = sorted(self._promising(tensor), key=lambda each: each[:3])
        looked_at = promising[: self.looks]
        # the option that was best for the last tensor of this size is looked at in any case
        looked_at += [each for each in promising[len(looked_at) :] if each[2] == self.winners.get(self.sizes[tensor])]
        for bound, _, _, row in looked_at:
            # equal steps count only with fewer codec tasks
            limit = below if found is not None and row.codecs < codecs else below - 1
            if self.prune and bound > limit:
                continue
            programs = [*self.programs]
            programs[tensor] = row.program
            replayed = self._replay(programs, limit if self.prune else NEVER, tensor)
            if replayed is not None and replayed.step <= limit:
                below, codecs, found = replayed.step, row.codecs, (row, programs, replayed)
        if found is None:
            return False
        row, self.programs, self.best = found
        self.chosen[tensor] = self.winners[self.sizes[tensor]] = row.option
        self.first_encodes[tensor], self.after_encode[tensor] = row.first_encode, row.chain - row.first_encode
        self.on_inter[tensor], self.on_intra[tensor] = row.inter, row.intra
        return True

    def _replay(self, programs: list[ReplayProgram], limit: int, tensor: int | None = None) -> Replayed | None:
        self.simulated += 1
        if tensor is None:
            return self.line.run(programs, self.releases, self.skew, limit)
        return self.line.run(programs, self.releases, self.skew, limit, self.best, tensor)

    def _promising(self, tensor: int) -> list[tuple[int, int, int, _Row]]:
        """(lower bound of the step, codec tasks, index, row) of compressed options that might shorten the step."""
        below = self.best.step
        now = self.programs[tensor]
        encode, inter, intra = self.first_encodes[tensor], self.on_inter[tensor], self.on_intra[tensor]
        encoded = list(map(add, self.line.after[1:], accumulate(self.first_encodes)))
        last = tensor == len(self.tables) - 1
        inter_before, inter_own, inter_later = _bounds(encoded, self.on_inter, tensor)
        intra_before, intra_own, intra_later = _bounds(encoded, self.on_intra, tensor)
        chains = list(map(add, encoded, self.after_encode))
        chain_later = max(chains[tensor + 1 :], default=0)
        own_tail = not last and tensor >= len(self.tables) - _OVERTAKEN
        inter_tail = 0 if own_tail else self._tail(self.programs[-1], INTER)
        intra_tail = 0 if own_tail else self._tail(self.programs[-1], INTRA)
        compute = self.line.after[-1] + sum(program.busy[COMPUTE] for program in self.programs) - now.busy[COMPUTE]
        found = []
        for row in self.rows[tensor]:
            more_encode, more_inter, more_intra = row.first_encode - encode, row.inter - inter, row.intra - intra
            if last:
                inter_tail, intra_tail = self._tail(row.program, INTER), self._tail(row.program, INTRA)
            bound = max(
                inter_tail
                + max(inter_before + more_inter, inter_own + more_inter + more_encode, inter_later + more_encode),
                intra_tail
                + max(intra_before + more_intra, intra_own + more_intra + more_encode, intra_later + more_encode),
                encoded[tensor] - encode + row.chain,
                chain_later + more_encode,
                compute + row.compute,
            )
            if row.option != self.chosen[tensor] and (bound < below or not self.prune):
                found.append((bound, row.codecs, row.option, row))
        return found

    def _tail(self, program: ReplayProgram, link: int) -> int:
        """Femtoseconds in which a link does not work, at least, after the last tensor's first exchange on it, if it has this
        program."""
        first = next((at for at, task in enumerate(program.tasks) if task[0] == link), None)
        if first is None:
            return 0
        count = len(self.programs)
        key = launch_key(count - 1, program.tasks[first][3], self.skew)
        behind = 0
        for tensor in range(max(0, count - _OVERTAKEN), count - 1):
            for resource, length, _, phase in self.programs[tensor].tasks:
                if resource == link and launch_key(tensor, phase, self.skew) > key:
                    behind += length
        beside = sum(length for resource, length, _, _ in program.tasks[first:] if resource != link)
        return max(0, beside - behind)


def _rows(table: Sequence[ReplayProgram]) -> list[_Row]:
    """The compressed options."""
    return [
        _Row(
            *(_first_encode(p), p.busy[INTER], p.busy[INTRA], p.busy[COMPUTE], sum(p.busy), p.codecs, index, p),
        )
        for index, p in enumerate(table)
        if p.codecs
    ]


def _first_encode(program: ReplayProgram) -> int:
    resource, length = program.tasks[0][:2]
    return length if resource == COMPUTE else 0


def _bounds(encoded: Sequence[int], on_link: Sequence[int], tensor: int) -> tuple[int, int, int]:
    """What the link alone makes of the step: from earlier tensors' readiness on, from this one's, from later ones'."""
    still = list(accumulate(reversed(on_link)))[::-1]
    ends = list(map(add, encoded, still))
    return max(ends[:tensor], default=0), ends[tensor], max(ends[tensor + 1 :], default=0)
