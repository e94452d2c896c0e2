"""Adapters, frozen layers, experts, tied weights, two models, a teacher and torch.compile in the trainers of Transformers and
Lightning: the weights are those of their own DDP, bit for bit."""

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from beside_ddp import plain
from integration_scripts import EAGER, Adapted, Experts, Tied
from torch import nn
from worlds import Worlds, digest, seeded

import gradwire as gw

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lightning") is None, reason="gradwire's extra lightning is not installed"),
    pytest.mark.skipif(find_spec("transformers") is None, reason="gradwire's extra transformers is not installed"),
]

EXACT = gw.Uniform(gw.Identity())
STEPS = 6


class Script(NamedTuple):
    """A model and its loss."""

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, torch.Tensor, int], torch.Tensor] = lambda net, x, step: net(x).square().mean()
    unused: bool = False
    """Whether some steps leave out parameters, so that DDP needs `find_unused_parameters`."""
    before: Callable[[nn.Module, int], object] = lambda net, step: None
    """Called before each step."""
    compiled: bool = False
    """Whether the framework compiles the whole model."""


class ActorAndCritic(nn.Module):
    """Two models, which one loss trains."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = plain(), plain()


def of_both(net: nn.Module, x: torch.Tensor, step: int) -> torch.Tensor:
    values = net.critic(x)
    advantage = (x.mean(1, keepdim=True) - values).detach()
    return (net.actor(x).log_softmax(-1) * advantage).mean() + values.square().mean()


def of_the_student(net: nn.Module, x: torch.Tensor, step: int) -> torch.Tensor:
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(8)
        wanted = plain()(x)
    return (net(x) - wanted).square().mean()


def in_blocks() -> nn.Module:
    model = plain()
    for block in model:
        block.compile(backend=EAGER)
    return model


SCRIPTS = {
    "compiled model": Script(plain, compiled=True),
    "frozen later": Script(plain, unused=True, before=lambda net, step: net[0].requires_grad_(step not in (2, 3))),
    "experts": Script(Experts, lambda net, x, step: net(x, step % 3).square().mean(), unused=True),
    "actor and critic": Script(ActorAndCritic, of_both),
    "teacher and student": Script(plain, of_the_student),
    "adapters": Script(Adapted),
    "tied weights": Script(Tied),
    "compiled blocks": Script(in_blocks),
}


def as_torchrun_does() -> None:
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, GROUP_RANK="0", HF_HUB_OFFLINE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", TORCHELASTIC_RUN_ID="tests", TOKENIZERS_PARALLELISM="false")


def inputs_of(count: int) -> torch.Tensor:
    return torch.randn(count, 6, generator=seeded(1))


class WithLoss(nn.Module):
    """A model as Transformers' Trainer calls it. It counts its steps where the script asks for them."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.script, self.net, self.steps = script, script.make(), 0

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = self.script.loss(self.net, x, self.steps)
        if self.script.unused:
            self.steps += 1
        return {"loss": loss}


def in_transformers(folder: str, name: str, ours: bool) -> tuple[str, str, int]:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from gradwire.integrations.transformers import use

    script = SCRIPTS[name]

    class Before(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            script.before(model.net, state.global_step)

    as_torchrun_does()
    torch._dynamo.reset()
    torch.manual_seed(3)
    model = WithLoss(script)
    first = digest(model.parameters())
    settings: dict[str, Any] = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    settings |= {"torch_compile_backend": EAGER} if script.compiled else {}
    try:
        arguments = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=4, ddp_find_unused_parameters=script.unused, **settings
        )
        trainer = Trainer(model, arguments, train_dataset=[{"x": each} for each in inputs_of(96)], callbacks=[Before()])
        callback = use(trainer, plan=EXACT) if ours else None
        trainer.train()
    finally:
        for variable in [each for each in os.environ if each.startswith("ACCELERATE_DYNAMO")]:
            del os.environ[variable]
    assert digest(model.parameters()) != first
    steps = callback.handle.stats().steps if callback is not None else STEPS
    return digest(model.parameters()), type(trainer.model_wrapped).__name__, steps


@pytest.mark.parametrize("name", SCRIPTS)
def test_transformers(framework_worlds: Worlds, tmp_path: Any, name: str) -> None:
    ddp, own = (framework_worlds.run(2, in_transformers, str(tmp_path), name, ours, deadline_s=300.0) for ours in (False, True))
    assert [weights for weights, *_ in own] == [weights for weights, *_ in ddp]
    compiled = SCRIPTS[name].compiled
    assert {wrapped for _, wrapped, _ in ddp} == {"OptimizedModule" if compiled else "DistributedDataParallel"}
    assert {(wrapped, steps) for _, wrapped, steps in own} == {("OptimizedModule" if compiled else "WithLoss", STEPS)}


def scripted(script: Script) -> Any:
    """A script as Lightning's Trainer calls it. Only ranks load Lightning, which takes seconds."""
    import lightning

    class Scripted(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = script.make()

        def on_train_batch_start(self, batch: Any, at: int) -> None:
            script.before(self.net, at)

        def training_step(self, batch: Any, at: int) -> torch.Tensor:
            return script.loss(self.net, batch, at if script.unused else 0)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    return Scripted()


def in_lightning(folder: str, name: str, ours: bool) -> tuple[str, str, int]:
    import lightning
    from torch.utils.data import DataLoader

    from gradwire.integrations.lightning import GradwireStrategy

    as_torchrun_does()
    torch._dynamo.reset()
    script = SCRIPTS[name]
    strategy = GradwireStrategy(EXACT) if ours else "ddp_find_unused_parameters_true" if script.unused else "ddp"
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = lightning.Trainer(
        default_root_dir=folder, max_steps=STEPS, accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, **quiet
    )
    torch.manual_seed(3)
    module = scripted(script)
    first = digest(module.parameters())
    trainer.fit(torch.compile(module, backend=EAGER) if script.compiled else module, DataLoader(inputs_of(96), batch_size=4))
    assert digest(module.parameters()) != first
    steps = trainer.strategy.handle.stats().steps if ours else trainer.global_step
    return digest(module.parameters()), type(trainer.strategy).__name__, steps


@pytest.mark.parametrize("name", SCRIPTS)
def test_lightning(framework_worlds: Worlds, tmp_path: Any, name: str) -> None:
    ddp, own = (framework_worlds.run(2, in_lightning, str(tmp_path), name, ours, deadline_s=300.0) for ours in (False, True))
    assert [weights for weights, *_ in own] == [weights for weights, *_ in ddp]
    assert {(strategy, steps) for _, strategy, steps in ddp + own} == {("DDPStrategy", STEPS), ("GradwireStrategy", STEPS)}
