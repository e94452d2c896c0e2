"""A member of the jobs of `python -m benchmarks members`: `python -m benchmarks.members_worker FOLDER ARM NODE`.

It writes a line of JSON when it is ready to begin, and waits for the file FOLDER/go. Then it trains until it is killed. The
seconds of the cell begin with the first step that counts and has gradients, which the first round of local steps has not. The
member of node 0 saves the weights that are the same on all members every few seconds, to FOLDER/NUMBER.pt.
"""

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its __all__

import gradwire as gw
from benchmarks.members_node import LEAST, MEMBERS, PORT, await_
from gradwire.bench.jobs import Job, make_job
from gradwire.testbed.network import address_of

JOB = "transformer"
EVERY = 30
"""Local steps from one round to the next."""
TIMEOUT_S = 600.0
"""For one transfer. Over 10 Mb/s the state of all joiners takes 3 minutes, since one member sends it."""
SNAPSHOTS = 12
"""Evaluations of a run."""


class Arm(ABC):
    """One way to train."""

    def __init__(self, job: Job, model: torch.nn.Module, optimizer: torch.optim.Optimizer, lighthouse: str) -> None:
        self.job, self.model, self.optimizer, self.lighthouse = job, model, optimizer, lighthouse
        self.trained: torch.nn.Module = model
        """The model that the loop calls."""
        self.every = 1
        """Batches of a member in a step that counts."""
        self.batches = 0
        """Batches of all members that count so far."""

    @property
    @abstractmethod
    def steps(self) -> int:
        """The steps that count so far."""

    @abstractmethod
    def step(self, inputs: Any) -> None:
        """Train on one batch."""

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights that are the same on all members."""
        return {name: each.detach().clone() for name, each in self.model.named_parameters()}


class GradwireArm(Arm):
    """gw.elastic with some plan."""

    def __init__(self, plan: Any, *given: Any) -> None:
        super().__init__(*given)
        self.every = getattr(getattr(plan, "schedule", None), "every", 1)
        self._elastic = gw.elastic(
            self.model, self.optimizer, plan=plan, min_replicas=LEAST, lighthouse=self.lighthouse, timeout_s=TIMEOUT_S
        )

    @property
    def steps(self) -> int:
        return self._elastic.step

    def step(self, inputs: Any) -> None:
        before = self.steps
        self.job.loss(self.model, inputs).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.steps != before and (before or self.every == 1):  # the first round of local steps only makes weights equal
            self.batches += self._elastic.taking_part

    def weights(self) -> dict[str, torch.Tensor]:
        with self._elastic.global_weights():
            return super().weights()


class TorchftArm(Arm):
    """What the arms of torchft have in common: its manager on gloo, as its examples set it up."""

    def __init__(self, is_async: bool, *given: Any) -> None:
        super().__init__(*given)
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupGloo

        address, timeout = address_of(int(os.environ["RANK"])), timedelta(seconds=TIMEOUT_S)
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=timeout),
            load_state_dict=self._load,
            state_dict=self._save,
            min_replica_size=LEAST,
            use_async_quorum=is_async,
            timeout=timeout,
            quorum_timeout=timedelta(hours=1),
            rank=0,
            world_size=1,
            store_addr=address,
            store_port=self._store.port,
            lighthouse_addr=f"http://{self.lighthouse}",
            replica_id=f"member{os.environ['RANK']}",
            hostname=address,
        )

    def _save(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def _load(self, state: Any) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    @property
    def steps(self) -> int:
        return self.manager.current_step()


class TorchftDDP(TorchftArm):
    """DDP of torchft."""

    def __init__(self, *given: Any) -> None:
        super().__init__(True, *given)
        from torchft.ddp import DistributedDataParallel
        from torchft.optim import OptimizerWrapper

        self.trained = DistributedDataParallel(self.manager, self.model)
        self._wrapped = OptimizerWrapper(self.manager, self.optimizer)

    def step(self, inputs: Any) -> None:
        self._wrapped.zero_grad()
        self.job.loss(self.trained, inputs).backward()
        self._wrapped.step()
        self.batches = self.manager.batches_committed()


class TorchftDiLoCo(TorchftArm):
    """DiLoCo of torchft, with the outer optimizer of `gw.LocalSteps.diloco`."""

    def __init__(self, *given: Any) -> None:
        super().__init__(False, *given)
        from torchft.local_sgd import DiLoCo

        self.every = EVERY
        self._outer = torch.optim.SGD(self.model.parameters(), 0.7, 0.9, nesterov=True)
        self._diloco = DiLoCo(self.manager, [self.model], self.optimizer, self._outer, sync_every=EVERY)
        self._diloco.__enter__()

    def _save(self) -> dict[str, Any]:
        return {**super()._save(), "outer": self._outer.state_dict()}

    def _load(self, state: Any) -> None:
        super()._load(state)
        self._outer.load_state_dict(state["outer"])

    def step(self, inputs: Any) -> None:
        self.optimizer.zero_grad()
        self.job.loss(self.model, inputs).backward()
        self.optimizer.step()
        self.batches = self.manager.batches_committed()

    def weights(self) -> dict[str, torch.Tensor]:
        [fragment] = self._diloco._fragments
        return {name: each.clone() for name, each in fragment.original_parameters.items()}


TWO_BITS = gw.ErrorFeedback(gw.QSGD(bits=2, scale="ls", levels="lloyd"))
LOCAL = gw.Uniform(TWO_BITS, schedule=gw.LocalSteps(every=EVERY))
ARMS: dict[str, Callable[..., Arm]] = {
    "torchft ddp": TorchftDDP,
    "elastic 2 bits": lambda *given: GradwireArm(TWO_BITS, *given),
    "elastic auto": lambda *given: GradwireArm("auto", *given),
    "torchft diloco": TorchftDiLoCo,
    "elastic local": lambda *given: GradwireArm(LOCAL, *given),
}


def train(folder: Path, name: str, rank: int) -> None:
    """Train. The member of node 0 saves weights, and says which steps and samples they hold."""
    torch.set_num_threads(1)
    job = make_job(JOB)
    model = job.make_model(0)
    arm = ARMS[name](job, model, job.make_optimizer(model), f"{address_of(MEMBERS)}:{PORT}")
    print(json.dumps({"ready": rank, "pid": os.getpid()}), flush=True)
    go = folder / "go"
    await_(go.exists)
    random, marks, saved, began_s = torch.Generator(), float(go.read_text()) / SNAPSHOTS, 0, 0.0
    random.seed()
    while True:
        arm.step(job.batch(rank, MEMBERS, int(torch.randint(2**30, (), generator=random))))
        if not began_s and rank == 0 and arm.batches:  # all have the weights of one of them
            began_s = time.time()
            print(json.dumps({"began": began_s}), flush=True)
        now_s = time.time() - began_s if began_s else 0.0
        if rank == 0 and now_s >= (saved + 1) * marks:
            saved = int(now_s / marks)
            torch.save(arm.weights(), folder / f"{saved}.part")
            (folder / f"{saved}.part").rename(folder / f"{saved}.pt")
            samples = arm.batches * arm.every * job.batch_size
            print(json.dumps({"saved": saved, "s": round(now_s, 2), "steps": arm.steps, "samples": samples}), flush=True)


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
