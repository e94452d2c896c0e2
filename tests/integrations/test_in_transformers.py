"""The Trainer of Transformers with gradwire: its own numbers under an identity plan, checkpoints, logs."""

import json
import math
import os
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from worlds import Worlds, digest, gradwire_threads, seeded

import gradwire as gw
from gradwire.record.run import Run
from gradwire.report.page import write_report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("transformers") is None, reason="gradwire's extra transformers is not installed"),
]

FEEDBACK = gw.Uniform(gw.ErrorFeedback(gw.TopK(0.05)))
WORDS = 32


def as_torchrun_does() -> None:
    """What torchrun tells a rank, and what Accelerate reads."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, HF_HUB_OFFLINE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", TOKENIZERS_PARALLELISM="false")


def sentences(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Each word follows from the one before, in three of four cases."""
    drawn = torch.randint(WORDS, (count, 12), generator=seeded(seed))
    for at in range(1, 12):
        follows = torch.rand(count, generator=seeded(seed, at)) < 0.75
        drawn[:, at] = torch.where(follows, (5 * drawn[:, at - 1] + 3) % WORDS, drawn[:, at])
    return [{"input_ids": each, "labels": each} for each in drawn]


def trainer_of(folder: str, dropout: float = 0.1, **arguments: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    as_torchrun_does()
    torch.manual_seed(11)
    usual = {"max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 3e-3, "save_strategy": "no", "seed": 5}
    usual |= {"logging_steps": 1, "report_to": [], "disable_tqdm": True, "use_cpu": True}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = GPT2Config(vocab_size=WORDS, n_positions=16, n_embd=32, n_layer=2, n_head=2, **drops)
    return Trainer(
        GPT2LMHeadModel(config),
        TrainingArguments(folder, **usual | arguments),
        train_dataset=sentences(512, 1),
        eval_dataset=sentences(64, 2),
    )


def trained(folder: str, plan: Any, arguments: dict[str, Any], resume: str | None = None) -> dict[str, Any]:
    """What a Trainer ends with; a plan of None is plain DDP."""
    from gradwire.integrations.transformers import use

    trainer = trainer_of(folder, **arguments)
    callback = use(trainer, plan=plan) if plan is not None else None
    trainer.train(resume_from_checkpoint=resume)
    moments = [value for entry in trainer.optimizer.state.values() for value in entry.values()]
    wrapped = type(trainer.model_wrapped).__name__
    left = hasattr(trainer.model, "no_sync"), bool(trainer.model._forward_pre_hooks)
    told = {"weights": digest(trainer.model.parameters()), "moments": digest(moments), "wrapped": wrapped, "left": left}
    told["history"] = trainer.state.log_history
    told["loss"] = trainer.evaluate()["eval_loss"]
    if callback is not None:
        told["residuals"] = {key: digest([value]) for key, value in callback.handle.state_dict().items() if "residual" in key}
    return told


ARGUMENTS = {
    "accumulation": {"gradient_accumulation_steps": 3},
    "bfloat16": {"bf16": True},
    "clipping": {"max_grad_norm": 0.05},
    "ordinary": {},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "no clipping": {"max_grad_norm": 0.0},
    "no log": {"logging_strategy": "no"},
    "no step": {"max_steps": -1, "num_train_epochs": 0},
    "no find_unused_parameters": {"ddp_find_unused_parameters": False, "ddp_bucket_cap_mb": 0, "ddp_broadcast_buffers": False},
    "no checkpoint": {"save_strategy": "no", "eval_strategy": "no"},
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_two_ranks_end_bit_for_bit_as_with_ddp(framework_worlds: Worlds, tmp_path: Path, case: str) -> None:
    ddp, ours = (
        framework_worlds.run(2, trained, str(tmp_path / name), plan, ARGUMENTS[case], deadline_s=300.0)
        for name, plan in (("ddp", None), ("gradwire", gw.Uniform(gw.Identity())))
    )
    for theirs, own in zip(ddp, ours, strict=True):
        assert theirs["wrapped"] == "DistributedDataParallel"
        assert (own["wrapped"], own["left"]) == ("GPT2LMHeadModel", (False, False))
        for name in ("weights", "moments", "loss"):
            assert own[name] == theirs[name], name
        assert [each.get("loss") for each in own["history"]] == [each.get("loss") for each in theirs["history"]]


@pytest.mark.thorough
def test_the_loss_is_that_of_ddp_with_4_bits(framework_worlds: Worlds, tmp_path: Path) -> None:
    arguments = {"max_steps": 150, "logging_steps": 50, "dropout": 0.0}
    ddp, ours = (
        framework_worlds.run(2, trained, str(tmp_path / str(plan is None)), plan, arguments, deadline_s=300.0)[0]
        for plan in (None, gw.QSGD(bits=4))
    )
    assert ddp["loss"] < 0.6 * math.log(WORDS)
    assert ours["loss"] == pytest.approx(ddp["loss"], rel=0.01)


@pytest.mark.parametrize("plan", [FEEDBACK, gw.QSGD(bits=4)], ids=["feedback", "qsgd"])
def test_a_checkpoint_is_taken_up_bit_for_bit(framework_worlds: Worlds, tmp_path: Path, plan: Any) -> None:
    arguments = {"save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}
    whole = framework_worlds.run(2, trained, str(tmp_path), plan, arguments, deadline_s=300.0)
    folder = tmp_path / "checkpoint-3"
    assert sorted(path.name for path in folder.glob("gradwire*")) == ["gradwire-rank0.pt", "gradwire-rank1.pt"]
    resumed = framework_worlds.run(2, trained, str(tmp_path / "b"), plan, arguments, str(folder), deadline_s=300.0)
    for before, after in zip(whole, resumed, strict=True):
        for name in ("weights", "moments", "residuals"):
            assert after[name] == before[name], name
    assert bool(whole[0]["residuals"]) == (plan is FEEDBACK)


def thawing(folder: str, plan: Any, resume: str | None = None) -> tuple[str, int, list[str]]:
    """The weights and the steps of a training in which a callback thaws a block before the third step; and the warnings."""
    from transformers import TrainerCallback

    from gradwire.integrations.transformers import use

    class Thaws(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if state.global_step == 2:
                block.requires_grad_(True)

    trainer = trainer_of(folder, save_strategy="steps", save_steps=4)
    block = trainer.model.transformer.h[0].requires_grad_(False)
    trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=3e-3)
    trainer.add_callback(Thaws())
    use(trainer, plan=plan)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train(resume_from_checkpoint=resume)
    said = [words for each in caught if "trainable tensors" in (words := str(each.message))]
    return digest(trainer.model.parameters()), trainer.state.global_step, said


@pytest.mark.parametrize(
    "plan", [FEEDBACK, gw.Uniform(gw.QSGD(bits=4), schedule=gw.LocalSteps(every=2))], ids=["backward", "local"]
)
def test_a_run_whose_layers_thaw_is_resumed(framework_worlds: Worlds, tmp_path: Path, plan: Any) -> None:
    """The script freezes the block anew before the Trainer loads the checkpoint."""
    for _, steps, said in framework_worlds.run(2, thawing, str(tmp_path / "a"), plan, deadline_s=300.0):
        assert steps == 6 and not said
    checkpoint = str(tmp_path / "a" / "checkpoint-4")
    one, other = framework_worlds.run(2, thawing, str(tmp_path / "b"), plan, checkpoint, deadline_s=300.0)
    assert one[:2] == other[:2] and one[1] == 6
    for _, _, said in (one, other):
        assert len(said) == 1 and "checkpoint-4 was saved with 28 trainable tensors, and 16 are trainable now" in said[0]


def test_a_checkpoint_is_taken_up_by_one_rank(framework_worlds: Worlds, tmp_path: Path) -> None:
    arguments = {"save_strategy": "steps", "save_steps": 3}
    framework_worlds.run(2, trained, str(tmp_path), FEEDBACK, arguments, deadline_s=300.0)
    folder = str(tmp_path / "checkpoint-3")
    (told,) = framework_worlds.run(1, trained, str(tmp_path / "b"), FEEDBACK, arguments, folder, deadline_s=300.0)
    assert told["history"][-1]["step"] == 6


def just_in_time(
    folder: str, plan: Any, event: str = "", step: int = 0, resume: str | None = None
) -> tuple[str, dict[str, str], list[str]]:
    """The weights and the residuals at the end, and what was warned of. A just-in-time checkpoint is requested at this event
    after so many steps, and saved at the next event."""
    from transformers import TrainerCallback

    from gradwire.integrations.transformers import use

    class Terminates(TrainerCallback):
        """As SIGTERM does, some seconds later."""

    def request(self: Any, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step == step:
            (own,) = (each for each in trainer.callback_handler.callbacks if type(each).__name__ == "JITCheckpointCallback")
            own.jit_manager.is_checkpoint_requested = True

    if event:
        setattr(Terminates, event, request)
    trainer = trainer_of(folder, dropout=0.0, enable_jit_checkpoint=True)
    trainer.add_callback(Terminates())
    callback = use(trainer, plan=plan)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train(resume_from_checkpoint=resume)
    residuals = {key: digest([value]) for key, value in callback.handle.state_dict().items() if "residual" in key}
    said = [words for each in caught if "checkpoint-" in (words := str(each.message))]
    return digest(trainer.model.parameters()), residuals, said


LOCAL = gw.Uniform(gw.QSGD(bits=4), schedule=gw.LocalSteps(every=3))
JUST_IN_TIME = {
    "between steps": (FEEDBACK, "on_step_end", 4),
    "between local steps": (LOCAL, "on_step_end", 4),
    "in a local step": (LOCAL, "on_step_begin", 3),
}


@pytest.mark.parametrize("case", JUST_IN_TIME)
def test_a_just_in_time_checkpoint_is_taken_up_bit_for_bit(framework_worlds: Worlds, tmp_path: Path, case: str) -> None:
    plan, event, step = JUST_IN_TIME[case]
    whole = framework_worlds.run(2, just_in_time, str(tmp_path / "whole"), plan, deadline_s=300.0)
    for _, _, said in framework_worlds.run(2, just_in_time, str(tmp_path), plan, event, step, deadline_s=300.0):
        assert not said
    folder = tmp_path / f"checkpoint-{step}"
    assert sorted(path.name for path in folder.glob("gradwire*")) == ["gradwire-rank0.pt", "gradwire-rank1.pt"]
    assert framework_worlds.run(2, just_in_time, str(tmp_path / "b"), plan, "", 0, str(folder), deadline_s=300.0) == whole


def test_a_just_in_time_checkpoint_in_the_middle_of_a_step_is_told(framework_worlds: Worlds, tmp_path: Path) -> None:
    told = framework_worlds.run(2, just_in_time, str(tmp_path), FEEDBACK, "on_step_begin", 3, deadline_s=300.0)
    for _, _, said in told:
        assert len(said) == 1 and said[0].startswith("checkpoint-3 is saved between backward and the optimizer's step")
    checkpoint = str(tmp_path / "checkpoint-3")
    resumed = framework_worlds.run(2, just_in_time, str(tmp_path / "b"), FEEDBACK, "", 0, checkpoint, deadline_s=300.0)
    assert resumed[0][0] == resumed[1][0] and not resumed[0][2]


def failed_before(folder: str, plan: Any) -> tuple[str, list[str]]:
    """The weights after a Trainer failed and another one trained its model; and the threads in between."""
    from transformers import Trainer, TrainerCallback

    from gradwire.integrations.transformers import use

    class Fails(TrainerCallback):
        def on_step_end(self, *_: Any, **named: Any) -> None:
            raise KeyError("as ordered")

    trainer = trainer_of(folder)
    trainer.add_callback(Fails())
    if plan is not None:
        use(trainer, plan=plan)
    with pytest.raises(KeyError):
        trainer.train()
    threads = gradwire_threads()
    other = Trainer(trainer.model, trainer.args, train_dataset=sentences(512, 1))
    if plan is not None:
        use(other, plan=plan)
    other.train()
    return digest(trainer.model.parameters()), threads


def test_another_trainer_trains_the_model_of_one_that_failed(framework_worlds: Worlds, tmp_path: Path) -> None:
    ddp, ours = (
        framework_worlds.run(2, failed_before, str(tmp_path / name), plan, deadline_s=300.0)
        for name, plan in (("ddp", None), ("gradwire", gw.Uniform(gw.Identity())))
    )
    assert ours == ddp


def test_bytes_are_in_the_log(framework_worlds: Worlds, tmp_path: Path) -> None:
    arguments = {"save_strategy": "steps", "save_steps": 6}
    for told in framework_worlds.run(2, trained, str(tmp_path), gw.QSGD(bits=4), arguments, deadline_s=300.0):
        steps = [each for each in told["history"] if "loss" in each]
        assert len(steps) == 6
        assert all(0.005 < each["gradwire_sent_mb"] < 0.05 for each in steps)
        assert all(0 <= each["gradwire_exposed_ms"] < 60e3 and each["gradwire_decisions"] == 0 for each in steps)
    saved = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    assert "gradwire_sent_mb" in saved["log_history"][0]


def decided(folder: str) -> tuple[str, int]:
    from gradwire.integrations.transformers import use

    trainer = trainer_of(folder, max_steps=120)
    use(trainer)
    trainer.train()
    history = trainer.state.log_history
    first = next((each for each in history if "gradwire_decision" in each), {})
    return first.get("gradwire_decision", ""), first.get("gradwire_decisions", 0)


def test_decisions_of_auto_are_in_the_log(framework_worlds: Worlds, tmp_path: Path) -> None:
    for text, count in framework_worlds.run(2, decided, str(tmp_path), deadline_s=300.0):
        assert "ms" in text and count >= 1


def tracked(folder: str) -> list[str]:
    """The lines above the progress bar of a Trainer with TensorBoard, whose training is recorded."""
    from transformers.trainer_callback import ProgressCallback

    from gradwire.integrations.transformers import use

    os.environ["TENSORBOARD_LOGGING_DIR"] = f"{folder}/events"
    trainer = trainer_of(folder, max_steps=40, disable_tqdm=False, report_to=["tensorboard"] * (dist.get_rank() == 0))
    (bar,) = (each for each in trainer.callback_handler.callbacks if isinstance(each, ProgressCallback))
    lines: list[str] = []

    class Bar:
        def write(self, line: str, **named: Any) -> None:
            lines.append(line)

        def update(self, count: int) -> None: ...
        def close(self) -> None: ...

    plain = bar.on_train_begin

    def begin(*args: Any, **named: Any) -> None:
        plain(*args, **named)
        bar.training_bar = Bar()

    bar.on_train_begin = begin
    use(trainer, record=f"{folder}/run")
    trainer.train()
    return [line for line in lines if line.startswith("gradwire: ")]


def test_a_tracker_file_has_bytes_step_times_and_the_decision(framework_worlds: Worlds, tmp_path: Path) -> None:
    reading = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="gradwire's extra report is not installed"
    )
    lines, _ = framework_worlds.run(2, tracked, str(tmp_path), deadline_s=300.0)
    assert len([line for line in lines if "plan='auto' runs" in line]) >= 1  # on a busy machine there may be another decision
    found = reading.EventAccumulator(str(tmp_path / "events"))
    found.Reload()
    assert {f"train/gradwire_{name}" for name in ("sent_mb", "step_ms", "exposed_ms", "predicted_ms")} <= {
        *found.Tags()["scalars"]
    }
    text, *_ = found.Tensors("train/gradwire_decision/text_summary")
    assert b"plan='auto' runs" in text.tensor_proto.string_val[0]
    run = Run.read(tmp_path / "run")
    assert run.model == "GPT2LMHeadModel" and len(run.steps) == 40 and any(step.loss for step in run.steps)
    assert run.decision.by.startswith("plan='auto'") and "A step takes" in write_report(tmp_path / "run")


def twice(folder: str, scaled: bool) -> list[str]:
    """The weights after each of two trainings with the delayed schedule, maybe with a GradScaler."""
    from gradwire.integrations.transformers import use

    trainer = trainer_of(folder, max_grad_norm=0.0, dropout=0.0, optim="adamw_torch")
    if scaled:  # as with fp16=True, which Accelerate has for GPUs alone
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    use(trainer, plan=gw.Uniform(gw.Identity(), schedule=gw.Delayed()))
    ends = []
    for _ in range(2):
        trainer.train()
        ends.append(digest(trainer.model.parameters()))
    return ends


def test_a_grad_scaler_leaves_the_step_to_the_schedule(framework_worlds: Worlds, tmp_path: Path) -> None:
    """With each step Accelerate puts the step of before back. Scales of powers of two change no bit."""
    plain, scaled = (framework_worlds.run(2, twice, str(tmp_path), scale, deadline_s=300.0) for scale in (False, True))
    assert plain[0] == plain[1] == scaled[0] == scaled[1]


def compiled(folder: str, plan: Any) -> list[str]:
    """The weights after two trainings of a compiled model, which was evaluated before."""
    from gradwire.integrations.transformers import use

    trainer = trainer_of(folder, dropout=0.0, torch_compile=True, torch_compile_backend="eager")
    if plan is not None:
        use(trainer, plan=plan)
    trainer.evaluate()
    ends = []
    for _ in range(2):
        trainer.train()
        ends.append(digest(trainer.model.parameters()))
    assert plan is None or not (hasattr(trainer.model, "no_sync") or trainer.model._forward_pre_hooks)
    return ends


@pytest.mark.slow
@pytest.mark.thorough
def test_a_compiled_model_trains_after_an_evaluation_and_again(framework_worlds: Worlds, tmp_path: Path) -> None:
    first, second = framework_worlds.run(2, compiled, str(tmp_path), gw.Uniform(gw.Identity()), deadline_s=300.0)
    assert first == second and first[0] != first[1]


def out_of_memory(folder: str) -> None:
    """A recorded training that runs out of memory in its second step, and begins again with smaller batches."""
    from transformers import TrainerCallback

    from gradwire.integrations.transformers import use

    class RunsOut(TrainerCallback):
        is_out = False

        def on_step_end(self, args: Any, state: Any, *_: Any, **named: Any) -> None:
            if state.global_step == 2 and not self.is_out:
                self.is_out = True
                raise RuntimeError("CUDA out of memory. as ordered")

    trainer = trainer_of(folder, auto_find_batch_size=True)
    trainer.add_callback(RunsOut())
    use(trainer, plan=gw.QSGD(bits=4), record=f"{folder}/run")
    trainer.train()


def test_a_record_is_of_the_training_after_it_ran_out_of_memory(framework_worlds: Worlds, tmp_path: Path) -> None:
    framework_worlds.run(2, out_of_memory, str(tmp_path), deadline_s=300.0)
    assert len(Run.read(tmp_path / "run").steps) == 6


def with_shards(folder: str) -> str:
    from gradwire.integrations.transformers import use

    with pytest.raises(gw.PlanError) as caught:
        use(trainer_of(folder), plan=gw.Uniform(gw.Identity(), schedule=gw.Pipelined(shard_optimizer=True)))
    return str(caught.value)


def test_a_sharded_optimizer_is_refused_by_name(framework_worlds: Worlds, tmp_path: Path) -> None:
    for words in framework_worlds.run(2, with_shards, str(tmp_path), deadline_s=300.0):
        assert "shard_optimizer=True" in words and "the Trainer saves" in words and "a loop of your own" in words


def another_accelerator(folder: str) -> str:
    from gradwire.integrations.transformers import use

    trainer = trainer_of(folder)
    use(trainer, plan=gw.QSGD(bits=4))
    with pytest.raises(gw.PlanError, match="was called on this Trainer already"):
        use(trainer)
    trainer.train()
    trainer.train()  # with another handle
    trainer.create_accelerator_and_postprocess()
    try:
        trainer.train()
    except gw.StepStateError as error:
        return str(error)
    return ""


def test_another_accelerator_is_told(framework_worlds: Worlds, tmp_path: Path) -> None:
    for told in framework_worlds.run(2, another_accelerator, str(tmp_path), deadline_s=300.0):
        assert told.startswith("the Trainer made another Accelerator")
