"""The simulator: small steps worked out by hand, schedules, rules, refusals, traces."""

import json

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_steps import GATHERED, NESTED, PLAIN, SPLIT, TWO_PHASE, cluster, codec, plan_of, profile

from gradwire.core import (
    Cast,
    Cluster,
    CodecCosts,
    Costs,
    Delayed,
    Link,
    LocalSteps,
    Pipelined,
    RandomK,
    Truncate,
)
from gradwire.core.launch import launch_tasks, tasks_by_lane
from gradwire.errors import FormatError, PlanError
from gradwire.sim.events import COMPUTE, INTER, INTRA, POOL, RESOURCES
from gradwire.sim.rules import Rules, changed_rules, device_of, rules_of
from gradwire.sim.simulator import Simulator
from gradwire.sim.timeline import Event, Timeline, simulate
from gradwire.sim.views import as_trace


def times(timeline, what, bucket=None):
    """(start, end) of all events of this kind."""
    return [(e.start_us, e.end_us) for e in timeline.events if e.what == what and bucket in (None, e.bucket)]


class TestByHand:
    def test_one_bucket(self):
        model = profile((40, 100.0, 50.0))
        timeline = simulate(plan_of(model, [PLAIN]), model, cluster(), Costs(codecs=()))
        assert times(timeline, "forward") == [(0, 50)]
        assert times(timeline, "backward") == [(50, 150)]
        assert times(timeline, "allreduce") == [(150, 190)]
        assert (timeline.step_us, timeline.exposed_comm_us, timeline.idle_us) == (190, 40, 0)

    def test_the_optimizer_comes_before_the_next_forward(self):
        model = msgspec.structs.replace(profile((40, 100.0, 50.0)), optimizer_us=7.0)
        timeline = simulate(plan_of(model, [PLAIN]), model, cluster(), Costs(codecs=()))
        assert times(timeline, "optimizer") == [(0, 7)]
        assert times(timeline, "forward") == [(7, 57)]
        assert times(timeline, "allreduce") == [(157, 197)]
        assert (timeline.optimizer_us, timeline.forward_us, timeline.step_us) == (7, 50, 197)

    def test_all_reduce_has_a_link_of_its_own_where_one_was_measured(self):
        model, slow = profile((40, 100.0, 50.0)), Link(0.0, 0.004)  # 40 bytes in 80 us
        apart = msgspec.structs.replace(cluster(), allreduce=slow)
        plan, gathered = plan_of(model, [PLAIN]), plan_of(model, [GATHERED], Cast())
        usual, own = (simulate(plan, model, links, Costs(codecs=())) for links in (cluster(), apart))
        assert (usual.exposed_comm_us, own.exposed_comm_us) == (40, 80)
        usual, own = (simulate(gathered, model, links, codec(3.0, 2.0)) for links in (cluster(), apart))
        assert usual == own

    def test_lanes_spend_time_of_the_processor_on_each_exchange(self):
        model, links = profile((40, 10.0), (40, 100.0)), msgspec.structs.replace(cluster(), launch_us=5.0)
        plan = plan_of(model, [PLAIN, PLAIN])
        timeline = simulate(plan, model, links, Costs(codecs=()), rules_of("cpu"))
        assert times(timeline, "launch") == [(10, 15), (115, 120)]
        assert times(timeline, "backward") == [(0, 10), (15, 115)]
        assert times(timeline, "allreduce") == [(15, 55), (120, 160)]
        assert (timeline.exposed_codec_us, timeline.exposed_comm_us) == (10, 40)
        assert simulate(plan, model, links, Costs(codecs=())).step_us == 150, "GPUs have none"

    def test_an_all_reduce_of_gradients_takes_the_processor_time_of_its_link(self):
        model, own = profile((40, 10.0), (40, 100.0)), Link(10.0, 0.008, cpu_us=3.0, cpu_us_per_byte=0.1)
        links = msgspec.structs.replace(cluster(), allreduce=own, launch_us=5.0)
        plan = plan_of(model, [PLAIN, PLAIN])
        timeline = simulate(plan, model, links, Costs(codecs=()), rules_of("cpu"))
        assert times(timeline, "launch") == [(10, 17), (117, 124)]
        assert times(timeline, "backward") == [(0, 10), (17, 117)], "backward waits"
        coded = plan_of(model, [GATHERED, GATHERED], Cast())
        prices = Simulator(model, links, codec(3.0, 2.0), Rules(lanes=2)).prices
        launches = [price.us for price in prices.of(coded.buckets[0]).tasks if price.task.startswith("launch")]
        assert launches == [5], "compressed buckets have launch_us"
        assert not times(simulate(plan, model, links, Costs(codecs=())), "launch"), "GPUs have none"

    def test_two_buckets_that_backward_hides(self):
        """The first exchange is over before the second gradient is ready: a bubble, and nothing before it need be smaller."""
        model = profile((40, 10.0), (20, 100.0))
        timeline = simulate(plan_of(model, [PLAIN, PLAIN]), model, cluster(), Costs(codecs=()))
        assert times(timeline, "allreduce") == [(10, 50), (110, 130)]
        assert (timeline.step_us, timeline.exposed_comm_us) == (130, 20)
        (bubble,) = timeline.bubbles
        assert (bubble.start_us, bubble.end_us, bubble.before) == (50, 110, (0,))

    def test_two_buckets_that_wait_for_the_link(self):
        model = profile((40, 10.0), (20, 10.0))
        timeline = simulate(plan_of(model, [PLAIN, PLAIN]), model, cluster(), Costs(codecs=()))
        assert times(timeline, "allreduce") == [(10, 50), (50, 70)]
        assert (timeline.step_us, timeline.exposed_comm_us, timeline.bubbles) == (70, 50, ())

    def test_launch_order_is_kept_though_another_bucket_is_ready(self):
        model = profile((40, 10.0), (20, 10.0))
        plan = plan_of(model, [PLAIN, PLAIN], launch=[(1, "allreduce"), (0, "allreduce")])
        assert times(simulate(plan, model, cluster(), Costs(codecs=())), "allreduce", 0) == [(40, 80)]

    def test_an_encode_runs_before_the_next_backward(self):
        model = profile((40, 10.0), (40, 10.0))
        timeline = simulate(plan_of(model, [GATHERED] * 2, Cast()), model, cluster(), codec(3.0, 2.0))
        assert times(timeline, "backward") == [(0, 10), (13, 23)]
        assert times(timeline, "comp") == [(10, 13), (23, 26)]
        assert times(timeline, "allgather") == [(13, 33), (33, 53)]
        assert times(timeline, "decomp") == [(33, 37), (53, 57)]
        assert timeline.step_us == 57
        # under no backward: encodes 3 + 3 and decodes 4 + 4, of which links hide the first decode and the second encode
        assert (timeline.exposed_comm_us, timeline.exposed_codec_us) == (30, 7)
        assert timeline.cupcake_comm_us == 30 - 3 - 4

    def test_a_decode_comes_between_two_tensors_of_one_bucket(self):
        """It arrives at 20, in the middle of t1's backward, and runs before t2's."""
        model = profile((20, 10.0), (4, 15.0), (4, 10.0), (4, 10.0))
        plan = plan_of(model, [GATHERED, PLAIN], Cast(), groups=[[0], [1, 2, 3]])
        timeline = simulate(plan, model, cluster(), codec(0.0, 2.0))
        assert times(timeline, "decomp") == [(25, 29)]
        assert times(timeline, "backward") == [(0, 10), (10, 25), (29, 39), (39, 49)]

    def test_a_wait_inside_a_buckets_own_exchange_is_no_bubble(self):
        model = profile((40, 0.0))
        timeline = simulate(plan_of(model, [TWO_PHASE], Cast()), model, cluster(), codec(0.0, 10.0))
        assert [e.start_us for e in timeline.events if e.resource == "inter link"] == [0, 20]
        assert timeline.bubbles == ()

    def test_a_thread_of_its_own_leaves_backward_alone(self):
        model = profile((40, 10.0), (40, 10.0))
        rules = Rules(codec_on="own thread")
        timeline = simulate(plan_of(model, [GATHERED] * 2, Cast()), model, cluster(), codec(3.0, 2.0), rules)
        assert times(timeline, "backward") == [(0, 10), (10, 20)]
        assert times(timeline, "comp") == [(10, 13), (20, 23)]
        assert {e.resource for e in timeline.events if e.what == "comp"} == {"cpu pool"}

    @pytest.mark.parametrize(
        ("decode", "decodes", "step_us"),
        [
            ("at once", [(40, 44), (164, 168)], 168),
            ("after backward", [(140, 144), (160, 164)], 164),
            ("with encode", [(44, 44), (168, 168)], 168),
            ("none", [(40, 40), (160, 160)], 160),
        ],
    )
    def test_when_last_decodes_run(self, decode, decodes, step_us):
        """Three parts of backward: 10, 20 and 100. The first bucket arrives while the last part runs or is about to."""
        model = profile((60, 10.0), (0, 30.0), (40, 100.0))
        options = [GATHERED, PLAIN, GATHERED]
        timeline = simulate(plan_of(model, options, Cast()), model, cluster(), codec(0.0, 2.0), Rules(decode=decode))
        assert (times(timeline, "decomp"), timeline.step_us) == (decodes, step_us)

    def test_decodes_are_added_to_the_first_encode_wherever_it_is(self):
        option = ("reducescatter:intra", "comp:gpu", "allgather:inter", "decomp:gpu", "allgather:intra")
        model = profile((40, 0.0))
        timeline = simulate(plan_of(model, [option], Cast()), model, cluster(2, 2), codec(3.0, 2.0), Rules(decode="with encode"))
        assert times(timeline, "comp") == [(20, 20 + 3 + 2 * 2)]
        assert times(timeline, "decomp") == [(47, 47)]

    def test_two_divisible_buckets_in_bucket_order_and_interleaved(self):
        """60 us in bucket order, 40 us interleaved; the last decode takes 10 us more."""
        model = profile((40, 0.0), (40, 0.0))
        rest = (model, cluster(), codec(0.0, 10.0))
        assert simulate(plan_of(model, [TWO_PHASE] * 2, Cast()), *rest).step_us == 60 + 10
        order = [(0, "alltoall"), (1, "alltoall"), (0, "allgather"), (1, "allgather")]
        assert simulate(plan_of(model, [TWO_PHASE] * 2, Cast(), order), *rest).step_us == 40 + 10

    def test_lanes_interleave_by_themselves(self):
        model = profile((40, 0.0), (40, 0.0))
        plan = plan_of(model, [TWO_PHASE] * 2, Cast())
        lengths = [simulate(plan, model, cluster(), codec(0.0, 10.0), Rules(lanes=lanes)).step_us for lanes in (1, 2)]
        assert lengths == [80, 50]

    def test_two_links_work_at_the_same_time(self):
        """Of 40 bytes: 20 us inside, then 40 us between nodes for both ranks' 20 bytes, then 20 us inside."""
        model = profile((40, 0.0), (40, 0.0))
        order = [(b, word) for word in ("reducescatter", "allreduce", "allgather") for b in (0, 1)]
        timeline = simulate(plan_of(model, [NESTED] * 2, launch=order), model, cluster(2, 2), Costs(codecs=()))
        assert times(timeline, "reducescatter") == [(0, 20), (20, 40)]
        assert times(timeline, "allreduce") == [(20, 60), (60, 100)]
        assert times(timeline, "allgather") == [(60, 80), (100, 120)]
        assert (timeline.sent_bytes, timeline.intra_bytes, timeline.inter_bytes) == (120, 80, 80)

    def test_each_link_takes_its_tasks_in_launch_order(self):
        """Bucket by bucket, the second reduce-scatter comes after the first bucket's all-gather on the same link."""
        model = profile((40, 0.0), (40, 0.0))
        assert simulate(plan_of(model, [NESTED] * 2), model, cluster(2, 2), Costs(codecs=())).step_us == 160

    def test_on_one_node_flat_exchanges_use_the_intra_link(self):
        model = profile((40, 10.0))
        timeline = simulate(plan_of(model, [PLAIN]), model, cluster(1, 2), Costs(codecs=()))
        assert [e.resource for e in timeline.events if e.what == "allreduce"] == ["intra link"]
        assert (timeline.step_us, timeline.intra_bytes, timeline.inter_bytes) == (50, 40, 0)

    def test_offloaded_codecs_use_the_pool_and_its_workers(self):
        model = profile((40, 0.0), (40, 0.0), (40, 100.0))
        option = ("comp:cpu", "allgather:inter", "decomp:cpu")
        plan = plan_of(model, [option, option, PLAIN], Cast())
        for workers, encodes in ((1, [(0, 30), (30, 60)]), (2, [(0, 30), (0, 30)])):
            timeline = simulate(plan, model, cluster(), codec(30.0, 0.0), Rules(cpu_workers=workers))
            assert times(timeline, "backward", -1)[-1] == (0, 100)
            assert times(timeline, "comp") == encodes

    def test_chunks_overlap_codec_and_link(self):
        """Whole: encode 8, all-gather 20, decode 2 payloads. In 2 chunks the second encode hides under the first exchange."""
        model = profile((40, 0.0))
        costs = Costs(codecs=[CodecCosts(spec=Cast(), device="gpu", encode=[(0, 0.0), (40, 8.0)], decode=[(0, 0.0)])])
        whole, cut = (plan_of(model, [GATHERED], Cast(), chunk_bytes=size) for size in (0, 20))
        assert simulate(whole, model, cluster(), costs).step_us == 28
        timeline = simulate(cut, model, cluster(), costs)
        assert times(timeline, "comp") == [(0, 4), (4, 8)]
        assert times(timeline, "allgather") == [(4, 14), (14, 24)]


class TestSchedules:
    MODEL = profile((40, 10.0, 30.0), (40, 10.0, 30.0))
    LAUNCH = ((0, "reducescatter"), (1, "reducescatter"), (1, "allgather"), (0, "allgather"))

    def test_pipelined_gathers_in_the_next_forward(self):
        """DeAR. Backward 0 to 20; reduces 10 to 50; the gather of t1, which forward needs first, is there at 70, that of t0
        at 90 beside t1's forward; forward 70 to 130. What is exposed is from 20 to 70."""
        plan = plan_of(self.MODEL, [SPLIT] * 2, launch=self.LAUNCH, schedule=Pipelined())
        timeline = simulate(plan, self.MODEL, cluster(), Costs(codecs=()))
        assert (timeline.step_us, timeline.exposed_comm_us, timeline.idle_us) == (130, 50, 0)
        assert timeline.steady and timeline.steps == 1
        assert len(timeline.events) == 8
        # the timeline begins where backward ended: the rest of a step's exchange is the step before's
        gathers = [(e.start_us, e.end_us, e.bucket, e.step) for e in timeline.events if e.what == "allgather"]
        assert gathers == [(30, 50, 1, -1), (50, 70, 0, -1)]

    def test_the_same_plan_in_backward(self):
        plan = plan_of(self.MODEL, [SPLIT] * 2)
        assert simulate(plan, self.MODEL, cluster(), Costs(codecs=())).step_us == 60 + 10 + 80

    def test_pipelined_on_a_link_that_is_always_busy(self):
        """400 us of wire each step, and everything else beside it: but each step's gathers end before its reduces can begin."""
        model = profile((200, 10.0, 1.0), (200, 10.0, 1.0))
        plan = plan_of(model, [SPLIT] * 2, launch=self.LAUNCH, schedule=Pipelined())
        timeline = simulate(plan, model, cluster(), Costs(codecs=()))
        assert timeline.steady
        assert timeline.step_us == 400 + 1 + 10  # forward and backward of t0, which its gather is followed by

    def test_pipelined_needs_forward_times(self):
        model = profile((40, 10.0, 30.0), (40, 10.0))
        plan = plan_of(model, [SPLIT] * 2, launch=self.LAUNCH, schedule=Pipelined())
        with pytest.raises(PlanError, match="1 of 2 tensors of the profile have no forward_us, 't1' first"):
            simulate(plan, model, cluster(), Costs(codecs=()))

    @settings(max_examples=40, deadline=None)
    @given(
        tau=st.integers(1, 60),
        ratio=st.integers(2, 16),
        delta=st.integers(0, 20),
        scale=st.integers(1, 4),
        k=st.sampled_from([None, 1, 2, 5, 20]),
    )
    def test_delayed_is_equation_7_of_cd_sgd(self, tau, ratio, delta, scale, k):
        """With encode on the compute cores, where encode and exchange of a step go one after the other."""
        phi, psi = 4 * ratio * scale, 4 * scale
        model = profile((phi, float(tau)))
        spec = Truncate(ratio=float(ratio), unsafe=True)
        plan = plan_of(model, [GATHERED], spec, schedule=Delayed(k=k))
        timeline = simulate(plan, model, cluster(), codec(float(delta), 0.0, spec), Rules(lanes=1))
        usual, corrected = max(tau + delta, delta + psi), max(tau, phi)
        expected = usual if k is None else ((k - 1) * usual + corrected) / k
        assert timeline.steady
        assert timeline.step_us == pytest.approx(expected)

    def test_delayed_as_the_notes_compute_it(self):
        model = profile((64, 10.0))
        spec = Truncate(ratio=8.0, unsafe=True)
        link = Link(0.0, 0.0128)  # 64 bytes take 40 us, 8 bytes 5
        shape = Cluster(nodes=2, ranks_per_node=1, intra=link, inter=link)
        plan = plan_of(model, [GATHERED], spec, schedule=Delayed(k=5))
        timeline = simulate(plan, model, shape, codec(2.0, 0.0, spec), Rules(lanes=1))
        assert timeline.step_us == pytest.approx(17.6)
        assert (timeline.steps, len(times(timeline, "comp"))) == (5, 4)

    @given(
        tau=st.integers(1, 400),
        ratio=st.integers(2, 16),
        scale=st.integers(1, 4),
        k=st.sampled_from([1, 2, 5]),
        buckets=st.sampled_from([5, 10, 20]),
    )
    @example(tau=178, ratio=8, scale=1, k=2, buckets=10)  # exchanges fall behind after five periods only
    @example(tau=238, ratio=3, scale=4, k=1, buckets=5)  # by 2 us in each: the computation waits after 119 steps
    @example(tau=319, ratio=15, scale=1, k=2, buckets=10)  # the same, and only unless staggered
    def test_staggered_corrections_take_no_step_longer_than_another(self, tau, ratio, scale, k, buckets):
        """Equal buckets: each step of a period sends as many bytes."""
        k = k if buckets % k == 0 else 1
        sizes = [4 * ratio * scale] * buckets
        model = profile(*((size, tau / buckets) for size in sizes))
        spec = Truncate(ratio=float(ratio), unsafe=True)
        plan = plan_of(model, [GATHERED] * buckets, spec, schedule=Delayed(k=k))
        timeline = simulate(plan, model, cluster(), codec(0.0, 0.0, spec))
        phi, psi = sum(sizes), 4 * scale * buckets
        assert timeline.step_us == pytest.approx(max(tau, ((k - 1) * psi + phi) / k))
        at_once = msgspec.structs.replace(plan, schedule=Delayed(k=k, stagger=False))
        unstaggered = simulate(at_once, model, cluster(), codec(0.0, 0.0, spec))
        assert timeline.step_us <= unstaggered.step_us * (1 + 1e-9)
        # a timeline of exchanges that fall behind covers more periods
        assert timeline.sent_bytes / timeline.steps == pytest.approx(unstaggered.sent_bytes / unstaggered.steps)

    def test_a_correction_that_takes_too_long_for_one_step_is_hidden_under_five(self):
        model, spec = profile(*[(64, 20.0)] * 5), Truncate(ratio=8.0, unsafe=True)
        times_us = {}
        for stagger in (True, False):
            plan = plan_of(model, [GATHERED] * 5, spec, schedule=Delayed(k=5, stagger=stagger))
            times_us[stagger] = simulate(plan, model, cluster(), codec(0.0, 0.0, spec)).step_us
        assert times_us[True] == 100 and times_us[False] > 120

    def test_staggered_corrections_change_their_link_tasks_alone(self):
        """Payloads that are summed: corrections are one all-reduce, and the other buckets keep their tasks and their places."""
        spec, option = RandomK(ratio=0.5), ("comp:gpu", "allreduce:inter", "decomp:gpu")
        model = profile((80, 5.0), (40, 5.0), (40, 5.0))
        plan = plan_of(model, [option] * 3, spec, schedule=Delayed(k=2))
        timeline = simulate(plan, model, cluster(), codec(0.0, 0.0, spec))
        # 80 bytes as they are and half of 80, in turn with the other two
        assert timeline.step_us == 120
        sent = [(e.step % 2, e.bucket, e.end_us - e.start_us) for e in timeline.events if e.what == "allreduce"]
        assert sorted(sent) == [(0, 0, 80), (0, 1, 20), (0, 2, 20), (1, 0, 40), (1, 1, 40), (1, 2, 40)]

    @pytest.mark.parametrize(
        ("numel", "delay", "expected"),
        [(40, 0, (4 * 150 + 40) / 4), (40, 1, 150), (400, 2, (4 * 150 + 100) / 4), (800, 4, 200)],
        ids=[
            "one exchange a period",
            "hidden by one step",
            "hidden by two in part",
            "the wire is slower than a period",
        ],
    )
    def test_local_steps_exchange_once_a_period(self, numel, delay, expected):
        model = profile((numel, 100.0, 50.0))
        plan = plan_of(model, [PLAIN], schedule=LocalSteps(every=4, delay=delay))
        timeline = simulate(plan, model, cluster(), Costs(codecs=()))
        assert timeline.steady and timeline.step_us == expected
        assert (timeline.steps, len(times(timeline, "allreduce"))) == (4, 1)
        backward = simulate(plan_of(model, [PLAIN]), model, cluster(), Costs(codecs=()))
        assert timeline.sent_bytes == backward.sent_bytes, "the bytes of one exchange, in four steps"

    @pytest.mark.parametrize(("delay", "expected"), [(0, (4 * 110 + 40 + 400) / 4), (2, (4 * 110 + 400 - 220) / 4)])
    def test_fragments_are_exchanged_one_after_another(self, delay, expected):
        model = profile((40, 10.0), (400, 100.0))
        plan = plan_of(model, [PLAIN] * 2, schedule=LocalSteps(every=4, fragments=2, delay=delay))
        timeline = simulate(plan, model, cluster(), Costs(codecs=()))
        assert timeline.steady and timeline.step_us == expected
        steps = {event.bucket: event.step % 4 for event in timeline.events if event.what == "allreduce"}
        assert steps == {0: 1, 1: 3}

    def test_fewer_buckets_than_fragments_are_refused(self):
        model = profile((40, 10.0))
        plan = plan_of(model, [PLAIN], schedule=LocalSteps(every=4, fragments=2))
        with pytest.raises(PlanError, match="fragments is 2 and the plan has 1 buckets"):
            simulate(plan, model, cluster(), Costs(codecs=()))

    def test_without_local_update_nothing_is_hidden(self):
        """BIT-SGD, equation 5 of CD-SGD: tau + delta + psi; a correction is tau + phi."""
        model = profile((32, 6.0), (32, 4.0))
        spec = Truncate(ratio=8.0, unsafe=True)
        for k, expected in ((None, 10 + 4 + 8), (2, (10 + 4 + 8 + 10 + 64) / 2)):
            schedule = Delayed(k=k, local_update=False)
            plan = plan_of(model, [GATHERED] * 2, spec, schedule=schedule)
            timeline = simulate(plan, model, cluster(), codec(2.0, 0.0, spec), Rules(lanes=1))
            assert timeline.step_us == pytest.approx(expected), k

    def test_without_lanes_the_next_encode_runs_beside_the_exchange(self):
        """phi = 8 bytes; encode 5 under the last step's exchange: max(tau + delta, psi) where equation 7 has delta + psi."""
        model = profile((64, 1.0))
        spec = Truncate(ratio=8.0, unsafe=True)
        plan = plan_of(model, [GATHERED], spec, schedule=Delayed(k=None))
        step_us = [simulate(plan, model, cluster(), codec(5.0, 0.0, spec), Rules(lanes=n)).step_us for n in (0, 1)]
        assert step_us == [8, 13]

    def test_an_exchange_that_falls_behind_slowly_is_waited_for_in_the_end(self):
        """100 us of computation, 104 of wire, of which 90 begin under backward: the link is late by 4 us more each step, and
        only after 22 steps the computation waits."""
        model = profile((100, 10.0), (4, 90.0))
        timeline = simulate(plan_of(model, [PLAIN] * 2, schedule=Delayed(k=None)), model, cluster(), Costs(codecs=()))
        assert (timeline.step_us, timeline.steady) == (104, True)
        assert timeline.simulated_steps > 22

    def test_steps_that_do_not_settle_say_so(self):
        """The same, late by a tenth of a microsecond each step: in the long run a step takes what the link takes."""
        model = profile((100, 10.0), (4, 93.9))
        timeline = simulate(plan_of(model, [PLAIN] * 2, schedule=Delayed(k=None)), model, cluster(), Costs(codecs=()))
        assert not timeline.steady
        assert timeline.step_us == pytest.approx(104)

    def test_a_correction_may_be_compressed_too(self):
        model = profile((40, 0.0))
        plan = plan_of(model, [GATHERED], Cast(), schedule=Delayed(k=1, correction=Cast("bfloat16")))
        costs = Costs(codecs=[*codec(0.0, 0.0).codecs, *codec(0.0, 0.0, Cast("bfloat16")).codecs])
        assert simulate(plan, model, cluster(), costs).step_us == 20
        plain = plan_of(model, [GATHERED], Cast(), schedule=Delayed(k=1))
        assert simulate(plain, model, cluster(), costs).step_us == 40

    def test_a_correction_of_payloads_that_are_summed(self):
        spec = RandomK(ratio=0.5)
        option = ("comp:gpu", "allreduce:inter", "decomp:gpu")
        model = profile((80, 5.0), (80, 5.0))
        plan = plan_of(model, [option] * 2, spec, schedule=Delayed(k=2), chunk_bytes=40)
        for lanes in (0, 1, 2):
            timeline = simulate(plan, model, cluster(), codec(0.0, 0.0, spec), Rules(lanes=lanes))
            assert timeline.step_us == (160 + 80) / 2


class TestRules:
    def test_the_engine_on_cpus_has_two_lanes_and_exchanges_directly(self):
        assert rules_of("cpu") == Rules(device="cpu", lanes=2, routing="wires", reports=True)
        assert rules_of("gpu") == Rules() and Rules().routing == "direct"

    @pytest.mark.parametrize(("name", "device"), [("V100", "gpu"), ("cpu", "cpu"), ("CPU, 2 cores", "cpu")])
    def test_the_profile_says_where_gradients_are(self, name, device):
        model = profile((4, 1.0), device=name)
        assert device_of(model) == device
        assert changed_rules(model).device == device

    def test_a_profile_of_a_cpu_is_simulated_with_lanes(self):
        option = tuple(task.replace("gpu", "cpu") for task in TWO_PHASE)
        model = profile((40, 0.0), (40, 0.0), device="cpu")
        assert simulate(plan_of(model, [option] * 2, Cast()), model, cluster(), codec(0.0, 10.0)).step_us == 50

    def test_lanes_take_the_pieces_that_the_engines_take(self):
        model = profile((40, 1.0), (80, 1.0), (40, 1.0))
        plan = plan_of(model, [TWO_PHASE] * 3, Cast(), chunk_bytes=40)
        layout = Simulator(model, cluster(), codec(1.0, 1.0), Rules(lanes=2)).outcome(plan, record=False).layouts[0]
        ours = [[(x.bucket, x.chunk) for x in row if x.price.task.endswith("inter")] for row in layout.labels]
        engine = tasks_by_lane(launch_tasks(plan.launch, [1, 2, 1], skew=False), 2)
        assert ours == [[(bucket, piece) for bucket, piece, _ in tasks] for tasks in engine]

    @pytest.mark.parametrize(
        ("fields", "said"),
        [
            ({"device": "tpu"}, "device is 'tpu'"),
            ({"codec_on": "own"}, "codec_on is 'own'"),
            ({"decode": "later"}, "decode is 'later'"),
            ({"lanes": -1}, "lanes is -1"),
            ({"lanes": 10**8}, "lanes is 100000000: .* from 0 to 1024"),
            ({"lanes": 1, "offload_lanes": 1025}, "offload_lanes is 1025"),
            ({"cpu_workers": 0}, "cpu_workers is 0"),
            ({"cpu_workers": 1025}, "cpu_workers is 1025"),
            ({"lanes": 2, "decode": "after backward"}, "stand still until backward ends"),
        ],
    )
    def test_impossible_rules_are_refused(self, fields, said):
        with pytest.raises(PlanError, match=said):
            Rules(**fields)


def test_a_timeline_can_be_saved_and_read():
    model = profile((40, 10.0), (20, 100.0))
    timeline = simulate(plan_of(model, [PLAIN, PLAIN]), model, cluster(), Costs(codecs=()))
    assert timeline.bubbles
    assert Timeline.from_json(timeline.to_json()) == Timeline.from_json(timeline.to_json(indent=2)) == timeline


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("version", 7, "version is 7"),
        ("steps", 0, "steps is 0"),
        ("step_us", -1.0, "step_us is -1.0"),
        ("sent_bytes", -5, "sent_bytes is -5"),
        ("schedule", "", "schedule is ''"),
        ("resources", [{"name": "compute", "busy_us": -1.0, "exposed_us": 0.0}], "busy_us is -1.0"),
        ("resources", [{"name": "gpu", "busy_us": 1.0, "exposed_us": 0.0}], "name is 'gpu'"),
        ("bubbles", [{"start_us": 2.0, "end_us": 1.0, "before": [0]}], "end_us is 1.0, before start_us, 2.0"),
        (
            "events",
            [{"what": "comp", "resource": "compute", "start_us": 2.0, "end_us": 1.0}],
            r"events\[0\].end_us is 1.0, before",
        ),
        ("events", [{"what": "comp", "resource": "gpu", "start_us": 0.0, "end_us": 1.0}], r"events\[0\].resource is 'gpu'"),
    ],
)
def test_a_timeline_with_impossible_values_is_refused(field, value, said):
    model = profile((40, 10.0), (20, 100.0))
    written = simulate(plan_of(model, [PLAIN, PLAIN]), model, cluster(), Costs(codecs=())).to_dict()
    with pytest.raises(FormatError, match=said):
        Timeline.from_dict(written | {field: value})


class TestRefusals:
    def test_a_plan_of_another_model(self):
        model, other = profile((40, 1.0)), profile((44, 1.0))
        with pytest.raises(PlanError, match="made for"):
            simulate(plan_of(other, [PLAIN]), model, cluster(), Costs(codecs=()))

    def test_a_codec_without_times(self):
        model = profile((40, 1.0))
        with pytest.raises(PlanError, match="no times of Cast"):
            simulate(plan_of(model, [GATHERED], Cast()), model, cluster(), Costs(codecs=()))


class TestTrace:
    def test_every_event_is_there_and_rows_have_names(self):
        model = profile((40, 10.0, 5.0), (20, 100.0, 5.0))
        timeline = simulate(plan_of(model, [GATHERED, PLAIN], Cast()), model, cluster(), codec(3.0, 2.0))
        trace = json.loads(as_trace(timeline))
        slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        names = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
        assert len(slices) == len(timeline.events) + len(timeline.bubbles)
        assert [s["name"] for s in slices if names[s["tid"]] == "inter link"] == ["allgather 0", "allreduce 1"]
        assert {s["name"]: (s["ts"], s["dur"]) for s in slices}["backward t1"] == (23.0, 100.0)
        assert [s["args"] for s in slices if s["name"] == "bubble"] == [{"buckets sent before": [0]}]

    def test_what_runs_at_once_gets_rows_of_its_own(self):
        model = profile((40, 0.0), (40, 0.0))
        option = ("comp:cpu", "allgather:inter", "decomp:cpu")
        plan = plan_of(model, [option] * 2, Cast())
        timeline = simulate(plan, model, cluster(), codec(30.0, 0.0), Rules(cpu_workers=2))
        names = {e["args"]["name"] for e in json.loads(as_trace(timeline))["traceEvents"] if e["ph"] == "M"}
        assert {"cpu pool", "cpu pool 2"} <= names

    def test_a_row_has_one_resource_however_much_runs_at_once(self):
        at_once = [Event(resource="cpu pool", what="comp", start_us=0.0, end_us=9.0, bucket=bucket) for bucket in range(12)]
        after = Event(resource="intra link", what="allreduce", start_us=3.0, end_us=4.0, bucket=0)
        model = profile((40, 1.0))
        made = simulate(plan_of(model, [PLAIN]), model, cluster(), Costs(codecs=()))
        timeline = msgspec.structs.replace(made, events=(*at_once, after), bubbles=())
        trace = json.loads(as_trace(timeline))["traceEvents"]
        names = {event["tid"]: event["args"]["name"] for event in trace if event["ph"] == "M"}
        rows = {names[event["tid"]] for event in trace if event["ph"] == "X"}
        assert sorted(rows) == sorted(names.values()) and len(rows) == 13
        assert list(names.values())[:2] == ["cpu pool", "cpu pool 2"] and names[12] == "intra link"


def test_resources_have_the_numbers_of_their_names():
    named = {COMPUTE: "compute", POOL: "cpu pool", INTRA: "intra link", INTER: "inter link"}
    assert dict(enumerate(RESOURCES)) == named
