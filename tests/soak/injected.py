"""Faults inside a rank: hooks that raise, memory that is short, bits that flip. Each says when it happened."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from flips import FlippingBackend, FlippingWire
from short_memory import short_memory

from soak.settings import Fault, Job, Trainee

BEFORE_BACKWARD = ("forward pre-hook", "forward hook")
IN_BACKWARD = ("backward hook", "gradient hook", "post-accumulate hook")
OF_STEP = ("step pre-hook", "step post-hook")
HOOKS = (*BEFORE_BACKWARD, *IN_BACKWARD, *OF_STEP)


class Injected(Exception):
    """What a hook raises."""


class RaisesInBackward(torch.autograd.Function):
    """Identity, whose backward raises."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise MemoryError("as ordered, in backward")


class Injector:
    """The fault of a job on this rank, if it has one here."""

    def __init__(self, job: Job, trainee: Trainee) -> None:
        self._fault: Fault | None = job.fault if job.fault and job.fault.rank == dist.get_rank() else None
        self._trainee, self._steps, self._setting = trainee, job.steps, job.setting
        self._lines, self._tried = 0, 0
        self._flips: FlippingBackend | FlippingWire | None = None
        self._flipping = False
        self._armed = False
        self._raised: list[str] = []
        if self._fault is not None and self._fault.kind == "corrupted" and trainee.lane_link is not None:
            self._prepare_flips(self._fault)

    @property
    def fired(self) -> list[str]:
        """What happened so far, each with what is known of the place."""
        if self._flipping and isinstance(self._flips, FlippingBackend) and self._flips.at_part == -1:
            return ["a bit of a message by Python"]
        if self._flipping and isinstance(self._flips, FlippingWire) and self._flips.flip_at < 0:
            return ["a bit on a wire"]
        return self._raised

    @contextmanager
    def during(self, step: int) -> Iterator[None]:
        """Around a step: the fault happens in it where its time has come."""
        fault = self._fault
        if fault is None or step < fault.step or self.fired:
            yield
            return
        match fault.kind:
            case "raised" | "hook raised":
                if not self._armed:
                    self._armed = True
                    self._arm(fault)
                yield
            case "short memory" if step + 1 < self._steps:  # after the last step a script does not go on
                with self._short(fault):
                    yield
            case "corrupted":
                self._flip(fault)
                yield
            case "dies":
                self._raised.append("SIGKILL")
                threading.Timer(0.02 * fault.draw, os.kill, (os.getpid(), signal.SIGKILL)).start()
                yield
            case _:
                yield

    # ---- hooks

    def _arm(self, fault: Fault) -> None:
        """Something raises once."""
        modules = [module for module in self._trainee.model.modules() if isinstance(module, torch.nn.Linear)]
        module = modules[int(fault.draw * len(modules))]
        parameter = (module.weight, module.bias)[int(fault.draw * 1000) % 2]
        hooks: list[Any] = []

        def fire(*_: Any, **__: Any) -> None:
            hooks.pop().remove()
            self._raised.append(fault.variant)
            raise Injected(fault.variant)

        def in_backward(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> Any:
            hooks.pop().remove()
            self._raised.append("backward")
            return RaisesInBackward.apply(output)

        register = {
            "": lambda: module.register_forward_hook(in_backward),
            "forward pre-hook": lambda: module.register_forward_pre_hook(fire),
            "forward hook": lambda: module.register_forward_hook(fire),
            "backward hook": lambda: module.register_full_backward_hook(fire),
            "gradient hook": lambda: parameter.register_hook(fire),
            "post-accumulate hook": lambda: parameter.register_post_accumulate_grad_hook(fire),
            "step pre-hook": lambda: self._trainee.optimizer.register_step_pre_hook(fire),
            "step post-hook": lambda: self._trainee.optimizer.register_step_post_hook(fire),
        }
        hooks.append(register[fault.variant]())

    # ---- memory

    @contextmanager
    def _short(self, fault: Fault) -> Iterator[None]:
        """The first time it counts gradwire's lines of a step, and later one of them raises: an earlier one where a step had
        fewer."""
        line = 1 + int(fault.draw * self._lines * 0.8**self._tried) if self._lines else -1
        self._tried += self._lines > 0
        with short_memory(line) as seen:
            try:
                yield
            finally:
                self._lines = self._lines or len(seen)
                if len(seen) == line:
                    self._raised.append(seen[-1])

    # ---- bits

    def _prepare_flips(self, fault: Fault) -> None:
        link = self._trainee.lane_link
        if link.wire is None:
            self._flips = link.backend = FlippingBackend(link.backend)
        else:
            size, rank = dist.get_world_size(), dist.get_rank()
            # of another node, where ranks share nodes; a ring sends to the next rank alone, a tree to that of its first round
            peer = (rank + (1 if self._setting == "ring" else size // 2)) % size
            if self._setting == "tree":
                peer = rank ^ 1 if rank ^ 1 < size else 0
            self._flips = FlippingWire(link.wire, peer)

    def _flip(self, fault: Fault) -> None:
        if self._flips is None:
            if self._trainee.lane_link is None:
                return
            self._prepare_flips(fault)
        if not self._flipping:
            self._flipping = True
            if isinstance(self._flips, FlippingBackend):
                self._flips.at_part = int(3 * fault.draw)
            elif isinstance(self._flips, FlippingWire):
                self._flips.flip_at = int(400 * fault.draw)
