"""What a trial trains: a schedule, a setting beside it, and the model, optimizer and handle that follow from a seed."""

import hashlib
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw

SCHEDULES = ("backward", "pipelined", "sharded", "delayed", "local", "auto")
HOOK = "ddp hook"
"""Beside the schedules: DDP with `gw.ddp_hook`, which knows neither schedules nor handles."""
INTEGRATIONS = ("fsdp2", "accelerate", "transformers", "lightning", "c10d")
"""Frameworks that run the loop or the collectives: soak.integrations."""
SPECS: dict[str, gw.Spec] = {
    "qsgd4": gw.QSGD(bits=4),
    "qsgd2-ef": gw.ErrorFeedback(gw.QSGD(bits=2)),
    "fp16": gw.Cast(),
    "identity": gw.Identity(),
    "topk-ef": gw.ErrorFeedback(gw.TopK(0.05)),
    "randomk-ef": gw.ErrorFeedback(gw.RandomK(0.1)),
    "onebit": gw.OneBit(),
    "powersgd": gw.PowerSGD(rank=1),
    "minmax3-ef": gw.ErrorFeedback(gw.QSGD(bits=3, scale="minmax")),
}
QUANTISED = ("qsgd4", "qsgd2-ef", "minmax3-ef")
"""Whose payloads have checksums in every schedule."""
SETTINGS = (
    "plain", "adaptive bits", "narrow residuals", "hierarchical", "ring", "tree", "DataLoader workers", "encrypted",
    "large model",
)  # fmt: skip
NOT_POSSIBLE: dict[str, tuple[tuple[str, ...], str]] = {
    "adaptive bits": (
        ("pipelined", "sharded", "delayed", "local", "auto", HOOK),
        "gw.AdaptiveBits is a plan of its own, in the schedule `backward`",
    ),
    "narrow residuals": (("sharded", "auto"), "shards are sent uncompressed, and auto chooses how residuals are kept"),
    "ring": (
        ("sharded", "auto"),
        "shards need a scheme in which each rank owns one between its phases; auto chooses the scheme",
    ),
    "tree": (("sharded", "auto"), "the same"),
    "hierarchical": (("sharded",), "shards of the optimizer's state lie on all ranks alike: plans are flat"),
}
"""By setting, the schedules beside which it has no meaning, and why."""


def settings_of(schedule: str) -> list[str]:
    """The settings that a schedule may have beside it."""
    return [setting for setting in SETTINGS if schedule not in NOT_POSSIBLE.get(setting, ((), ""))[0]]


def specs_of(schedule: str, setting: str) -> tuple[str, ...]:
    """The names of the specs that may run there."""
    if schedule in INTEGRATIONS:
        return ("qsgd4", "qsgd2-ef", "identity")
    if schedule == "sharded":
        return ("identity",)  # parameters are gathered, and must arrive as they are
    if setting in ("ring", "tree"):
        return ("qsgd4", "qsgd2-ef", "fp16", "identity")  # what these schemes carry
    return ("qsgd2-ef", "minmax3-ef") if setting == "narrow residuals" else tuple(SPECS)


@dataclass(frozen=True)
class Fault:
    """What goes wrong inside a rank. What comes from outside, such as a signal, is no part of a job."""

    kind: str
    rank: int
    step: int
    """The first step in which it may happen."""
    variant: str = ""
    draw: float = 0.0
    """Between 0 and 1: which line, which byte, which module."""
    caught: bool = True
    """Whether the script goes on after it; otherwise its process ends, as after an exception that nobody catches."""


@dataclass(frozen=True)
class Job:
    """One training, the same on all ranks but for what is said by rank."""

    seed: int
    schedule: str
    setting: str
    ranks: int
    steps: int
    folder: str
    """Where ranks tell how far they are, and keep their checkpoints."""
    spec: str = "qsgd4"
    begins: str = ""
    """The folder of checkpoints with which a run begins that has none of its own."""
    checkpoint_every: int = 0
    drift_check_steps: int = 1000
    fault: Fault | None = None
    odd: tuple[int, str] | None = None
    """(rank, what is different there)."""
    full_disk: tuple[int, int, str] | None = None
    """(rank, step from which its checkpoints go to a full disk, the folder there)."""
    batches: tuple[int, ...] = field(default=())
    """By rank, for loops of different length inside join(), before the steps that all make."""
    stateless: bool = False
    """Whether the optimizer keeps nothing."""
    saves_on_sigterm: bool = False
    by_python: bool = False
    """Whether Python carries gradients, in place of wires."""
    until_decided: bool = False
    """Whether to end, with a checkpoint, when auto has decided."""
    silence_s: float | None = None
    """`silence_s` of the handle."""
    strangers: bool = False
    """Whether strangers call each rank while ranks connect and train."""
    shared_memory: bool = True
    """Whether ranks of a node may share memory. Sums of three ranks or more are rounded otherwise there than by Python."""

    def progress(self, rank: int) -> Path:
        return Path(self.folder) / f"progress{rank}"


def chance_of(seed: int, what: str) -> random.Random:
    """A source of draws that depends on these alone."""
    return random.Random(hashlib.sha256(f"{seed} {what}".encode()).digest())


def network(job: Job) -> torch.nn.Module:
    """Layers whose sizes the seed chooses; 6 million parameters where the setting says so."""
    chance = chance_of(job.seed, "model")
    torch.manual_seed(job.seed)
    if job.setting == "large model":
        widths = [100, 2000, 2000, 900, 4]
    else:
        widths = [chance.choice([5, 8, 33, 70]) for _ in range(chance.randint(3, 5))]
    layers: list[torch.nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.Tanh()]
    if chance.random() < 0.3 and job.schedule != HOOK:  # DDP sends buffers itself, and its errors there are its own
        layers.insert(2, torch.nn.BatchNorm1d(widths[1]))
    return torch.nn.Sequential(*layers[:-1])


def optimizer_for(job: Job, model: torch.nn.Module) -> torch.optim.Optimizer:
    if job.stateless:  # join() leaves the state of optimizers where each rank's own loop ended: so there is none
        return torch.optim.SGD(model.parameters(), lr=0.05)
    if chance_of(job.seed, "optimizer").random() < 0.5 and job.setting != "large model":
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def schedule_for(job: Job) -> Any:
    chance = chance_of(job.seed, "schedule")
    match job.schedule:
        case "pipelined":
            return gw.Pipelined()
        case "sharded":
            return gw.Pipelined(shard_optimizer=True)
        case "delayed":
            return gw.Delayed(k=chance.choice([None, 3]), correction=chance.choice([None, gw.QSGD(bits=8)]))
        case "local":
            return gw.LocalSteps(every=chance.choice([2, 4]), fragments=chance.choice([1, 2]), delay=chance.choice([0, 1]),
                                 mixing=chance.choice([1.0, 0.5]))  # fmt: skip
    return gw.Backward()


def plan_for(job: Job, odd: str = "") -> Any:
    """What is passed as `plan=`."""
    if job.schedule == "auto":
        return "auto"
    if job.setting == "adaptive bits":
        return gw.AdaptiveBits(period=5, alpha=3.0 if odd == "plan" else 2.0)
    fields: dict[str, Any] = {}
    if job.setting in ("ring", "tree"):
        fields["scheme"] = job.setting
    if job.setting == "narrow residuals":
        fields["residual_dtype"] = ("bfloat16", "int8")[job.seed % 2]
    if job.setting != "large model":
        edge_bytes = 100 if job.schedule == "local" else 1000  # a fragment has a bucket of its own
        fields |= {"bucket_bytes": 4000, "edge_bytes": edge_bytes, "chunk_bytes": (0, 2000)[job.seed % 2]}
    spec = SPECS[job.spec]
    if odd == "plan" and job.schedule == "sharded":  # shards are sent uncompressed
        fields["bucket_bytes"] = 2000
    elif odd == "plan":
        spec = gw.ErrorFeedback(gw.QSGD(bits=5))
    return gw.Policy(default=spec, schedule=schedule_for(job), exempt_vectors=job.seed % 3 > 0, **fields)


@contextmanager
def on_nodes(job: Job) -> Iterator[None]:
    """In the setting "hierarchical" this rank says that it is on a node of two; in the setting "encrypted" all messages travel on
    encrypted connections."""
    here = {"GROUP_RANK": str(dist.get_rank() // 2), "LOCAL_WORLD_SIZE": "2"} if job.setting == "hierarchical" else {}
    if job.setting == "encrypted":
        here["GRADWIRE_TLS"] = "on"
    if not job.shared_memory or job.setting == "encrypted":
        here["GRADWIRE_SHARED_MEMORY"] = "off"
    before = {name: os.environ.get(name) for name in here}
    os.environ.update(here)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Trainee:
    """A model in training under a handle, or in DDP under the hook."""

    def __init__(self, job: Job, odd: str = "") -> None:
        rank = dist.get_rank()
        self.model = network(job)
        if odd == "dtype":
            self.model.double()
        if odd == "model":
            self.model.register_parameter("extra", torch.nn.Parameter(torch.zeros(3)))
        if odd == "seed":
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.add_(rank + 1.0)
        self.optimizer = optimizer_for(job, self.model)
        plan = plan_for(job, odd)
        self.handle: Any = None
        self.state: Any = None
        if job.schedule == HOOK:
            self.state, self.run = gw.DDPState(plan=plan), DistributedDataParallel(self.model)
            self.run.register_comm_hook(self.state, gw.ddp_hook)
        else:
            fields: dict[str, Any] = {"schedules": ("backward", "pipelined")} if job.seed % 4 == 0 else {}
            self.handle = gw.parallelize(
                self.model,
                self.optimizer,
                plan=plan,
                drift_check_steps=job.drift_check_steps,
                silence_s=job.silence_s,
                accuracy="exact" if job.schedule == "auto" and odd == "plan" else "safe",
                **(fields if job.schedule == "auto" else {}),
            )
            self.run = self.model
        self._sharded = job.schedule == "sharded"

    def join(self) -> AbstractContextManager[Any]:
        return self.run.join() if self.handle is None else self.handle.join()

    @property
    def decided(self) -> int:
        """How often auto has decided, with a decision that is under way."""
        driver = self.handle.session.driver if self.handle is not None else None
        return driver.decided + driver.searching if driver is not None else 0

    @property
    def next_step(self) -> int:
        """The number of the next step, as ranks count them; -1 where a script cannot go on after an error, or ranks need not make
        the same steps."""
        counts = self.handle is not None and self.handle.session.schedule.traits.sends_in_backward
        return self.handle.session.reducer.next_step if counts else -1

    def reset(self) -> None:
        self.handle.reset()

    def save(self) -> dict[str, Any]:
        """What a checkpoint holds. Collective with shards of the optimizer's state."""
        kept = (self.handle or self.state).state_dict()
        optimizer = self.handle.optimizer_state_dict() if self._sharded else self.optimizer.state_dict()
        return {"model": self.model.state_dict(), "optimizer": optimizer, "handle": kept}

    def load(self, saved: Mapping[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        (self.handle or self.state).load_state_dict(saved["handle"])
        load: Callable[[Any], None] = self.optimizer.load_state_dict
        (self.handle.load_optimizer_state_dict if self._sharded else load)(saved["optimizer"])

    @property
    def lane_link(self) -> Any:
        """The link of the first lane that carries gradients; None before there is one."""
        if self.handle is not None:
            return self.handle.session.lanes.data[0].link
        exchange = self.state._exchange
        return None if exchange is None else exchange.lanes.data[0].link

    def end(self) -> None:
        """Make the model an ordinary one again, without a warning of shards that are dropped."""
        if self.handle is not None:
            if self._sharded:
                self.handle.flush()
                self.optimizer.state.clear()
            self.handle.detach()
        elif self.state._exchange is not None:
            self.state._exchange.close()
