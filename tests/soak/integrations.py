"""Faults inside frameworks: FSDP2, Accelerate, Transformers, Lightning and c10d train, save and resume in their own way."""

import logging
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from worlds import digest, seeded

import gradwire as gw
from soak.settings import SPECS, Job, chance_of
from soak.stage import TIMEOUT_S, Stage, ended, expect, pid_of
from soak.training import End, Progress
from soak.trials import KINDS


def integration_killed(stage: Stage) -> None:
    """SIGKILL: the others raise in time, and a restart ends as an undisturbed run."""
    fails(stage, signal.SIGKILL)


def integration_stopped(stage: Stage) -> None:
    """SIGSTOP for longer than the timeout: the same."""
    fails(stage, signal.SIGSTOP)


def fails(stage: Stage, number: int) -> None:
    job = replace(stage.job, checkpoint_every=stage.chance.randint(2, 6))
    with stage.started(job) as world:
        victim, at = stage.signal(world, number)
        stage.failed_in_time(world, victim, at)
        with suppress(ProcessLookupError):
            os.kill(pid_of(world, victim), signal.SIGKILL)
    resumes(stage, job)


def integration_paused(stage: Stage) -> None:
    """SIGSTOP for a moment: nothing is lost."""
    job = replace(stage.job, steps=60, checkpoint_every=40)
    with stage.started(job) as world:
        victim, _ = stage.signal(world, signal.SIGSTOP, longest_s=0.02)
        expect(Progress.read(job.progress(victim)) < job.steps, "the run was over before the fault")
        time.sleep(stage.chance.uniform(0.05, 0.3 * TIMEOUT_S))
        os.kill(pid_of(world, victim), signal.SIGCONT)
        ends = [ended(outcome) for outcome in world.collect(60)]
    stage.alike(ends)
    resumes(stage, job, ends)


def resumes(stage: Stage, job: Job, like: list[End] | None = None) -> None:
    if stage.schedule == "c10d":
        stage.notes.not_comparable = "a group of c10d saves nothing: rounding begins anew"
    if like is None:
        stage.resumes(job)
    else:
        stage.resumes(job, before=job.steps, like=like)


PRELOADED = [
    "accelerate", "transformers.trainer", "transformers.models.gpt2.modeling_gpt2", "lightning",
    "gradwire.integrations.lightning", "gradwire.integrations.accelerate", "gradwire.integrations.transformers",
]  # fmt: skip
"""Modules that take seconds to load, longer than ranks wait for one another."""
OWN = {"framework killed": integration_killed, "framework stopped": integration_stopped, "framework paused": integration_paused}
"""The kinds for frameworks; all others are for scripts with a handle or the hook."""
KINDS |= OWN


# ---- what ranks do


def train_in(job: Job) -> End:
    """Train in a framework, from the newest checkpoint that all ranks have."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, GROUP_RANK="0", HF_HUB_OFFLINE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", TORCHELASTIC_RUN_ID="tests", TOKENIZERS_PARALLELISM="false")
    for name in ("gradwire", "lightning", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    run = Run(job)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            kept = list(LOOPS[job.schedule](job, run))
        except gw.GradwireError as error:
            return run.ended(type(error).__name__, str(error))
    return replace(run.ended("finished", ""), weights="" if job.schedule == "fsdp2" else digest(kept), whole=digest(kept))


class Run:
    """Where a rank is, and the checkpoints that all have."""

    def __init__(self, job: Job) -> None:
        self._job, self._rank = job, dist.get_rank()
        self._progress = Progress(job.progress(self._rank))
        found = {int(path.stem.rpartition("step")[2]) for path in Path(job.folder).glob(f"rank{self._rank}-step*.pt")}
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, found)
        self.first = max(set.intersection(*everybody), default=0)
        self._longest_s, self._last = 0.0, 0.0
        self._progress.tell(self.first)

    def steps(self) -> Iterator[int]:
        yield from range(self.first, self._job.steps)

    def is_due(self, step: int) -> bool:
        """Whether to save after so many steps."""
        every = self._job.checkpoint_every
        return bool(every) and step % every == 0

    def folder(self, step: int) -> str:
        """What the framework saves after so many steps."""
        return f"{self._job.folder}/step{step}"

    def saved(self, step: int, state: Any = None) -> None:
        """This rank's part is written: `state`, or what the framework wrote."""
        path = Path(self._job.folder) / f"rank{self._rank}-step{step}.pt"
        torch.save(state, path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)

    def load(self) -> Any:
        return torch.load(Path(self._job.folder) / f"rank{self._rank}-step{self.first}.pt", weights_only=False)

    def done(self, step: int) -> None:
        """So many steps are over."""
        now = time.monotonic()
        self._longest_s = max(self._longest_s, now - self._last) if self._last else 0.0
        self._last = now
        self._progress.tell(step)

    def ended(self, kind: str, words: str) -> End:
        return End(
            kind, words, time.monotonic(), self._progress.step, longest_s=self._longest_s, timeout_s=TIMEOUT_S + 3
        )  # a checkpoint of a framework takes a second


def network(job: Job) -> torch.nn.Sequential:
    torch.manual_seed(job.seed)
    width = chance_of(job.seed, "model").choice([8, 33, 70])
    return torch.nn.Sequential(torch.nn.Linear(12, width), torch.nn.Tanh(), torch.nn.Linear(width, 3))


def inputs(job: Job, step: int) -> torch.Tensor:
    return torch.randn(6, 12, generator=seeded(job.seed, dist.get_rank(), step))


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def moments(optimizer: Any) -> list[torch.Tensor]:
    return [each["momentum_buffer"] for each in optimizer.state.values()]


def in_fsdp2(job: Job, run: Run) -> Iterator[torch.Tensor]:
    from gradwire.integrations import fsdp2

    model = network(job)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[2], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer, exchanges = sgd(model), fsdp2.compress(model, SPECS[job.spec])

    def state() -> list[torch.Tensor]:
        return [each.to_local() for each in (*model.parameters(), *moments(optimizer))]

    try:
        if run.first:
            saved = run.load()
            for parameter in model.parameters():
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            with torch.no_grad():
                for tensor, value in zip(state(), saved["tensors"], strict=True):
                    tensor.copy_(value)
            exchanges.load_state_dict(saved["gradwire"])
        for step in run.steps():
            optimizer.zero_grad()
            model(inputs(job, step)).square().mean().backward()
            optimizer.step()
            if run.is_due(step + 1):
                run.saved(step + 1, {"tensors": state(), "gradwire": exchanges.state_dict()})
            run.done(step + 1)
        yield from state()
    finally:
        exchanges.close()


def in_c10d(job: Job, run: Run) -> Iterator[torch.Tensor]:
    from gradwire.integrations import c10d

    c10d.register_model(torch.nn.Module())
    c10d.quantise(min_numel=100)
    group = dist.new_group(backend="gradwire", timeout=timedelta(seconds=TIMEOUT_S))
    model = network(job)
    wrapped, optimizer = DistributedDataParallel(model, process_group=group), sgd(model)
    try:
        if run.first:
            saved = run.load()
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        for step in run.steps():
            optimizer.zero_grad()
            wrapped(inputs(job, step)).square().mean().backward()
            optimizer.step()
            if run.is_due(step + 1):
                run.saved(step + 1, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            run.done(step + 1)
        yield from (*model.parameters(), *moments(optimizer))
    finally:
        group.close()  # type: ignore[union-attr]


def in_accelerate(job: Job, run: Run) -> Iterator[torch.Tensor]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    from gradwire.integrations.accelerate import prepare

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    accelerator, model = Accelerator(cpu=True), network(job)
    loader = DataLoader(TensorDataset(torch.zeros(8, 12)), batch_size=4)
    model, optimizer, _ = prepare(accelerator, model, sgd(model), loader, plan=gw.Uniform(SPECS[job.spec]))
    try:
        if run.first:
            accelerator.load_state(run.folder(run.first))
        for step in run.steps():
            optimizer.zero_grad()
            accelerator.backward(model(inputs(job, step)).square().mean())
            optimizer.step()
            if run.is_due(step + 1):
                accelerator.save_state(run.folder(step + 1))
                run.saved(step + 1)
            run.done(step + 1)
        yield from (*model.parameters(), *moments(optimizer))
    finally:
        accelerator.free_memory()


def in_lightning(job: Job, run: Run) -> Iterator[torch.Tensor]:
    import lightning

    from gradwire.integrations.lightning import GradwireStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network(job)

        def training_step(self, rows: Any, at: int) -> torch.Tensor:
            return self.net(inputs(job, self.trainer.global_step)).square().mean()

        def on_train_batch_end(self, outputs: Any, rows: Any, at: int) -> None:
            step = self.trainer.global_step
            if run.is_due(step):
                self.trainer.save_checkpoint(run.folder(step))
                run.saved(step)
            run.done(step)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    module = Module()
    trainer = lightning.Trainer(
        max_steps=job.steps, max_epochs=-1, accelerator="cpu", devices=dist.get_world_size(), logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, default_root_dir=job.folder,
        strategy=GradwireStrategy(plan=gw.Uniform(SPECS[job.spec])),
    )  # fmt: skip
    rows = DataLoader(TensorDataset(torch.zeros(10_000, 1)), batch_size=1)
    trainer.fit(module, rows, ckpt_path=run.folder(run.first) if run.first else None)
    yield from module.parameters()


def in_transformers(job: Job, run: Run) -> Iterator[torch.Tensor]:
    from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
    from transformers.utils import logging as told

    from gradwire.integrations.transformers import use

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            run.done(state.global_step)

        def on_save(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            run.saved(state.global_step)

    told.set_verbosity_error()
    told.disable_progress_bar()
    torch.manual_seed(job.seed)
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2, **drops))
    words = torch.randint(16, (256, 8), generator=seeded(job.seed))
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": job.checkpoint_every} if job.checkpoint_every else {}
    arguments = TrainingArguments(
        job.folder, max_steps=min(job.steps, 10**6), per_device_train_batch_size=4, learning_rate=1e-2, seed=5,
        lr_scheduler_type="constant", report_to=[], disable_tqdm=True, use_cpu=True, logging_strategy="no",
        **({"save_strategy": "no"} | saving),
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": each, "labels": each} for each in words])
    use(trainer, plan=gw.Uniform(SPECS[job.spec]))
    trainer.add_callback(Watch())
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=f"{job.folder}/checkpoint-{run.first}" if run.first else None)
    yield from model.parameters()


LOOPS: dict[str, Callable[[Job, Run], Iterator[torch.Tensor]]] = {
    "fsdp2": in_fsdp2,
    "accelerate": in_accelerate,
    "transformers": in_transformers,
    "lightning": in_lightning,
    "c10d": in_c10d,
}
