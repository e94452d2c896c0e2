"""Which options can carry which specs: what the planner offers, the engine runs."""

import msgspec
import pytest
from every_method import EVERY_METHOD
from test_planner_joint import CODECS, made_up

import gradwire as gw
from gradwire.core import Costs, Spec
from gradwire.core.plan import Bucket
from gradwire.core.specs import example_specs
from gradwire.errors import PlanError
from gradwire.exchange.options import scheme_of
from gradwire.plan.grammar import DEVICES
from gradwire.plan.options import tree
from gradwire.plan.schemes import carries, tasks_of
from gradwire.planner.drafts import Limits, PlanningJob
from gradwire.planner.joint import joint
from gradwire.planner.methods import make_plan
from gradwire.planner.starts import ddp_draft
from gradwire.sim.simulator import FS_PER_US

WAYS = {(spec.schemes, spec.rounds, spec.state): spec for spec in example_specs() if spec.encodes}
SPECS: list[Spec] = [*WAYS.values(), gw.ErrorFeedback(gw.RandomK(0.01))]
"""Of the registered specs one for each way to travel and to remember."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_the_engine_runs_what_an_option_is_said_to_carry_and_nothing_else(spec: Spec, device: str) -> None:
    options = [option.tasks for option in tree(DEVICES) if option.compresses]
    options += [tasks_of("allreduce", each, spec) for each in DEVICES if spec.rounds]
    carried = 0
    for option in options:
        if device == "cpu" and any(task.endswith(":gpu") for task in option):
            continue
        bucket = Bucket(tensors=("w",), spec=spec, reduce_dtype="float32", option=option, numel=100)
        try:
            scheme_of(0, bucket, device)
            runs = True
        except PlanError:
            runs = False
        assert carries(option, spec, device) is runs, option
        carried += runs
    assert carried


def job_with(spec: Spec, nodes: int = 2, ranks_per_node: int = 1, limits: Limits | None = None) -> PlanningJob:
    profile, cluster = made_up(2, 6, gbps=0.5, nodes=nodes, ranks_per_node=ranks_per_node)
    codecs = [msgspec.structs.replace(codec, spec=spec) for codec in {codec.device: codec for codec in CODECS}.values()]
    return PlanningJob(profile, cluster, Costs(codecs=codecs), [spec], limits)


@pytest.mark.usefixtures("papers_methods")
@pytest.mark.parametrize("method", [method for method in EVERY_METHOD if method != "ddp"])
@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_every_method_plans_what_the_engine_runs(spec: Spec, method: str) -> None:
    for nodes, ranks_per_node in ((2, 1), (2, 2)):
        job = job_with(spec, nodes, ranks_per_node)
        made = make_plan(job, method)
        device = job.rules.device
        for index, bucket in enumerate(made.plan.buckets):
            scheme_of(index, bucket, device)
        assert made.plan.prediction is not None
        assert made.plan.prediction.step_us >= made.plan.prediction.lower_bound_us


def test_what_is_added_on_the_wire_is_priced_by_its_rounds() -> None:
    spec = gw.PowerSGD(rank=4)
    job = job_with(spec)
    draft = joint(job)
    coded = [part for part in draft.parts if part.choice.encodes]
    assert coded and all(part.choice.option.count("allreduce:inter") == spec.rounds for part in coded)
    plan = job.plan(draft, ddp_draft(job))
    assert plan.prediction is not None
    assert plan.prediction.step_us == pytest.approx(job.step(draft) / FS_PER_US, rel=1e-6)  # type: ignore[operator]


def test_a_spec_that_no_option_allowed_carries_is_named() -> None:
    with pytest.raises(PlanError, match=r"payloads of PowerSGD\(rank=4\): they travel only by allreduce. max_encodes is 1"):
        job_with(gw.PowerSGD(rank=4), limits=Limits(max_encodes=1))
    with pytest.raises(PlanError, match="restrict is 'inter-allgather'"):
        job_with(gw.SignSGD(), ranks_per_node=2, limits=Limits(restrict="inter-allgather"))


def test_a_spec_of_more_rounds_than_launch_keys_tell_apart_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gw.PowerSGD, "rounds", 4)
    job = job_with(gw.PowerSGD(rank=4))
    plan = make_plan(job).plan
    assert max(bucket.option.count("allreduce:inter") for bucket in plan.buckets) == 4
    monkeypatch.setattr(gw.PowerSGD, "rounds", 5)
    with pytest.raises(PlanError, match=r"only by allreduce in 5 rounds, and plans have at most 4\. max_encodes is None"):
        job_with(gw.PowerSGD(rank=4))
