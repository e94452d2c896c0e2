"""Sweeps: lists of numbers, scaling factors over clusters, their table, JSON and picture."""

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

import gradwire as gw
from gradwire.cli import app
from gradwire.core import QSGD, Cluster, CodecCosts, Costs, Link, Profile, TensorProfile
from gradwire.errors import FormatError, PlanError
from gradwire.planner import make_plan, steps_with_slow_node
from gradwire.planner.drafts import PlanningJob
from gradwire.planner.slow_node import PLAIN_DDP
from gradwire.planner.sweep import SWEPT, clusters, read_nodes, read_rates, sweep_methods, sweep_plan
from gradwire.report.pictures import Panel
from gradwire.sim import changed_rules, simulate

TENSORS = [
    TensorProfile(name=f"t{i}", shape=shape, dtype="float32", backward_us=900.0, forward_us=400.0)
    for i, shape in enumerate([(512, 256), (256,), (2048, 512), (64, 64), (1024, 1024)])
]
PROFILE = Profile(model="five tensors", batch=1, device="V100", tensors=TENSORS)
CLUSTER = Cluster(nodes=2, ranks_per_node=2, intra=Link(2.0, 100.0), inter=Link(10.0, 10.0))
COSTS = Costs(
    codecs=[CodecCosts(spec=QSGD(), device="gpu", encode=[(4096, 12.0), (2**22, 40.0)], decode=[(4096, 9.0), (2**22, 25.0)])]
)


def test_lists():
    assert read_nodes("3") == (3,)
    assert read_nodes(" 1, 3 ,9 ") == (1, 3, 9)
    assert read_nodes("1,2,4,...,512") == tuple(2**power for power in range(10))
    assert read_nodes("3,...,24") == (3, 6, 12, 24)
    assert read_nodes("1,6,12,...,24") == (1, 6, 12, 24)
    assert read_nodes("1,2,...,4") == (1, 2, 4)
    assert read_rates("0.5,1,...,4") == (0.5, 1, 2, 4)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "''"),
        ("1,,2", "''"),
        ("1,two", "'two'"),
        ("0,1", "'0'"),
        ("-1", "'-1'"),
        ("1.5", "'1.5'"),
        ("1,1e3", "'1e3'"),
        ("2,1", "'1' after 2"),
        ("2,2", "must rise"),
        ("...,8", "stands between"),
        ("1,2,...", "stands between"),
        ("1,...,4,8", "stands between"),
        ("1,2,3,...,8", "2,3,...: '...' continues a doubling"),
        ("1,2,...,12", "never reaches; next to it is 16"),
        ("4,...,2", "never reaches"),
        (",".join(map(str, range(1, 67))), "66 values"),
        ("9" * 400, "not a whole number"),
        ("2147483647", "--nodes has 2147483647: memory and time"),
    ],
)
def test_refused_numbers_of_nodes(text, told):
    with pytest.raises(FormatError, match=r"1,2,4,\.\.\.,64") as refused:
        read_nodes(text)
    assert told in str(refused.value)
    assert len(str(refused.value)) < 600


@pytest.mark.parametrize("text", ["nan", "inf", "1e999", "0", "x", "1,inf", "1,...,inf"])
def test_refused_rates(text):
    with pytest.raises(FormatError, match="Gb/s"):
        read_rates(text)


def sweep(rates, nodes, methods=SWEPT, profile=PROFILE):
    points = clusters(CLUSTER, rates, nodes)
    rows = sweep_methods(profile, points, COSTS, [QSGD()], methods=methods)
    return {(row.inter_gbps, row.nodes, row.method): row.scaling for row in rows}


def test_scaling_factors_are_what_they_are_called():
    found = sweep([10.0, 1e6], [1, 2])
    assert all(0 < scaling <= 1 for scaling in found.values())
    for gbps, nodes, method in found:
        assert found[gbps, nodes, method] <= found[gbps, nodes, "bound"]
        assert found[gbps, nodes, "ddp"] <= found[gbps, nodes, "joint"]
    one = sweep_methods(PROFILE, clusters(CLUSTER, [10.0], [2]), COSTS, methods=["ddp"])[0]
    assert one.ranks == 4
    assert one.scaling == pytest.approx(5 * 1300 / one.step_us)


@pytest.mark.parametrize("method", ["ddp", "bound"])
def test_more_bandwidth_never_costs_uncompressed_exchange(method):
    rates = read_rates("0.25,0.5,...,256")
    for nodes in (2, 3, 8):
        table = sweep(rates, [nodes], [method])
        found = [table[gbps, nodes, method] for gbps in rates]
        assert found == sorted(found)
        assert found[0] < found[-1]


def test_one_rank_alone_scales_perfectly():
    alone = Cluster(nodes=2, ranks_per_node=1, intra=Link(2.0, 100.0), inter=Link(10.0, 10.0))
    rows = sweep_methods(PROFILE, clusters(alone, None, [1, 2]), COSTS, [QSGD()], methods=["ddp", "joint"])
    assert [row.scaling for row in rows[:2]] == [1.0, 1.0]
    assert all(row.scaling < 1 for row in rows[2:])


def test_a_plan_encodes_on_one_rank_too():
    plan = make_plan(PlanningJob(PROFILE, CLUSTER, COSTS, [QSGD()]), "layerwise").plan
    assert any(bucket.spec == QSGD() for bucket in plan.buckets)
    (alone,) = clusters(msgspec.structs.replace(CLUSTER, ranks_per_node=1), None, [1])
    ddp, own = sweep_plan(plan, PROFILE, [alone], COSTS)
    assert (ddp.ranks, ddp.scaling) == (1, 1.0)
    assert own.step_us == simulate(plan, PROFILE, alone, COSTS, changed_rules(PROFILE, alone)).step_us
    assert own.step_us > PROFILE.compute_us and own.scaling < 1


def test_the_optimizer_is_in_the_step_of_one_rank_alone_too():
    fast = Cluster(nodes=2, ranks_per_node=1, intra=Link(0.001, 1e6), inter=Link(0.001, 1e6))
    profile = msgspec.structs.replace(PROFILE, optimizer_us=20_000.0)
    rows = sweep_methods(profile, clusters(fast, None, [1, 2]), COSTS, methods=["ddp", "bound"])
    assert [row.scaling for row in rows] == pytest.approx([1.0] * 4, rel=1e-3)


def test_all_reduce_keeps_its_share_of_the_rate():
    measured = Cluster(
        nodes=2,
        ranks_per_node=2,
        intra=CLUSTER.intra,
        inter=CLUSTER.inter,
        allreduce=Link(90.0, CLUSTER.inter.gbps / 2),
    )
    assert [c.allreduce for c in clusters(measured, [10.0, 40.0], [1, 8])] == [None, Link(90, 5), None, Link(90, 20)]
    single = Cluster(nodes=1, ranks_per_node=4, intra=CLUSTER.intra, inter=CLUSTER.inter, allreduce=Link(9.0, 50.0))
    assert [c.allreduce for c in clusters(single, [40.0], [1, 8])] == [Link(9.0, 50.0), None]


def test_refused_sweeps():
    with pytest.raises(PlanError, match="'best'"):
        sweep(None, None, ["best"])
    flat = Profile(model="flat", batch=1, device="V100", tensors=[TENSORS[1]])
    with pytest.raises(PlanError, match=r"none of the 1 tensors may be compressed.*--all-tensors"):
        sweep(None, None, profile=flat)
    still = Profile(
        model="still",
        batch=1,
        device="V100",
        tensors=[TensorProfile(name="t", shape=(8, 8), dtype="float32", backward_us=0.0)],
    )
    with pytest.raises(PlanError, match="'still' has no times"):
        sweep(None, None, profile=still)


@pytest.fixture
def files(tmp_path):
    for name, document in (("profile", PROFILE), ("cluster", CLUSTER), ("costs", COSTS)):
        document.save(tmp_path / f"{name}.json")
    return tmp_path


def command(files, name, *more):
    arguments = ["plan", str(files / "profile.json"), "--spec", "qsgd4"]
    if name == "simulate":
        arguments = ["simulate", str(files / "plan.json"), "--profile", str(files / "profile.json")]
    arguments += ["--cluster", str(files / "cluster.json"), "--costs", str(files / "costs.json")]
    return [*arguments, *more]


def ask(files, name, *more):
    return CliRunner().invoke(app, command(files, name, *more))


def test_a_sweep_from_files_to_a_picture_without_torch(files):
    picture = files / "sweep.png"
    code = (
        "import sys; from gradwire.cli import app\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
        "assert not {'torch', 'triton'} & set(sys.modules)\n"
    )
    arguments = command(files, "plan", "--inter", "1,10", "--nodes", "1,2,...,8", "--picture", str(picture))
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["inter", "Gb/s", "nodes", "ranks", *SWEPT]
    assert [line.split()[:3] for line in lines[1:9]] == [
        [gbps, str(nodes), str(2 * nodes)] for gbps in ("1", "10") for nodes in (1, 2, 4, 8)
    ]
    assert "Planning: 56 steps" in done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size < 100_000


@pytest.mark.parametrize("methods", ["", " , "])
def test_no_methods_are_refused(files, methods):
    asked = ask(files, "plan", "--nodes", "4", "--methods", methods)
    assert "it names no method. Write one or more" in str(asked.exception)


def test_a_plan_on_many_clusters(files):
    assert ask(files, "plan", "-o", str(files / "plan.json")).exit_code == 0
    first, second = (ask(files, "simulate", "--inter", "1,10,100", "--json").stdout for _ in range(2))
    assert first == second
    read = json.loads(first)
    assert read["model"] == "five tensors" and read["alone_us"] == 6500
    by_method = {}
    for row in read["rows"]:
        by_method.setdefault(row["method"], []).append(row)
    assert {method: len(rows) for method, rows in by_method.items()} == {"ddp": 3, "plan": 3}
    planned = json.loads(ask(files, "simulate", "--json").stdout)["step_us"]
    assert by_method["plan"][1]["step_us"] == pytest.approx(planned)
    assert ask(files, "simulate", "--nodes", "1,2,4").exit_code == 0


def test_a_plan_of_tensors_that_may_not_be_compressed_is_refused(files):
    Profile(model="flat", batch=1, device="V100", tensors=[TENSORS[1]]).save(files / "profile.json")
    refused = ask(files, "plan")
    assert refused.exit_code != 0 and "--all-tensors" in str(refused.exception)
    assert ask(files, "plan", "--all-tensors").exit_code == ask(files, "plan", "--method", "ddp").exit_code == 0


def test_a_plan_for_a_slow_node(files):
    """From files to the table and the plan with the least mean, which simulate then finds to take as long."""
    planned = ask(files, "plan", "--slow-node", "1,4,50", "-o", str(files / "plan.json"))
    assert planned.exit_code == 0, planned.output
    table = planned.stdout.splitlines()
    assert table[1].split() == ["1", "4", "50", "mean", "worst"]
    rows = {line[:15].strip(): [float(ms) for ms in line[15:].split()] for line in table[2 : table.index("")]}
    assert rows["plain DDP"][0] < rows["plain DDP"][1] < rows["plain DDP"][2] == rows["plain DDP"][4]
    for steps in rows.values():
        assert steps[3] == pytest.approx(sum(steps[:3]) / 3, abs=0.001)
    best = table[-1].removeprefix("Least mean: ").removesuffix(".")
    assert rows[best][3] == min(steps[3] for steps in rows.values()) < rows["plain DDP"][3]
    found = json.loads(ask(files, "simulate", "--slow-node", "1,4,50", "--json").stdout)
    assert (found["model"], found["slower"], found["best"]) == ("five tensors", [1.0, 4.0, 50.0], "the plan")
    ddp, own = found["rows"]
    assert [round(us / 1e3, 3) for us in own["steps_us"]] == pytest.approx(rows[best][:3], abs=0.0011)
    assert [round(us / 1e3, 3) for us in ddp["steps_us"]] == pytest.approx(rows["plain DDP"][:3], abs=0.0011)
    first, second = (ask(files, "plan", "--slow-node", "1,4,50", "--json").stdout for _ in range(2))
    assert first == second and json.loads(first)["best"] == best
    one = json.loads(ask(files, "simulate", "--json").stdout)["step_us"]
    assert own["steps_us"][0] == pytest.approx(one)
    only_ddp = ask(files, "plan", "--slow-node", "3", "--method", "ddp").stdout.splitlines()
    assert only_ddp[1].split() == ["3", "mean", "worst"] and only_ddp[3] == ""


def test_the_plan_that_is_written_is_one_that_gradwire_runs(files):
    """DDP's own all-reduce is quicker here than every plan, and gradwire's sum of DDP's buckets is not."""
    msgspec.structs.replace(CLUSTER, ddp=Link(0.1, 1e4)).save(files / "cluster.json")
    arguments = ("plan", "--slow-node", "1,4", "-o", str(files / "plan.json"))
    *_, least, of_plans = ask(files, *arguments).stdout.splitlines()
    assert least == "Least mean: plain DDP." and re.fullmatch(r"Of the plans for gradwire: (.*), in the mean .*", of_plans)
    found = json.loads(ask(files, *arguments, "--json").stdout)
    assert found["best"] == "plain DDP" and of_plans.startswith(f"Of the plans for gradwire: {found['best_plan']}, in the mean ")
    means = {row["name"]: row["mean_us"] for row in found["rows"]}
    written = json.loads(ask(files, "simulate", "--slow-node", "1,4", "--json").stdout)["rows"][1]
    del means["plain DDP"]
    assert written["mean_us"] == pytest.approx(means[found["best_plan"]]) and means[found["best_plan"]] == min(means.values())


def test_a_single_node_cannot_be_slow(files):
    msgspec.structs.replace(CLUSTER, nodes=1).save(files / "cluster.json")
    refused = ask(files, "plan", "--slow-node", "1,2").exception
    assert isinstance(refused, PlanError) and "nodes is 1" in str(refused)


def test_methods_can_be_chosen(files):
    table = ask(files, "plan", "--inter", "1,10", "--methods", "ddp,even").stdout
    assert table.splitlines()[0].split()[4:] == ["ddp", "even"]


@pytest.mark.parametrize(
    ("name", "more", "told"),
    [
        ("plan", ["--picture", "a.png"], "without a sweep"),
        ("plan", ["--inter", "1,2", "--picture", "a.pdf"], "ends with .png"),
        ("plan", ["--inter", "1,2", "--picture", "no/such/a.png"], "no folder 'no/such'"),
        ("plan", ["--inter", "1,...,512", "--nodes", "1,...,512", "--picture", "a.png"], "10 panels"),
        ("plan", ["--inter", "1,2", "-o", "plan.json"], "--out plan.json needs one cluster"),
        ("plan", ["--inter", "1,2", "--method", "ddp"], "--method ddp needs one cluster"),
        ("plan", ["--methods", "ddp"], "--methods ddp"),
        ("plan", ["--inter", "1,2", "--slow-node", "1,2"], "--slow-node 1,2 needs one cluster"),
        ("plan", ["--slow-node", "0.5,2"], "--slow-node has 0.5: a link less than 1 time slower is faster"),
        ("plan", ["--slow-node", "2,1"], "'1' after 2"),
        ("plan", ["--slow-node", "2x"], "'2x', which is not how many times slower"),
        ("simulate", ["--slow-node", "1,2", "--trace", "t.json"], "--slow-node has several"),
        ("simulate", ["--nodes", "2,x", "--trace", "t.json"], "'x'"),
        ("simulate", ["--nodes", "2,4", "--trace", "t.json"], "--trace t.json needs one cluster"),
    ],
)
def test_refused_together(files, name, more, told):
    refused = ask(files, name, *more).exception
    assert isinstance(refused, FormatError)
    assert told in str(refused)


def test_pictures_can_be_told_apart_without_colours(tmp_path):
    from benchmarks.bars import HATCHES, draw_bars
    from gradwire.report.pictures import COLOURS, MARKERS, STYLES

    assert len(COLOURS) == len(set(zip(MARKERS, STYLES, strict=True))) == len(set(HATCHES))
    with pytest.raises(FormatError, match="10 panels"):
        draw_bars(tmp_path / "a.png", "", [Panel("", ["a"], {"b": [1.0]})] * 10, "y")
    assert list(Path(tmp_path).iterdir()) == []


def test_plain_ddp_is_the_same_beside_pipelined_plans(files):
    pipelined = ("--schedule", "pipelined")
    own, beside = (ask(files, "plan", "--slow-node", "1,4", *more).stdout.splitlines() for more in ((), pipelined))
    assert [line for line in own if line.startswith("plain DDP")] == [line for line in beside if line.startswith("plain DDP")]
    swept = [
        json.loads(ask(files, "plan", "--inter", "1,10", "--methods", "ddp,joint", "--json", *m).stdout) for m in ((), pipelined)
    ]
    ddp, ddp_beside = ([row for row in each["rows"] if row["method"] == "ddp"] for each in swept)
    assert ddp and ddp == ddp_beside
    assert "pipelined" in ask(files, "plan", "--json", *pipelined).stdout
    assert "'ddp' is plain DDP" in str(ask(files, "plan", "--method", "ddp", *pipelined).exception)


def on_cpus(**fields: object) -> tuple[Profile, Cluster, Costs]:
    """A job on CPUs whose DDP has an all-reduce of its own, over far links."""
    far = Link(1_500.0, 1.0, message_us=10.0)
    links = {"intra": Link(2.0, 100.0), "inter": far, "allreduce": far, "ddp": Link(3_000.0, 0.4)}
    return msgspec.structs.replace(PROFILE, device="cpu"), Cluster(nodes=4, ranks_per_node=1, **links, **fields), Costs(codecs=())


@pytest.mark.parametrize("lanes", [1, 2, 4, 8])
def test_a_sweep_simulates_with_the_lanes_that_are_given(lanes: int) -> None:
    profile, cluster, costs = on_cpus()
    plan = gw.Uniform(gw.Identity(), scheme="alltoall", bucket_bytes=2**18).plan(profile.tensor_infos("cpu"), 4)
    rules_on = partial(changed_rules, profile, lanes=lanes)
    rows = sweep_plan(plan, profile, clusters(cluster, [1.0], None), costs, rules_on)
    assert rows[1].step_us == pytest.approx(simulate(plan, profile, cluster, costs, rules_on(cluster)).step_us)


def test_plain_ddp_beside_a_slow_node_is_that_of_every_other_table() -> None:
    profile, cluster, costs = on_cpus()
    job = PlanningJob(profile, cluster, costs)
    made = make_plan(job, "ddp")
    (row,) = steps_with_slow_node({PLAIN_DDP: made.plan}, profile, cluster, costs, [1.0]).rows
    assert made.plan.prediction is not None and row.steps_us[0] == pytest.approx(made.plan.prediction.baseline_step_us)
    (same,) = steps_with_slow_node({"plain all-reduce": made.plan}, profile, cluster, costs, [1.0]).rows
    assert same.steps_us[0] < 0.9 * row.steps_us[0]


def test_codecs_of_a_gpu_are_no_plan_for_a_cpu() -> None:
    profile, cluster, _ = on_cpus()
    with pytest.raises(PlanError, match=r"QSGD.*encoded on a GPU alone"):
        PlanningJob(profile, cluster, COSTS, [QSGD()])
