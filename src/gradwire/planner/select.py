"""ByteComp's Algorithm 1 (section 4.4.2): the option of each tensor, chosen by the gain of the whole step.

The search visits tensors from the largest to the smallest; of equal ones the latest in gradient-ready order comes first. Each
tensor gets the option with the shortest step while all others keep theirs. Before the first decision and after every one, the
search rules out uncompressed tensors that were sent before a bubble: sending them faster only widens the bubble. All tensors
begin with the one uncompressed option that is best for all. On a tie a tensor keeps its option; else the option with fewer codec
tasks wins (docs/papers/bytecomp.md).

**Exact.** `gradwire.sim.replay` simulates every candidate that is chosen or could be.

**Pruned.** The search skips candidates with a step that is certainly no shorter than the best one, so nothing is lost. A gradient
is ready no earlier than backward and the encodes at the start of options on compute allow. After that each link has to carry the
load of all later tensors. The greatest sum of both times over all tensors and both links is a lower bound of the step, and so is
all work of compute. Candidates are simulated by ascending bound, each until it exceeds the best step.

**Cut short.** `looks` limits how many candidates of a tensor are simulated: those with the least bounds, and the winner of the
last tensor of that size. The search may then miss a better candidate. Without `looks` hundreds of tensors take many seconds.
"""

from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from operator import add
from typing import NamedTuple

from gradwire.errors import PlanError
from gradwire.sim import COMPUTE, INTER, INTRA, NEVER, Replayed, Replayer, ReplayProgram, TooLongError, launch_key

_OVERTAKEN = 4
"""Number of last tensors whose exchanges may be launched behind those of the last tensor."""


class Selection(NamedTuple):
    chosen: tuple[int, ...]
    """The option of each tensor, as an index into its table."""
    replayed: Replayed
    """The step with the chosen options."""
    simulated: int
    """Number of simulated steps, also those simulated only until they could not win."""
    ruled_out: int
    """Number of tensors that stayed uncompressed because a bubble follows them."""


def select_options(
    line: Replayer,
    tables: Sequence[Sequence[ReplayProgram]],
    sizes: Sequence[float],
    skew: int = 1,
    prune: bool = True,
    looks: int | None = None,
) -> Selection:
    """Run Algorithm 1 over tables[tensor][option], in gradient-ready order; tensors of equal size may share one table.

    All tables have the same options in the same order. The table of a tensor that may have fewer ends before the first one that
    it may not have. Options without codec tasks are the uncompressed ones, which all tensors may have; without any, all tensors
    begin with the best of those in all tables. skew: see `gradwire.sim.replay`. prune: False simulates every candidate to its
    end, with the same result. looks: how many candidates of a tensor are simulated at most; None: all that could win. There is at
    least one tensor and one option.
    """
    order = sorted(range(len(tables)), key=lambda tensor: (-sizes[tensor], -tensor))
    if line.native is not None:
        place = {size: index for index, size in enumerate(dict.fromkeys(sizes))}
        with suppress(TooLongError):  # Python's whole numbers have no end
            found = line.native.select(tables, [place[size] for size in sizes], order, skew, prune, looks)
            chosen, step, begins, ends, (_, simulated, ruled_out) = found
            return Selection(tuple(chosen), Replayed(step, begins, ends), simulated, ruled_out)
    return _Search(line, tables, sizes, skew, prune, looks).run(order)


def by_own_times(tables: Sequence[Sequence[ReplayProgram]]) -> tuple[int, ...]:
    """ByteComp's myopic search (section 5.3): each tensor gets the option with the least sum of its own tasks."""
    chosen = {id(table): min(range(len(table)), key=lambda i: (sum(table[i].busy), table[i].codecs)) for table in tables}
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
        self.line, self.tables, self.sizes = line, tables, sizes
        self.skew, self.prune, self.looks = skew, prune, looks
        self.winners: dict[float, int] = {}
        self.releases = range(1, len(tables) + 1)
        plain = [index for index, program in enumerate(tables[0]) if not program.codecs]
        self.simulated = 0
        starts = []
        for option in plain or range(min(map(len, tables))):
            replayed = self._replay([table[option] for table in tables], NEVER)
            if replayed is None:
                raise PlanError(
                    "a step would take more than 30 years: a rate of the cluster or a time of the profile is wrong by many "
                    "powers of ten. Measure the rate or the time again, or correct the file."
                )
            starts.append((replayed.step, option, replayed))
        _, option, self.best = min(starts, key=lambda start: start[:2])
        self.chosen = [option] * len(tables)
        self.programs = [table[option] for table in tables]

    def run(self, order: Sequence[int]) -> Selection:
        left = set(order)
        ruled_out = self._rule_out(left)
        for tensor in order:
            if tensor in left:
                left.remove(tensor)
                if self._decide(tensor):
                    ruled_out += self._rule_out(left)
        return Selection(tuple(self.chosen), self.best, self.simulated, ruled_out)

    def _rule_out(self, left: set[int]) -> int:
        """Remove(): rule out uncompressed tensors whose exchange was over when the last bubble began."""
        bubble = self.best.last_bubble()
        found = {tensor for tensor in left if self.best.ends[tensor] <= bubble and not self.programs[tensor].codecs}
        left -= found
        return len(found)

    def _decide(self, tensor: int) -> bool:
        """GetBestOption(): give a tensor its best option; True if the option changed."""
        below = self.best.step
        codecs = 0  # the best so far; on a tie with the current option the current one stays
        found = None
        promising = sorted(self._promising(tensor))
        looked_at = promising[: self.looks]
        # the option that was best for the last tensor of this size is simulated in any case
        looked_at += [each for each in promising[len(looked_at) :] if each[2] == self.winners.get(self.sizes[tensor])]
        for bound, own_codecs, option in looked_at:
            # equal steps count only with fewer codec tasks
            limit = below if found is not None and own_codecs < codecs else below - 1
            if self.prune and bound > limit:
                continue
            programs = [*self.programs]
            programs[tensor] = self.tables[tensor][option]
            replayed = self._replay(programs, limit if self.prune else NEVER)
            if replayed is not None and replayed.step <= limit:
                below, codecs, found = replayed.step, own_codecs, (option, programs, replayed)
        if found is None:
            return False
        option, self.programs, self.best = found
        self.chosen[tensor] = self.winners[self.sizes[tensor]] = option
        return True

    def _replay(self, programs: list[ReplayProgram], limit: int) -> Replayed | None:
        self.simulated += 1
        return self.line.run(programs, self.releases, self.skew, limit)

    def _promising(self, tensor: int) -> list[tuple[int, int, int]]:
        """(lower bound of the step, codec tasks, index) of compressed options that might shorten the step."""
        now, last = self.programs[tensor], tensor == len(self.tables) - 1
        encode = _first_encode(now)
        encoded = list(map(add, self.line.after[1:], accumulate(map(_first_encode, self.programs))))
        links = []
        for link in (INTER, INTRA):
            on_link = [program.busy[link] for program in self.programs]
            own_tail = not last and tensor >= len(self.tables) - _OVERTAKEN
            tail = 0 if own_tail else self._tail(self.programs[-1], link)
            links.append((link, tail, _bounds(encoded, on_link, tensor)))
        chains = [at + sum(p.busy) - _first_encode(p) for at, p in zip(encoded, self.programs, strict=True)]
        chain_later = max(chains[tensor + 1 :], default=0)
        compute = self.line.after[-1] + sum(program.busy[COMPUTE] for program in self.programs) - now.busy[COMPUTE]
        found = []
        for option, program in enumerate(self.tables[tensor]):
            if not program.codecs or option == self.chosen[tensor]:
                continue
            more_encode = _first_encode(program) - encode
            bound = max(encoded[tensor] - encode + sum(program.busy), chain_later + more_encode, compute + program.busy[COMPUTE])
            for link, tail, (before, own, later) in links:
                more = program.busy[link] - now.busy[link]
                most = max(before + more, own + more + more_encode, later + more_encode)
                bound = max(bound, most + (self._tail(program, link) if last else tail))
            if bound < self.best.step or not self.prune:
                found.append((bound, program.codecs, option))
        return found

    def _tail(self, program: ReplayProgram, link: int) -> int:
        """Least femtoseconds that a link idles after the last tensor's first exchange, if the tensor has this program."""
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
        elsewhere = sum(length for resource, length, _, _ in program.tasks[first:] if resource != link)
        return max(0, elsewhere - behind)


def _first_encode(program: ReplayProgram) -> int:
    resource, length = program.tasks[0][:2]
    return length if resource == COMPUTE else 0


def _bounds(encoded: Sequence[int], on_link: Sequence[int], tensor: int) -> tuple[int, int, int]:
    """Lower bounds of the step by one link, counted from earlier tensors, from this tensor, and from later tensors."""
    still = list(accumulate(reversed(on_link)))[::-1]
    ends = list(map(add, encoded, still))
    return max(ends[:tensor], default=0), ends[tensor], max(ends[tensor + 1 :], default=0)
