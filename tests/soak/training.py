"""What the ranks of a trial do: train, save, take up what was saved, and say how it ended."""

import importlib
import io
import logging
import mmap
import multiprocessing
import os
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from strangers import Strangers, listening_ports
from worlds import digest, seeded

import gradwire as gw
from gradwire.core.files import write_whole
from gradwire.transport import Group
from soak.injected import Injected, Injector
from soak.settings import INTEGRATIONS, Job, Trainee, on_nodes

MAGIC = struct.Struct("<q")


@dataclass(frozen=True)
class End:
    """How a training ended on a rank."""

    kind: str
    """"finished", "saved" (on SIGTERM, or when auto had decided) or the name of the error."""
    words: str
    at: float
    """time.monotonic(), the same clock for all processes of a machine."""
    step: int
    """Batches that are over."""
    weights: str = ""
    """Digest of the parameters: the same on all ranks."""
    whole: str = ""
    """Digest of parameters, buffers and what the handle keeps: this rank's own."""
    told: int = 0
    """Errors that the script caught and went on from."""
    fired: tuple[str, ...] = ()
    """Faults that happened here."""
    longest_s: float = 0.0
    """The longest step."""
    timeout_s: float = 0.0
    """The group's: gloo never ends the wait for a send that had begun when its connection was shut down."""
    decided: int = 0
    """Decisions of auto, with one that is under way."""
    torn: str = ""
    """What is wrong with the checkpoints that it found."""


class Progress:
    """The number of finished steps, for whoever watches; 8 bytes in a file that stays when the rank is killed."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(MAGIC.pack(-1))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), MAGIC.size)
        self.step = -1

    def tell(self, step: int) -> None:
        self.step = step
        MAGIC.pack_into(self._memory, 0, step)

    @staticmethod
    def read(path: Path) -> int:
        raw = path.read_bytes() if path.exists() else b""
        return MAGIC.unpack(raw)[0] if len(raw) == MAGIC.size else -1


class Batches(torch.utils.data.Dataset[torch.Tensor]):
    """This rank's batches, by step."""

    def __init__(self, job: Job, model: torch.nn.Module) -> None:
        self._job, self._rank, self._width = job, dist.get_rank(), next(iter(model.parameters())).shape[1]

    def __getitem__(self, step: int) -> torch.Tensor:
        return torch.randn(6, self._width, generator=seeded(self._job.seed, self._rank, step))


def train(job: Job) -> End:
    """Train to the end, or to an error of gradwire's."""
    if job.schedule in INTEGRATIONS:
        from soak.integrations import train_in

        with on_nodes(job):
            return train_in(job)
    with on_nodes(job), _without_wires(job.by_python), _as_version(job):
        training = Training(job)
        try:
            with training.strangers.first() if job.strangers else nullcontext():
                return training.go()
        except gw.GradwireError as error:
            return training.ended(type(error).__name__, str(error))


def train_twice(job: Job, other: Job) -> tuple[End, End]:
    """Two trainings, one after the other."""
    return train(job), train(other)


class Training:
    """One training on this rank."""

    def __init__(self, job: Job) -> None:
        self.job, self.rank = job, dist.get_rank()
        self._progress = Progress(job.progress(self.rank))
        self._told, self._longest_s, self._torn = 0, 0.0, ""
        self._terminated = False
        self.strangers = Strangers()
        """Who calls this rank, if the job says so."""
        self._trainee: Trainee | None = None
        self._injector: Injector | None = None

    def go(self) -> End:
        job = self.job
        logging.getLogger("gradwire").setLevel(logging.WARNING)  # not what auto decides
        odd = job.odd[1] if job.odd is not None and job.odd[0] == self.rank else ""
        self._trainee = trainee = Trainee(job, odd)
        if job.strangers and trainee.handle is not None:
            assert all(lane.link.wire is not None for lane in trainee.handle.session.lanes.data), "a wire was lost"
        for port in listening_ports() if job.strangers else ():
            self.strangers.call("127.0.0.1", port)
        self._injector = Injector(job, trainee)
        first, begins = self._resume()
        self._progress.tell(first)
        if begins and job.batches:
            first = self._uneven(first)
        with self._on_sigterm():
            batches = self._batches(first)
            for step in range(first, job.steps):
                inputs = next(batches)
                self._one(step, inputs)
                self._progress.tell(step + 1)
                if self._is_over(step + 1):
                    break
        kind = "finished" if self._progress.step >= job.steps else "saved"
        kept = [value for _, value in sorted(trainee.save()["handle"].items())]
        weights = digest(trainee.model.parameters())
        whole = digest([*trainee.model.parameters(), *trainee.model.buffers(), *kept])
        end = replace(self.ended(kind, ""), weights=weights, whole=whole)
        trainee.end()
        return end

    def ended(self, kind: str, words: str) -> End:
        fired = [*self._injector.fired] if self._injector is not None else []
        fired += ["strangers called"] if self.strangers.calls else []
        self.strangers.leave()
        return End(
            kind, words, time.monotonic(), self._progress.step, told=self._told, fired=tuple(fired),
            longest_s=self._longest_s, timeout_s=Group.of(None).timeout.total_seconds(), torn=self._torn,
            decided=self._trainee.decided if self._trainee is not None else 0,
        )  # fmt: skip

    # ---- steps

    def _one(self, step: int, inputs: torch.Tensor) -> None:
        """A step, or what a script does that catches what goes wrong in it."""
        assert self._trainee is not None and self._injector is not None
        trainee, optimizer, fault = self._trainee, self._trainee.optimizer, self.job.fault
        began, in_step, number = time.monotonic(), False, trainee.next_step
        try:
            with self._injector.during(step):
                optimizer.zero_grad(set_to_none=step % 2 == 0 or self.job.schedule == "sharded")
                trainee.run(inputs).square().mean().backward()
                in_step = True
                optimizer.step()
        except (Injected, MemoryError, gw.StepStateError) as error:
            if fault is None or fault.kind == "corrupted":
                raise
            if trainee.handle is None or (fault.rank == self.rank and not fault.caught):
                if isinstance(error, gw.GradwireError):
                    raise
                os._exit(1)
            self._told += 1
            if not in_step or isinstance(error, gw.GradwireError):
                trainee.reset()
                if trainee.next_step == number >= 0:  # it failed before gradwire heard of the batch
                    self._one(step, inputs)
            elif fault.variant != "step post-hook" and self.job.schedule != "delayed":
                optimizer.step()  # nothing was stepped yet; under `delayed` the next step does it
        finally:
            self._longest_s = max(self._longest_s, time.monotonic() - began)

    def _uneven(self, first: int) -> int:
        """Loops of different length, and a checkpoint after them."""
        assert self._trainee is not None
        batches = Batches(self.job, self._trainee.model)
        with self._trainee.join():
            for step in range(first, first + self.job.batches[self.rank]):
                self._one(step, batches[step])
        self._save(first + max(self.job.batches))
        return first + max(self.job.batches)

    def _batches(self, first: int) -> Iterator[torch.Tensor]:
        assert self._trainee is not None
        batches, steps = Batches(self.job, self._trainee.model), range(first, self.job.steps)
        if self.job.setting != "DataLoader workers":
            return (batches[step] for step in steps)
        # ranks are daemons of the soak, which may have no children otherwise
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        loader = torch.utils.data.DataLoader(
            batches, batch_size=None, sampler=steps, num_workers=1, multiprocessing_context="fork"
        )
        return iter(loader)

    # ---- checkpoints

    def _is_over(self, step: int) -> bool:
        """Save what is due. Whether the training ends here."""
        job = self.job
        if job.saves_on_sigterm:
            asked = torch.tensor(int(self._terminated))
            dist.all_reduce(asked, dist.ReduceOp.MAX)
            if asked:
                self._save(step)
                return True
        assert self._trainee is not None
        if job.until_decided and self._trainee.handle.decision is not None:
            self._save(step)
            return True
        if job.checkpoint_every and step % job.checkpoint_every == 0:
            self._save(step)
        return False

    def _save(self, step: int) -> None:
        assert self._trainee is not None
        buffer, folder, job = io.BytesIO(), self.job.folder, self.job
        torch.save({"step": step, **self._trainee.save()}, buffer)
        if job.full_disk is not None and job.full_disk[0] == self.rank and step >= job.full_disk[1]:
            folder = job.full_disk[2]
        try:
            write_whole(Path(folder) / f"rank{self.rank}-step{step}.pt", buffer.getvalue())
        except OSError:
            self._told += 1  # the script goes on without this checkpoint

    def _resume(self) -> tuple[int, bool]:
        """From the newest checkpoint that all ranks have, after a look at all of them. The step, and whether the run begins
        there: none of the checkpoints is its own."""
        for folder in filter(None, (self.job.folder, self.job.begins)):
            paths = {int(path.stem.rpartition("step")[2]): path for path in Path(folder).glob(f"rank{self.rank}-step*.pt")}
            everybody: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everybody, set(paths))
            common = sorted(set.intersection(*everybody))
            if common:
                break
        else:
            return 0, True
        looked = common[-1:] if self.job.setting == "large model" else common
        saved = {step: torch.load(paths[step], weights_only=True) for step in looked}
        self._look_for_torn(saved)
        assert self._trainee is not None
        self._trainee.load(saved[common[-1]])
        return common[-1], folder != self.job.folder

    def _look_for_torn(self, saved: dict[int, Any]) -> None:
        """Checkpoints must be whole, and those of a step must have the same weights on all ranks."""
        assert self._trainee is not None
        names = [name for name, _ in self._trainee.model.named_parameters()]
        own = {
            step: (
                each["step"],
                digest(each["model"][name] for name in names),
                [int(value) for key, value in each["handle"].items() if key.endswith("/step")],
            )
            for step, each in saved.items()
        }
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, own)
        if any(step != saved_step for step, (saved_step, *_) in own.items()) or any(other != own for other in everybody):
            self._torn = f"checkpoints of one step differ between ranks: {everybody}"

    @contextmanager
    def _on_sigterm(self) -> Iterator[None]:
        def terminate(*_: Any) -> None:
            self._terminated = True

        if not self.job.saves_on_sigterm:
            yield
            return
        before = signal.signal(signal.SIGTERM, terminate)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)


@contextmanager
def _without_wires(by_python: bool) -> Iterator[None]:
    import gradwire.transport.rendezvous as rendezvous

    able = rendezvous.why_no_wires
    if by_python:
        rendezvous.why_no_wires = lambda: "the test wants none"
    try:
        yield
    finally:
        rendezvous.why_no_wires = able


@contextmanager
def _as_version(job: Job) -> Iterator[None]:
    """The odd rank may say that it is of another version."""
    prepare = importlib.import_module("gradwire.engine.prepare")
    from gradwire.exchange import tensors

    version = prepare.__version__
    if job.odd == (dist.get_rank(), "version"):
        prepare.__version__ = tensors.__version__ = "9.9.9"  # of a handle, and of an exchange alone
    try:
        yield
    finally:
        prepare.__version__ = tensors.__version__ = version


def threads_and_files() -> tuple[int, int]:
    """Open files of this process, and its threads as the kernel counts them."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
