"""Compares predictions with measurements: each job over each link is profiled, its methods are predicted, and only then
measured.

    python -m benchmarks predict [--jobs mlp] [--links 100mbit] [--methods ddp,gradwire:qsgd4] [--spec SPEC] [--json FILE]

The profiling is a run of its own on the same emulated cluster: `gradwire profile` on all ranks. Nothing of the measured cells
goes into their predictions.
"""

import importlib.metadata
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console

from benchmarks.campaigns.measuring import options_parser, request_from
from benchmarks.campaigns.predictions import LinkFit, Predicted, PredictRun, ddp_plan, prediction_table, summary
from gradwire.bench.names import DECIDING, GRADWIRE_PREFIX, parse_policy, parse_spec, split_names
from gradwire.bench.progress import ProgressView
from gradwire.bench.runner import BenchRequest, emulation_problem, run_bench, run_profile
from gradwire.bench.table import FULL_WIDTH
from gradwire.core.checks import whole
from gradwire.core.cluster import Cluster
from gradwire.core.collectives import CODEC_TASKS
from gradwire.core.costs import Costs
from gradwire.core.plan import Plan
from gradwire.core.profile import Profile
from gradwire.core.provenance import Made
from gradwire.core.specs import Spec
from gradwire.errors import FormatError, TestbedError
from gradwire.planner.drafts import PlanningJob
from gradwire.planner.methods import make_plan
from gradwire.sim.rules import as_ddp, rules_of
from gradwire.sim.timeline import Timeline, simulate

__all__ = ["PLANNED", "SPECS", "PredictRequest", "Profiled", "group", "plan_of", "predictable", "profiled", "run", "run_predict"]

PLANNED = "planned"
"""The plan that the joint planner makes from what was profiled."""
SPECS = ("QSGD(bits=4)", "ErrorFeedback(TopK(0.01))")
"""The default of --spec."""


def run(arguments: list[str]) -> int:
    """Profile, predict and measure. Print the predicted times with the measured times. Returns 1 if a method failed."""
    parser = options_parser("predict", links="100mbit,500mbit,1000mbit")
    parser.add_argument("--methods", default="ddp,gradwire:qsgd4", help="comma-separated: ddp, gradwire:POLICY")
    parser.add_argument("--spec", action="append", help=f"a spec for the planner; may be repeated; default: {SPECS}")
    options = parser.parse_args(arguments)
    measured = request_from(options, predictable(split_names(options.methods)))
    request = PredictRequest(measured, [parse_spec(each) for each in options.spec or SPECS])
    done = run_predict(request, emulation_problem(), ProgressView(Console(stderr=True)), options.json)
    Console(width=FULL_WIDTH).print(prediction_table(done))
    print(summary(done))
    failed = [cell for cell in done.cells if cell.failure is not None]
    for cell in failed:
        print(f"FAILED: {cell.job}, {cell.link}, {cell.method}: {cell.failure}", file=sys.stderr)
    return 1 if failed else 0


@dataclass(frozen=True)
class PredictRequest:
    """The predictions and measurements to make. Raises FormatError, or an error of BenchRequest, for the first wrong value."""

    measured: BenchRequest
    """Jobs, links, and methods: ddp and gradwire:POLICY. The planner's own plan is one more."""
    specs: Sequence[Spec]
    """Specs that the planner may use besides all-reduce. All of them are timed."""
    profile_steps: int = 20

    def __post_init__(self) -> None:
        whole("profile_steps", self.profile_steps, "steps of each profiling", low=1)
        for method in self.measured.methods:
            if method not in predictable([method]):
                raise FormatError(
                    f"{method!r} cannot be predicted: no plan says what it does. Predicted are ddp and gradwire:POLICY."
                )


def predictable(methods: Sequence[str]) -> list[str]:
    """Return the methods of the bench that a plan describes."""
    deciding = {GRADWIRE_PREFIX + name for name in DECIDING}
    return [m for m in methods if m == "ddp" or (m.startswith(GRADWIRE_PREFIX) and m not in deciding)]


class Profiled(NamedTuple):
    """The measurements of one profiling."""

    profile: Profile
    cluster: Cluster
    costs: Costs
    warned: tuple[str, ...]

    def fit(self, job: str, link: str) -> LinkFit:
        """Return the fit of the link that predictions use."""
        inter, summed = self.cluster.inter, self.cluster.ddp or self.cluster.allreduce or self.cluster.inter
        return LinkFit(
            job=job,
            link=link,
            inter_alpha_us=inter.alpha_us,
            inter_gbps=inter.gbps,
            allreduce_alpha_us=summed.alpha_us,
            allreduce_gbps=summed.gbps,
            said=self.warned,
        )

    def timeline(self, method: str, plan: Plan) -> Timeline:
        """Return the predicted step of a method that executes this plan."""
        cluster, rules = self.cluster, rules_of("cpu", self.cluster)
        if method == "ddp":
            cluster, rules = as_ddp(cluster, rules)
        return simulate(plan, self.profile, cluster, self.costs, rules)


def profiled(
    asked: BenchRequest, job: str, link: str, specs: Sequence[Spec], steps: int, folder: Path, watch: ProgressView
) -> Profiled:
    """Profile the job on the request's cluster. Raises TestbedError if that fails, with what the ranks said."""
    warned = run_profile(asked, job, link, specs, steps, folder, watch)
    links = Cluster.load(folder / "cluster.json")
    return Profiled(Profile.load(folder / "profile.json"), links, Costs.load(folder / "costs.json"), warned)


def run_predict(request: PredictRequest, problem: str | None, watch: ProgressView, save_to: Path | None = None) -> PredictRun:
    """Profile, predict and measure everything asked for. `problem` is `emulation_problem()`.

    With `save_to` the file is written after every group of cells. Raises TestbedError where no link can be emulated, or
    where a profiling fails, with what its ranks said.
    """
    if problem is not None:
        raise TestbedError(f"predictions need links of known rates: {problem}. Run as root or allow user namespaces.")
    asked = request.measured
    run = PredictRun(
        made=Made.now(),
        torch=importlib.metadata.version("torch"),
        cores=os.cpu_count() or 1,
        nodes=asked.nodes,
        ranks_per_node=asked.ranks_per_node,
        profile_steps=request.profile_steps,
        steps=asked.steps,
    )
    with tempfile.TemporaryDirectory(prefix="gradwire-predict-") as folder:
        for link in asked.links:
            for job in asked.jobs:
                fit, cells = group(request, job, link, Path(folder, f"{job}-{link}"), watch)
                run = msgspec.structs.replace(run, fits=(*run.fits, fit), cells=(*run.cells, *cells)).with_errors()
                if save_to is not None:
                    run.save(save_to)
    return run


def group(request: PredictRequest, job: str, link: str, folder: Path, watch: ProgressView) -> tuple[LinkFit, list[Predicted]]:
    """One job over one link: profiled and predicted, then measured."""
    found = profiled(request.measured, job, link, request.specs, request.profile_steps, folder, watch)
    plans = {method: plan_of(method, found) for method in request.measured.methods}
    joint = make_plan(PlanningJob(found.profile, found.cluster, found.costs, request.specs)).plan
    joint.save(folder / "plan.json")
    plans[f"{GRADWIRE_PREFIX}{folder / 'plan.json'}"] = joint
    timelines = {method: found.timeline(method, plan) for method, plan in plans.items()}
    methods = tuple(plans)
    measured = run_bench(replace(request.measured, jobs=(job,), links=(link,), methods=methods, alone_steps=0), None, watch)
    cells = []
    for method, timeline in timelines.items():
        cell = measured.cell(job, link, method)
        assert cell is not None
        name = method if method in request.measured.methods else PLANNED
        cells.append(_predicted(job, link, name, timeline))
        if cell.step is not None:
            times = {"measured_us": cell.step.median_us, "p10_us": cell.step.p10_us, "p90_us": cell.step.p90_us}
            cells[-1] = msgspec.structs.replace(cells[-1], **times)
        else:
            cells[-1] = msgspec.structs.replace(cells[-1], failure=cell.failure)
    return found.fit(job, link), cells


def plan_of(method: str, found: Profiled) -> Plan:
    """The plan that the method executes on the profiled model."""
    if method == "ddp":
        return ddp_plan(found.profile)
    policy = parse_policy(method.removeprefix(GRADWIRE_PREFIX))
    if isinstance(policy, str):
        return Plan.load(policy)
    infos = found.profile.tensor_infos(rules_of("cpu").device)
    return policy.plan(infos, found.cluster.world_size, found.cluster.ranks_per_node)


def _predicted(job: str, link: str, method: str, timeline: Timeline) -> Predicted:
    busy = {resource.name: resource.busy_us for resource in timeline.resources}
    codec = sum(event.end_us - event.start_us for event in timeline.events if event.what in CODEC_TASKS)
    computation = timeline.optimizer_us + timeline.forward_us + timeline.backward_us
    return Predicted(
        job=job,
        link=link,
        method=method,
        predicted_us=timeline.step_us,
        computation_us=computation,
        wire_us=busy["inter link"],
        codec_us=codec,
    )
