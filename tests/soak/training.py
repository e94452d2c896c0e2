"""What the ranks of a trial do: train a model whose gradients the trial's seed decides, so that two runs can be compared."""

import hashlib
import io
import mmap
import os
import random
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from worlds import Given, digest, seeded

import gradwire as gw
from gradwire.core.files import write_whole

PLANS: dict[str, gw.Policy] = {
    "qsgd4": gw.Uniform(gw.QSGD(bits=4), bucket_bytes=4000, chunk_bytes=2000),
    "qsgd2-ef": gw.Uniform(gw.ErrorFeedback(gw.QSGD(bits=2)), bucket_bytes=6000),
    "fp16-allgather": gw.Uniform(gw.Cast(), scheme="allgather", bucket_bytes=3000),
    "identity": gw.Uniform(gw.Identity(), bucket_bytes=5000),
    "qsgd4-large": gw.Uniform(gw.QSGD(bits=4), bucket_bytes=40_000, chunk_bytes=20_000),
    "topk-ef": gw.Uniform(gw.ErrorFeedback(gw.TopK(0.05)), bucket_bytes=5000),
    "randomk-ef": gw.Uniform(gw.ErrorFeedback(gw.RandomK(0.1)), bucket_bytes=5000),
    "onebit": gw.Uniform(gw.OneBit(), bucket_bytes=5000),
    "powersgd": gw.Uniform(gw.PowerSGD(rank=1), bucket_bytes=5000),
    "minmax3-ef": gw.Uniform(gw.ErrorFeedback(gw.QSGD(bits=3, scale="minmax")), scheme="allgather"),
}
MAGIC = struct.Struct("<q")


@dataclass(frozen=True)
class Job:
    """One training, the same on all ranks but for what is said by rank."""

    seed: int
    plan: str
    sizes: tuple[int, ...]
    steps: int
    folder: str
    """Where ranks tell how far they are, and keep their checkpoints."""
    checkpoint_every: int = 0
    drift_check_steps: int = 1000
    odd: tuple[int, str] | None = None
    """(rank, what is different there)."""
    raise_at: tuple[int, ...] = ()
    """Steps in whose backward a rank that the seed chooses raises; all go on after it."""
    corrupt_at: int | None = None
    """The number of the message that one rank sends with a bit flipped."""
    full_disk: tuple[int, int, str] | None = None
    """(rank, step from which its checkpoints go to a full disk, the folder there)."""
    batches: tuple[int, ...] = field(default=())
    """By rank, for loops of different length inside join()."""

    def progress(self, rank: int) -> Path:
        return Path(self.folder) / f"progress{rank}"


@dataclass(frozen=True)
class End:
    """How a training ended on a rank."""

    kind: str
    """"finished" or the name of the error."""
    words: str
    at: float
    """time.monotonic(), the same clock for all processes of a machine."""
    step: int
    digest: str = ""
    told: int = 0
    """Errors that the script caught and went on from."""


class RaisesInBackward(torch.autograd.Function):
    """Identity, whose backward raises."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise MemoryError("injected")


def train(job: Job) -> End:
    """Train to the end or to an error of gradwire's."""
    rank = dist.get_rank()
    progress = Progress(job.progress(rank))
    told = [0]
    try:
        final = _train(job, rank, progress, told)
    except gw.GradwireError as error:
        return End(type(error).__name__, str(error), time.monotonic(), progress.step, told=told[0])
    return End("finished", "", time.monotonic(), progress.step, final, told[0])


def _train(job: Job, rank: int, progress: "Progress", told: list[int]) -> str:
    odd = job.odd[1] if job.odd is not None and job.odd[0] == rank else ""
    torch.manual_seed(job.seed + (rank if odd == "seed" else 0))
    model = Given(job.sizes, torch.float64 if odd == "dtype" else torch.float32)
    if odd == "model":
        model.register_parameter("extra", torch.nn.Parameter(torch.zeros(3)))
    if odd == "version":
        import gradwire.engine.prepare as prepare

        prepare.__version__ = "9.9.9"
    plan = PLANS["identity" if odd == "dtype" else job.plan]
    if odd == "plan":
        plan = gw.Uniform(gw.QSGD(bits=5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    handle = gw.parallelize(model, optimizer, plan=plan, drift_check_steps=job.drift_check_steps)
    if job.corrupt_at is not None and rank == job.seed % dist.get_world_size():
        _flip_a_bit(job.corrupt_at, job.seed)
    first = _resume(job, rank, model, optimizer, handle) if job.checkpoint_every else 0
    progress.tell(first)

    def one(step: int) -> None:
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        fails = step in job.raise_at and seeded(job.seed, step).initial_seed() % dist.get_world_size() == rank
        gradients = model.random_gradients(job.seed, rank, step)
        loss = model(
            [RaisesInBackward.apply(g * p) / p if fails and i == 1 else g for i, (g, p) in _pairs(model, gradients)]
        )
        try:
            loss.backward()
        except (gw.StepStateError, MemoryError):
            if step not in job.raise_at:
                raise
            handle.reset()
            told[0] += 1
            return
        optimizer.step()

    if job.batches:
        with handle.join():
            for step in range(job.batches[rank]):
                one(step)
    else:
        for step in range(first, job.steps):
            one(step)
            progress.tell(step + 1)
            if job.checkpoint_every and (step + 1) % job.checkpoint_every == 0:
                _save(job, rank, step + 1, model, optimizer, handle, told)
    final = digest(
        [*model.parameters(), *(value for key, value in sorted(handle.state_dict().items()) if not job.batches)]
    )
    shared = digest(model.parameters())
    handle.detach()
    return f"{shared}:{final}"


def _pairs(model: Given, gradients: list[torch.Tensor]) -> Any:
    return enumerate(zip(gradients, model.parameters(), strict=True))


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


def _save(job: Job, rank: int, step: int, model: Any, optimizer: Any, handle: gw.Handle, told: list[int]) -> None:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "handle": handle.state_dict()}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    folder = job.folder
    if job.full_disk is not None and job.full_disk[0] == rank and step >= job.full_disk[1]:
        folder = job.full_disk[2]
    try:
        write_whole(Path(folder) / f"rank{rank}-step{step}.pt", buffer.getvalue())
    except OSError:
        told[0] += 1  # the script goes on without this checkpoint


def _resume(job: Job, rank: int, model: Any, optimizer: Any, handle: gw.Handle) -> int:
    """From the newest checkpoint that all ranks have."""
    own = {int(path.stem.rpartition("step")[2]) for path in Path(job.folder).glob(f"rank{rank}-step*.pt")}
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, own)
    common = set.intersection(*everybody)
    if not common:
        return 0
    state = torch.load(Path(job.folder) / f"rank{rank}-step{max(common)}.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    handle.load_state_dict(state["handle"])
    return max(common)


def _flip_a_bit(which: int, seed: int) -> None:
    """From now on the `which`-th message that this process sends has a bit flipped, in a copy. Gloo carries all messages then,
    since what a wire sends is encoded and sent in one call."""
    import gradwire.collectives.link as link
    import gradwire.exchange.wires as wires

    wires._listen = lambda *arguments: None  # type: ignore[assignment]

    chance, sent = random.Random(seed), [0]
    send = link.AllToAll.send

    def corrupted(self: Any, parts: Any) -> None:
        sent[0] += 1
        if sent[0] == which:
            parts = list(parts)
            to = chance.choice([rank for rank, part in enumerate(parts) if rank != self.link.rank and part.numel()])
            parts[to] = parts[to].clone()
            parts[to].view(torch.uint8)[chance.randrange(parts[to].numel())] ^= 1 << chance.randrange(8)
        send(self, parts)

    link.AllToAll.send = corrupted


def job_of(seed: int, folder: str, **changes: Any) -> Job:
    """A job that the seed chooses."""
    chance = random.Random(hashlib.sha256(str(seed).encode()).digest())
    sizes = tuple(chance.choice([1, 7, 300, 1500, 4096]) for _ in range(chance.randint(2, 6)))
    fields = {"seed": seed, "plan": chance.choice(sorted(PLANS)), "sizes": sizes, "steps": 40, "folder": folder}
    return Job(**{**fields, **changes})


def threads_and_files() -> tuple[int, int]:
    """Open files of this process, and its threads as the kernel counts them."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
