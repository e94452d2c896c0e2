"""Defines the methods of gradient exchange that the bench compares.

floor           no communication: the step time on an infinitely fast network
ddp             DistributedDataParallel with torch's defaults
ddp-again       ddp a second time: a difference between the two is noise
ddp-2mb         ddp with buckets of 2 MB, so that backward and exchange overlap
ddp-fp16        torch's fp16_compress_hook
ddp-powersgd    torch's PowerSGD hook at rank 4, in one bucket
gradwire:SPEC   gradwire with a policy, such as gradwire:qsgd4, or a policy and a schedule, such as gradwire:qsgd4@pipelined
gradwire:auto   gradwire chooses the plan (also gradwire:auto-exact, gradwire:auto-aggressive; gradwire:adaptive chooses bits);
                gradwire:auto@all chooses among all schedules but local steps, gradwire:auto@local has local steps too

Each method has its own model and optimizer from one seed, and its own process group. So all can run in turns in a process.
"""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from gradwire.auto import Auto, AutoDecision
from gradwire.bench.jobs import Batch, Job
from gradwire.bench.names import GRADWIRE_PREFIX, arguments_of, check_method
from gradwire.bench.results import Decided
from gradwire.errors import StepStateError

POWERSGD_RANK = 4
POWERSGD_START = 2
"""The first compressed step of PowerSGD, one step after DDP rebuilds its buckets. The hook requires at least 2."""
CODEC_REPEATS = 10
ERROR_STEPS = 10
"""Number of steps between measurements of compression errors in a recorded run."""


class Method(ABC):
    """A model in training with one method of gradient exchange."""

    model: nn.Module
    """The module that computes the loss: the job's model, or DDP's wrapper around the model."""
    wrong_on_purpose = False
    """Whether the method leaves out a part of each step. The bench then keeps neither its loss nor its speedup."""
    forward_us = 0.0
    """Time of the last step's forward, including the method's own work and waits. `backward_us` is the same of backward."""
    backward_us = 0.0

    def __init__(self, job: Job, seed: int, process_group: dist.ProcessGroup | None) -> None:
        self.job = job
        self.process_group = process_group
        self.world_size = process_group.size() if process_group is not None else 1
        self.bare_model = job.make_model(seed)
        self.optimizer = job.make_optimizer(self.bare_model)
        self.model = self.bare_model

    def step(self, batch: Batch) -> float:
        """Make one training step. Returns this rank's loss."""
        began = time.perf_counter()
        loss = self.job.loss(self.model, batch)
        computed = time.perf_counter()
        loss.backward()
        self.forward_us, self.backward_us = (computed - began) * 1e6, (time.perf_counter() - computed) * 1e6
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    @property
    @abstractmethod
    def bytes_planned(self) -> int | None:
        """Return the bytes of gradients that this rank plans to send in a step; None if unknown."""

    @property
    def crossing_bytes(self) -> int | None:
        """Return the bytes of gradients that this rank plans to send to other nodes in a step, to other sites where there are
        any; None if unknown."""
        return None

    @property
    def phases(self) -> int | None:
        """Return how often, one after another, the exchange of a bucket waits for other nodes or sites; None if unknown."""
        return None

    def codec_seconds(self) -> float | None:
        """Return the CPU seconds of a step's encodes and decodes, measured alone; None if they cannot run alone."""
        return None

    def record(self, folder: Path) -> None:  # noqa: B027
        """Record the training into this folder, if the method supports recording."""

    @property
    def decided(self) -> list[Decided]:
        """Return the method's decisions so far, in order."""
        return []

    @property
    def deciding(self) -> bool:
        """Whether the method has yet to choose its plan."""
        return False

    @property
    def warm_up_steps(self) -> int:
        """Return the first steps in which the method's codecs run otherwise than later."""
        return 0

    @torch.no_grad()
    def held_out_loss(self, batches: Sequence[Batch]) -> float:
        """Return the mean loss of this rank's weights on these batches. Not collective."""
        self.bare_model.eval()
        losses = [self.job.loss(self.bare_model, batch).item() for batch in batches]
        self.bare_model.train()
        return sum(losses) / len(losses)

    def settle(self) -> None:  # noqa: B027
        """Wait for the exchanges of the last step. Called before another method takes its turn."""

    def check(self) -> None:  # noqa: B027
        """Raise `StepStateError` if the method did not run as named."""

    def close(self) -> None:  # noqa: B027
        """Release the method's resources."""


class Floor(Method):
    """Training without communication: every rank trains its own model on its own share of the data."""

    @property
    def bytes_planned(self) -> int:
        return 0

    def codec_seconds(self) -> float:
        return 0.0


class DDP(Method):
    """DistributedDataParallel, with a bucket size or torch's default."""

    def __init__(self, job: Job, seed: int, process_group: dist.ProcessGroup | None, bucket_cap_mb: float | None = None) -> None:
        super().__init__(job, seed, process_group)
        self.wrapper = DistributedDataParallel(self.bare_model, process_group=process_group, bucket_cap_mb=bucket_cap_mb)
        self.model = self.wrapper

    @property
    def bytes_planned(self) -> int:
        return allreduce_bytes(gradient_bytes(self.bare_model), self.world_size)

    def codec_seconds(self) -> float | None:
        return 0.0 if type(self) is DDP else None  # a hook's codecs cannot run alone


class DDPFloat16(DDP):
    """DDP that casts gradients to float16 for the exchange."""

    def __init__(self, job: Job, seed: int, process_group: dist.ProcessGroup | None) -> None:
        super().__init__(job, seed, process_group)
        self.wrapper.register_comm_hook(process_group, default_hooks.fp16_compress_hook)

    @property
    def bytes_planned(self) -> int:
        halves = sum(2 * parameter.numel() for parameter in _trained(self.bare_model))
        return allreduce_bytes(halves, self.world_size)


class DDPPowerSGD(DDP):
    """DDP with torch's PowerSGD hook. One bucket holds the model: on gloo the hook races with two or more."""

    def __init__(self, job: Job, seed: int, process_group: dist.ProcessGroup | None) -> None:
        super().__init__(job, seed, process_group, bucket_cap_mb=2 * gradient_bytes(job.make_model(seed)) / 2**20)
        self.state = powerSGD_hook.PowerSGDState(
            process_group, matrix_approximation_rank=POWERSGD_RANK, start_powerSGD_iter=POWERSGD_START
        )
        self.wrapper.register_comm_hook(self.state, powerSGD_hook.powerSGD_hook)

    @property
    def bytes_planned(self) -> int:
        nbytes = 0
        for parameter in _trained(self.bare_model):
            rows = parameter.shape[0]
            columns = parameter.numel() // rows
            low_rank = (rows + columns) * min(rows, columns, POWERSGD_RANK)
            compressed = low_rank * self.state.min_compression_rate < parameter.numel()
            nbytes += (low_rank if compressed else parameter.numel()) * parameter.element_size()
        return allreduce_bytes(nbytes, self.world_size)

    def check(self) -> None:
        buckets = len(self.state.error_dict)
        if buckets > 1:
            raise StepStateError(
                f"PowerSGD ran with {buckets} buckets instead of 1, and torch's hook has a race on gloo with several buckets, "
                "so its numbers mean nothing. Use a torch version in which bucket_cap_mb limits DDP's first bucket too."
            )


class Gradwire(Method):
    """gradwire, applied to the model in place."""

    def __init__(
        self, job: Job, seed: int, process_group: dist.ProcessGroup | None, policy: str, drift_check_steps: int = 1000
    ) -> None:
        super().__init__(job, seed, process_group)
        import gradwire as gw

        arguments = arguments_of(policy)
        plan = arguments["plan"]
        self._decides = plan == "auto"
        if isinstance(plan, gw.Policy) and isinstance(plan.default, gw.DGC):
            momentum = 0.0  # momentum of the job's optimizer, if it has any: DGC applies the momentum instead
            for group in self.optimizer.param_groups:
                momentum, group["momentum"] = group.get("momentum", 0.0), 0.0
            arguments["plan"] = msgspec.structs.replace(plan, default=msgspec.structs.replace(plan.default, momentum=momentum))
        arguments = {**arguments, "process_group": process_group, "drift_check_steps": drift_check_steps}
        self.handle = gw.parallelize(self.bare_model, self.optimizer, **arguments)
        self._recording = contextlib.ExitStack()

    @property
    def bytes_planned(self) -> int | None:
        return self.handle.stats().wire_bytes

    @property
    def crossing_bytes(self) -> int | None:
        return self.handle.stats().inter_bytes

    @property
    def phases(self) -> int | None:
        crossing = ([task for task in bucket.option if task.endswith(":inter")] for bucket in self.handle.plan.buckets)
        return max(sum(1 + task.startswith("allreduce") for task in tasks) for tasks in crossing)

    def codec_seconds(self) -> float | None:
        return self.handle.time_codec(CODEC_REPEATS)

    @property
    def decided(self) -> list[Decided]:
        return [
            Decided(
                chosen=each.chosen.name,
                plain=each.chosen == each.plain,
                step=each.step,
                cost_us=each.cost_us,
                predicted_us=each.chosen.predicted_us,
                measured_us=each.chosen.measured_us,
                learns_us=1e6 * each.seconds_for(1),
            )
            for each in self.handle.decisions
            if isinstance(each, AutoDecision)
        ]

    @property
    def deciding(self) -> bool:
        driver = self.handle.session.driver
        again = isinstance(driver, Auto) and driver.looks_again
        return self._decides and (not self.handle.decisions or again)

    @property
    def warm_up_steps(self) -> int:
        fields = ("warm_up_steps", "start_step")
        return max((getattr(spec, field, 0) for spec in self.handle.plan.specs for field in fields), default=0)

    def record(self, folder: Path) -> None:
        self._recording.enter_context(self.handle.record(folder, error_steps=ERROR_STEPS))

    def settle(self) -> None:
        self.handle.flush()
        if isinstance(self.handle.session.driver, Auto):  # turns of other methods would look like slow steps
            self.handle.session.driver.pause()

    def close(self) -> None:
        self._recording.close()
        self.handle.detach()


def gradient_bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in _trained(model))


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def allreduce_bytes(size: int, world_size: int) -> int:
    """Return the bytes that one rank sends in an all-reduce: a reduce-scatter and an all-gather, each of (n-1)/n of `size`."""
    return 2 * size * (world_size - 1) // world_size


Builder = Callable[[str, Job, int, dist.ProcessGroup | None], Method]
"""The type of `build`."""
_BUILDERS: dict[str, Callable[[Job, int, dist.ProcessGroup | None], Method]] = {
    "floor": Floor,
    "ddp": DDP,
    "ddp-again": DDP,
    "ddp-2mb": lambda job, seed, group: DDP(job, seed, group, bucket_cap_mb=2),
    "ddp-fp16": DDPFloat16,
    "ddp-powersgd": DDPPowerSGD,
}


def build(name: str, job: Job, seed: int, process_group: dist.ProcessGroup | None) -> Method:
    """Build a method by its name. Collective: every rank builds the same methods in the same order.

    Raises `FormatError` if the name is not that of a method.
    """
    check_method(name)
    if name in _BUILDERS:
        return _BUILDERS[name](job, seed, process_group)
    return Gradwire(job, seed, process_group, name.removeprefix(GRADWIRE_PREFIX))
