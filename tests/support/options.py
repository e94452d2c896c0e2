"""Options run by all ranks of a grid, in one process or many: what tests and the benchmark of all options share."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from fake_links import FakeLink, drive
from threads import here
from worlds import Given, digest

import gradwire as gw
from gradwire.core import Plan, Spec, TensorInfo, fingerprint
from gradwire.core.plan import Bucket
from gradwire.exchange import Exchange, layout
from gradwire.exchange import options as engine_options
from gradwire.exchange.layout import BucketBuffers
from gradwire.plan.options import tree
from gradwire.transport import Grid, Group

__all__ = ["SIZES", "Ranks", "all_in_one", "gradients", "on_grid", "plan_for", "true_mean"]

SIZES = (703, 1, 299)
"""Elements of three tensors, 1003 in all: no multiple of a block, of ranks, of anything."""


def plan_for(
    tasks: Sequence[str],
    spec: Spec,
    sizes: Iterable[int] = SIZES,
    dtype: str = "float32",
    chunk_bytes: int = 0,
    residual_dtype: str = "float32",
) -> Plan:
    """One bucket of tensors t0, t1, .. that travels like this."""
    tensors = [TensorInfo(f"t{index}", (size,), dtype) for index, size in enumerate(sizes)]
    names = tuple(tensor.name for tensor in tensors)
    bucket = Bucket(
        tensors=names,
        spec=spec,
        option=tuple(tasks),
        chunk_bytes=chunk_bytes,
        reduce_dtype="float32",
        residual_dtype=residual_dtype,
    )
    launch = tuple((0, word) for word in bucket.link_tasks)
    return Plan(fingerprint=fingerprint(tensors), buckets=(bucket,), launch=launch)


def gradients(rank: int, step: int, sizes: Iterable[int] = SIZES) -> list[torch.Tensor]:
    """Normal numbers, others for every rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(size, generator=generator) for size in sizes]


def true_mean(world_size: int, step: int, sizes: Iterable[int] = SIZES) -> torch.Tensor:
    """Return the mean of all tensors, one after another, in float64."""
    return torch.stack([torch.cat(gradients(rank, step, sizes)).double() for rank in range(world_size)]).mean(0)


class Ranks:
    """All ranks of a grid in one process, with a plan of one bucket."""

    def __init__(
        self,
        plan: Plan,
        grid: Sequence[Grid],
        sizes: Iterable[int] = SIZES,
        dtype: torch.dtype = torch.float32,
        root: int = 0,
        codecs: Callable[[Any, int], dict[str, Any]] | None = None,
        wired: bool = False,
        in_place: bool = False,
    ) -> None:
        """`root`: as if the bucket had this index. `codecs`: of a codec and a rank, what runs on each device instead. `wired`:
        see `fake_links.links`. `in_place`: gradients are lent."""
        self.wired = wired
        self.plan, self.sizes, self.world_size = plan, tuple(sizes), len(grid)
        everybody, minute = tuple(range(len(grid))), timedelta(seconds=60)
        nobody: Any = None
        self.ranks: list[Exchange] = []
        for rank in everybody:
            group = Group(nobody, rank, everybody, minute, grid[rank])
            parameters = {
                f"t{index}": torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for index, size in enumerate(self.sizes)
            }
            with _instead(root, codecs):
                lanes: Any = SimpleNamespace(group=group, data=[nobody], offload=0, first_tag=0)
                self.ranks.append(Exchange.on(lanes, parameters, plan, 0, in_place=in_place))

    @property
    def buckets(self) -> list[BucketBuffers]:
        """The bucket of each rank."""
        return [rank._buckets[0] for rank in self.ranks]

    def step(self, step: int, given: Sequence[Sequence[torch.Tensor]]) -> list[FakeLink]:
        """Exchange what each rank gives; the means are in `results()` then."""
        for rank, own in zip(self.ranks, given, strict=True):
            rank.random[0][:, :, 1] = step
            rank._lent.give_back()
            for slot, gradient in zip(rank._buckets[0].slots, own, strict=True):
                if slot.apart:
                    rank._lent.lend(slot, gradient.clone())
                else:
                    torch.mul(gradient, 1.0 / self.world_size, out=slot.view)
        sent = []
        for chunk in range(len(self.buckets[0].chunks)):
            pieces = [bucket.chunks[chunk] for bucket in self.buckets]
            sent += drive(pieces, len(self.plan.buckets[0].link_tasks), self.wired)
        return sent

    def held_back(self) -> torch.Tensor:
        """The sum of all that ranks have not sent yet, in float64."""
        total = torch.zeros(sum(self.sizes), dtype=torch.float64)
        for rank in self.ranks:
            for key, value in rank.residuals.state().items():
                if key.startswith("residual/"):
                    slot = next(slot for slot in rank._buckets[0].slots if slot.name == key.split("/")[2])
                    total[slot.offset : slot.offset + value.numel()] += value.double()
        return total

    def results(self) -> list[torch.Tensor]:
        """The contents of each rank's bucket, or of the gradients that were lent."""
        return [
            torch.cat([rank._lent.of(slot) for slot in bucket.slots]) if bucket.slots[0].apart else bucket.flat
            for bucket, rank in zip(self.buckets, self.ranks, strict=True)
        ]


@contextmanager
def _instead(root: int, codecs: Callable[[Any, int], dict[str, Any]] | None) -> Iterator[None]:
    """Use another root and other codecs while a rank is assembled."""
    real = engine_options.scheme_of

    def scheme_of(index: int, bucket: Bucket, device: str, sharded: bool = False) -> Any:
        if codecs is not None:
            return lambda codec, piece, group, index: engine_options.Route(
                bucket.option, codecs(codec, group.rank), piece, group.grid, root
            )
        make = real(index, bucket, device, sharded)
        return make and (lambda codec, piece, group, index: make(codec, piece, group, root))

    layout.scheme_of = scheme_of
    try:
        yield
    finally:
        layout.scheme_of = real


@contextmanager
def on_grid(ranks_per_node: int) -> Iterator[None]:
    """This rank says that it is on a node of so many."""
    with here.on_node(str(here.rank // ranks_per_node)):
        yield


def all_in_one(options: Sequence[Sequence[str]], spec: Spec) -> list[str]:
    """Run by every rank of a real group: each option a bucket of one plan, three tensors of odd sizes each. What is wrong."""
    options = [tasks for tasks in options if isinstance(spec, gw.Identity) or "comp:cpu" in tasks]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = Given(SIZES * len(options))
    names = [name for name, _ in model.named_parameters()]
    tensors = [TensorInfo(name, tuple(p.shape), "float32") for name, p in model.named_parameters()]
    buckets = tuple(
        Bucket(tensors=tuple(names[3 * index : 3 * index + 3]), spec=spec, option=tuple(tasks))
        for index, tasks in enumerate(options)
    )
    launch = tuple((index, word) for index, bucket in enumerate(buckets) for word in bucket.link_tasks)
    handle = gw.parallelize(model, plan=Plan(fingerprint=fingerprint(tensors), buckets=buckets, launch=launch))
    model(model.random_gradients(rank)).backward()
    true = list(model.mean_of(lambda other: model.random_gradients(other), world_size))
    problems = []
    for index, tasks in enumerate(options):
        found = torch.cat([model.get_parameter(name).grad for name in buckets[index].tensors])
        mean = torch.cat(true[3 * index : 3 * index + 3])
        off = float((found.double() - mean).norm() / mean.norm())
        bound = 2e-7 if isinstance(spec, gw.Identity) else 0.2 * math.sqrt(tasks.count("comp:cpu"))
        if not off < bound:
            problems.append(f"{' '.join(tasks)}: off by {off}")
        words = torch.tensor(list(bytes.fromhex(digest([found]))), dtype=torch.uint8)
        everybody = [torch.empty_like(words) for _ in range(world_size)]
        dist.all_gather(everybody, words)
        if any(not torch.equal(words, other) for other in everybody):
            problems.append(f"{' '.join(tasks)}: ranks have other bits")
    handle.detach()
    return problems


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    every = [option.tasks for option in tree(("cpu",))]
    wrong = [problem for spec in (gw.Identity(), gw.QSGD(bits=4)) for problem in all_in_one(every, spec)]
    compressing = sum("comp:cpu" in tasks for tasks in every)
    if dist.get_rank() == 0:
        print(json.dumps({"options": len(every), "runs": len(every) + compressing, "problems": wrong}))
    dist.destroy_process_group()
