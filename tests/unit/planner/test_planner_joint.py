"""The joint planner beside brute force, its bound, its limits, and `gradwire plan`."""

import json
import random
import subprocess
import sys

import pytest
from every_method import EVERY_METHOD
from typer.testing import CliRunner

from benchmarks.papers.oracle import best_step_us
from gradwire.cli import app
from gradwire.core import (
    QSGD,
    Cluster,
    CodecCosts,
    Costs,
    EFSignSGD,
    Link,
    Plan,
    Profile,
    TensorProfile,
    TopK,
)
from gradwire.costs.prices import bytes_of
from gradwire.errors import PlanError
from gradwire.planner.bytecomp import bytecomp
from gradwire.planner.drafts import Choice, Draft, Limits, Part, PlanningJob
from gradwire.planner.joint import _carry, joint, quick_starts
from gradwire.planner.methods import explain_plan, make_plan
from gradwire.planner.starts import ddp_draft
from gradwire.sim.rules import Rules, rules_of
from gradwire.sim.simulator import FS_PER_US

SPEC = QSGD()
CODECS = [
    CodecCosts(
        spec=spec,
        device=device,
        encode=[(4096, 12.0 * slow), (2**22, 40.0 * slow)],
        decode=[(4096, 9.0 * slow), (2**22, 25.0 * slow)],
    )
    for spec in (SPEC, TopK(0.01))
    for device, slow in (("gpu", 1), ("cpu", 3))
]


def made_up(seed, tensors, gbps=None, nodes=None, ranks_per_node=None):
    rng = random.Random(seed)
    rows = [
        TensorProfile(
            name=f"t{i}",
            shape=(rng.choice([10, 400, 4000]), 256) if rng.random() < 0.7 else (1000,),
            dtype="float32",
            backward_us=rng.choice([10.0, 1000.0]) * rng.random(),
            forward_us=5.0,
        )
        for i in range(tensors)
    ]
    profile = Profile(model="made up", batch=1, device="V100", tensors=rows)
    cluster = Cluster(
        nodes=nodes or rng.choice([1, 2, 4]),
        ranks_per_node=ranks_per_node or rng.choice([2, 4]),
        intra=Link(2.0, 100.0),
        inter=Link(10.0, gbps or rng.choice([1.0, 10.0, 100.0])),
    )
    return profile, cluster


def job_of(seed, tensors, specs=(SPEC,), limits=None, rules=None, **cluster):
    profile, links = made_up(seed, tensors, **cluster)
    return PlanningJob(profile, links, Costs(codecs=CODECS), specs, limits, rules)


def few(job):
    """Leave a job one uncompressed and two compressed options, so that all its plans can be tried."""
    kept = job.choices()[:1] + [choice for choice in job.choices() if choice.encodes][:2]
    options = [option for option in job.options if option.tasks in {choice.option for choice in kept}]
    return PlanningJob(job.profile, job.cluster, Costs(codecs=CODECS), job.specs, job.limits, job.rules, options)


@pytest.mark.parametrize(("tensors", "ranks_per_node"), [(3, 1), (2, 4)])
@pytest.mark.parametrize("seed", range(8))
def test_near_the_best_of_all_plans(seed, tensors, ranks_per_node):
    profile, cluster = made_up(seed, tensors, nodes=4, ranks_per_node=ranks_per_node)
    limits = Limits(devices=("gpu",), exempt_vectors=seed % 2 == 0)
    job = few(PlanningJob(profile, cluster, Costs(codecs=CODECS), [SPEC], limits, Rules(decode_calls="one")))
    best_us = best_step_us(job, job.choices())
    found_us = job.step(joint(job)) / FS_PER_US
    assert job.lower_bound_us() <= best_us
    assert best_us <= found_us * (1 + 1e-9)
    assert found_us <= best_us * 1.01


def test_the_oracle_tries_every_order():
    """Two two-phase buckets: interleaved is shorter than one after the other."""
    job = job_of(1, 2, limits=Limits(exempt_vectors=False, devices=("gpu",)), gbps=1.0, nodes=2)
    choice = Choice(SPEC, ("comp:gpu", "alltoall:inter", "decomp:gpu", "comp:gpu", "allgather:inter", "decomp:gpu"))
    alone = Draft((Part((0,), choice), Part((1,), choice)), skew=0)
    assert best_step_us(job, [choice]) < job.step(alone) / FS_PER_US


@pytest.mark.parametrize("seed", range(8))
def test_never_worse_than_a_start_and_the_same_again(seed):
    job = job_of(seed, 20, specs=(SPEC, TopK(0.01)))
    starts = [job.step(draft) for draft in quick_starts(job)]
    found = joint(job, evaluations=10_000)
    assert job.step(found) <= min(starts)
    assert joint(job_of(seed, 20, specs=(SPEC, TopK(0.01))), evaluations=10_000) == found


@pytest.mark.usefixtures("papers_methods")
@pytest.mark.filterwarnings("ignore:the prunings")
@pytest.mark.parametrize("seed", range(6))
def test_the_bound_is_below_all_methods_and_not_below_compute_or_wire(seed):
    job = job_of(seed, 12)
    bound = job.lower_bound_us()
    for method in EVERY_METHOD:
        assert make_plan(job, method).plan.prediction.step_us >= bound
    assert bound >= job.line.after[-1] / FS_PER_US * (1 - 1e-9)


def test_the_bound_of_uncompressed_plans_is_the_wire():
    job = job_of(0, 5, specs=(), gbps=0.1, nodes=4, ranks_per_node=1)
    wire_us = 1.5 * sum(t.nbytes for t in job.profile.tensors) * 8 / 100
    assert wire_us <= job.lower_bound_us() <= job.step(ddp_draft(job)) / FS_PER_US


@pytest.mark.parametrize("spec", [SPEC, TopK(0.01), EFSignSGD(), QSGD(bits=2, block=64)])
def test_fusing_saves_no_more_payload_than_the_bound_allows_for(spec):
    rows = made_up(3, 6)[0].tensors
    for count in range(1, 7):
        apart = sum(max(0, bytes_of([t], spec).first - 64) for t in rows[:count])
        assert bytes_of(rows[:count], spec).first >= apart


def test_limits_are_kept():
    few = joint(job_of(2, 8, limits=Limits(max_encodes=1, devices=("gpu",)), gbps=1.0))
    tasks = [task for part in few.parts for task in part.choice.option]
    assert "comp:cpu" not in tasks and any(task == "comp:gpu" for task in tasks)
    assert all(part.choice.option.count("comp:gpu") <= 1 for part in few.parts)
    free = job_of(2, 8, gbps=1.0)
    needed = free.extra_bytes(joint(free))
    tight = job_of(2, 8, gbps=1.0, limits=Limits(memory_bytes=needed - 1))
    assert tight.extra_bytes(joint(tight)) < needed
    with pytest.raises(PlanError, match="memory_bytes is 1"):
        joint(job_of(2, 8, limits=Limits(memory_bytes=1)))


def test_exempt_tensors_are_not_compressed():
    job = job_of(4, 12, gbps=1.0)
    for method in ("joint", "fusion", "hipress"):
        made = make_plan(job, method)
        names = {job.profile.tensors[place].name for place in job.exempt}
        specs = {name: bucket.spec_of(name) for bucket in made.plan.buckets for name in bucket.tensors}
        assert names and not any(specs[name].encodes for name in names)  # they may travel with others, uncompressed


def test_one_rank_has_nothing_to_plan():
    profile, _ = made_up(0, 2)
    link = Link(1.0, 1.0)
    with pytest.raises(PlanError, match="1 rank"):
        PlanningJob(profile, Cluster(nodes=1, ranks_per_node=1, intra=link, inter=link), Costs(codecs=()))


def test_lanes_are_simulated_whole():
    profile, cluster = made_up(5, 6, gbps=1.0)
    job = PlanningJob(profile, cluster, Costs(codecs=CODECS), [SPEC], Limits(devices=("cpu",)), rules_of("cpu"))
    made = make_plan(job, "joint")
    assert made.plan.prediction.step_us == pytest.approx(job.simulator.step_us(made.plan))
    assert made.plan.prediction.step_us <= made.plan.prediction.baseline_step_us * (1 + 1e-9)


def test_bytecomp_takes_every_tensor_alone():
    job = job_of(6, 6, gbps=1.0, nodes=4)
    draft = bytecomp(job).draft
    assert [part.tensors for part in draft.parts] == [(place,) for place in range(6)]
    assert job.step(draft) <= min(job.step(Draft(tuple(Part((p,), c) for p in range(6)))) for c in job.plain)


@pytest.fixture
def files(tmp_path):
    profile, cluster = made_up(7, 10, gbps=1.0, nodes=4)
    profile.save(tmp_path / "profile.json")
    cluster.save(tmp_path / "cluster.json")
    Costs(codecs=CODECS).save(tmp_path / "costs.json")
    return tmp_path


def plan(files, *more, costs=True):
    arguments = ["plan", str(files / "profile.json"), "--cluster", str(files / "cluster.json")]
    arguments += ["--costs", str(files / "costs.json")] * costs
    return CliRunner().invoke(app, [*arguments, *more])


@pytest.mark.usefixtures("papers_methods")
@pytest.mark.filterwarnings("ignore:the prunings")
@pytest.mark.parametrize("method", EVERY_METHOD)
def test_every_method_gives_a_plan_that_can_be_simulated(files, method):
    done = plan(files, "--spec", "qsgd4", "--method", method, "--json", "-o", str(files / "plan.json"))
    assert done.exit_code == 0, done.output
    read = json.loads(done.output)
    assert read.pop("planning_ms") > 0
    saved = Plan.load(files / "plan.json")
    assert saved == Plan.from_dict(read)
    arguments = [f"--{name}={files / name}.json" for name in ("profile", "cluster", "costs")]
    timeline = CliRunner().invoke(app, ["simulate", str(files / "plan.json"), *arguments, "--json"])
    assert json.loads(timeline.output)["step_us"] == pytest.approx(saved.prediction.step_us)
    assert json.loads(timeline.output)["sent_bytes"] == pytest.approx(saved.prediction.bytes_per_rank, abs=1)


def test_the_explanation_says_what_each_bucket_gains(files):
    done = plan(files, "--spec", '{"id":"qsgd","bits":4}', "--spec", "TopK(0.01)")
    assert done.exit_code == 0
    assert "gain ms" in done.output and "plain DDP" in done.output and "no plan below" in done.output
    assert "QSGD" in done.output or "TopK" in done.output


def test_the_explanation_says_why_nothing_helps():
    job = job_of(8, 6, gbps=10_000.0, nodes=2, ranks_per_node=1, limits=Limits(devices=("gpu",)))
    rows = [*job.profile.tensors, TensorProfile(name="last", shape=(8, 8), dtype="float32", backward_us=90_000.0)]
    profile = Profile(model="slow", batch=1, device="V100", tensors=rows)
    job = PlanningJob(profile, job.cluster, Costs(codecs=CODECS), [SPEC])
    assert "compute-bound: communication hides behind backward" in explain_plan(job, make_plan(job))
    assert "plain DDP never does" in explain_plan(job, make_plan(job, "ddp"))
    nothing = PlanningJob(profile, job.cluster, Costs(codecs=()))
    assert "no spec was given" in explain_plan(nothing, make_plan(nothing))


def test_refusals(files):
    for more, message in (
        (("--spec", "qsgd4", "--method", "best"), "'best'"),
        (("--spec", "QSGD(bits=8)"), "no times of QSGD"),
        (("--spec", '{"default":{"id":"qsgd"},"scheme":"allgather"}'), "no spec"),
    ):
        assert message in str(plan(files, *more).exception)


def test_no_torch(files):
    code = (
        "import sys; from gradwire.cli import app\n"
        f"app(['plan', r'{files / 'profile.json'}', '--cluster', r'{files / 'cluster.json'}', '--costs', "
        f"r'{files / 'costs.json'}', '--spec', 'qsgd4'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_grace_compresses_every_tensor_and_gathers():
    draft = make_plan(job_of(6, 6, gbps=1.0, nodes=4, limits=Limits(exempt_vectors=False)), "grace").draft
    gathered = ("comp:gpu", "allgather:inter", "decomp:gpu")
    assert draft.parts == tuple(Part((place,), Choice(SPEC, gathered)) for place in range(6))


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(4, 1), (4, 4)])
def test_hipress_compresses_between_nodes_what_is_then_sooner_exchanged(nodes, ranks_per_node):
    limits = Limits(exempt_vectors=False, devices=("gpu",))
    job = job_of(3, 12, gbps=25.0, nodes=nodes, ranks_per_node=ranks_per_node, limits=limits)
    draft = make_plan(job, "hipress").draft
    inside = ("reducescatter:intra",) if ranks_per_node > 1 else ()
    gathered = (*inside, "comp:gpu", "allgather:inter", "decomp:gpu", *(("allgather:intra",) if inside else ()))
    for part in draft.parts:
        own, *others = (
            sum(job.program(part._replace(choice=choice)).busy) for choice in (part.choice, Choice(SPEC, gathered), *job.plain)
        )
        assert own <= min(others)
        assert not part.choice.encodes or (part.choice.option[:1] == inside or not inside)
    assert 0 < sum(part.choice.encodes for part in draft.parts) < len(draft.parts) == 12


INSIDE, BACK = ("reducescatter:intra",), ("allgather:intra",)
GATHERED = ("comp:gpu", "allgather:inter", "decomp:gpu")
PUSHED = ("comp:cpu", "alltoall:inter", "decomp:cpu", "comp:cpu", "allgather:inter", "decomp:cpu")


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(4, 1), (2, 2), (1, 4)])
@pytest.mark.parametrize(("method", "tasks"), [("hitopkcomm", GATHERED), ("byteps-compress", PUSHED)])
def test_systems_compress_every_tensor_between_nodes_alone(method, tasks, nodes, ranks_per_node):
    """HiTopKComm on the gradients' device, BytePS-Compress on CPUs though these are slower; joint is no worse."""
    limits = Limits(exempt_vectors=False)
    job = job_of(3, 6, gbps=1.0, nodes=nodes, ranks_per_node=ranks_per_node, limits=limits)
    option = (*INSIDE, *tasks, *BACK) if 1 < nodes < job.cluster.world_size else tasks
    draft = make_plan(job, method).draft
    assert draft.parts == tuple(Part((place,), Choice(SPEC, option)) for place in range(6))
    assert job.step(make_plan(job).draft) <= job.step(draft)


def test_byteps_compress_needs_times_of_cpus():
    limits = Limits(exempt_vectors=False, devices=("gpu",))
    draft = make_plan(job_of(3, 6, gbps=1.0, nodes=4, ranks_per_node=1, limits=limits), "byteps-compress").draft
    assert not any(part.choice.encodes for part in draft.parts)
    assert any(
        part.choice.encodes for part in make_plan(job_of(3, 6, gbps=1.0, nodes=4, limits=limits), "hitopkcomm").draft.parts
    )


def test_without_a_compressed_bucket_none_is_asked_whether_it_can_carry_others(monkeypatch):
    job = job_of(4, 12)
    draft = Draft(tuple(Part((place,), job.plain[0]) for place in range(12)))
    monkeypatch.setattr(job, "may", lambda tensors, choice: pytest.fail(f"asked about {choice}"))
    assert job.exempt and list(_carry(job, draft, [])) == []
