"""One rank that measures schemes: `python -m benchmarks.campaigns.schemes_worker WORK.json`, with torchrun's variables set."""

import statistics
import sys
import time
from itertools import product

import msgspec
import torch
import torch.distributed as dist

import gradwire as gw
from benchmarks.campaigns.schemes import BITS, SCHEMES, Exchange, Scheme, SchemesRecord, SchemesWork, predicted_us
from gradwire.bench.ranks import Ranks, die_with, sent_by_interface
from gradwire.bench.results import StepEvent, print_event
from gradwire.core.costs import Costs
from gradwire.profiler.codecs import measure_codecs
from gradwire.profiler.links import MeasuredLinks, measure_links, measured_links
from gradwire.transport import Grid, Group, Link

__all__ = ["main"]

_SMALL_BYTES, _SMALL_REPEATS = 16 << 10, 20


class _Turn:
    """A bucket of one size that travels by one option."""

    def __init__(self, scheme: Scheme, tasks: str, nbytes: int, ranks: Ranks) -> None:
        self.ranks = ranks
        self.weight = torch.nn.Parameter(torch.zeros(nbytes // 4))
        self.model = torch.nn.ParameterList([self.weight])
        self.gradient = torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(ranks.rank))
        policy = gw.Uniform(scheme.spec, scheme=tasks)
        self.handle = gw.parallelize(self.model, plan=policy, process_group=ranks.new_group())
        self.handed_on = 0.0
        # runs after gradwire's own hook, which copies the gradient and hands the bucket to the lanes
        self._hook = self.weight.register_post_accumulate_grad_hook(self._ready)

    def _ready(self, parameter: torch.nn.Parameter) -> None:
        self.handed_on = time.perf_counter()

    def close(self) -> None:
        """Give the bucket's memory back: the hook and this hold each other in a way that Python does not see."""
        self._hook.remove()
        self.handle.detach()

    def once(self) -> tuple[float, int]:
        """Microseconds on the slowest rank, bytes that this rank's interface sent."""
        self.weight.grad = None
        loss = self.weight @ self.gradient
        self.ranks.meet()
        before = sent_by_interface()
        loss.backward()
        slowest = torch.tensor((time.perf_counter() - self.handed_on) * 1e6)
        self.ranks.meet()
        sent = sent_by_interface() - before
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return slowest.item(), sent


def main(path: str) -> None:
    """Carry out the order in the file."""
    work = SchemesWork.load(path)
    die_with(work.runner)
    torch.set_num_threads(1)
    ranks = Ranks(work.collective_timeout_s, communicating=True)
    fits, costs = _profiled(ranks)
    start_us = _start_us(fits, costs, ranks)
    found = _measured_in_turns(work, ranks)
    if ranks.rank == 0:
        SchemesRecord(
            cluster=fits.cluster, costs=costs, problems=tuple(fits.problems), start_us=start_us, exchanges=tuple(found.values())
        ).save(work.result)
    ranks.meet()
    ranks.close()


def _measured_in_turns(work: SchemesWork, ranks: Ranks) -> dict[tuple[str, bool, int], Exchange]:
    """Each scheme and size, flat and hierarchical, once in a round. A round begins with another scheme than the one before."""
    found: dict[tuple[str, bool, int], Exchange] = {}
    for turn in range(work.rounds):
        first = turn % len(SCHEMES)
        ways = [
            (scheme, tasks)
            for scheme in SCHEMES[first:] + SCHEMES[:first]
            for tasks in (scheme.flat, scheme.hierarchical)
            if tasks
        ]
        for (nbytes, repeats), (scheme, tasks) in product(zip(work.nbytes, work.repeats, strict=True), ways):
            measured = _measure(scheme, tasks, nbytes, repeats, ranks)
            key = (measured.scheme, measured.hierarchical, nbytes)
            found[key] = _with_earlier(measured, found.get(key))
            if ranks.rank == 0:
                done = sum(len(each.us) for each in found.values())
                print_event(StepEvent("options", done - 1, statistics.median(measured.us), 0.0))
    return found


def _profiled(ranks: Ranks) -> tuple[MeasuredLinks, Costs]:
    """The links and the codec by themselves, all ranks working at once as in the schemes."""
    group, device = Group.of(ranks.new_group()).meet(), torch.device("cpu")
    grid = Grid.even(ranks.world_size // ranks.local_world_size, ranks.local_world_size, ranks.rank)
    link = Link(group, "profile", device, group.timeout)
    fits = measured_links(measure_links(link, grid, device), grid)
    link.close()
    ranks.meet()
    return fits, measure_codecs([BITS], device)


def _start_us(fits: MeasuredLinks, costs: Costs, ranks: Ranks) -> float:
    """The median over all schemes of what the model misses at a size at which it should say next to nothing."""
    missed = []
    for scheme in SCHEMES:
        measured = _measure(scheme, scheme.flat, _SMALL_BYTES, _SMALL_REPEATS, ranks)
        if ranks.rank == 0:
            missed.append(statistics.median(measured.us) - predicted_us(measured, fits.cluster, costs))
    return max(0.0, statistics.median(missed or [0.0]))


def _measure(scheme: Scheme, tasks: str, nbytes: int, repeats: int, ranks: Ranks) -> Exchange:
    turn = _Turn(scheme, tasks, nbytes, ranks)
    turn.once()  # the first one opens connections and touches memory
    times, sent = zip(*(turn.once() for _ in range(repeats)), strict=True)
    planned = ranks.gather(turn.handle.stats().inter_bytes)
    counted = ranks.gather(int(statistics.median(sent)))
    nodes = range(0, ranks.world_size, ranks.local_world_size)
    of_nodes = [sum(planned[first : first + ranks.local_world_size]) for first in nodes]
    plan = turn.handle.plan
    turn.close()
    return Exchange(
        scheme=scheme.name,
        hierarchical=tasks == scheme.hierarchical,
        nbytes=nbytes,
        us=times,
        inter_bytes=max(of_nodes),
        counted_bytes=max(counted),
        plan=plan,
    )


def _with_earlier(measured: Exchange, earlier: Exchange | None) -> Exchange:
    if earlier is None:
        return measured
    return msgspec.structs.replace(measured, us=(*earlier.us, *measured.us))


if __name__ == "__main__":
    main(sys.argv[1])
