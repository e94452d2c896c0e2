"""CD-SGD as published: its methods, one step by hand, the choice of its local rate, and the tables of its losses."""

import pytest
import torch

import gradwire as gw
from benchmarks.cd_sgd_published import (
    BEGIN,
    END,
    EVERY,
    FIRST,
    METHODS,
    PAGE,
    RATIOS,
    REFERENCE,
    TUNED,
    WARMUP_STEPS,
    Cell,
    Method,
    Ranks,
    SmallCNN,
    SmallMLP,
    T,
    methods_with,
    tables,
    tuned_ratio,
)
from gradwire.compressors.roundtrip import roundtrip

CELL = Cell("cnn", 0.9, 2)


def test_methods_are_the_papers() -> None:
    for k in EVERY:
        assert Method(f"CD-SGD, k={k}", 4.0).schedule == gw.Delayed.cd_sgd(k, WARMUP_STEPS, local_ratio=4.0)
    assert Method("OD-SGD", 4.0).schedule == gw.Delayed.cd_sgd(1, WARMUP_STEPS, local_ratio=4.0)
    assert Method("CD-SGD, never corrects", 4.0).schedule == gw.Delayed.cd_sgd(None, WARMUP_STEPS, local_ratio=4.0)
    assert Method("BIT-SGD").schedule == gw.Delayed(None, warmup_steps=WARMUP_STEPS, local_update=False)
    assert Method(REFERENCE).schedule is None and T == 0.5 / 32


def test_a_cell_has_every_method_at_its_tuned_rate() -> None:
    assert [each.name for each in methods_with(4.0)] == [*METHODS]
    assert {each.ratio for each in methods_with(4.0)} == {None, 4.0}
    assert {each.ratio for each in FIRST if each.name == TUNED} == {*RATIOS}
    assert len({*FIRST} | {*methods_with(4.0)}) == len(FIRST) + len(METHODS) - 3  # S-SGD, BIT-SGD and k=5 are in both


def test_no_rank_trains_on_what_is_held_out() -> None:
    job = SmallCNN(0, 0.9)
    images, labels = job.held_out()[0]
    assert images.shape == (360, 64) and labels.shape == (360,)
    assert [len(job.batch(rank, 4, 0)[1]) for rank in range(4)] == [32] * 4
    loss = job.loss(job.make_model(0), job.batch(0, 4, 0)).item()
    assert loss == pytest.approx(2.3, abs=0.2)  # log 10: nothing is learned yet


def gradient_of(job: SmallMLP, weights: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    model = job.make_model(0)
    torch.nn.utils.vector_to_parameters(weights.clone(), model.parameters())
    job.loss(model, job.batch(rank, 2, step)).backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def stepped(method: Method, job: SmallMLP, steps: int) -> Ranks:
    ranks = Ranks(method, job, 2, seed=0, steps=100)
    for step in range(steps):
        ranks.step(step, [job.batch(rank, 2, step) for rank in range(2)])
    return ranks


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_synchronous_sgd_is_torchs(momentum: float) -> None:
    job = SmallMLP(0, momentum)
    model = job.make_model(0)
    optimizer = job.make_optimizer(model)
    for step in range(5):
        optimizer.zero_grad()
        sum(job.loss(model, job.batch(rank, 2, step)) / 2 for rank in range(2)).backward()  # type: ignore[union-attr]
        optimizer.step()
    expected = torch.nn.utils.parameters_to_vector(model.parameters())
    assert torch.allclose(stepped(Method(REFERENCE), job, 5).weights, expected, atol=1e-6)


def test_a_step_is_that_of_algorithm_1() -> None:
    job, method = SmallMLP(0, 0.0), Method("CD-SGD, k=2", 4.0)
    before = stepped(method, job, WARMUP_STEPS + 1)  # the first formal step was a correction; the next one sends codes
    weights, local = before.weights.clone(), [each.clone() for each in before.local]
    assert not any(residual.any() for residual in before.residuals)
    number = WARMUP_STEPS + 1
    gradients = [gradient_of(job, local[rank], rank, number) for rank in range(2)]
    before.step(number, [job.batch(rank, 2, number) for rank in range(2)])
    codes = [roundtrip(gradient, gw.TwoBit(threshold=T))[0] for gradient in gradients]
    assert all(code.any() for code in codes)
    assert torch.allclose(before.weights, weights - 0.1 * (codes[0] + codes[1]) / 2, atol=1e-6)
    for rank in range(2):
        assert torch.allclose(before.local[rank], weights - 4 * 0.1 * gradients[rank], atol=1e-6)
        assert torch.allclose(before.residuals[rank], gradients[rank] - codes[rank], atol=1e-6)


def test_the_last_step_of_the_warm_up_makes_local_weights() -> None:
    job, method = SmallMLP(0, 0.9), Method("OD-SGD", 1.0)
    for steps, alike in ((WARMUP_STEPS - 1, True), (WARMUP_STEPS, False)):
        ranks = stepped(method, job, steps)
        assert torch.equal(ranks.local[0], ranks.weights) is torch.equal(ranks.local[0], ranks.local[1]) is alike


def line(method: str, ratio: float | None, seed: int, loss: float, accuracy: float = 0.5) -> dict[str, object]:
    return {**CELL._asdict(), "steps": 200, "seed": seed, "method": method, "ratio": ratio, "loss": loss, "accuracy": accuracy}


def test_the_local_rate_is_that_of_the_lowest_loss_on_the_first_seed() -> None:
    losses = {0.125: 3.0, 0.25: 2.0, 1.0: 1.4, 4.0: 1.0, 10.0: 9.0}
    lines = [line(TUNED, ratio, 1, loss) for ratio, loss in losses.items()]
    assert tuned_ratio(CELL, lines) == 4.0
    assert tuned_ratio(CELL, [*lines, line(TUNED, 1.0, 0, 0.1)]) == 4.0  # a seed that no other ratio has does not count
    assert tuned_ratio(CELL, lines[1:]) is None


def test_a_row_says_what_was_measured() -> None:
    lines = [line(REFERENCE, None, 0, 1.0), *(line(TUNED, ratio, 0, 1.0 + ratio / 10, 0.48) for ratio in RATIOS)]
    found = tables(lines)
    assert "| cnn, momentum 0.9, 2 ranks | CD-SGD, k=5 | 1 | 1.012 | +1.2% | -2.0 |" in found
    assert "| cnn, momentum 0.9, 2 ranks | +1% | +2% | +10% | +40% | +100% |" in found
    page = PAGE.read_text()
    assert page.index(BEGIN) < page.index(END)
