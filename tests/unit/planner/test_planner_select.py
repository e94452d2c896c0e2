"""Selection and offload: the replayed timeline, ByteComp's two algorithms, what pruning may not change."""

import random
from itertools import product

import pytest

from gradwire.core import (
    QSGD,
    Bucket,
    Cluster,
    CodecCosts,
    Costs,
    Identity,
    Link,
    Plan,
    Profile,
    TensorProfile,
    fingerprint,
)
from gradwire.costs import DECODE_CALLS
from gradwire.costs.prices import bytes_of
from gradwire.plan.options import select
from gradwire.planner.offload import offload, on_cpu
from gradwire.planner.programs import Pricer
from gradwire.planner.select import by_own_times, select_options
from gradwire.sim.events import COMPUTE, INTER
from gradwire.sim.native import ReplayProgram
from gradwire.sim.replay import Replayer, launch_key
from gradwire.sim.rules import Rules
from gradwire.sim.simulator import FS_PER_US, Simulator

SPEC = QSGD()


def case(seed, rules=None, most=9):
    """A random profile, its simulator, pricer and replayer."""
    rng = random.Random(seed)
    tensors = [
        TensorProfile(
            name=f"t{i}",
            shape=(rng.choice([1000, 100_000, 1_000_000]),),
            dtype="float32",
            backward_us=rng.choice([0.0, 10.0, 1000.0]) * rng.random(),
            forward_us=5.0,
        )
        for i in range(rng.randint(1, most))
    ]
    profile = Profile(model="made up", batch=1, device="V100", tensors=tensors)
    inter = Link(10.0, rng.choice([1.0, 10.0, 100.0]))
    cluster = Cluster(nodes=rng.choice([1, 2, 4]), ranks_per_node=rng.choice([2, 4]), intra=Link(2.0, 100.0), inter=inter)
    codecs = [
        CodecCosts(
            spec=SPEC,
            device=device,
            encode=[(4096, 12.0 * slow), (2**22, 40.0 * slow)],
            decode=[(4096, 9.0 * slow), (2**22, 25.0 * slow)],
        )
        for device, slow in (("gpu", 1), ("cpu", 3))
    ]
    simulator = Simulator(profile, cluster, Costs(codecs=codecs), rules or Rules())
    gaps = [round(tensor.backward_us * FS_PER_US) for tensor in tensors]
    forward = sum(round(5.0 * FS_PER_US) for _ in tensors)
    return rng, simulator, Pricer(simulator), Replayer(forward, gaps, simulator.rules.cpu_workers)


def options_of(simulator, **constraints):
    cluster = simulator.prices.cluster
    return select(nodes=cluster.nodes, ranks_per_node=cluster.ranks_per_node, **constraints)


def tables_of(simulator, pricer, options):
    return [[pricer.program(o.tasks, SPEC, bytes_of([t], SPEC)) for o in options] for t in simulator.profile.tensors]


@pytest.mark.parametrize("seed", range(60))
def test_a_replayed_step_is_the_simulated_one(seed):
    rng = random.Random(seed)
    rules = Rules(
        decode=rng.choice(["at once", "after backward", "with encode"]),
        decode_calls=rng.choice(DECODE_CALLS),
        codec_on=rng.choice(["compute", "own thread"]),
        cpu_workers=rng.choice([1, 2]),
        routing=rng.choice(["ring", "direct"]),
    )
    rng, simulator, pricer, line = case(seed, rules)
    tensors, options, skew = simulator.profile.tensors, options_of(simulator), rng.choice([0, 1, 2])
    ends = sorted({*rng.sample(range(1, len(tensors) + 1), rng.randint(1, len(tensors))), len(tensors)})
    groups = [tensors[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    chosen = [rng.choice(options) for _ in groups]
    buckets = [
        Bucket(tensors=[t.name for t in group], spec=SPEC if o.compresses else Identity(), option=o.tasks)
        for group, o in zip(groups, chosen, strict=True)
    ]
    keys = [(launch_key(i, p, skew), i, word) for i, b in enumerate(buckets) for p, word in enumerate(b.link_tasks)]
    prints = fingerprint(simulator.profile.tensor_infos("gpu"))
    plan = Plan(fingerprint=prints, buckets=buckets, launch=[(i, word) for _, i, word in sorted(keys)])
    programs = [pricer.program(b.option, b.spec, bytes_of(g, b.spec)) for g, b in zip(groups, buckets, strict=True)]
    replayed = line.run(programs, ends, skew)
    assert replayed.step / FS_PER_US == pytest.approx(simulator.step_us(plan), rel=1e-9)

    assert line.run(programs, ends, skew, limit=replayed.step) == replayed
    assert line.run(programs, ends, skew, limit=replayed.step - 1) is None


def made_up(link, codec=0, index=0):
    """A program with an encode and an exchange."""
    tasks = ((COMPUTE, codec, 0, 0), (INTER, link, 0, 0)) if codec else ((INTER, link, 0, 0),)
    return ReplayProgram(tasks, (INTER,), (codec, 0, 0, link), 1 if codec else 0)


def test_bubbles():
    line = Replayer(0, [10, 100, 1])
    replayed = line.run([made_up(40), made_up(30), made_up(5)], [1, 2, 3], 1)
    assert (replayed.begins, replayed.ends, replayed.step) == ([10, 110, 140], [50, 140, 145], 145)
    assert replayed.last_bubble() == 50


def test_tensors_before_a_bubble_are_left_alone():
    """The first exchange ends at 50, the second gradient is ready at 110."""
    table = [made_up(40), made_up(10, codec=1)]
    found = select_options(Replayer(0, [10, 100, 1]), [table] * 3, [4, 4, 4])
    assert (found.chosen, found.ruled_out) == ((0, 1, 1), 1)


def test_of_equal_tensors_the_latest_is_decided_first():
    """Either may be compressed, and then nothing is left to gain by the other: the last one is."""
    line = Replayer(0, [10, 10])
    table = [made_up(20), made_up(18, codec=1)]
    found = select_options(line, [table, table], [4, 4])
    assert line.run([table[0], table[0]], [1, 2], 1).step == 50
    assert found.chosen[1] == 1


def test_on_a_tie_the_current_option_stays_then_the_one_with_fewer_codec_tasks():
    line = Replayer(0, [10])
    assert select_options(line, [[made_up(20), made_up(19, codec=1)]], [4]).chosen == (0,)
    two = made_up(10, codec=2)._replace(codecs=2)
    assert select_options(line, [[made_up(20), two, made_up(10, codec=2)]], [4]).chosen == (2,)


@pytest.mark.parametrize("seed", range(12))
def test_pruning_loses_nothing(seed):
    _, simulator, pricer, line = case(seed, Rules(decode_calls="one"), most=6)
    tables = tables_of(simulator, pricer, options_of(simulator, devices=["gpu"]))
    sizes = [tensor.nbytes for tensor in simulator.profile.tensors]
    pruned = select_options(line, tables, sizes)
    full = select_options(line, tables, sizes, prune=False)
    assert (pruned.chosen, pruned.replayed.step) == (full.chosen, full.replayed.step)
    assert pruned.simulated <= full.simulated
    plain = [i for i, program in enumerate(tables[0]) if not program.codecs]
    assert full.replayed.step <= min(line.run([t[i] for t in tables], range(1, len(tables) + 1), 1).step for i in plain)


def test_a_search_that_is_cut_short_looks_at_fewer():
    _, simulator, pricer, line = case(3, most=6)
    tables = tables_of(simulator, pricer, options_of(simulator, devices=["gpu"]))
    sizes = [tensor.nbytes for tensor in simulator.profile.tensors]
    starts = sum(not program.codecs for program in tables[0])
    assert select_options(line, tables, sizes, looks=1).simulated <= starts + 2 * len(tables)


def test_myopic_search_takes_the_shortest_own_time():
    assert by_own_times([[made_up(40), made_up(10, codec=1)], [made_up(5), made_up(5, codec=1)]]) == (1, 0)


def offloading(seed):
    _, simulator, pricer, line = case(seed, most=7)
    options = [o for o in options_of(simulator, devices=["gpu"]) if o.compresses]
    option = options[seed % len(options)].tasks
    sizes = [bytes_of([t], SPEC) for t in simulator.profile.tensors]
    programs = [pricer.program(option, SPEC, size) for size in sizes]
    moved = {i: pricer.program(on_cpu(option), SPEC, size) for i, size in enumerate(sizes)}
    return line, programs, moved, sizes


@pytest.mark.parametrize("seed", range(12))
def test_offload_tries_all_counts(seed):
    line, programs, moved, groups = offloading(seed)
    found = offload(line, programs, moved, groups)
    assert found.exhaustive
    best = min(
        line.run([moved[i] if on else p for i, (p, on) in enumerate(zip(programs, where, strict=True))],
                 range(1, len(programs) + 1), 1).step
        for where in product([False, True], repeat=len(programs))
        if all(not on or where[i] for j, on in enumerate(where) for i in range(j) if groups[i] == groups[j])
    )  # fmt: skip
    assert found.replayed.step == best
    for tensor in found.tensors:
        assert all(i in found.tensors for i in range(tensor) if groups[i] == groups[tensor]), "the earliest go first"


@pytest.mark.parametrize("seed", range(6))
def test_too_many_counts_are_searched_by_coordinates(seed):
    line, programs, moved, groups = offloading(seed)
    found = offload(line, programs, moved, groups, most=1)
    start = line.run(programs, range(1, len(programs) + 1), 1)
    assert not found.exhaustive
    assert found.replayed.step <= start.step
