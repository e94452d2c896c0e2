"""Runs the same training script under plain DDP and under gradwire, in one world, and compares the results bit for bit.

A script is a module-level function that takes a Library, calls `library.parallelize` where it would call either
library's own, trains, and returns what else than the weights is compared.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from worlds import Worlds, digest, seeded

import gradwire as gw
from gradwire.exchange import layout

__all__ = [
    "Ends",
    "Library",
    "Training",
    "assert_as",
    "batch",
    "everything",
    "in_buckets",
    "name_of",
    "normalised",
    "ordinary",
    "plain",
    "sgd",
    "step_once",
]

Kind = Literal["ddp", "by hand", "gradwire", "in buckets"]


class Library:
    """Plain DDP, gradwire, gradwire that copies all gradients into buckets, or what gradients are defined as, as a script sees
    them."""

    def __init__(self, kind: Kind, plan: Any = None) -> None:
        self.kind, self.plan = kind, plan or gw.Uniform(gw.Identity())
        self._models: list[nn.Module] = []
        self._at_first: list[str] = []
        self._handles: dict[nn.Module, gw.Handle] = {}

    def parallelize(self, model: nn.Module, **ddp: Any) -> Any:
        """Parallelize the model. The script calls the returned object instead of the model: a wrapper, or the model
        itself."""
        wrapped = model
        if self.kind == "ddp":
            wrapped = DistributedDataParallel(model, **ddp)
        elif self.kind in ("gradwire", "in buckets"):
            self._handles[model] = gw.parallelize(model, plan=self.plan)
        else:
            for tensor in model.state_dict().values():
                dist.broadcast(tensor, 0)
        self._models.append(model)
        self._at_first.append(digest(model.parameters()))
        return wrapped

    def averaged(self, model: nn.Module) -> None:
        """Called after backward: where nothing else averages gradients, the mean over ranks by hand."""
        if self.kind == "by hand":
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= dist.get_world_size()
                    dist.all_reduce(parameter.grad)

    def no_sync(self, wrapped: Any) -> AbstractContextManager[None]:
        return wrapped.no_sync() if self.kind == "ddp" else self._handles[wrapped].no_sync()

    def join(self, wrapped: Any) -> AbstractContextManager[None]:
        """Return the library's join context, for ranks with different numbers of batches."""
        return wrapped.join() if self.kind == "ddp" else self._handles[wrapped].join()

    def end(self) -> list[str]:
        """Return the digests of all models at the end. Fails if a model was not trained."""
        at_end = [digest(model.parameters()) for model in self._models]
        for first, last in zip(self._at_first, at_end, strict=True):
            assert first != last, "nothing was trained"
        for handle in self._handles.values():
            handle.detach()
        return at_end


Training = Callable[[Library], Iterable[torch.Tensor | None]]
Ends = Iterator[torch.Tensor | None]


def assert_as(worlds: Worlds, reference: Kind, training: Training, plan: Any = None) -> None:
    """Both ranks end with the same weights, and on each all weights and all that the script returns are, bit for bit,
    what they are with the reference."""
    both = worlds.run(2, _train, ("gradwire", reference), training, plan)
    for ours, other in both:
        assert ours == other, f"not as {reference}"
    (weights, _), *_ = both[0]
    assert weights == both[1][0][0], "ranks have different weights"


def _train(kinds: tuple[Kind, ...], training: Training, plan: Any) -> list[tuple[list[str], list[str | None]]]:
    ends = []
    for kind in kinds:
        torch.manual_seed(dist.get_rank())
        library = Library(kind, plan)
        with in_buckets() if kind == "in buckets" else nullcontext():
            returned = [None if tensor is None else digest([tensor]) for tensor in training(library)]
        ends.append((library.end(), returned))
    return ends


@contextmanager
def in_buckets() -> Iterator[None]:
    """All exchanges that are made copy gradients into buckets."""
    real = layout.works_apart
    layout.works_apart = lambda *_: False
    try:
        yield
    finally:
        layout.works_apart = real


# ---- for the lists of scripts


def name_of(value: Any) -> str:
    return getattr(value, "__name__", str(value))


# ---- what scripts are made of


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def normalised() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(trained, lr=0.05, momentum=0.9, weight_decay=0.1)


def batch(step: int, *shape: int) -> torch.Tensor:
    """This rank's inputs of a step."""
    return torch.randn(shape or (4, 6), generator=seeded(dist.get_rank(), step))


def step_once(run: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    run(batch(step)).square().mean().backward()
    optimizer.step()


def ordinary(library: Library, model: nn.Module, run: Any) -> Ends:
    optimizer = sgd(model)
    for step in range(4):
        step_once(run, optimizer, step)
    return everything(model)


def everything(*models: nn.Module) -> Iterator[torch.Tensor | None]:
    """Gradients and buffers; weights are compared in any case."""
    for model in models:
        yield from (parameter.grad for parameter in model.parameters())
        yield from model.buffers()
