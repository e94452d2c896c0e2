"""The C++ timelines and searches beside their Python twins: equal to the femtosecond, on everything they may be given."""

import random
import subprocess
import sys

import pytest
from test_planner_joint import job_of
from test_planner_select import SPEC, case, options_of, tables_of

from benchmarks.growth_simulated import bert_large
from gradwire.core import Cluster, CodecCosts, Costs, Link
from gradwire.costs import DECODE_CALLS
from gradwire.costs.prices import bytes_of
from gradwire.planner import select
from gradwire.planner.bytecomp import published
from gradwire.planner.drafts import PlanningJob
from gradwire.planner.joint import joint
from gradwire.planner.offload import offload, on_cpu
from gradwire.planner.select import select_options
from gradwire.sim import native
from gradwire.sim.events import COMPUTE, INTER, INTRA, POOL
from gradwire.sim.native import ReplayProgram
from gradwire.sim.replay import Replayer
from gradwire.sim.rules import Rules

needed = pytest.mark.skipif(native._library() is None, reason="csrc/planner.cpp was not built (no g++)")


def twins(line):
    """The same line in C++ and in Python."""
    gaps = [after - before for before, after in zip(line.after, line.after[1:], strict=False)]
    here = Replayer(line.after[0], gaps, line.workers)
    assert here.native is not None
    return here, Replayer(line.after[0], gaps, line.workers, native=False)


def random_program(rng):
    """Any order of tasks on all four resources, some of no length, with up to four exchanges."""
    links = [rng.choice([INTRA, INTER]) for _ in range(rng.randint(1, 4))]
    tasks = []
    for phase, link in enumerate(links):
        for _ in range(rng.randint(0, 2)):
            tasks.append((rng.choice([COMPUTE, POOL]), rng.choice([0, 3, rng.randint(1, 40)]), 0, phase))
        tasks.append((link, rng.randint(0, 60), 0, phase))
    for _ in range(rng.randint(0, 2)):
        tasks.append((rng.choice([COMPUTE, POOL]), rng.randint(0, 30), rng.choice([0, 1, 2]), len(links) - 1))
    busy = [sum(task[1] for task in tasks if task[0] == resource) for resource in range(4)]
    return ReplayProgram(tuple(tasks), tuple(links), tuple(busy), sum(task[0] < INTRA for task in tasks))


@needed
@pytest.mark.parametrize("seed", range(200))
def test_steps_are_the_same_to_the_femtosecond(seed):
    rng = random.Random(seed)
    tensors = rng.randint(1, 40)
    here, there = twins(Replayer(rng.randint(0, 50), [rng.randint(0, 50) for _ in range(tensors)], rng.randint(1, 3)))
    releases = sorted({*rng.sample(range(1, tensors + 1), rng.randint(1, tensors)), tensors})
    for skew in (0, 1, 3):
        programs = [random_program(rng) for _ in releases]
        step = there.run(programs, releases, skew).step
        assert here.step(programs, releases, skew) == step
        assert here.step(programs, releases, skew, step) == step
        assert here.step(programs, releases, skew, step - 1) is None


@needed
@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("looks", [None, 2])
def test_selections_are_the_same(seed, looks):
    rules = Rules(decode_calls=DECODE_CALLS[seed // 2 % 3], codec_on=["compute", "own thread"][seed % 3 == 0])
    rng, simulator, pricer, line = case(seed, rules, most=12)
    options = sorted(options_of(simulator, devices=["gpu"]), key=lambda option: option.compresses)
    kept = sorted(rng.sample(range(len(options)), min(25, len(options))))
    tables = tables_of(simulator, pricer, [options[0], *(options[i] for i in kept if i)])
    plain = sum(not program.codecs for program in tables[0])
    tables[1:] = [rng.choice([table, table[:plain]]) for table in tables[1:]]  # some must not be compressed
    sizes = [tensor.nbytes for tensor in simulator.profile.tensors]
    here, there = twins(line)
    for skew, prune in ((1, True), (0, True), (1, False)):
        found, expected = (select_options(each, tables, sizes, skew, prune, looks) for each in (here, there))
        assert found[2:] == expected[2:] and found.chosen == expected.chosen
        assert found.replayed[1:] == expected.replayed[1:] and found.replayed.step == expected.replayed.step


@needed
@pytest.mark.parametrize("seed", [*range(20), 729, 893, 2242])  # the last three found a mistake each
def test_selections_are_the_same_where_links_are_far_behind(seed):
    rng = random.Random(seed)
    tensors = rng.randint(8, 16)
    here, there = twins(Replayer(3, [rng.randint(0, 6) for _ in range(tensors)], rng.randint(1, 2)))
    plain = [ReplayProgram(((link, 40, 0, 0),), (link,), (0, 0, *busy), 0) for link, busy in ((INTER, (0, 40)), (INTRA, (40, 0)))]
    table = [*plain, *(random_program(rng) for _ in range(10))]
    sizes = [rng.randint(0, 3) for _ in range(tensors)]
    for skew in (0, 1, 2):
        found, expected = (select_options(each, [table] * tensors, sizes, skew) for each in (here, there))
        assert found[2:] == expected[2:] and found.chosen == expected.chosen
        assert found.replayed[1:] == expected.replayed[1:] and found.replayed.step == expected.replayed.step


@needed
@pytest.mark.parametrize("seed", range(20))
def test_offloads_are_the_same(seed):
    rng, simulator, pricer, line = case(seed, most=9)
    options = [option for option in options_of(simulator, devices=["gpu"]) if option.compresses]
    rows = simulator.profile.tensors
    sizes, chosen = [bytes_of([t], SPEC) for t in rows], [rng.choice(options).tasks for _ in rows]
    programs = [pricer.program(option, SPEC, size) for option, size in zip(chosen, sizes, strict=True)]
    moved = {i: pricer.program(on_cpu(o), SPEC, sizes[i]) for i, o in enumerate(chosen) if rng.random() < 0.8}
    here, there = twins(line)
    for most in (1, 100_000):
        found, expected = (offload(each, programs, moved, sizes, most=most) for each in (here, there))
        assert (found.tensors, found.exhaustive, found.simulated) == expected[:1] + expected[2:]
        assert found.replayed[1:] == expected.replayed[1:] and found.replayed.step == expected.replayed.step


@needed
@pytest.mark.parametrize("seed", range(3))
def test_plans_are_the_same(seed):
    here, there = job_of(seed, 24, gbps=1.0), job_of(seed, 24, gbps=1.0)
    assert here.line.native is not None
    there.line.native = None
    assert joint(here) == joint(there)
    assert published(here, looks=2) == published(there, looks=2)


@needed
def test_steps_that_64_bits_cannot_hold_are_left_to_python():
    long = 2**61
    program = ReplayProgram(((INTER, long, 0, 0),), (INTER,), (0, 0, 0, long), 0)
    line = Replayer(0, [1, 1, 1, 1])
    assert line.native is not None
    assert line.step([program] * 4, [1, 2, 3, 4], 1) == 1 + 4 * long
    assert select_options(line, [[program]] * 4, [4] * 4).replayed.step == 1 + 4 * long
    assert Replayer(0, [2**63]).native is None


def test_without_the_library_python_does_it(monkeypatch):
    monkeypatch.setattr(native, "_library", lambda: None)
    line = Replayer(0, [10])
    program = ReplayProgram(((INTER, 5, 0, 0),), (INTER,), (0, 0, 0, 5), 0)
    assert line.native is None
    assert line.step([program], [1], 1) == 15


@needed
def test_a_search_without_enough_memory_is_an_error():
    """In a process of its own, which may have 64 MB more: the states of 3,000 tensors that wait for decodes take 144 MB."""
    code = (
        "import resource\n"
        "from gradwire.errors import PlanError\n"
        "from gradwire.planner.offload import offload\n"
        "from gradwire.planner.select import select_options\n"
        "from gradwire.sim.native import ReplayProgram\n"
        "from gradwire.sim.replay import Replayer\n"
        "count, program = 3000, ReplayProgram(((3, 100, 0, 0), (0, 1, 1, 0)), (3,), (1, 0, 0, 100), 1)\n"
        "line = Replayer(0, [1] * count)\n"
        "taken = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (taken + 2**26, taken + 2**26))\n"
        "for search in (lambda: select_options(line, [[program]] * count, [4] * count),\n"
        "               lambda: offload(line, [program] * count, {}, [0] * count)):\n"
        "    try:\n"
        "        search()\n"
        "    except PlanError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ByteComp's search among 3000 tensors needs more memory than this process may have") == 2


@needed
@pytest.mark.parametrize("looks", [None, 2])
@pytest.mark.parametrize("seed", range(10))
def test_options_without_a_chance_may_take_longer_than_64_bits_hold(seed, looks, monkeypatch):
    rng = random.Random(seed)
    tensors = rng.randint(5, 12)
    here, there = twins(Replayer(3, [rng.randint(0, 6) for _ in range(tensors)], rng.randint(1, 2)))
    plain, *hopeless = [
        ReplayProgram(((INTER, length, 0, 0),), (INTER,), (0, 0, 0, length), codecs)
        for length, codecs in ((40, 0), (10**18, 0), (2**70, 0), (10**18, 2), (2**70, 1))
    ]
    table = [hopeless[0], plain, hopeless[1], *(random_program(rng) for _ in range(8)), *hopeless[2:]]
    sizes = [rng.randint(0, 3) for _ in range(tensors)]
    expected = select_options(there, [table] * tensors, sizes, looks=looks)
    monkeypatch.setattr(select, "_Search", lambda *arguments: pytest.fail("left to Python"))
    found = select_options(here, [table] * tensors, sizes, looks=looks)
    assert found == expected


@needed
def test_a_slow_link_between_many_nodes_does_not_leave_the_selection_to_python(monkeypatch):
    """64 nodes with 100 Mb/s: BERT-large through one root takes 13,500 s."""
    cluster = Cluster(nodes=64, ranks_per_node=1, intra=Link(5.0, 400.0), inter=Link(30.0, 0.1))
    costs = Costs(codecs=[CodecCosts(spec=SPEC, device="gpu", encode=[(1024, 15.0), (2**26, 700.0)], decode=[(1024, 15.0)])])
    job = PlanningJob(bert_large(), cluster, costs, [SPEC])
    monkeypatch.setattr(select, "_Search", lambda *arguments: pytest.fail("left to Python"))
    assert any(part.choice.encodes for part in published(job).draft.parts)
