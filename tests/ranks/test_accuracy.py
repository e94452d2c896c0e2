"""The benchmark of accuracy: one model that stands for all ranks has their bits, its codec the errors of its levels."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from threads import Threads, built, here

import gradwire as gw
from benchmarks import accuracy
from benchmarks.accuracy.forms import TRIAL, form_of
from benchmarks.accuracy.jobs import job_of
from benchmarks.accuracy.levels import Levels, lloyd_levels
from benchmarks.accuracy.training import Training, gradients_of, policy_of, train
from gradwire.auto.driver import SETTLE_STEPS
from gradwire.auto.measuring import LOOK_STEPS
from gradwire.auto.trial import MOST_STEPS
from gradwire.compressors import SoleRank, compressor_for
from gradwire.exchange import embeddings_of, info_of, plan_for
from gradwire.kernels import Segment, Segments


def replicas(job_name: str, form: str, steps: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """One rank of a group that trains with `gw.parallelize`: the weights at its end, and the buffers."""
    job = job_of(job_name, seed=0)
    model = built(0, lambda: job.make_model(seed=0))
    optimizer = job.make_optimizer(model)
    rates = [group["lr"] for group in optimizer.param_groups]
    embeddings = embeddings_of(model)
    tensors = [info_of(name, tensor, id(tensor) in embeddings) for name, tensor in gradients_of(model).items()]
    plan, _ = plan_for(policy_of(form_of(form)), tensors, here.world_size)
    handle = gw.parallelize(model, optimizer, plan=plan, process_group=here.group)
    for step in range(steps):
        if (spec := form_of(form).turns.get(step)) is not None:
            handle.session.change_to(plan_for(policy_of(form_of(form), spec), tensors, here.world_size)[0])
        job.loss(model, job.batch(here.rank, here.world_size, step)).backward()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * job.rate(step, steps)
        optimizer.step()
        optimizer.zero_grad()
    handle.detach()
    return [weight.detach() for weight in model.parameters()], [buffer.detach() for buffer in model.buffers()]


@pytest.mark.parametrize(
    ("job", "form", "steps"),
    [
        ("transformer", "today2", 20),
        ("transformer", "four+warm3", 5),
        ("transformer", "weighted4", 22),
        ("tied", "weighted4+trial", 22),
        ("cnn", "today2", 4),
    ],
)
def test_one_model_has_the_bits_of_three_ranks(threads: Threads, job: str, form: str, steps: int) -> None:
    ranks = threads.run(3, replicas, job, form, steps, deadline_s=300.0)
    ended: list[Training] = []
    train(job_of(job, seed=0), form_of(form), seed=0, ranks=3, steps=steps, after=ended.append)
    weights, buffers = ranks[0]
    assert all(map(torch.equal, weights, ended[0].model.parameters()))
    assert len(buffers) == len([*ended[0].model.buffers()]) and all(map(torch.equal, buffers, ended[0].model.buffers()))
    assert all(map(torch.equal, ranks[2][0], weights))


@pytest.mark.parametrize("form", ["exact+diffs", "exact+ef21"])
def test_what_surrounds_an_exact_exchange_changes_rounding_only(form: str) -> None:
    losses = [train(job_of("transformer", 0), form_of(each), 0, ranks=2, steps=6)["loss"] for each in ("exact", form)]
    assert losses[1] == pytest.approx(losses[0], rel=2e-4)


def test_weights_leave_the_applied_mean_unbiased_by_their_size() -> None:
    """With 16 levels the applied mean is near the exact one, whatever elements are divided by; residuals follow the weights."""
    found = {form: train(job_of("tied", 0), form_of(form), 0, 2, steps=12) for form in ("sixteen", "sixteen+weights")}
    for each in found.values():
        assert each["error_norm"] < 0.3 and each["sent_energy"] == pytest.approx(1, abs=0.1)
    assert found["sixteen+weights"]["residual_norm"] < 0.3


@pytest.mark.parametrize(("count", "error"), [(3, 0.190), (4, 0.1175), (7, 0.0440), (8, 0.0345), (15, 0.0108), (16, 0.0095)])
def test_levels_have_the_least_error_of_so_many(count: int, error: float) -> None:
    """The errors are those of Max (1960), table I, for normal values, or a little less: each block has a scale of its own. The
    residual is orthogonal to the decoded values."""
    values = torch.randn(128 * 600 + 40, generator=torch.Generator().manual_seed(3))
    rows = Segment(0, 128 * 300, 1, 0, 0), Segment(128 * 300, len(values) - 128 * 300, 2, 0, 0)
    spec, state = Levels(count), [torch.zeros(len(values))]
    decoded = SoleRank(compressor_for(spec), Segments.of(rows), torch.float32, state).step([0, 0, 0, 0], values.clone())
    energy = float(values.square().sum())
    assert 0.92 * error < float((values - decoded).square().sum()) / energy < 1.02 * error
    assert abs(float((state[0] * decoded).sum())) / energy < (0.03 if count == 3 else 0.002)
    assert torch.allclose(values - decoded, state[0], atol=1e-6)
    assert torch.equal(lloyd_levels(count), -lloyd_levels(count).flip(0)) or count % 2


def test_a_trial_is_as_long_as_the_longest_of_auto() -> None:
    assert (TRIAL[0], TRIAL[-1]) == (SETTLE_STEPS + LOOK_STEPS, MOST_STEPS)
    form, warm = form_of("weighted4+trial"), form_of("weighted4").spec
    specs = [form.planned.at_step(0), *(spec.at_step(step) for step, spec in form.turns.items())]
    late, four = warm.at_step(20), gw.QSGD(bits=4)
    assert specs == [warm.at_step(0), late, four, gw.Identity(), late, warm.at_step(15)]


def test_a_file_is_continued_where_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[Any] = []

    def losing(*cell: Any) -> dict[str, Any]:
        trained.append(cell)
        return {
            "loss": 2.0 + 0.02 * (len(trained) % 2 == 0),
            "sent_energy": 1.0,
            "residual_norm": 0.2,
            "error_norm": 0.1,
        }

    monkeypatch.setattr(accuracy, "train", losing)
    file = tmp_path / "found.jsonl"
    words = ["--jobs", "tied", "--ranks", "4", "--specs", "four+weights", "--out", str(file), "--seeds"]
    run: Callable[[str], int] = lambda seeds: accuracy.run([*words, seeds])  # noqa: E731
    assert run("1") == 0 and len(trained) == 2
    assert run("2") == 0 and len(trained) == 4
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["form"] for line in lines] == ["exact", "four+weights"] * 2
    assert [line["seed"] for line in lines] == [0, 0, 1, 1]
    assert accuracy.table(lines)[-1] == "| tied | 4 | four+weights | 0.266 | 2 | +1.00 ± 0.00 | 1.00 | 0.20 | 0.10 |"
    assert accuracy.table(lines, "four+weights")[-1].startswith("| tied | 4 | exact | 4.000 | 2 | -0.99 ± 0.00 |")


@pytest.mark.parametrize(("words", "said"), [("four+heavy", "'heavy'"), ("four+", "''"), ("nine", "'nine'")])
def test_wrong_forms_are_one_message(words: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(gw.GradwireError, match=said):
        accuracy.run(["--specs", words, "--out", str(tmp_path / "none")])
