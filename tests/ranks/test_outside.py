"""A compressor, a collective and a schedule of other packages, one file each: planned, simulated, run on ranks and listed."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from outside import install, lay_out, use
from worlds import Given, World, digest

import gradwire as gw
from gradwire.compressors import compressor_for, register_compressor
from gradwire.compressors.base import Compressor
from gradwire.core import TensorInfo, collectives, entry_points, schedules
from gradwire.core.collectives import COLLECTIVES, Collective, collective, collective_of, is_link_word, register_collective
from gradwire.core.schedules import Schedule, as_schedule
from gradwire.core.specs import ElementRun, base, registered_specs, spec_from_dict, spec_from_text
from gradwire.costs.steps import steps_of
from gradwire.engine.schedules.backward import BackwardSchedule
from gradwire.errors import FormatError, PlanError, SpecError
from gradwire.exchange.options import scheme_of
from gradwire.plan.schemes import beside_tree, correction_plan
from gradwire.planner import schedule_rows

SRC = Path(gw.__file__).parents[1]


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    for example in ("own_compressor", "own_collective", "own_schedule"):
        install(example, folder)
    return folder


def trained(folder: str, scheme: str, schedule: str, compressor: str) -> str:
    """What the weights of one rank are after six steps."""
    use(folder)
    spec = {
        "mulaw": lambda: gw.ErrorFeedback(spec_from_dict({"id": "mulaw"})),
        "qsgd": lambda: gw.QSGD(bits=4),
        "weighted": lambda: gw.ErrorFeedback(gw.QSGD(bits=2, scale="ls", levels="lloyd"), weights=0.9),
    }
    policy = gw.Policy(default=spec[compressor](), scheme=scheme, schedule=schedule, bucket_bytes=900, chunk_bytes=500)
    torch.manual_seed(0)
    model = Given([200, 77])
    with torch.no_grad():
        model.weight = torch.nn.Parameter(torch.zeros(31, 7))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gw.parallelize(model, optimizer, plan=policy)
    for step in range(6):
        optimizer.zero_grad()
        model(model.random_gradients(dist.get_rank(), step)).backward()
        optimizer.step()
    handle.flush()
    assert {word for bucket in handle.plan.buckets for word in bucket.link_tasks} == {scheme}
    handle.detach()
    return digest(model.parameters())


def runs(folder: str) -> list[list[str]]:
    cases = [("backward", "qsgd"), ("pipelined", "qsgd"), ("delayed", "mulaw"), ("backward", "mulaw"), ("backward", "weighted")]
    return [[trained(folder, scheme, *case) for scheme in ("relay", "allgather")] for case in cases]


@pytest.mark.parametrize("world_size", [2, 3])
def test_both_run_on_ranks_and_the_collective_gives_the_bits_of_all_gather(packages: Path, world_size: int) -> None:
    with World(world_size) as world:
        ranks = world.run(runs, str(packages))
    assert all(rank == ranks[0] for rank in ranks)
    assert all(relayed == gathered for relayed, gathered in ranks[0])


def scheduled(folder: str) -> list[str]:
    """What the weights are after six steps with the toy schedule, and with `backward`; a rank leaves a gradient out."""
    use(folder)
    found = []
    for schedule in ("atend", "backward"):
        policy = gw.Policy(default=gw.QSGD(bits=4), schedule=schedule, bucket_bytes=900, chunk_bytes=500)
        torch.manual_seed(0)
        model = Given([200, 77, 40])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = gw.parallelize(model, optimizer, plan=policy)
        for step in range(6):
            optimizer.zero_grad()
            model(model.random_gradients(dist.get_rank(), step)).backward()
            optimizer.step()
        state = handle.state_dict()
        handle.load_state_dict(state)
        assert handle.plan.schedule.word == schedule and gw.Plan.from_json(handle.plan.to_json()) == handle.plan
        handle.detach()
        found.append(digest(model.parameters()))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_schedule_runs_on_ranks_and_gives_the_bits_of_backward(packages: Path, world_size: int) -> None:
    with World(world_size) as world:
        ranks = world.run(scheduled, str(packages))
    assert all(rank == ranks[0] for rank in ranks)
    assert ranks[0][0] == ranks[0][1]


PLANNED = """
import sys
import gradwire as gw
from gradwire.core import *
from gradwire.plan.schemes import check_known
from gradwire.sim.timeline import simulate
from gradwire.sim.rules import Rules

assert not any(name.startswith("gradwire_") for name in sys.modules), "nothing asked for a package yet"
spec = spec_from_dict({"id": "mulaw"})
assert "gradwire_relay" not in sys.modules, "the other group is read when it is needed"
tensors = [TensorProfile(name=n, shape=(1000, 9), dtype="float32", backward_us=1e3, forward_us=1e3) for n in "ab"]
tensors.append(TensorProfile(name="bias", shape=(9,), dtype="float32", backward_us=1e3, forward_us=1e3))
profile = Profile(model="two", batch=1, device="cpu", tensors=tensors)
cluster = Cluster(nodes=3, ranks_per_node=2, intra=Link(1.0, 10.0), inter=Link(9.0, 0.1))
times = Costs(codecs=[CodecCosts(spec=spec, device="cpu", encode=[(0, 9.0)], decode=[(0, 7.0)])])
for schedule in ("backward", "pipelined", gw.Delayed(k=3)):
    policies = [gw.Policy(default=spec, scheme=scheme, schedule=schedule) for scheme in ("relay", "allgather")]
    plans = [gw.Policy.from_json(policy.to_json()).plan(profile.tensor_infos("cpu")) for policy in policies]
    assert [bucket.option for bucket in plans[0].buckets] == [("comp:cpu", "relay:inter", "decomp:cpu"), ("relay:inter",)]
    assert [bucket.gathers for bucket in plans[0].buckets] == [0, 0]
    for plan in plans:
        assert gw.Plan.from_json(plan.to_json()).digest() == plan.digest()
        for bucket in plan.buckets:
            check_known(bucket.option)
    relay, gather = (simulate(plan, profile, cluster, times, Rules(device="cpu", routing="ring")) for plan in plans)
    assert relay.step_us == gather.step_us > 4e3, (relay.step_us, gather.step_us)
tensors[0] = TensorProfile(name="a", shape=(1000, 9), dtype="float32", backward_us=1e3, forward_us=1e3)
late, early = (
    simulate(
        gw.Policy(default=spec, schedule=schedule, bucket_bytes=40_000).plan(profile.tensor_infos("cpu")), profile, cluster,
        times, Rules(device="cpu", routing="ring"),
    )
    for schedule in ("atend", "backward")
)
assert late.step_us > early.step_us > 6e3, (late.step_us, early.step_us)
print("planned")
"""


def python(packages: Path, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(packages), str(SRC)])}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_both_are_planned_and_simulated(packages: Path) -> None:
    assert python(packages, "-c", PLANNED) == "planned\n"


LISTED = f"""
import sys
sys.path.insert(0, {str(SRC.parent)!r})
from typer.testing import CliRunner
from benchmarks.page import collectives_table, page, schedules_table
from gradwire.cli import app

for words in (["options", "--collectives", "--json"], ["compressors", "--json"]):
    print(CliRunner().invoke(app, words, catch_exceptions=False).stdout.replace("\\n", " "))
print(CliRunner().invoke(app, ["options", "--collectives"]).stdout)
print(CliRunner().invoke(app, ["schedules"]).stdout)
print(collectives_table(), schedules_table(), page({{}}, {{}}))
"""


def test_both_are_listed_with_their_package_by_the_command_line_and_in_the_docs(packages: Path) -> None:
    listed_collectives, compressors, rest = python(packages, "-c", LISTED).split("\n", maxsplit=2)
    listed = {row["name"]: row for row in json.loads(listed_collectives)}
    assert listed["relay"]["tasks"] == ["comp", "relay:inter", "decomp"]
    assert {name: row["package"] for name, row in listed.items()} == {
        **dict.fromkeys(COLLECTIVES, "gradwire"),
        "relay": "gradwire-relay 0.1",
    }
    listed = {row["id"]: row for row in json.loads(compressors)}
    assert listed["mulaw"]["package"] == "gradwire-mulaw 0.1" and listed["mulaw"]["law"] == "contractive"
    assert {row["package"] for name, row in listed.items() if name != "mulaw"} == {"gradwire"}
    text, table, pages = rest.partition("| `scheme=` |")
    assert "gradwire-relay 0.1" in text and table
    assert "| `relay` | `comp relay:inter decomp` |" in pages and "| `MuLaw()` | contractive |" in pages
    assert "gradwire-atend 0.1" in text and "| `atend` | after backward | no | no | All gradients when" in pages
    assert pages.count("gradwire-relay 0.1") == pages.count("gradwire-mulaw 0.1") == 1


# ---- what cannot be used


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of packages that this process looks into."""
    monkeypatch.syspath_prepend(tmp_path)
    entry_points._groups.cache_clear()
    yield tmp_path
    entry_points._groups.cache_clear()


def test_an_entry_point_that_cannot_be_loaded_is_named_with_its_package(broken: Path) -> None:
    lay_out(
        broken,
        "half-done",
        {group: {"half": "half_done:NOTHING"} for group in ("gradwire.specs", "gradwire.collectives")},
    )
    for error, ask in ((SpecError, lambda: spec_from_dict({"id": "half"})), (PlanError, lambda: collective("half"))):
        with pytest.raises(error, match=r"half = 'half_done:NOTHING' of gradwire\.\w+ in package half-done 0.1 .*half_done"):
            ask()
    assert spec_from_dict({"id": "qsgd"}) == gw.QSGD() and collective("ring") is COLLECTIVES["ring"]


def test_one_name_in_two_packages_is_refused(broken: Path) -> None:
    for name in ("first", "second"):
        lay_out(broken, name, {"gradwire.collectives": {"both": f"{name}:BOTH"}})
    with pytest.raises(PlanError, match=r"'both' of gradwire.collectives is in packages first 0.1 and second 0.1"):
        collective("both")


def test_an_entry_point_with_another_name_is_refused(broken: Path) -> None:
    install("own_compressor", broken)
    (broken / "gradwire_mulaw-0.1.dist-info" / "entry_points.txt").write_text("[gradwire.specs]\nlaw = gradwire_mulaw:MuLaw\n")
    entry_points._groups.cache_clear()
    try:
        with pytest.raises(SpecError, match=r"law = 'gradwire_mulaw:MuLaw' .* differs"):
            spec_from_dict({"id": "law"})
    finally:
        base._REGISTRY.pop("mulaw", None)
        sys.modules.pop("gradwire_mulaw", None)


def test_an_entry_point_with_another_name_than_the_collective_is_refused(broken: Path) -> None:
    lay_out(broken, "ours", {"gradwire.collectives": {"mine": "gradwire.core.collectives:COLLECTIVES"}})
    with pytest.raises(PlanError, match=r"mine = .* in package ours 0.1 .* must be a gradwire.core.collectives.Collective"):
        collective("mine")
    (broken / "renamed.py").write_text("from gradwire.core.collectives import COLLECTIVES\nRING = COLLECTIVES['ring']\n")
    lay_out(broken, "renamed", {"gradwire.collectives": {"round": "renamed:RING"}})
    entry_points._groups.cache_clear()
    with pytest.raises(PlanError, match=r"round = 'renamed:RING' .* the collective's name is 'ring'"):
        collective("round")


def ask(group: str) -> object:
    """Use the name `odd` of a group of entry points."""
    if group == "compressors":
        return compressor_for(Odd())
    return {"specs": lambda: spec_from_dict({"id": "odd"}), "collectives": lambda: collective("odd")}.get(
        group, lambda: as_schedule("odd")
    )()


class Odd(gw.Spec, frozen=True):
    id = "odd"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("ending:ANY", "SystemExit: 9"),
        ("not a target", 'it does not have the form "module:name"'),
        ("oddity:", 'it does not have the form "module:name"'),
        ("oddity", 'it does not have the form "module:name"'),
        ("oddity:NONE", ""),
    ],
)
@pytest.mark.parametrize("group", ["specs", "compressors", "collectives", "schedules"])
def test_a_target_that_is_no_use_is_named_with_the_reason(broken: Path, group: str, target: str, why: str) -> None:
    (broken / "oddity.py").write_text("NONE = None\n")
    (broken / "ending.py").write_text("raise SystemExit(9)\n")
    lay_out(broken, "odd-one", {f"gradwire.{group}": {"odd": target}})
    reasons = {
        "specs": "None is no subclass of gradwire.Spec",
        "compressors": "None cannot be the compressor of Odd: it must be a subclass of Compressor",
        "collectives": "None is a NoneType: it must be a gradwire.core.collectives.Collective",
        "schedules": "None is not a subclass of gradwire.core.schedules.Schedule with tag='odd'",
    }
    with pytest.raises(gw.GradwireError) as caught:
        ask(group)
    assert f"{why or reasons[group]}. Repair the package, or uninstall it." in str(caught.value)
    assert f"entry point odd = {target!r} of gradwire.{group} in package odd-one 0.1 cannot be used" in str(caught.value)
    sys.modules.pop("oddity", None)


def test_a_name_in_code_that_ends_python_is_an_error(broken: Path) -> None:
    (broken / "ending.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(PlanError, match=r"'ending:Engine' cannot be loaded: SystemExit: 3\. Correct the name, or repair"):
        entry_points.named("ending:Engine")


CLASS = """
import gradwire as gw
from typing import ClassVar

class {name}(gw.Spec, frozen=True):
    id: ClassVar[str] = "{id}"
"""


def test_a_class_of_another_package_does_not_take_a_name(broken: Path) -> None:
    for module, name, id in (("first", "QSGD", "odd.1"), ("second", "Rounds", "odd.2"), ("third", "Rounds", "odd.3")):
        (broken / f"{module}.py").write_text(CLASS.format(name=name, id=id))
        lay_out(broken, module, {"gradwire.specs": {id: f"{module}:{name}"}})
    entry_points._groups.cache_clear()
    try:
        with pytest.raises(SpecError, match=r"'Rounds' is the name of a spec class in second 0.1 \(id 'odd.2'\) and third 0.1"):
            spec_from_text("Rounds()")
        assert spec_from_text("QSGD(bits=2)") == gw.QSGD(bits=2)
    finally:
        for module, id in (("first", "odd.1"), ("second", "odd.2"), ("third", "odd.3")):
            base._REGISTRY.pop(id, None)
            sys.modules.pop(module, None)


NEEDY = """
from gradwire.core.schedules import Schedule

class Needy(Schedule, frozen=True, tag="needy"):
    \"\"\"A schedule with a field that has no default.\"\"\"
    rounds: int
"""


def test_a_schedule_with_a_field_without_default_is_listed(broken: Path) -> None:
    (broken / "needy.py").write_text(NEEDY)
    lay_out(broken, "needy", {"gradwire.schedules": {"needy": "needy:Needy"}})
    entry_points._groups.cache_clear()
    try:
        row = schedule_rows()[-1]
        assert (row["kind"], row["exchange runs"], row["package"]) == ("needy", "-", "needy 0.1")
        with pytest.raises(
            FormatError, match=r"schedule is 'needy', and rounds of Needy has no default\. Write .*\(rounds=\.\.\.\)"
        ):
            as_schedule("needy")
        assert as_schedule({"kind": "needy", "rounds": 3}).rounds == 3  # type: ignore[attr-defined]
    finally:
        schedules._BY_WORD.pop("needy", None)
        sys.modules.pop("needy", None)


def test_a_schedule_that_needs_no_whole_number_of_buckets_is_refused() -> None:
    class Uncountable(Schedule, frozen=True, tag="uncountable"):
        fewest_buckets = "two"  # type: ignore[assignment]

    with pytest.raises(FormatError, match=r"fewest_buckets of Uncountable is 'two', a str: it must be"):
        gw.Policy(default=gw.QSGD(), schedule=Uncountable())


def test_a_compressor_that_cannot_be_loaded_is_named(broken: Path) -> None:
    class Lonely(gw.Spec, frozen=True):
        id = "lonely"  # type: ignore[misc]

    lay_out(broken, "alone", {"gradwire.compressors": {"lonely": "alone:Lonely"}})
    with pytest.raises(SpecError, match=r"lonely = 'alone:Lonely' of gradwire.compressors in package alone 0.1"):
        compressor_for(Lonely())


class Forgetful(BackwardSchedule):
    """A schedule whose author forgot the call."""

    def on_begin(self) -> None:
        pass


class Lacking:
    """A schedule whose author forgot methods."""

    def __init__(self, reducer: object, schedule: object, job: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name in ("traits", "settle", "detach"):
            raise AttributeError(name)
        return print


class Unfinished(Schedule, frozen=True, tag="unfinished"):
    runs: str

    @property
    def engine(self) -> str:
        return f"{__name__}:{self.runs}"


class Short(gw.Spec, frozen=True):
    id = "short"  # type: ignore[misc]

    def payload_bytes(self, runs: Sequence[ElementRun], itemsize: int) -> int:
        return 3


class ShortCompressor(Compressor):
    def encode(self, src: Any, state: Any, segments: Any, context: Any, payload: torch.Tensor) -> None:
        payload[:] = torch.zeros(4, dtype=torch.uint8)

    def decode(self, payload: Any, segments: Any, dtype: Any, add: bool, dst: Any, context: Any) -> None:
        pass


def refused() -> list[str]:
    """What scripts are told in their first step, with what its author has not finished."""
    register_compressor(Short, ShortCompressor)
    told = []
    for plan in (
        gw.Policy(default=gw.QSGD(), schedule=Unfinished("Lacking")),
        gw.Policy(default=gw.QSGD(), schedule=Unfinished("Forgetful")),
        gw.Policy(default=gw.QSGD(), schedule=Unfinished("RELAY")),
        gw.Uniform(Short()),
    ):
        with pytest.raises(gw.GradwireError) as caught:
            model = Given([20])
            gw.parallelize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plan)
            model(model.random_gradients(0, 0)).backward()
        told.append(str(caught.value))
    return told


def test_what_its_author_has_not_finished_is_named() -> None:
    with World(1) as world:
        lacking, forgetful, relay, short = world.run(refused)[0]
    assert "Lacking, which runs the schedule 'unfinished', has no traits, settle, detach" in lacking
    assert "the engine of the schedule 'unfinished' is {" in relay and "it must be the class that runs its steps" in relay
    assert "on_begin of Forgetful did not call reducer.begin(exchange)" in forgetful
    assert "Does `encode` write more than `payload_bytes` of the spec declares?" in short


RELAY = {
    "name": "passing", "about": "passes", "tasks": ("comp", "pass:inter", "decomp"), "phases": ("whole",),
    "runs": "nowhere:Pass", "steps": "nowhere:steps",
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"name": "ring"}, "'ring' has a name that is empty or taken"),
        ({"tasks": ("comp", "pass", "decomp")}, "task 'pass': it must be comp, decomp, or word:inter"),
        ({"tasks": ("comp", "allgather:intra", "decomp")}, "at least one needs a word that no other collective has"),
        ({"phases": ("reduce", "gather")}, r"phases \['reduce', 'gather'\] for link tasks \['pass:inter'\]"),
        ({"phases": ("gather",)}, "gather phases come last, after at least one other phase"),
        ({"phases": ("all",)}, "reduce, gather or whole"),
        ({"steps": ""}, "the costs of new words are unknown"),
    ],
)
def test_a_collective_that_is_not_whole_is_refused(changed: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        register_collective(Collective(**{**RELAY, **changed}))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"must be a gradwire.core.collectives.Collective"):
        register_collective("pass")  # type: ignore[arg-type]


def test_words_that_nobody_has_are_refused_by_plans_and_policies() -> None:
    for option in (("pass:inter",), ("comp:cpu", "pass:inter", "decomp:cpu")):
        with pytest.raises(FormatError, match=r"option\[\d\] is 'pass:inter': .* one of comp, decomp, allreduce"):
            gw.Bucket(tensors=("w",), spec=gw.Identity(), option=option)
    absent = "No installed package has an entry point"
    with pytest.raises(FormatError, match=rf"scheme is 'rings'.*did you mean 'ring'.*{absent} 'rings' in gradwire.coll"):
        gw.Policy(default=gw.QSGD(), scheme="rings")
    for schedule in ("halfway", {"kind": "halfway"}):
        with pytest.raises(FormatError, match=rf"{absent} 'halfway' in gradwire.schedules"):
            gw.Policy(default=gw.QSGD(), schedule=schedule)  # type: ignore[arg-type]
    with pytest.raises(FormatError, match=r"schedule is 3: .*\}\.$"):
        gw.Policy(default=gw.QSGD(), schedule=3)  # type: ignore[arg-type]


@pytest.fixture
def passing() -> Iterator[None]:
    """A collective of two phases that this process has registered; its code is missing."""
    tasks, phases = ("comp", "pass:inter", "decomp", "comp", "allgather:inter", "decomp"), ("reduce", "gather")
    register_collective(Collective(**{**RELAY, "tasks": tasks, "phases": phases}))  # type: ignore[arg-type]
    yield
    del collectives._REGISTRY["passing"], collectives._BY_WORD["pass"]
    collective_of.cache_clear()


TWO_PHASES = ("comp:cpu", "pass:inter", "decomp:cpu", "comp:cpu", "allgather:inter", "decomp:cpu")


@pytest.mark.usefixtures("passing")
def test_the_phases_of_the_record_decide_what_runs_in_the_next_forward() -> None:
    tensors = [TensorInfo(name, (300, 300), "float32") for name in "abc"] + [TensorInfo("last", (9, 1), "float32")]
    whole = [("last", gw.Identity())]
    policy = gw.Policy(default=gw.QSGD(), rules=whole, scheme="passing", schedule="pipelined", bucket_bytes=300_000)
    plan = policy.plan(tensors)
    assert [bucket.option for bucket in plan.buckets] == [*[TWO_PHASES] * 3, ("allreduce:inter",)]
    assert plan.launch == (
        *((index, "pass") for index in range(3)), (3, "allreduce"), *((index, "allgather") for index in (2, 1, 0)),
    )  # fmt: skip
    assert plan.gate == 4
    corrected = correction_plan(plan, gw.Delayed(), tensors)
    assert {bucket.option for bucket in corrected.buckets} == {("allreduce:inter",)}, "its words carry no gradients"


@pytest.mark.usefixtures("passing")
def test_a_spec_may_name_the_collective_that_carries_it() -> None:
    class Passed(gw.Spec, frozen=True):
        id = "passed"  # type: ignore[misc]
        schemes = ("passing",)  # type: ignore[misc]

    tensors = [TensorInfo("a", (30, 30), "float32")]
    assert gw.Uniform(Passed()).plan(tensors).buckets[0].option == TWO_PHASES
    with pytest.raises(PlanError, match=r"scheme is 'allgather', .* Use scheme='passing'"):
        gw.Uniform(Passed(), scheme="allgather").plan(tensors)
    Passed.schemes = ("elsewhere",)  # type: ignore[misc]
    with pytest.raises(PlanError, match="travels by 'elsewhere', but no installed package has a collective"):
        gw.Uniform(Passed()).plan(tensors)


@pytest.mark.usefixtures("passing")
def test_a_plan_for_a_collective_that_cannot_run_says_why() -> None:
    bucket = gw.Bucket(tensors=("w",), spec=gw.QSGD(), option=TWO_PHASES)
    with pytest.raises(PlanError, match="'nowhere:Pass' cannot be loaded: ModuleNotFoundError"):
        scheme_of(0, bucket, "cpu")
    with pytest.raises(PlanError, match=r"its tensors on the gpu run .*'comp:gpu', 'pass:inter', 'decomp:gpu'"):
        scheme_of(0, bucket, "gpu")
    with pytest.raises(PlanError, match="'nowhere:steps' cannot be loaded"):
        steps_of(bucket.option, 2, 1)
    with pytest.raises(FormatError, match=r"the collective of \w+ has other tasks too"):
        gw.Bucket(tensors=("w",), spec=gw.QSGD(), option=("comp:cpu", "pass:inter", "pass:inter", "decomp:cpu"))


# ---- gradwire's own table


@pytest.mark.parametrize("name", COLLECTIVES)
def test_gradwires_own_collectives_are_whole(name: str) -> None:
    each = COLLECTIVES[name]
    assert each.name == name and all(is_link_word(task.partition(":")[0]) for task in each.link_tasks)
    assert len(each.phases) == len(each.link_tasks)
    assert each.divisible == (set(each.phases) == {"reduce", "gather"})
    assert callable(entry_points.named(each.runs)) and (not each.steps or callable(entry_points.named(each.steps)))
    for device in ("cpu", "gpu"):
        assert collective_of(each.on(device)) is each
        bucket = gw.Bucket(tensors=("w",), spec=gw.Cast(), option=each.on(device))
        assert bucket.gathers == each.phases.count("gather")
    assert beside_tree(each.on("cpu")) == ("" if name in ("allgather", "alltoall") else name)
    assert all(each.carries(spec()) for spec in (gw.QSGD, gw.Cast)) == (name != "allreduce")
    assert not registered_specs().keys() & {"mulaw"}
