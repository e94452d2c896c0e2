"""Accelerate with gradwire: its own numbers under an identity plan, accumulation, mixed precision, states."""

import copy
import os
import pickle
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from beside_ddp import name_of, normalised
from integration_scripts import SCRIPTS, experts, frozen_later
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from worlds import Worlds, digest, gradwire_threads, seeded

import gradwire as gw
from gradwire.record.run import Run as Record
from gradwire.report.modules import module_rows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("accelerate") is None, reason="gradwire's extra accelerate is not installed"),
]

FEEDBACK = gw.Uniform(gw.ErrorFeedback(gw.TopK(0.05)))


class Run:
    """A script of Accelerate's; a plan of None is plain DDP."""

    def __init__(self, plan: Any, mixed_precision: str = "no", accumulate: int = 1, features: int = 6, **ddp: Any) -> None:
        """ddp: options of DDP."""
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState
        from accelerate.utils import DistributedDataParallelKwargs

        rank, size = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        self.accelerator = Accelerator(
            cpu=True,
            mixed_precision=mixed_precision,
            gradient_accumulation_steps=accumulate,
            kwargs_handlers=[DistributedDataParallelKwargs(**ddp)] if ddp else None,
        )
        self.plan, self.features = plan, features
        self.prepare()

    def prepare(self, model: nn.Module | None = None) -> None:
        """Prepare a new model, or this one, with all that trains it."""
        from gradwire.integrations.accelerate import prepare

        plan, features = self.plan, self.features
        torch.manual_seed(4)
        if model is None:
            layers = (nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, 5)) if features != 6 else ()
            model = nn.Sequential(*layers) if layers else normalised()
        count = 640 if features == 6 else 5120
        inputs = torch.randn(count, features, generator=seeded(1))
        noise = 2 * torch.randn(count, 3, generator=seeded(3))  # the loss stays well above zero
        labels = (inputs[:, :6] @ torch.randn(6, 3, generator=seeded(2)) + noise).argmax(1)
        loader = DataLoader(TensorDataset(inputs, labels), batch_size=8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
        objects = model, optimizer, loader, schedule
        prepared = self.accelerator.prepare(*objects) if plan is None else prepare(self.accelerator, *objects, plan=plan)
        self.model, self.optimizer, self.loader, self.schedule = prepared

    def train(self, batches: int, skip: int = 0) -> float:
        loss = torch.tensor(0.0)
        for inputs, labels in [*self.loader][skip:batches]:
            with self.accelerator.accumulate(self.model):
                loss = nn.functional.cross_entropy(self.model(inputs), labels)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
        return loss.item()

    def end(self) -> list[str]:
        plain = self.accelerator.unwrap_model(self.model)
        moments = [value for entry in self.optimizer.state.values() for value in entry.values()]
        told = [digest(plain.state_dict().values()), digest(moments)]
        for handle in vars(self.accelerator).get("gradwire", []):
            told.append(digest(value for key, value in handle.state_dict().items() if "residual" in key))
        return told


def ends(plan: Any, mixed_precision: str, accumulate: int) -> tuple[str, list[str]]:
    run = Run(plan, mixed_precision, accumulate)
    run.train(12)
    return type(run.model).__name__, run.end()[:2]


@pytest.mark.parametrize(("mixed_precision", "accumulate"), [("no", 1), ("no", 3), ("bf16", 1), ("bf16", 5)])
def test_two_ranks_end_bit_for_bit_as_with_ddp(framework_worlds: Worlds, mixed_precision: str, accumulate: int) -> None:
    ddp, ours = (
        framework_worlds.run(2, ends, plan, mixed_precision, accumulate, deadline_s=200.0)
        for plan in (None, gw.Uniform(gw.Identity()))
    )
    assert [name for name, _ in ddp] == ["DistributedDataParallel"] * 2
    assert [name for name, _ in ours] == ["Sequential"] * 2
    assert [told for _, told in ours] == [told for _, told in ddp]


def with_options_of_ddp(plan: Any, options: dict[str, Any]) -> tuple[list[str], float]:
    """The end of a run in which each rank begins with buffers of its own, and the mean of them."""
    run = Run(plan, **options)
    means = run.accelerator.unwrap_model(run.model)[1].running_mean
    means.add_(dist.get_rank())
    run.train(6)
    return run.end()[:2], means.mean().item()


OFF = {
    "buffers": {"broadcast_buffers": False},
    "unused parameters and buckets": {"find_unused_parameters": False, "bucket_cap_mb": 0},
    "no bucket size": {"bucket_cap_mb": None},
}


@pytest.mark.parametrize("case", OFF)
def test_what_is_switched_off_in_ddp_is_off(framework_worlds: Worlds, case: str) -> None:
    ddp, ours = (
        framework_worlds.run(2, with_options_of_ddp, plan, OFF[case], deadline_s=200.0)
        for plan in (None, gw.Uniform(gw.Identity()))
    )
    assert ours == ddp
    assert (ours[1][1] - ours[0][1] > 0.3) == (case == "buffers")


def with_a_hook() -> str:
    from accelerate import DDPCommunicationHookType

    with pytest.raises(gw.PlanError) as error:
        Run(gw.Identity(), comm_hook=DDPCommunicationHookType.FP16)
    return str(error.value)


def test_a_communication_hook_of_ddp_is_refused_by_name(framework_worlds: Worlds) -> None:
    for said in framework_worlds.run(2, with_a_hook, deadline_s=200.0):
        assert "hook 'fp16'" in said and "gw.Cast()" in said


@pytest.mark.parametrize("most", [0.0, float("inf")])
def test_clipping_that_is_off_leaves_gradients_as_with_ddp(framework_worlds: Worlds, most: float) -> None:
    ddp, ours = (framework_worlds.run(2, clipped, plan, most, deadline_s=200.0) for plan in (None, gw.Uniform(gw.Identity())))
    assert ours == ddp


def clipped(plan: Any, most: float) -> tuple[float, str]:
    run = Run(plan)
    run.accelerator.backward(run.model(next(iter(run.loader))[0]).square().mean())
    norm = run.accelerator.clip_grad_norm_(run.model.parameters(), most)
    return float(norm), digest(each.grad for each in run.model.parameters())


def exchanges(accumulate: int) -> int:
    run = Run(gw.QSGD(bits=4), accumulate=accumulate)
    run.train(12)
    return run.accelerator.gradwire[0].stats().steps


def test_gradients_are_exchanged_once_in_an_accumulation(framework_worlds: Worlds) -> None:
    assert framework_worlds.run(2, exchanges, 4, deadline_s=200.0) == [3, 3]


def triggered(plan: Any) -> tuple[str, int]:
    """The weights of a run whose forwards are all inside `no_sync`, and how many of its steps were exchanged."""
    run = Run(plan)
    accelerator = run.accelerator
    for pair in zip(*[iter([*run.loader][:6])] * 2, strict=True):
        with accelerator.no_sync(run.model):
            first, second = (nn.functional.cross_entropy(run.model(inputs), labels) for inputs, labels in pair)
            accelerator.backward(first)
        with accelerator.trigger_sync_in_backward(run.model):
            accelerator.backward(second)
        run.optimizer.step()
        run.optimizer.zero_grad()
    handles = vars(accelerator).get("gradwire", [])
    return digest(accelerator.unwrap_model(run.model).parameters()), handles[0].stats().steps if handles else 3


def test_a_backward_sends_where_accelerate_triggers_it(framework_worlds: Worlds) -> None:
    ddp, ours = (framework_worlds.run(2, triggered, plan, deadline_s=200.0) for plan in (None, gw.Uniform(gw.Identity())))
    assert ours == ddp and ours[0] == ours[1]


def learned(plan: Any) -> float:
    run = Run(plan, features=20)
    run.train(320)
    inputs, labels = run.loader.dataset.tensors
    return nn.functional.cross_entropy(run.accelerator.unwrap_model(run.model)(inputs), labels).item()


@pytest.mark.thorough
def test_the_loss_is_that_of_ddp_with_4_bits(framework_worlds: Worlds) -> None:
    ddp, ours = (framework_worlds.run(2, learned, plan, deadline_s=200.0)[0] for plan in (None, gw.QSGD(bits=4)))
    assert ddp < 0.75
    assert ours == pytest.approx(ddp, rel=0.01)


def saved_and_gone_on(folder: str, plan: Any) -> list[str]:
    run = Run(plan)
    run.train(5)
    run.accelerator.save_state(folder)
    run.train(10, skip=5)
    return run.end()


def gone_on(folder: str, plan: Any) -> Run:
    run = Run(plan)
    run.train(2)  # is forgotten
    run.accelerator.load_state(folder)
    run.train(10, skip=5)
    return run


def taken_up(folder: str, plan: Any) -> list[str]:
    return gone_on(folder, plan).end()


def weights_taken_up(folder: str, plan: Any) -> str:
    run = gone_on(folder, plan)
    return digest(run.accelerator.unwrap_model(run.model).parameters())


PLANS = {
    "feedback": FEEDBACK,
    "qsgd": gw.QSGD(bits=4),
    "delayed": gw.Uniform(gw.QSGD(bits=4), schedule=gw.Delayed(k=3, local_lr=0.01)),
    "local": gw.Uniform(gw.QSGD(bits=4), schedule=gw.LocalSteps(every=2)),
}


@pytest.mark.parametrize("plan", PLANS)
def test_a_state_is_taken_up_bit_for_bit(framework_worlds: Worlds, tmp_path: Path, plan: str) -> None:
    before = framework_worlds.run(2, saved_and_gone_on, str(tmp_path), PLANS[plan], deadline_s=200.0)
    names = [path.name for path in sorted((tmp_path / "gradwire_0").iterdir())]
    assert names == ["gradwire-rank0.pt", "gradwire-rank1.pt"]
    assert framework_worlds.run(2, taken_up, str(tmp_path), PLANS[plan], deadline_s=200.0) == before


def test_a_state_is_taken_up_by_three_ranks(framework_worlds: Worlds, tmp_path: Path) -> None:
    for plan in (FEEDBACK, PLANS["local"]):
        framework_worlds.run(2, saved_and_gone_on, str(tmp_path), plan, deadline_s=200.0)
        assert len({*framework_worlds.run(3, weights_taken_up, str(tmp_path), plan, deadline_s=200.0)}) == 1


def prepared_again(folder: str, error: bool) -> tuple[list[str], list[str]]:
    """The ends of a run that was prepared anew, after another one was freed or failed in backward, and what it saved."""
    run = Run(FEEDBACK)
    run.train(2)
    if error:
        hook = run.model[0].weight.register_hook(lambda gradient: {}["memory"])
        with pytest.raises(KeyError):
            run.train(1)
        hook.remove()
    run.model, run.optimizer, run.loader, run.schedule = run.accelerator.free_memory(
        run.model, run.optimizer, run.loader, run.schedule
    )
    run.prepare()
    run.train(5)
    run.accelerator.save_state(folder)
    run.train(10, skip=5)
    return run.end(), sorted(path.name for path in Path(folder).glob("gradwire*"))


@pytest.mark.parametrize("error", [False, True], ids=["freed", "failed"])
def test_a_new_preparation_forgets_the_one_before(framework_worlds: Worlds, tmp_path: Path, error: bool) -> None:
    """A state holds the handle that trains, and another job resumes with it."""
    before = framework_worlds.run(2, prepared_again, str(tmp_path), error, deadline_s=200.0)
    assert [names for _, names in before] == [["gradwire_0"]] * 2
    after = framework_worlds.run(2, taken_up, str(tmp_path), FEEDBACK, deadline_s=200.0)
    assert after == [ends for ends, _ in before]


def many_preparations(free: bool, same: bool) -> tuple[list[int], list[int], int]:
    """Threads and descriptors after each preparation of a new model or the same one, and the handles at the end."""
    threads, descriptors, run = [], [], Run(FEEDBACK)
    for _ in range(6):
        run.train(2)
        threads.append(threading.active_count())
        descriptors.append(len(os.listdir("/proc/self/fd")))
        if free:
            run.accelerator.free_memory()
        run.prepare(run.model if same else None)
    run.train(1)
    return threads, descriptors, len(run.accelerator.gradwire)


@pytest.mark.parametrize(("free", "same"), [(True, False), (True, True), (False, True)])
def test_threads_and_descriptors_stay_as_they_were(framework_worlds: Worlds, free: bool, same: bool) -> None:
    for threads, descriptors, handles in framework_worlds.run(2, many_preparations, free, same, deadline_s=200.0):
        # five preparations; one thread sends heartbeats from some moment on, and another one connects and ends
        assert threads[-1] < threads[0] + 3 and descriptors[-1] < descriptors[0] + 5, (threads, descriptors)
        assert handles == 1


STEPPING = {
    "delayed": gw.Uniform(gw.Identity(), schedule=gw.Delayed()),
    "pipelined": gw.Uniform(gw.Identity(), schedule=gw.Pipelined()),
    "local": gw.Uniform(gw.Identity(), schedule=gw.LocalSteps(every=2)),
}
"""Schedules that take an optimizer."""


def of_one_optimizer(schedule: str, scaled: bool, preparations: int) -> str:
    """The parameters of a model that was prepared so many times with the same optimizer, maybe with a GradScaler."""
    from gradwire.integrations.accelerate import prepare

    run = Run(None)
    accelerator, model = run.accelerator, normalised()
    if scaled:  # as with mixed_precision="fp16", which Accelerate has for GPUs alone
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.randn(64, 6, generator=seeded(1))), batch_size=4))
    for _ in range(preparations):
        model, optimizer = prepare(accelerator, model, optimizer, plan=STEPPING[schedule])
        for (inputs,) in [*loader][:6]:
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    told = digest(parameter for name, parameter in model.state_dict().items() if "running" not in name and "num" not in name)
    accelerator.free_memory()
    assert isinstance(pickle.loads(pickle.dumps(optimizer)), type(optimizer))
    return told


@pytest.mark.parametrize("preparations", [1, 2])
@pytest.mark.parametrize("schedule", STEPPING)
def test_an_optimizer_may_have_a_grad_scaler_and_be_prepared_again(
    framework_worlds: Worlds, schedule: str, preparations: int
) -> None:
    """With each step of a GradScaler Accelerate puts the step of before back. Scales of powers of two change no bit."""
    plain, scaled = (
        framework_worlds.run(2, of_one_optimizer, schedule, scale, preparations, deadline_s=200.0) for scale in (False, True)
    )
    assert len({*plain, *scaled}) == 1


def freed() -> list[str]:
    run = Run(FEEDBACK)
    run.train(2)
    run.accelerator.free_memory()
    return gradwire_threads()


def test_free_memory_ends_the_threads(framework_worlds: Worlds) -> None:
    assert framework_worlds.run(2, freed, deadline_s=200.0) == [[], []]


def two_models(folder: str) -> list[str]:
    """Two models that train at the same time keep a handle each."""
    run = Run(FEEDBACK)
    first = run.model
    run.prepare()
    for model in (first, run.model):
        nn.functional.cross_entropy(model(torch.ones(4, 6)), torch.zeros(4, dtype=torch.long)).backward()
    run.accelerator.save_state(folder)
    return sorted(path.name for path in Path(folder).glob("gradwire*"))


def test_two_models_have_a_handle_each(framework_worlds: Worlds, tmp_path: Path) -> None:
    expected = [["gradwire_0", "gradwire_1"]] * 2
    assert framework_worlds.run(2, two_models, str(tmp_path), deadline_s=200.0) == expected


def loaded_when_detached(folder: str) -> list[str]:
    """What is saved of a model that trains on without its handle, and then loads."""
    run = Run(FEEDBACK)
    run.train(2)
    run.accelerator.save_state(folder)
    run.accelerator.gradwire[0].detach()
    before = digest(run.model.parameters())
    run.train(1)
    run.accelerator.wait_for_everyone()
    run.accelerator.load_state(folder)
    assert digest(run.model.parameters()) == before
    return sorted(path.name for path in Path(folder).glob("gradwire*"))


def test_a_script_loads_after_it_detached_its_handle(framework_worlds: Worlds, tmp_path: Path) -> None:
    assert framework_worlds.run(2, loaded_when_detached, str(tmp_path), deadline_s=200.0) == [["gradwire_0"]] * 2


def copied() -> list[bool]:
    run = Run(gw.QSGD(bits=4))
    run.train(1)
    others = [copy.deepcopy(run.model), pickle.loads(pickle.dumps(run.model))]
    run.accelerator.gradwire[0].detach()
    return [hasattr(other, "no_sync") for other in others]


def test_copies_of_the_model_are_ordinary(framework_worlds: Worlds) -> None:
    assert framework_worlds.run(2, copied, deadline_s=200.0) == [[False, False]] * 2


SHARDED = gw.Uniform(gw.Identity(), schedule=gw.Pipelined(shard_optimizer=True))


def with_shards() -> list[str]:
    """What is said to a policy with shard_optimizer, and to a function that makes its plan; the steps of the next run."""
    said = []
    for plan in (SHARDED, lambda tensors, ranks: SHARDED.plan(tensors, ranks)):
        with pytest.raises(gw.PlanError) as caught:
            Run(plan)
        said.append(str(caught.value))
    Run(gw.Identity()).train(1)
    return said


def test_a_sharded_optimizer_is_refused_by_name(framework_worlds: Worlds) -> None:
    for said in framework_worlds.run(2, with_shards, deadline_s=200.0):
        assert len(said) == 2 and all("shard_optimizer=True" in words and "a loop of your own" in words for words in said)


def misused() -> str:
    from gradwire.integrations.accelerate import prepare

    run = Run(gw.QSGD(bits=4))
    with pytest.raises(gw.PlanError) as caught:
        prepare(run.accelerator, nn.Linear(2, 2), nn.Linear(2, 2))
    return str(caught.value)


def test_two_models_at_once_are_refused(framework_worlds: Worlds) -> None:
    for told in framework_worlds.run(2, misused, deadline_s=200.0):
        assert told.startswith("2 models were passed to prepare()")


def recorded(folder: str) -> None:
    run = Run(gw.QSGD(bits=4), features=40)
    with run.accelerator.gradwire[0].record(folder, error_steps=2) as recording:
        recording.log(run.train(6))


def test_a_record_has_modules_with_errors(framework_worlds: Worlds, tmp_path: Path) -> None:
    framework_worlds.run(2, recorded, str(tmp_path), deadline_s=300.0)
    run = Record.read(tmp_path)
    rows = {row.name: row for row in module_rows(run, None)}
    assert len(run.steps) == 6 and rows.keys() == {"0", "2"}
    assert rows["0"].error is not None and rows["0"].measured_us and rows["0"].wire_bytes < rows["0"].gradient_bytes / 4


def with_a_script(script: Any, ours: bool) -> list[str]:
    from accelerate import DistributedDataParallelKwargs

    from gradwire.integrations.accelerate import prepare

    run = Run(gw.Uniform(gw.Identity()))
    for handle in run.accelerator.gradwire[:]:
        handle.detach()
    if not ours:
        run.accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=script in (experts, frozen_later))
    torch.manual_seed(0)

    def wrap(model: nn.Module) -> Any:
        if ours:
            return prepare(run.accelerator, model, plan=gw.Uniform(gw.Identity()))[0]
        return run.accelerator.prepare(model)

    return [digest(model.parameters()) for model in script(wrap)]


@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_scripts_end_bit_for_bit_as_with_ddp(framework_worlds: Worlds, script: Any) -> None:
    ddp, ours = (framework_worlds.run(2, with_a_script, script, ours, deadline_s=300.0) for ours in (False, True))
    assert ours == ddp


def tracked(folder: str) -> list[list[str]]:
    """The names in each call of the trackers: of a model that decides, then with a second one, then without any."""
    run = Run("auto", features=20)
    run.accelerator.project_configuration.set_directories(folder)
    run.accelerator.log_with = ["tensorboard"] if dist.get_rank() == 0 else []
    run.accelerator.init_trackers("events")
    names: list[list[str]] = []
    for step in range(2):
        run.train(40)
        run.accelerator.log({"loss": 1.0, "gradwire_sent_mb": -1.0} if step else {"loss": 1.0}, step=step)
        names.append(sorted(run.accelerator.gradwire.facts()))
    run.prepare()
    names.append(sorted(run.accelerator.gradwire.facts()))
    run.accelerator.free_memory()
    names.append(sorted(run.accelerator.gradwire.facts()))
    run.accelerator.end_training()
    return names


NUMBERS = [f"gradwire_{name}" for name in ("decisions", "exposed_ms", "predicted_ms", "sent_mb", "step_ms")]


def test_a_tracker_file_has_bytes_step_times_and_the_decision(framework_worlds: Worlds, tmp_path: Path) -> None:
    reading = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="gradwire's extra report is not installed"
    )
    for first, second, third, last in framework_worlds.run(2, tracked, str(tmp_path), deadline_s=300.0):
        assert first == second == NUMBERS  # the text of the decision came once, in the call before
        assert {*NUMBERS} < {*third} and "gradwire_1_sent_mb" in third and last == []
    found = reading.EventAccumulator(str(tmp_path / "events"))
    found.Reload()
    assert {"loss", *NUMBERS} <= {*found.Tags()["scalars"]}
    sent = [event.value for event in found.Scalars("gradwire_sent_mb")]
    assert 0.0005 < sent[0] < 0.02 and sent[1] == -1.0  # 2 bits or more; the script's own value counts
    text, *_ = found.Tensors("gradwire_decision/text_summary")  # on a busy machine there may be another decision
    assert b"plan='auto' runs" in text.tensor_proto.string_val[0]
