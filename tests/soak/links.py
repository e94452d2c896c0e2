"""Faults of links: ranks in the network namespaces of an emulated cluster, whose links go down."""

import os
import time
from dataclasses import replace
from typing import Any

from worlds import Place

from gradwire.testbed import EmulatedCluster, namespaces, network
from soak.settings import HOOK
from soak.stage import ALLOWANCE_S, ENDLESS, TIMEOUT_S, Stage, ended, expect
from soak.training import End
from soak.trials import KINDS, LEFT_OUT


def link_lost(stage: Stage) -> None:
    """A link is down for longer than the timeout: all ranks are told in time, and a restart loses nothing."""
    _without_memory(stage)
    stage.decide()
    job = replace(stage.job, checkpoint_every=stage.chance.randint(2, 6))
    cluster = stage.cluster()
    node = stage.chance.randrange(cluster.nodes)
    try:
        with stage.started(job, places_on(cluster, stage.size)) as world:
            time.sleep(stage.chance.uniform(0, 0.05))
            cluster.set_link(node, up=False)
            stage.notes.fired = f"the link of node {node} went down"
            stage.told_in_time(world, None, time.monotonic())
    finally:
        cluster.set_link(node, up=True)
    stage.resumes(job)


def link_flaps(stage: Stage) -> None:
    """A link is down for a moment and comes back: nothing is lost."""
    _without_memory(stage)
    stage.decide()
    job = replace(stage.job, steps=stage.begin + 40, checkpoint_every=30)
    cluster = stage.cluster()
    with stage.started(job, places_on(cluster, stage.size), timeout_s=6 * TIMEOUT_S) as world:
        node = stage.chance.randrange(cluster.nodes)
        cluster.set_link(node, up=False)
        stage.notes.fired = f"the link of node {node} went down"
        time.sleep(stage.chance.uniform(0.05, 0.5))
        cluster.set_link(node, up=True)
        ends = [ended(outcome) for outcome in world.collect(90)]
    stage.alike(ends)
    stage.resumes(job, before=job.steps, like=ends)
    if not stage.notes.not_comparable:
        stage.same(ends, stage.kept(replace(job, folder=stage.new_folder(), checkpoint_every=0)))


def outage_shorter(stage: Stage) -> None:
    """The network is away for less than `silence_s`: nothing is lost."""
    ends = _outage(stage, stage.chance.uniform(1.0, SILENCE_S - 0.5))
    stage.alike([replace(end, longest_s=0.0) for end in ends])  # the step of the outage is long


def outage_longer(stage: Stage) -> None:
    """The network is away for longer than `silence_s`: all ranks are told long before the timeout."""
    ends = _outage(stage, SILENCE_S + 6.0)
    expect(all(end.kind == "CommunicationError" for end in ends), f"{ends}")


def _outage(stage: Stage, seconds: float) -> list[End]:
    _without_memory(stage)
    stage.decide()
    steps = stage.begin + 300 if seconds < SILENCE_S else ENDLESS
    job = replace(stage.job, steps=steps, silence_s=SILENCE_S)
    cluster = stage.cluster()
    node = stage.chance.randrange(cluster.nodes)
    try:
        with stage.started(job, places_on(cluster, stage.size), timeout_s=60.0) as world:
            cluster.set_link(node, up=False)
            at = time.monotonic()
            stage.notes.fired = f"the link of node {node} was down for {seconds:.1f} s"
            if seconds < SILENCE_S:
                time.sleep(seconds)
                cluster.set_link(node, up=True)
                return [ended(outcome) for outcome in world.collect(90)]
            # torch waits 5 s for each worker of a DataLoader when the iterator is collected, after the error
            ends = [ended(outcome) for outcome in world.collect(SILENCE_S + 2 * ALLOWANCE_S + 20)]
            stage.notes.latency_s = latest = max(end.at for end in ends) - at
            expect(latest <= SILENCE_S + 2 * ALLOWANCE_S + 5, f"the last error came after {latest:.1f} s")
            return ends
    finally:
        cluster.set_link(node, up=True)


SILENCE_S = 8.0
OF_LINKS = {"link lost": link_lost, "link flaps": link_flaps, "outage shorter": outage_shorter, "outage longer": outage_longer}
KINDS |= OF_LINKS
LEFT_OUT |= {(kind, HOOK): "the hook has no `silence_s`" for kind in ("outage shorter", "outage longer")}


def _without_memory(stage: Stage) -> None:
    """Ranks in different namespaces share none, so those that go on outside must not either: they are compared bit for bit."""
    stage.job = replace(stage.job, shared_memory=False)


def places_on(cluster: EmulatedCluster, size: int) -> list[Place]:
    """Where ranks live on the nodes of a cluster."""
    nodes = [rank * cluster.nodes // size for rank in range(size)]
    return [Place(str(cluster.namespace(node)), network.INTERFACE, network.address_of(node)) for node in nodes]


def possible() -> bool:
    """Whether clusters can be emulated here."""
    return os.name == "posix" and namespaces.permission_problem() is None and not namespaces.needs_user_namespace()


def namespaces_left() -> list[Any]:
    """Of this program's clusters."""
    return list(namespaces.existing(f"gradwire-{namespaces.this_owner()}-"))
