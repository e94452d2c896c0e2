"""The arms of CD-SGD as published, and the table of their losses."""

import torch

import gradwire as gw
from benchmarks.cd_sgd_published import BEGIN, END, EVERY, PAGE, RATIO, RATIOS, REFERENCE, WARMUP_STEPS, arms, table, tuning
from gradwire.bench.jobs import make_job


def test_arms_are_the_papers() -> None:
    for job, ratio in RATIO.items():
        found = arms(job)
        for k in EVERY:
            plan = found[f"CD-SGD, k={k}"].plan
            schedule = plan.schedule
            assert (schedule.k, schedule.warmup_steps, schedule.local_ratio) == (k, WARMUP_STEPS, ratio)
            assert schedule.local_step == "sgd" and not schedule.stagger and not schedule.warmup_lands
            assert plan.scheme == "CD-SGD" and plan.default == gw.TwoBit(threshold=0.5 / 32)
        assert {found[tuning(each)].plan.schedule.local_ratio for each in RATIOS} == {*RATIOS} >= {ratio}


def test_jobs_train_with_sgd_and_momentum() -> None:
    for job in map(make_job, RATIO):
        optimizer = job.make_optimizer(job.make_model(0))
        assert type(optimizer) is torch.optim.SGD and optimizer.param_groups[0]["momentum"] == 0.9


def test_a_row_says_what_was_measured() -> None:
    losses = {REFERENCE: (1.0, 0.5), "CD-SGD, k=5": (1.1, 0.48)}
    one = {name: {"0": {"loss": loss, "accuracy": accuracy}} for name, (loss, accuracy) in losses.items()}
    lines = table({"finals": {"resnet, 2 ranks": one}, "steps": 60})
    assert lines[0] == "60 steps each:"
    assert "| resnet, 2 ranks | CD-SGD, k=5 | 1 | 1.100 | +10.0% | -2.0 |" in lines
    page = PAGE.read_text()
    assert page.index(BEGIN) < page.index(END)
