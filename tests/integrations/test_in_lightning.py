"""Lightning's Trainer with gradwire's strategy: DDP's numbers under an identity plan, checkpoints, logs."""

import os
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from worlds import World, Worlds, digest, seeded

import gradwire as gw
from gradwire.record.run import Run
from gradwire.report.page import write_report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lightning") is None, reason="gradwire's extra lightning is not installed"),
]

FEEDBACK = gw.Uniform(gw.ErrorFeedback(gw.TopK(0.05)))


def classifier(by_hand: bool = False, by_step: bool = False) -> Any:
    """Return a Classifier. Only ranks load Lightning, which takes seconds."""
    import lightning

    class Classifier(lightning.LightningModule):
        """With batch norm; on request with an optimization by hand, or with inputs that follow from rank and step alone."""

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 5))
            self.automatic_optimization = not by_hand

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.net(inputs)

        def training_step(self, batch: Any, at: int) -> torch.Tensor | None:
            step = self.trainer.global_step
            inputs, labels = next(iter(data(8, dist.get_rank(), step))) if by_step else batch
            # as scripts do: through the module, or through a part of it
            loss = nn.functional.cross_entropy(self(inputs) if step % 2 else self.net(inputs), labels)
            if self.automatic_optimization:
                return loss
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5)
            optimizer.step()
            return None

        def validation_step(self, batch: Any, at: int) -> None:
            self.log("held out", nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)

    return Classifier()


def data(count: int, *seed: int) -> DataLoader[Any]:
    inputs, noise = torch.randn(count, 20, generator=seeded(*seed)), torch.randn(count, 5, generator=seeded(*seed, 1))
    labels = (inputs @ torch.randn(20, 5, generator=seeded(2)) + 3 * noise).argmax(1)
    return DataLoader(TensorDataset(inputs, labels), batch_size=8)


def trainer_of(folder: str, plan: Any, **arguments: Any) -> Any:
    """A plan of None is DDP."""
    import lightning

    from gradwire.integrations.lightning import GradwireStrategy

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, GROUP_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", TORCHELASTIC_RUN_ID="tests")
    usual = {"max_steps": 8, "accelerator": "cpu", "devices": dist.get_world_size(), "logger": False}
    usual |= {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    names = {None: "ddp", "by name": "gradwire"}
    usual["strategy"] = names[plan] if plan is None or isinstance(plan, str) else GradwireStrategy(plan)
    return lightning.Trainer(default_root_dir=folder, **usual | arguments)


def trained(folder: str, plan: Any, arguments: dict[str, Any], by_hand: bool = False) -> dict[str, Any]:
    trainer = trainer_of(folder, plan, **arguments)
    torch.manual_seed(3)
    model = classifier(by_hand)
    trainer.fit(model, data(256, 1), data(64, 5))
    told = {"weights": digest(model.parameters()), "strategy": type(trainer.strategy).__name__}
    told |= {"left": bool(model._forward_pre_hooks), "steps": trainer.global_step}
    # with accumulation, and by hand, Lightning with DDP sends buffers of rank 0 in other steps
    return told if by_hand or "accumulate_grad_batches" in arguments else told | {"buffers": digest(model.buffers())}


CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "accumulation": ({"accumulate_grad_batches": 3}, False),
    "bfloat16": ({"precision": "bf16-mixed"}, False),
    "clipping": ({"gradient_clip_val": 0.1}, False),
    "ordinary": ({}, False),
    "by hand": ({}, True),
    "barebones": ({"barebones": True}, False),
    "no log": ({"log_every_n_steps": 0}, False),
    "no clipping": ({"gradient_clip_val": 0, "log_every_n_steps": None}, False),
    "no end": ({"max_epochs": -1, "num_sanity_val_steps": 0, "limit_val_batches": 0}, False),
}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_end_bit_for_bit_as_with_ddp(framework_worlds: Worlds, tmp_path: Path, case: str) -> None:
    arguments, by_hand = CASES[case]
    ddp, ours = (
        framework_worlds.run(2, trained, str(tmp_path), plan, arguments, by_hand, deadline_s=300.0)
        for plan in (None, gw.Uniform(gw.Identity()))
    )
    for theirs, own in zip(ddp, ours, strict=True):
        assert (theirs.pop("strategy"), own.pop("strategy")) == ("DDPStrategy", "GradwireStrategy")
        assert own["steps"] == 8 and not own["left"]
        assert own == theirs


def adversarial() -> Any:
    import lightning

    class Adversaries(lightning.LightningModule):
        """A generator with frozen weights and an adapter, and a discriminator; two optimizers, by hand."""

        def __init__(self) -> None:
            super().__init__()
            self.base, self.adapter = nn.Linear(20, 20).requires_grad_(False), nn.Linear(20, 20)
            self.judge = nn.Sequential(nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 1))
            self.automatic_optimization = False

        def training_step(self, batch: Any, at: int) -> None:
            inputs = next(iter(data(8, dist.get_rank(), at)))[0]
            of_judge, of_adapter = self.optimizers()
            fake = self.base(inputs) + self.adapter(inputs)
            of_judge.zero_grad()
            self.manual_backward((self.judge(fake.detach()).square() - self.judge(inputs)).mean())
            of_judge.step()
            of_adapter.zero_grad()
            self.manual_backward(-self.judge(fake).mean())
            of_adapter.step()

        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(each.parameters(), lr=0.05) for each in (self.judge, self.adapter)]

    return Adversaries()


def adversaries(folder: str, plan: Any) -> tuple[str, str]:
    strategy = {} if plan is not None else {"strategy": "ddp_find_unused_parameters_true"}
    trainer = trainer_of(folder, plan, **strategy)
    torch.manual_seed(3)
    model = adversarial()
    trainer.fit(model, data(256, 1))
    return digest(model.parameters()), type(trainer.strategy).__name__


def test_a_gan_with_frozen_weights_ends_bit_for_bit_as_with_ddp(framework_worlds: Worlds, tmp_path: Path) -> None:
    ddp, ours = (
        framework_worlds.run(2, adversaries, str(tmp_path), plan, deadline_s=300.0) for plan in (None, gw.Uniform(gw.Identity()))
    )
    assert [weights for weights, _ in ours] == [weights for weights, _ in ddp]
    assert ours[0][1] == "GradwireStrategy" and ours[0][0] == ours[1][0]


def learned(folder: str, plan: Any) -> float:
    trainer, loader = trainer_of(folder, plan, max_steps=300), data(4800, 1)
    torch.manual_seed(3)
    model = classifier()
    trainer.fit(model, loader)
    inputs, labels = loader.dataset.tensors
    return nn.functional.cross_entropy(model.eval()(inputs), labels).item()


@pytest.mark.thorough
def test_the_loss_is_that_of_ddp_with_4_bits(framework_worlds: Worlds, tmp_path: Path) -> None:
    ddp, ours = (framework_worlds.run(2, learned, str(tmp_path), plan, deadline_s=300.0)[0] for plan in (None, gw.QSGD(bits=4)))
    assert ddp < 1.2
    assert ours == pytest.approx(ddp, rel=0.01)


def saved_on_the_way(folder: str, plan: Any) -> tuple[str, str, bool]:
    """Fit to the eighth step; a checkpoint is saved after each epoch of four."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    keep = ModelCheckpoint(dirpath=folder, filename="{step}", save_top_k=-1, save_on_train_epoch_end=True)
    return fitted(trainer_of(folder, plan, callbacks=[keep], enable_checkpointing=True))


def taken_up(folder: str, plan: Any) -> tuple[str, str, bool]:
    return fitted(trainer_of(folder, plan), f"{folder}/step=4.ckpt")


def fitted(trainer: Any, checkpoint: str | None = None) -> tuple[str, str, bool]:
    """Digests of weights and momenta, and of this rank's residuals and buffers; whether there are residuals."""
    import lightning

    told: list[Any] = []

    class Watch(lightning.Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            state = trainer.strategy.handle.state_dict()
            residuals = [value for key, value in state.items() if "residual" in key]
            momenta = [entry["momentum_buffer"] for entry in trainer.optimizers[0].state.values()]
            told.append(digest([*module.parameters(), *momenta]))
            told.append(digest([*module.buffers(), *residuals]))
            told.append(bool(residuals))

    trainer.callbacks.append(Watch())
    torch.manual_seed(3)
    trainer.fit(classifier(by_step=True), data(8 * 4 * dist.get_world_size(), 1), ckpt_path=checkpoint)
    return told[0], told[1], told[2]


@pytest.mark.parametrize("plan", [FEEDBACK, gw.QSGD(bits=4)], ids=["feedback", "qsgd"])
def test_a_checkpoint_is_taken_up_bit_for_bit(framework_worlds: Worlds, tmp_path: Path, plan: Any) -> None:
    whole = framework_worlds.run(2, saved_on_the_way, str(tmp_path), plan, deadline_s=300.0)
    saved = torch.load(tmp_path / "step=4.ckpt", weights_only=True)["gradwire"]
    assert {"rank0/step", "rank1/step"} <= saved.keys()
    assert framework_worlds.run(2, taken_up, str(tmp_path), plan, deadline_s=300.0) == whole
    assert whole[0][2] == (plan is FEEDBACK)


def after_a_range_test(folder: str, plan: Any, tests: bool) -> tuple[tuple[str, str, bool], int]:
    """The end of a fit that begins with a range test of learning rates, or without; and the steps that gradwire counted."""
    from lightning.pytorch.callbacks import LearningRateFinder

    finder = [LearningRateFinder(num_training_steps=6, update_attr=False)] if tests else []
    trainer = trainer_of(folder, plan, callbacks=finder)
    end = fitted(trainer)
    return end, trainer.strategy.handle.session.step


RANGE_TESTED = {
    "feedback": FEEDBACK,
    "local": gw.Uniform(gw.QSGD(bits=4), schedule=gw.LocalSteps(every=3)),
}


@pytest.mark.parametrize("plan", RANGE_TESTED)
def test_a_range_test_of_learning_rates_leaves_nothing_behind(framework_worlds: Worlds, tmp_path: Path, plan: str) -> None:
    """It restores a checkpoint in the middle of the fit."""
    plain, tested = (
        framework_worlds.run(2, after_a_range_test, str(tmp_path), RANGE_TESTED[plan], tests, deadline_s=300.0)
        for tests in (False, True)
    )
    assert tested == plain


def saved_after(folder: str, plan: Any) -> tuple[str, str, bool]:
    """Fit to the fourth step, and save then."""
    trainer = trainer_of(folder, plan, max_steps=4)
    end = fitted(trainer)
    trainer.save_checkpoint(f"{folder}/step=4.ckpt")
    return end


def test_a_checkpoint_that_is_saved_after_fit_is_taken_up_bit_for_bit(framework_worlds: Worlds, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = framework_worlds.run(2, saved_on_the_way, str(tmp_path / "whole"), FEEDBACK, deadline_s=300.0)
    framework_worlds.run(2, saved_after, str(tmp_path), FEEDBACK, deadline_s=300.0)
    assert {"rank0/step", "rank1/step"} <= torch.load(tmp_path / "step=4.ckpt", weights_only=True)["gradwire"].keys()
    assert framework_worlds.run(2, taken_up, str(tmp_path), FEEDBACK, deadline_s=300.0) == whole


def thawing(folder: str, plan: Any, checkpoint: str | None = None) -> tuple[str, int, list[str]]:
    """The weights and the steps after a fit in which a callback thaws a layer after the first epoch; and the warnings."""
    from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint

    class Thaws(BaseFinetuning):
        def freeze_before_training(self, module: Any) -> None:
            self.freeze(module.net[0])

        def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.net[0], optimizer, lr=0.01)

    keep = ModelCheckpoint(dirpath=folder, filename="{step}", save_top_k=-1, save_on_train_epoch_end=True)
    trainer = trainer_of(folder, plan, max_steps=12, callbacks=[Thaws(), keep], enable_checkpointing=True)
    torch.manual_seed(3)
    module = classifier(by_step=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, data(8 * 4 * dist.get_world_size(), 1), ckpt_path=checkpoint)
    said = [words for each in caught if "trainable tensors" in (words := str(each.message))]
    return digest(module.parameters()), trainer.global_step, said


def test_a_run_whose_layers_thaw_is_resumed(framework_worlds: Worlds, tmp_path: Path) -> None:
    """Lightning freezes the layer anew before it restores the checkpoint."""
    first, _ = framework_worlds.run(2, thawing, str(tmp_path), FEEDBACK, deadline_s=300.0)
    assert first[1:] == (12, [])
    one, other = framework_worlds.run(2, thawing, str(tmp_path / "b"), FEEDBACK, f"{tmp_path}/step=8.ckpt", deadline_s=300.0)
    assert one[:2] == other[:2] and one[1] == 12
    for _, _, said in (one, other):
        assert len(said) == 1 and "saved with 6 trainable tensors, and 4 are trainable now" in said[0]


def taken_up_with_words(folder: str, plan: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        taken_up(folder, plan)
    return [str(each.message) for each in caught if "no 'gradwire'" in str(each.message)]


def test_a_checkpoint_without_a_state_is_told(framework_worlds: Worlds, tmp_path: Path) -> None:
    framework_worlds.run(2, saved_after, str(tmp_path), FEEDBACK, deadline_s=300.0)
    saved = torch.load(tmp_path / "step=4.ckpt", weights_only=True)
    del saved["gradwire"]
    torch.save(saved, tmp_path / "step=4.ckpt")
    for words in framework_worlds.run(2, taken_up_with_words, str(tmp_path), FEEDBACK, deadline_s=300.0):
        assert len(words) == 1 and "Residuals begin at zero" in words[0]


def left_in_backward(folder: str, failing: tuple[int, ...]) -> tuple[str, list[str]]:
    """Fit until backward raises on some ranks; what this rank raises, and what the checkpoint's warning says."""
    from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint

    from gradwire.integrations.lightning import GradwireStrategy

    class Fails(Callback):
        def on_before_backward(self, trainer: Any, module: Any, loss: torch.Tensor) -> None:
            if trainer.global_step == 3 and dist.get_rank() in failing:
                module.net[0].weight.register_hook(lambda gradient: 1 / 0)  # those of the last layer were sent by then

    own = {"strategy": GradwireStrategy(FEEDBACK), "callbacks": [Fails(), OnExceptionCheckpoint(folder)]}
    with warnings.catch_warnings(record=True) as caught, pytest.raises(Exception) as raised:
        warnings.simplefilter("always")
        trainer_of(folder, None, enable_checkpointing=True, **own).fit(classifier(by_step=True), data(256, 1))
    said = [str(each.message) for each in caught if "saved without 'gradwire'" in str(each.message)]
    return repr(raised.value), said


@pytest.mark.parametrize("failing", [(0, 1), (1,)], ids=["all ranks", "one rank"])
def test_an_exception_in_backward_leaves_a_checkpoint(tmp_path: Path, failing: tuple[int, ...]) -> None:
    with World(2, group_timeout_s=8.0, frameworks=True) as world:
        told = world.run(left_in_backward, str(tmp_path), failing, deadline_s=300.0)
    others = "ZeroDivisionError" if 0 in failing else "CommunicationError"
    assert [raised.partition("(")[0] for raised, _ in told] == [others, "ZeroDivisionError"]
    assert all(len(said) == 1 for _, said in told)
    saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=True)
    assert saved["global_step"] == 3 and "gradwire" not in saved
    os.rename(tmp_path / "on_exception.ckpt", tmp_path / "step=4.ckpt")
    with World(2, frameworks=True) as world:
        assert [len(words) for words in world.run(taken_up_with_words, str(tmp_path), FEEDBACK, deadline_s=300.0)] == [1, 1]


def test_a_checkpoint_is_taken_up_by_three_ranks(framework_worlds: Worlds, tmp_path: Path) -> None:
    framework_worlds.run(2, saved_on_the_way, str(tmp_path), FEEDBACK, deadline_s=300.0)
    weights = {told[0] for told in framework_worlds.run(3, taken_up, str(tmp_path), FEEDBACK, deadline_s=300.0)}
    assert len(weights) == 1


def logged(folder: str) -> tuple[list[str], str]:
    from lightning.pytorch.loggers import CSVLogger

    trainer = trainer_of(folder, "by name", logger=CSVLogger(folder), log_every_n_steps=4, max_steps=120)
    torch.manual_seed(3)
    trainer.fit(classifier(), data(2048, 1))
    return sorted(trainer.logged_metrics), str(trainer.strategy.handle.decision)


def test_the_strategy_by_its_name_decides_and_logs(framework_worlds: Worlds, tmp_path: Path) -> None:
    for names, decision in framework_worlds.run(2, logged, str(tmp_path), deadline_s=300.0):
        assert [name for name in names if name.startswith("gradwire_")] == [
            "gradwire_decisions",
            "gradwire_exposed_ms",
            "gradwire_predicted_ms",
            "gradwire_sent_mb",
            "gradwire_step_ms",
        ]
        assert "ms" in decision
    (written,) = tmp_path.rglob("metrics.csv")
    assert "gradwire_sent_mb" in written.read_text().splitlines()[0]


def tracked(folder: str) -> list[str]:
    """The lines above the progress bar of a Trainer with TensorBoard, whose training is recorded."""
    from lightning.pytorch.callbacks import ProgressBar
    from lightning.pytorch.loggers import TensorBoardLogger

    from gradwire.integrations.lightning import GradwireStrategy

    lines: list[str] = []

    class Bar(ProgressBar):
        def print(self, *texts: Any, **named: Any) -> None:
            lines.extend(texts)

        def disable(self) -> None: ...

    logger, strategy = TensorBoardLogger(folder, name="", version="events"), GradwireStrategy(record=f"{folder}/run")
    settings: dict[str, Any] = {"logger": logger, "callbacks": [Bar()], "enable_progress_bar": True, "log_every_n_steps": 4}
    trainer = trainer_of(folder, None, strategy=strategy, max_steps=60, **settings)
    torch.manual_seed(3)
    trainer.fit(classifier(), data(2048, 1))
    return [line for line in lines if line.startswith("gradwire: ")]


def test_a_tracker_file_has_bytes_step_times_and_the_decision(framework_worlds: Worlds, tmp_path: Path) -> None:
    reading = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="gradwire's extra report is not installed"
    )
    lines, _ = framework_worlds.run(2, tracked, str(tmp_path), deadline_s=300.0)
    assert len([line for line in lines if "plan='auto' runs" in line]) >= 1  # on a busy machine there may be another decision
    found = reading.EventAccumulator(str(tmp_path / "events"))
    found.Reload()
    assert {f"gradwire_{name}" for name in ("sent_mb", "step_ms", "exposed_ms", "predicted_ms")} <= {*found.Tags()["scalars"]}
    assert any(b"plan='auto' runs" in path.read_bytes() for path in (tmp_path / "events").iterdir() if path.is_file())
    run = Run.read(tmp_path / "run")
    assert run.model == "Classifier" and len(run.steps) == 60 and all(step.loss is not None for step in run.steps)
    assert "A step takes" in write_report(tmp_path / "run")


def refused_options() -> list[str]:
    from gradwire.integrations.lightning import GradwireStrategy

    said = []
    for wrong in ({"find_unused_parameters": True}, {"ddp_comm_hook": print}):
        with pytest.raises(gw.PlanError) as refused:
            GradwireStrategy(plan=gw.QSGD(bits=4), **wrong)
        said.append(str(refused.value))
    with pytest.raises(gw.PlanError, match=r"shard_optimizer=True.*Lightning saves"):
        GradwireStrategy(gw.Uniform(gw.Identity(), schedule=gw.Pipelined(shard_optimizer=True)))
    return said


def refused_schedules(folder: str) -> list[str]:
    said = []
    for schedule in (gw.Pipelined(), gw.Delayed()):
        trainer, model = trainer_of(folder, gw.Uniform(gw.Identity(), schedule=schedule)), classifier()
        with pytest.raises(gw.PlanError) as refused:
            trainer.fit(model, data(64, 1))
        assert trainer.global_step == 0 and not model._forward_pre_hooks
        said.append(str(refused.value))
    return said


def test_schedules_that_step_later_are_refused_before_the_first_step(framework_worlds: Worlds, tmp_path: Path) -> None:
    for pipelined, delayed in framework_worlds.run(2, refused_schedules, str(tmp_path), deadline_s=200.0):
        for words, schedule in ((pipelined, "Pipelined()"), (delayed, "Delayed()")):
            assert words.startswith(f"plan has the schedule {schedule}") and "Lightning" in words and "LocalSteps" in words


def by_hand_without_wrapper(folder: str, schedule: Any) -> str:
    """The cure that the refusal names."""
    trainer = trainer_of(folder, gw.Uniform(gw.Identity(), schedule=schedule), max_epochs=1)
    torch.manual_seed(3)
    model = classifier(by_hand=True)
    wrapped = model.optimizers
    model.optimizers = lambda: wrapped(use_pl_optimizer=False)
    trainer.fit(model, data(64, 1))
    return digest(model.parameters())


def test_a_loop_by_hand_steps_later(framework_worlds: Worlds, tmp_path: Path) -> None:
    backward, pipelined = (
        framework_worlds.run(2, by_hand_without_wrapper, str(tmp_path), schedule, deadline_s=200.0)
        for schedule in (gw.Backward(), gw.Pipelined())
    )
    assert len({*backward, *pipelined}) == 1


def test_options_of_ddp_and_a_sharded_optimizer_are_refused(framework_worlds: Worlds) -> None:
    for said in framework_worlds.run(2, refused_options):
        assert len(said) == 2 and all("is an option of DDP" in words for words in said)


def taken_up_where_it_lies() -> bool:
    """Whether the handle gets the checkpoint's own tensors, though the model is on another device."""
    from gradwire.integrations import lightning as ours

    strategy, read = ours.GradwireStrategy(), list[Any]()
    saved = strategy._saved = {"rank0/step": torch.tensor(1), "rank1/step": torch.tensor(1)}
    handle: Any = SimpleNamespace(session=SimpleNamespace(device=torch.device("meta")))
    with mock.patch.multiple(ours, why_others_train=lambda *_: "", load_state=lambda _, state: read.append(state())):
        strategy._load(handle)
    return all(read[0][key] is value for key, value in saved.items())


def test_states_of_all_ranks_are_not_copied_to_each_device(worlds: Worlds) -> None:
    assert worlds.run(1, taken_up_where_it_lies) == [True]
