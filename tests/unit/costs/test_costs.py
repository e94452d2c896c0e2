"""Costs: what collectives put on links, what ranks hold, codec times, bytes against the engine's, fits, folding, importing."""

import json
import math
import random

import pytest
from cluster_of_sums import NODES, RANKS_PER_NODE, WORLD
from cluster_of_sums import Cluster as Miniature
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.core import (
    COLLECTIVES,
    DGC,
    QSGD,
    Bucket,
    Cast,
    Cluster,
    CodecCosts,
    Costs,
    EFSignSGD,
    ErrorFeedback,
    Identity,
    Link,
    OneBit,
    Plan,
    PowerSGD,
    Profile,
    TensorInfo,
    TensorProfile,
    TopK,
)
from gradwire.core.specs.base import ElementRun
from gradwire.costs.collectives import flat_traffic, group_traffic
from gradwire.costs.fit import fit_line, fit_link
from gradwire.costs.imported import costs_from, import_file, profile_from
from gradwire.costs.prices import Prices, bytes_of, fold, time_at
from gradwire.costs.steps import steps_of
from gradwire.errors import FormatError, PlanError
from gradwire.plan import Uniform
from gradwire.plan.options import tree

GRACE = ("comp:gpu", "allgather:inter", "decomp:gpu")
TWO_PHASE = ("comp:gpu", "alltoall:inter", "decomp:gpu", "comp:gpu", "allgather:inter", "decomp:gpu")
SPECS = [QSGD(bits=4), QSGD(bits=3, block=512), Cast(), TopK(0.01), Identity()]
# alpha 10 us, 1 GB/s between nodes: a byte takes 0.001 us; 1 us and 10 GB/s inside them
INTER, INTRA = Link(10.0, 8.0), Link(1.0, 80.0)


def cluster(nodes, ranks_per_node=1):
    return Cluster(nodes=nodes, ranks_per_node=ranks_per_node, intra=INTRA, inter=INTER)


def constant(spec, encode, decode, device="gpu"):
    return Costs(codecs=[CodecCosts(spec=spec, device=device, encode=[(0, encode)], decode=[(0, decode)])])


def prices(option, spec, shape, numel=1000, costs=Costs(codecs=()), **kwargs):  # noqa: B008
    bucket = Bucket(tensors=("w",), spec=spec, option=option, **kwargs)
    return Prices([TensorInfo("w", (numel,), "float32")], shape, costs).of(bucket).tasks


WEIGHTED = ErrorFeedback(QSGD(bits=3, scale="ls", levels="lloyd"), weights=0.98)
HIERARCHICAL = ("reducescatter:intra", *TWO_PHASE, "allgather:intra")


@pytest.mark.parametrize("option", [TWO_PHASE, HIERARCHICAL], ids=" ".join)
def test_all_elements_are_weighed_on_each_rank_whatever_part_it_encodes(option: tuple[str, ...]) -> None:
    curves = {"spec": WEIGHTED, "device": "gpu", "encode": [(0, 5.0)], "decode": [(0, 2.0)]}
    without, costs = (Costs(codecs=[CodecCosts(**curves, **more)]) for more in ({}, {"weigh": [(0, 0.0), (4000, 8.0)]}))
    before, after = (prices(option, WEIGHTED, cluster(2, 4), costs=each) for each in (without, costs))
    assert [b.us - a.us for a, b in zip(before, after, strict=True) if a != b] == pytest.approx([8.0])
    assert next(b.task for a, b in zip(before, after, strict=True) if a != b) == "comp:gpu"
    folded = [fold(option, WEIGHTED, Prices([], cluster(2, 4), each)) for each in (without, costs)]
    for nbytes in (4000, 8000, 64_000):
        assert folded[1].encode(nbytes) - folded[0].encode(nbytes) == pytest.approx(8.0 * nbytes / 4000)
    again = Costs.from_dict(json.loads(costs.to_json()))
    assert again == costs and '"weigh"' not in without.to_json()
    with pytest.raises(FormatError, match=r"weigh\[1\]"):
        CodecCosts(**curves, weigh=[(8, 1.0), (4, 1.0)])


class TestCollectives:
    @pytest.mark.parametrize(
        ("word", "messages", "factor"),
        [
            ("allreduce", 6, 1.5),
            ("reducescatter", 3, 0.75),
            ("alltoall", 3, 0.75),
            ("allgather", 3, 3.0),
            ("gather", 3, 3.0),
            ("reduce", 3, 1.0),
            ("broadcast", 3, 1.0),
        ],
    )
    def test_formulas_of_four_ranks(self, word, messages, factor):
        """As in the table of gradwire.costs.collectives."""
        assert group_traffic(word, 4, "inter").inter == (messages, factor)
        assert flat_traffic(word, nodes=4, ranks_per_node=1) == group_traffic(word, 4, "inter")

    @pytest.mark.parametrize("word", ["reduce", "broadcast"])
    def test_a_root_exchanges_with_each_rank_directly(self, word):
        """As the engine does (decision 13)."""
        assert group_traffic(word, 5, "intra", "direct").intra == (4, 4.0)
        traffic = flat_traffic(word, nodes=3, ranks_per_node=4, routing="direct")
        assert (traffic.inter, traffic.intra) == ((8, 8.0), (3, 3.0))

    @pytest.mark.parametrize(("nodes", "local", "inside", "between"), [(2, 1, 0, 1), (2, 2, 1, 1), (4, 2, 1, 2), (1, 8, 3, 0)])
    def test_trees_have_ceil_log2_hops(self, nodes, local, inside, between):
        """CGX's: a hop is a whole payload; the busiest path encodes and decodes once more than it has hops."""
        steps = steps_of(("comp:cpu", "reduce:inter", "broadcast:inter", "decomp:cpu"), nodes, local)
        assert [(step.share, step.parts) for step in steps[::3]] == [(1.0, inside + between + 1)] * 2
        for step in steps[1:3]:
            assert (step.traffic.intra, step.traffic.inter) == ((inside, inside), (between, between))

    def test_a_ring_of_payloads_codes_shard_by_shard_and_decodes_others_twice(self):
        steps = steps_of(("comp:cpu", "reducescatter:inter", "allgather:inter", "decomp:cpu"), 2, 2)
        assert [(step.share, step.parts) for step in steps] == [(0.25, 4), (1.0, 1), (0.25, 1), (0.25, 6)]
        assert [step.traffic.inter for step in steps[1:3]] == [(3, 0.75), (3, 3.0)]

    @pytest.mark.parametrize("word", ["allreduce", "reducescatter", "allgather", "alltoall", "gather", "reduce", "broadcast"])
    def test_one_rank_has_nobody_to_exchange_with(self, word):
        assert flat_traffic(word, 1, 1).time_us(1e6, INTRA, INTER) == 0.0

    @pytest.mark.parametrize("word", ["allreduce", "reducescatter", "allgather", "alltoall", "gather", "reduce", "broadcast"])
    def test_on_one_node_the_flat_link_is_the_intra_link(self, word):
        traffic = flat_traffic(word, 1, 4)
        assert traffic.inter == (0, 0.0)
        assert traffic.intra == group_traffic(word, 4, "intra").intra

    @pytest.mark.parametrize("word", ["alltoall", "allgather", "reducescatter"])
    @pytest.mark.parametrize(("nodes", "local"), [(2, 1), (2, 3), (3, 4), (8, 8)])
    def test_direct_exchanges_are_the_sum_of_pairs(self, word, nodes, local):
        """Every pair of ranks exchanges by itself: count what leaves node 0, and what rank 0 sends inside it."""
        world = nodes * local
        each = 1.0 if word == "allgather" else 1 / world
        left = sum(each for source in range(world) for target in range(world) if source < local <= target)
        inside = sum(each for target in range(1, local))
        traffic = flat_traffic(word, nodes, local, "direct")
        assert traffic.inter.factor == pytest.approx(left)
        assert traffic.intra.factor == pytest.approx(inside)
        assert traffic.sent == pytest.approx(each * (world - 1))

    def test_a_root_receives_from_every_rank_of_other_nodes(self):
        traffic = flat_traffic("gather", nodes=3, ranks_per_node=4)
        assert (traffic.inter, traffic.intra) == ((8, 8.0), (3, 3.0))

    def test_a_ring_crosses_each_node_once(self):
        traffic = flat_traffic("allreduce", 4, 8)
        assert traffic.inter == (62, 2 * 31 / 32)

    def test_flows_share_the_link(self):
        alone, shared = (group_traffic("allreduce", 4, "inter", flows=flows) for flows in (1, 8))
        assert shared.inter.messages == alone.inter.messages
        assert shared.inter.factor == 8 * alone.inter.factor

    def test_unknown_words_are_refused(self):
        with pytest.raises(PlanError, match="'scatter' is no collective"):
            group_traffic("scatter", 4, "inter")


class TestSteps:
    @pytest.mark.parametrize("option", [option.tasks for option in tree(("gpu",))], ids=" ".join)
    def test_what_ranks_hold_is_what_the_miniature_cluster_holds(self, option):
        """The cluster in miniature was written apart from all this: it counts every payload of every chunk."""
        miniature = Miniature(flat=not any(task.endswith("intra") for task in option))
        for task, step in zip(option, steps_of(option, NODES, RANKS_PER_NODE), strict=True):
            if step.traffic is not None:
                most = max(sum(map(len, held.values())) for held in miniature.held)
                assert step.share * step.parts == pytest.approx(most / WORLD)
            miniature = miniature.after(task.removesuffix(":gpu"))

    def test_one_decode_for_each_payload(self):
        assert [step.parts for step in steps_of(GRACE, 4, 2)] == [1, 1, 8]

    def test_the_owner_of_a_part_neither_encodes_nor_decodes_its_own(self):
        """The own part is added unencoded: of 4 parts 3 are encoded, 3 payloads of the own part decoded; then all 4 sums."""
        work = [(step.share, step.parts) for step in steps_of(TWO_PHASE, 4, 1) if step.traffic is None]
        assert work == [(0.75, 1), (0.25, 3), (0.25, 1), (1.0, 1)]

    def test_payloads_that_go_on_undecoded_are_all_encoded(self):
        steps = steps_of(("comp:gpu", "alltoall:inter", "allgather:inter", "decomp:gpu"), 4, 1)
        assert [(step.share, step.parts) for step in steps] == [(1.0, 1), (1.0, 1), (0.25, 4), (1.0, 4)]

    def test_gather_phase_begins_with_the_second_steps(self):
        option = ("reducescatter:intra", "reducescatter:inter", "allgather:inter", "allgather:intra")
        assert [step.gathers for step in steps_of(option, 2, 2)] == [False, False, True, True]
        assert not any(step.gathers for step in steps_of(GRACE, 2, 2))

    @pytest.mark.parametrize(
        ("option", "said"),
        [
            (("comp:gpu", "comp:gpu", "allgather:inter", "decomp:gpu"), "encoded already"),
            (("decomp:gpu", "allreduce:inter"), "not encoded"),
            (("comp:gpu", "allreduce:inter", "decomp:gpu"), "cannot be added on the wire"),
            (("comp:gpu", "alltoall:inter", "decomp:gpu"), "ends before all ranks"),
            (("comp:gpu", "allgather:inter"), "ends before all ranks"),
            (("broadcast:inter",), "sent to a root"),
            (("reducescatter:inter", "broadcast:inter"), "sent to a root|allgather"),
        ],
    )
    def test_options_that_are_none_are_refused(self, option, said):
        with pytest.raises(PlanError, match=said):
            steps_of(option, 2, 1)


class TestPrices:
    def test_plain_all_reduce(self):
        (price,) = prices(("allreduce:inter",), Identity(), cluster(4))
        assert price.us == pytest.approx(6 * 10 + 1.5 * 4000 * 0.001)
        assert price.sent_bytes == price.inter_bytes == 6000

    def test_an_exchange_of_payloads_carries_their_bytes(self):
        encode, exchange, decode = prices(GRACE, Cast(), cluster(4), costs=constant(Cast(), 7.0, 2.0))
        assert (encode.us, decode.us) == (7.0, 4 * 2.0)
        assert exchange.us == pytest.approx(3 * 10 + 3 * 2000 * 0.001)
        assert exchange.sent_bytes == 3 * Cast().payload_bytes([ElementRun(1000)], 4) == 6000

    def test_lists_of_payloads_are_carried_whole(self):
        """Of 4 ranks each has a quarter of everybody's 2000 bytes undecoded, and sends that to 3."""
        option = ("comp:gpu", "alltoall:inter", "allgather:inter", "decomp:gpu")
        first, second = prices(option, Cast(), cluster(4), costs=constant(Cast(), 0.0, 0.0))[1:3]
        assert (first.sent_bytes, second.sent_bytes) == (0.75 * 2000, 3 * 4 * 500)

    def test_hierarchical_flows_share_the_inter_link(self):
        """4 ranks a node each send a quarter of 4000 bytes; between 2 nodes an all-reduce carries as much as it is given."""
        option = ("reducescatter:intra", "allreduce:inter", "allgather:intra")
        inside, between, back = prices(option, Identity(), cluster(2, 4))
        assert inside.us == pytest.approx(3 * 1 + 0.75 * 4000 * 0.0001)
        assert between.us == pytest.approx(2 * 10 + 4 * 1000 * 0.001)
        assert (between.sent_bytes, between.inter_bytes) == (1000, 4000)
        assert back.us == pytest.approx(3 * 1 + 3 * 1000 * 0.0001)

    def test_after_a_reduce_inside_the_node_one_rank_goes_on(self):
        option = ("reduce:intra", "allreduce:inter", "broadcast:intra")
        assert prices(option, Identity(), cluster(2, 4))[1].us == pytest.approx(2 * 10 + 4000 * 0.001)

    def test_one_call_may_decode_all_payloads(self):
        """4 payloads of 4000 bytes: 4 calls of 10 us, or one for 16,000 bytes."""
        times = CodecCosts(spec=Cast(), device="gpu", encode=[(0, 0.0)], decode=[(8000, 10.0), (24000, 30.0)])
        bucket = Bucket(tensors=("w",), spec=Cast(), option=GRACE)
        for calls, us in (("each", 40.0), ("one", 20.0)):
            ours = Prices([TensorInfo("w", (1000,), "float32")], cluster(4), Costs(codecs=[times]), decode_calls=calls)
            assert ours.of(bucket).tasks[-1].us == pytest.approx(us)

    @pytest.mark.parametrize(
        ("option", "spec", "device", "at"),
        [
            ("alltoall", QSGD(), "gpu", {2}),
            ("grid", QSGD(), "gpu", {2, 5}),
            ("alltoall", ErrorFeedback(QSGD()), "gpu", {2}),
            ("allgather", QSGD(), "gpu", set()),  # all payloads are decoded, the own one too
            ("alltoall", TopK(0.01), "gpu", set()),
            ("alltoall", EFSignSGD(), "gpu", set()),
            ("alltoall", QSGD(), "cpu", set()),
        ],
    )
    def test_the_engine_adds_payloads_to_the_own_part_in_one_call_on_a_gpu(self, option, spec, device, at):
        """As `gradwire.collectives` does for specs that take batches."""
        times = CodecCosts(spec=spec, device=device, encode=[(0, 0.0)], decode=[(1, 10.0), (2**30, 10.0)])
        tensors, tasks = [TensorInfo("w", (2**20,), "float32")], COLLECTIVES[option].on(device)
        bucket = Bucket(tensors=("w",), spec=spec, option=tasks)
        engine, each = (
            Prices(tensors, cluster(16), Costs(codecs=[times]), decode_calls=calls).of(bucket) for calls in ("engine", "each")
        )
        ours = [(task.us, other.us) for task, other in zip(engine.tasks, each.tasks, strict=True) if "decomp" in task.task]
        steps = [step for step in steps_of(tasks, 16, 1) if "decomp" in step.task]
        where = [number for number, task in enumerate(tasks) if "decomp" in task]
        for number, step, (us, us_each) in zip(where, steps, ours, strict=True):
            assert (us, us_each) == (10.0 if number in at else 10.0 * step.parts, 10.0 * step.parts)

    @pytest.mark.parametrize("calls", ["engine", "each", "one"])
    def test_one_rank_alone_exchanges_nothing(self, calls):
        ours = Prices([TensorInfo("w", (1000,), "float32")], cluster(1), constant(Cast(), 5.0, 5.0), decode_calls=calls)
        bucket = Bucket(tensors=("w",), spec=Cast(), option=TWO_PHASE)
        assert [price.us for price in ours.of(bucket).tasks] == [0, 0, 0, 5, 0, 5]

    def test_rounds_share_payload_and_encode(self):
        spec = PowerSGD(rank=2)
        tensor = TensorInfo("w", (64, 32), "float32")
        option = ("comp:gpu", "allreduce:inter", "comp:gpu", "allreduce:inter", "decomp:gpu")
        bucket = Bucket(tensors=("w",), spec=spec, option=option)
        tasks = Prices([tensor], cluster(2), constant(spec, 8.0, 3.0)).of(bucket).tasks
        assert [task.us for task in tasks if task.task.startswith(("comp", "decomp"))] == [4.0, 4.0, 3.0]
        assert sum(task.sent_bytes for task in tasks) == 4 * 2 * (64 + 32)

    def test_chunks_divide_a_bucket(self):
        costs = constant(Cast(), 1.0, 1.0)
        bucket = Bucket(tensors=("w",), spec=Cast(), option=TWO_PHASE, chunk_bytes=1500)
        priced = Prices([TensorInfo("w", (1000,), "float32")], cluster(2), costs).of(bucket)
        whole = prices(TWO_PHASE, Cast(), cluster(2), costs=costs)
        assert priced.pieces == 3
        assert [3 * task.sent_bytes for task in priced.tasks] == pytest.approx([task.sent_bytes for task in whole])

    def test_tensors_with_several_widths_share_one_call(self):
        narrow, wide = QSGD(bits=2), QSGD(bits=8)
        codecs = [
            CodecCosts(spec=spec, device="gpu", encode=[(0, us)], decode=[(0, us)]) for spec, us in ((narrow, 4.0), (wide, 8.0))
        ]
        tensors = [TensorInfo("a", (3000,), "float32"), TensorInfo("b", (1000,), "float32")]
        bucket = Bucket(tensors=("a", "b"), spec={"a": narrow, "b": wide}, option=GRACE)
        assert Prices(tensors, cluster(2), Costs(codecs=codecs)).of(bucket).tasks[0].us == pytest.approx(5.0)

    def test_a_codec_that_was_not_measured_is_named_with_the_cure(self):
        with pytest.raises(PlanError, match=r"no times of QSGD\(bits=4, block=128\) on gpu.*Cast.*add an entry"):
            prices(GRACE, QSGD(), cluster(2), costs=constant(Cast(), 1.0, 1.0))

    @pytest.mark.parametrize("ranks", [2, 3, 4])
    @pytest.mark.parametrize(("spec", "scheme"), [(spec, scheme) for spec in SPECS for scheme in spec.schemes])
    def test_bytes_are_those_that_the_engine_sends(self, spec, scheme, ranks):
        from datetime import timedelta

        import torch

        from gradwire.exchange.layout import build_buckets
        from gradwire.transport import Grid, Group

        shapes = [(300, 70), (4097,), (123, 7)]
        tensors = [TensorInfo(f"t{index}", shape, "float32", "cpu") for index, shape in enumerate(shapes)]
        plan = Uniform(spec, scheme=scheme, chunk_bytes=0).plan(tensors)
        parameters = {t.name: torch.nn.Parameter(torch.zeros(t.shape)) for t in tensors}
        everybody = tuple(range(ranks))
        groups = [Group(None, rank, everybody, timedelta(1), Grid.even(1, ranks, rank)) for rank in everybody]
        random_state = torch.zeros(len(plan.buckets), 8, 4, dtype=torch.int64)
        sent = [
            sum(
                sum(chunk.bytes_to) for built in build_buckets(plan, parameters, group, random_state, 0) for chunk in built.chunks
            )
            for group in groups
        ]
        times = constant(spec, 1.0, 1.0, "cpu")
        priced = [Prices(tensors, cluster(ranks), times).of(bucket) for bucket in plan.buckets]
        predicted = sum(task.sent_bytes for bucket in priced for task in bucket.tasks)
        # a shard is rounded to blocks of 512 elements and to 16 bytes of scales
        assert predicted == pytest.approx(sum(sent) / ranks, rel=0.02, abs=200 * ranks)


class TestCodecTimes:
    POINTS = ((1000, 10.0), (2000, 30.0), (4000, 40.0))

    @pytest.mark.parametrize(("nbytes", "us"), [(0, 10), (1000, 10), (1500, 20), (2000, 30), (3000, 35), (4000, 40), (6000, 50)])
    def test_piecewise_linear(self, nbytes, us):
        assert time_at(self.POINTS, nbytes) == pytest.approx(us)

    def test_one_point_is_a_constant_and_times_never_fall_beyond_the_last(self):
        assert time_at(((1000, 10.0),), 10**6) == 10.0
        assert time_at(((1000, 10.0), (2000, 8.0)), 10**6) == 8.0

    @settings(deadline=None)
    @given(st.integers(0, 10**7), st.integers(0, 10**7))
    def test_more_bytes_never_take_less_where_points_rise(self, a, b):
        assert time_at(self.POINTS, min(a, b)) <= time_at(self.POINTS, max(a, b))

    def test_devices_are_apart(self):
        times = Prices([], cluster(2), constant(Cast(), 1.0, 2.0, "cpu"))
        assert time_at(times.points(Cast(), "cpu", "decode"), 10) == 2.0
        with pytest.raises(PlanError, match="on gpu"):
            times.points(Cast(), "gpu", "encode")


def line(alpha, beta, sizes):
    return [(size, alpha + beta * size) for size in sizes]


SIZES = [2**k for k in range(10, 24)]


class TestFit:
    @settings(deadline=None)
    @given(st.floats(0.1, 1000), st.floats(1e-6, 1e-1))
    def test_a_line_is_found_exactly(self, alpha, beta):
        fit = fit_line(line(alpha, beta, SIZES))
        assert fit.alpha_us == pytest.approx(alpha, rel=1e-6)
        assert fit.us_per_byte == pytest.approx(beta, rel=1e-6)
        assert fit.outliers == () and fit.problem == "" and fit.worst_relative_error < 1e-6

    def test_noise_and_outliers_leave_it_near_and_are_told(self):
        noise = random.Random(3)
        points = [(size, us * noise.uniform(0.97, 1.03)) for size, us in line(30.0, 0.001, SIZES)]
        for index in (2, 7, 13):
            points[index] = (points[index][0], points[index][1] * 9)
        fit = fit_line(points)
        assert set(fit.outliers) == {2, 7, 13}
        assert fit.alpha_us == pytest.approx(30, rel=0.1)
        assert fit.us_per_byte == pytest.approx(0.001, rel=0.1)
        assert fit.problem == ""

    def test_small_sizes_count_as_much_as_large_ones(self):
        """A fit of absolute residuals would lose alpha in the noise of the last points."""
        points = line(30.0, 0.001, SIZES)
        points[-1] = (points[-1][0], points[-1][1] * 1.04)
        assert fit_line(points).alpha_us == pytest.approx(30, rel=0.02)

    def test_a_bend_at_the_end_is_not_taken_for_noise(self):
        """As codecs on GPUs: flat, then linear. A line through the flat part sets the largest sizes aside."""
        knee = [(size, 400.0 * max(1, size / 2**20)) for size in SIZES]
        assert "the largest sizes all lie far from the line" in fit_line(knee).problem

    def test_what_is_no_line_says_so(self, monkeypatch):
        monkeypatch.setattr("gradwire.costs.fit._OUTLIER_AT", 1e9)
        curve = [(size, 0.1 * size**0.5) for size in SIZES]
        assert "do not follow one line" in fit_line(curve).problem

    def test_many_outliers_say_so(self):
        points = line(5.0, 0.01, SIZES)
        for index in range(0, 12, 2):
            points[index] = (points[index][0], points[index][1] * 20)
        assert "6 of 14 points lie far" in fit_line(points).problem

    def test_no_negative_start_or_slope(self):
        falling = [(1000, 10.0), (2000, 9.0), (3000, 8.0)]
        steep = [(1000, 1.0), (2000, 3.0), (3000, 5.0)]
        assert fit_line(falling).us_per_byte == 0.0
        assert math.isinf(fit_line(falling).gbps)
        assert fit_line(steep).alpha_us == 0.0

    def test_rate(self):
        assert fit_line(line(1.0, 0.00032, SIZES)).gbps == pytest.approx(25.0)

    @pytest.mark.parametrize("routing", ["ring", "direct"])
    @pytest.mark.parametrize("word", ["allreduce", "alltoall", "allgather", "broadcast"])
    @pytest.mark.parametrize("ranks", [2, 5])
    def test_the_link_is_found_from_any_collective(self, word, ranks, routing):
        traffic = group_traffic(word, ranks, "inter", routing)
        link, fit = fit_link([(size, traffic.time_us(size, INTRA, INTER)) for size in SIZES], word, ranks, routing)
        assert (link.alpha_us, link.gbps) == (pytest.approx(INTER.alpha_us), pytest.approx(INTER.gbps))
        assert fit.problem == ""

    @pytest.mark.parametrize(
        ("points", "ranks", "said"),
        [([(1, 2.0), (2, 2.0), (3, 2.0)], 2, "do not grow with bytes"), ([(1, 1.0)] * 3, 1, "ranks is 1")],
    )
    def test_times_that_tell_no_link_are_refused(self, points, ranks, said):
        with pytest.raises(FormatError, match=said):
            fit_link(points, "allreduce", ranks)

    @pytest.mark.parametrize(
        ("points", "said"),
        [
            ([(1, 1.0), (2, 2.0)], "2 points of 2 sizes"),
            ([(1, 1.0)] * 5, "5 points of 1 sizes"),
            ([(1, 1.0), (2, 0.0), (3, 3.0)], r"points\[1\]\[1\] is 0.0"),
            ([(1, 1.0), (2, math.nan), (3, 3.0)], r"points\[1\]\[1\] is nan"),
        ],
    )
    def test_bad_points_are_refused(self, points, said):
        with pytest.raises(FormatError, match=said):
            fit_line(points)


class TestFold:
    @settings(max_examples=30, deadline=None)
    @given(st.sampled_from([GRACE, TWO_PHASE]), st.integers(2, 9), st.sampled_from([Cast(), QSGD(), TopK(0.01)]))
    def test_folded_costs_are_the_prices_of_any_size(self, option, nodes, spec):
        codec = CodecCosts(spec=spec, device="gpu", encode=[(0, 5.0), (10**9, 405.0)], decode=[(0, 2.0), (10**9, 102.0)])
        costs = Costs(codecs=[codec])
        encode, link, busiest, decode = fold(option, spec, Prices([], cluster(nodes), costs))
        assert busiest == link
        for numel in (2**16, 2**20, 2**22 + 128):
            tasks = prices(option, spec, cluster(nodes), numel, costs)
            exchange = sum(task.us for task in tasks if task.task.endswith("inter"))
            assert link(4 * numel) == pytest.approx(exchange, rel=1e-3)
            assert decode(4 * numel) == pytest.approx(tasks[-1].us, rel=1e-6)
            codecs = sum(task.us for task in tasks[:-1] if not task.task.endswith("inter"))
            assert encode(4 * numel) == pytest.approx(codecs, rel=1e-6)


PUBLISHED = {"model": "two", "source": "somewhere", "tensors": [["fc.bias", 10, 0], ["fc.weight", 640, 72]]}
TIMES = {"onebit_comp_overhead": [[0, 26, 620, 2000], [0, 22, 170, 520], [10]]}


class TestImport:
    def test_profiles(self, tmp_path):
        (tmp_path / "p.json").write_text(json.dumps(PUBLISHED))
        profile = import_file(tmp_path / "p.json", 32, "V100")
        assert isinstance(profile, Profile)
        assert [(t.name, t.numel, t.backward_us, t.forward_us) for t in profile.tensors] == [
            ("fc.bias", 10, 0.0, None),
            ("fc.weight", 640, 72.0, None),
        ]
        assert profile.made is not None and "somewhere" in profile.made.command
        assert Profile.from_json(profile.to_json()) == profile

    def test_codec_times_are_flat_then_proportional(self):
        costs = costs_from(TIMES)
        codec = next(codec for codec in costs.codecs if codec.spec == OneBit())
        assert [time_at(codec.encode, 4 * n) for n in (1, 2**20, 2**22)] == [450.0, 450.0, 1800.0]
        assert [time_at(codec.decode, 4 * n) for n in (1, 2**20, 2**22)] == [170.0, 170.0, 680.0]
        assert Costs.from_json(costs.to_json()) == costs

    def test_each_codec_once(self):
        both = TIMES | {"dgc_comp_overhead": [[0, 26, 390, 1400], [0, 22, 34, 100], [10]]}
        assert [codec.spec for codec in costs_from(both).codecs] == [Cast(), OneBit(), DGC(ratio=0.01)]

    @pytest.mark.parametrize(
        ("data", "said"),
        [
            ({"tensors": 3}, "tensors is 3"),
            ({"tensors": [["a", 1]]}, r"tensors\[0\] is \['a', 1\]"),
            ({"tensors": [["a", -1, 0]]}, r"tensors\[0\]\[1\] is -1"),
            ({"tensors": [["a", 1, -5]]}, r"tensors\[0\]\[2\] is -5"),
            ({"tensors": []}, "at least one tensor"),
            ({"dgb_comp_overhead": []}, "'dgb_comp_overhead' is no known compressor"),
            ({"dgc_comp_overhead": [[0, 26]]}, r"has no \[1\]\[1\]|has no \[0\]\[2\]"),
            ({"dgc_comp_overhead": [[0, 26, 30, 0], [0, 22, 40, 0]]}, r"\[1\]\[2\] is 40.0 us for decode alone"),
            ({}, "empty"),
            ([], "an object with tensors"),
        ],
    )
    def test_wrong_files_are_refused_by_name(self, data, said, tmp_path):
        path = tmp_path / "wrong.json"
        path.write_text(json.dumps(data))
        with pytest.raises(FormatError, match=said) as refused:
            import_file(path)
        assert "wrong.json" in str(refused.value)

    def test_plans_can_be_made_from_them(self):
        profile = profile_from(PUBLISHED, 32, "V100")
        plan = Uniform(ErrorFeedback(QSGD())).plan(profile.tensor_infos("gpu"))
        assert isinstance(plan, Plan)


def test_codecs_are_priced_by_elements_whatever_the_gradients_dtype() -> None:
    """They are timed on float32: bfloat16 gradients of as many elements take as long, and half as many bytes to read."""
    spec = QSGD(bits=4)
    points = ((1000, 10.0), (1_000_000, 1000.0))
    costs = Costs(codecs=(CodecCosts(spec=spec, device="gpu", encode=points, decode=points),))
    cluster = Cluster(nodes=2, ranks_per_node=1, intra=Link(1.0, 100.0), inter=Link(10.0, 8.0))
    tensors = [TensorInfo("wide", (50_000,), "float32"), TensorInfo("narrow", (50_000,), "bfloat16")]
    prices = Prices(tensors, cluster, costs)
    option = ("comp:gpu", "allgather:inter", "decomp:gpu")
    wide, narrow = (prices.of(Bucket(tensors=(name,), spec=spec, option=option)) for name in ("wide", "narrow"))
    codecs = [[p.us for p in each.tasks if "comp" in p.task] for each in (wide, narrow)]
    assert codecs[0] == codecs[1] and codecs[0][0] == pytest.approx(time_at(points, 200_000))
    profile = [TensorProfile(name=t.name, shape=t.shape, dtype=t.dtype, backward_us=1.0) for t in tensors]
    assert bytes_of(profile[1:], spec).coded == bytes_of(profile[:1], spec).coded == 200_000
