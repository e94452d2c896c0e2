"""Laws of simulated steps: of every plan, of steps that overlap, and against the same rules written the slow way."""

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from slow_step import slow_step
from small_steps import BYTE_A_US, GATHERED, SPLIT, TWO_PHASE, cluster, codec, plan_of, profile

from gradwire.core import Cast, Cluster, CodecCosts, Costs, Delayed, Link, Pipelined
from gradwire.core.launch import launch_tasks
from gradwire.plan.options import tree
from gradwire.sim.rules import Rules
from gradwire.sim.simulator import Simulator
from gradwire.sim.timeline import simulate


@st.composite
def cases(draw):
    """A model, a cluster, a plan with options of the whole tree, codec times, and rules."""
    number = st.integers(0, 40)
    count = draw(st.integers(1, 8))
    model = profile(*[(4 * draw(st.integers(0, 30)), draw(number), draw(number)) for _ in range(count)])
    cuts = sorted(draw(st.sets(st.integers(1, count - 1)))) if count > 1 else []
    groups = [list(range(a, b)) for a, b in pairwise([0, *cuts, count])]
    options = [draw(st.sampled_from(tree())).tasks for _ in groups]
    plan = plan_of(model, options, Cast(), groups=groups, chunk_bytes=draw(st.sampled_from([0, 0, 24])))
    left = [list(bucket.link_tasks) for bucket in plan.buckets]
    launch = []
    while any(left):
        index = draw(st.sampled_from([i for i, tasks in enumerate(left) if tasks]))
        launch.append((index, left[index].pop(0)))
    plan = plan_of(model, options, Cast(), launch, groups, chunk_bytes=plan.buckets[0].chunk_bytes)
    shape = cluster(draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    lanes = draw(st.integers(0, 2))
    rules = Rules(
        codec_on=draw(st.sampled_from(["compute", "own thread"])),
        decode=draw(st.sampled_from(["at once", "with encode", "none", *["after backward"] * (not lanes)])),
        lanes=lanes,
        cpu_workers=draw(st.integers(1, 2)),
    )
    return model, shape, plan, codec(float(draw(number)), float(draw(number))), rules


class TestLaws:
    @settings(max_examples=80, deadline=None)
    @given(cases())
    def test_of_every_timeline(self, case):
        model, shape, plan, costs, rules = case
        timeline = simulate(plan, model, shape, costs, rules)
        simulator = Simulator(model, shape, costs, rules)
        assert simulator.step_us(plan) == timeline.step_us
        assert simulate(plan, model, shape, costs, rules).to_json() == timeline.to_json()
        self.check_resources(timeline, rules)
        self.check_order(timeline, plan, simulator, rules)
        parts = timeline.forward_us + timeline.backward_us + timeline.exposed_comm_us + timeline.exposed_codec_us
        assert parts + timeline.idle_us == pytest.approx(timeline.step_us)
        assert timeline.idle_us == 0  # somebody is always at work
        assert timeline.cupcake_comm_us <= timeline.exposed_comm_us

    def check_resources(self, timeline, rules):
        """None does two things at once, and none is busy for longer than the step."""
        for resource in timeline.resources:
            workers = rules.cpu_workers if resource.name == "cpu pool" else 1
            changes = []
            for event in timeline.events:
                if event.resource == resource.name and event.start_us < event.end_us:
                    changes += [(event.start_us, 1), (event.end_us, -1)]
            at_work = 0
            for _, change in sorted(changes):
                at_work += change
                assert 0 <= at_work <= workers
            assert resource.busy_us <= workers * timeline.step_us + 1e-6

    def check_order(self, timeline, plan, simulator, rules):
        """Every task once, those of a piece in the option's order after its gradients, links in launch order."""
        computed = [(e.what, e.tensor) for e in timeline.events if e.resource == "compute" and e.bucket < 0]
        names = [tensor.name for tensor in simulator.profile.tensors]
        assert computed == [("forward", n) for n in reversed(names)] + [("backward", n) for n in names]
        ready = {e.tensor: e.end_us for e in timeline.events if e.what == "backward"}
        pieces = [simulator.prices.of(bucket).pieces for bucket in plan.buckets]
        for index, bucket in enumerate(plan.buckets):
            for chunk in range(pieces[index]):
                events = [e for e in timeline.events if (e.bucket, e.chunk) == (index, chunk)]
                events.sort(key=lambda e: e.index)
                assert [e.what for e in events] == [task.partition(":")[0] for task in bucket.option]
                assert max(ready[name] for name in bucket.tensors) <= events[0].start_us
                assert all(before.end_us <= after.start_us for before, after in pairwise(events))
        if not rules.lanes:
            for link in ("intra link", "inter link"):
                self.check_launch([e for e in timeline.events if e.resource == link], plan, pieces)

    def check_launch(self, events, plan, pieces):
        order = launch_tasks(plan.launch, pieces, skew=True)
        starts = {(e.bucket, e.chunk, self.phase(plan, e)): e.start_us for e in events}
        in_order = [starts[piece] for piece in order if piece in starts]
        assert len(in_order) == len(events)
        assert in_order == sorted(in_order)

    @staticmethod
    def phase(plan, event):
        """Which link task of its bucket an event is."""
        before = plan.buckets[event.bucket].option[: event.index]
        return sum(not task.startswith(("comp", "decomp")) for task in before)

    @settings(max_examples=200, deadline=None)
    @given(cases())
    def test_the_slow_loop_agrees(self, case):
        """The same rules, tensor by tensor and microsecond by microsecond, written without looking ahead."""
        model, shape, plan, costs, rules = case
        simulator = Simulator(model, shape, costs, rules)
        work = simulator.outcome(plan, record=False).layouts[0].work
        assert simulator.step_us(plan) == pytest.approx(slow_step(work, rules) / 1e9)


@st.composite
def overlapping(draw):
    """A model, a cluster and a pipelined or delayed plan: reduces as gradients come, gathers in forward order."""
    number = st.integers(1, 40)
    count = draw(st.integers(1, 6))
    model = profile(*[(4 * draw(st.integers(1, 30)), draw(number), draw(number)) for _ in range(count)])
    options = [draw(st.sampled_from([SPLIT, TWO_PHASE])) for _ in range(count)]
    reduces = [(i, "alltoall" if option == TWO_PHASE else "reducescatter") for i, option in enumerate(options)]
    launch = reduces + [(i, "allgather") for i in reversed(range(count))]
    schedule = draw(st.sampled_from([Pipelined(), Delayed(k=None), Delayed(k=3)]))
    plan = plan_of(model, options, Cast(), launch, schedule=schedule)
    rules = Rules(codec_on=draw(st.sampled_from(["compute", "own thread"])), lanes=draw(st.integers(0, 2)))
    return model, plan, codec(float(draw(number)), float(draw(number))), rules


def link_that_falls_behind():
    """A case that is not steady after the most steps, and whose link has more to do than the observed steps are long."""
    model = profile((28, 1, 1), (36, 1, 1), (4, 1, 28))
    launch = [*((index, "reducescatter") for index in range(3)), *((index, "allgather") for index in reversed(range(3)))]
    plan = plan_of(model, [SPLIT] * 3, Cast(), launch, schedule=Delayed(k=None))
    return model, plan, codec(1.0, 1.0), Rules(lanes=2)


class TestLawsOfOverlappingSteps:
    @settings(max_examples=80, deadline=None)
    @given(overlapping())
    @example(link_that_falls_behind())
    def test_of_every_timeline(self, case):
        model, plan, costs, rules = case
        timeline = simulate(plan, model, cluster(), costs, rules)
        parts = timeline.forward_us + timeline.backward_us + timeline.exposed_comm_us + timeline.exposed_codec_us
        assert parts + timeline.idle_us == pytest.approx(timeline.length_us)
        assert timeline.idle_us == pytest.approx(0, abs=1e-6)
        assert all(resource.busy_us <= timeline.length_us + 1e-6 for resource in timeline.resources)
        assert Simulator(model, cluster(), costs, rules).step_us(plan) == timeline.step_us
        if timeline.steady:
            self.check_every_task_once(timeline, plan)
            busiest = max(resource.busy_us for resource in timeline.resources)
            assert timeline.step_us * timeline.steps >= busiest - 1e-6

    def check_every_task_once(self, timeline, plan):
        steps, found = timeline.steps, [e for e in timeline.events if e.bucket >= 0 and e.resource.endswith("link")]
        tasks = [(index, word) for index, bucket in enumerate(plan.buckets) for word in bucket.link_tasks]
        assert sorted((e.bucket, e.what) for e in found) == sorted(tasks * steps)
        backward = [e.tensor for e in timeline.events if e.what == "backward"]
        assert backward == list(plan.tensors) * steps

    @settings(max_examples=40, deadline=None)
    @given(overlapping())
    def test_steps_are_no_longer_than_one_after_the_other(self, case):
        """Everything a step does, nothing at the same time, is the most that a step can take."""
        model, plan, costs, rules = case
        timeline = simulate(plan, model, cluster(), costs, rules)
        assert timeline.length_us <= sum(resource.busy_us for resource in timeline.resources) + 1e-6


class TestClosedForms:
    @settings(max_examples=60, deadline=None)
    @given(
        tensors=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30)), min_size=1, max_size=10),
        cuts=st.sets(st.integers(1, 9)),
        alpha_h=st.integers(0, 9),
        alpha_g=st.integers(0, 9),
    )
    def test_cupcakes_timeline(self, tensors, cuts, alpha_h, alpha_g):
        """Cupcake's timeline: encodes end at B + y alpha_h + beta_h S; an exchange begins then or when the link is free."""
        model = profile(*[(4 * numel, float(us)) for numel, us in tensors])
        edges = [0, *sorted(cut for cut in cuts if cut < len(tensors)), len(tensors)]
        groups = [list(range(a, b)) for a, b in pairwise(edges)]
        times_of = CodecCosts(spec=Cast(), device="gpu", encode=[(0, alpha_h), (1000, alpha_h + 250.0)], decode=[(0, 99.0)])
        shape = Cluster(nodes=2, ranks_per_node=1, intra=BYTE_A_US, inter=Link(float(alpha_g), 0.008))
        backward = encoded = link = 0.0
        for group in groups:
            nbytes = sum(4 * tensors[i][0] for i in group)
            backward += sum(tensors[i][1] for i in group)
            encoded += alpha_h + 0.25 * nbytes
            link = max(link, backward + encoded) + alpha_g + nbytes / 2
        plan = plan_of(model, [GATHERED] * len(groups), Cast(), groups=groups)
        timeline = simulate(plan, model, shape, Costs(codecs=[times_of]), Rules(decode="none"))
        assert timeline.step_us == pytest.approx(link)
