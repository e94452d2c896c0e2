"""Which plans are offered for a trial, on made-up profiles: no ranks."""

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from benchmarks import convergence
from benchmarks.accuracy import read
from benchmarks.common import RESULTS
from benchmarks.paired import interval
from gradwire.auto.accuracy import (
    LOCAL_SPECS,
    SCHEDULES,
    STEPS_FOR_ONE,
    all_specs,
    check_accuracy,
    first_policy,
    later_specs,
    schedules_of,
    specs_of,
)
from gradwire.auto.adaptive_bits import with_bits
from gradwire.auto.driver import Auto, _beyond, _rules_of
from gradwire.auto.live import Live
from gradwire.auto.local import local_offer
from gradwire.auto.measured_losses import COUNTS, EIGHT_BITS, FOUR_BITS, ROWS, WEIGHTED_3, WEIGHTED_4, WEIGHTED_8, LossRow
from gradwire.auto.planning import MOST_TRIED, Seen, foreseen, offers, on_trial, words_of
from gradwire.core import QSGD, Cluster, Costs, ErrorFeedback, Identity, Link, Profile, TensorInfo, TensorProfile
from gradwire.core.costs import CodecCosts
from gradwire.core.schedules import Backward, Delayed, Pipelined
from gradwire.core.specs import DGC, PowerSGD, Spec
from gradwire.errors import PlanError
from gradwire.plan import AdaptiveBits, Policy, Uniform
from gradwire.planner import PlanningJob
from gradwire.planner.joint import joint

TENSORS = [TensorInfo(f"w{index}", (300, 500), "float32") for index in range(8)] + [TensorInfo("b", (500,), "float32")]


def profile(dtype: str = "float32") -> Profile:
    tensors = [TensorProfile(name=t.name, shape=t.shape, dtype=dtype, backward_us=2000.0, forward_us=900.0) for t in TENSORS]
    return Profile(model="made up", batch=1, device="cpu", optimizer_us=10_000.0, tensors=tensors)


def cluster(gbps: float) -> Cluster:
    return Cluster(nodes=2, ranks_per_node=1, intra=Link(50.0, gbps), inter=Link(50.0, gbps))


def shared_nodes(intra: Link, inter: Link) -> Cluster:
    return Cluster(nodes=2, ranks_per_node=2, intra=intra, inter=inter)


def costs(specs: tuple[Spec, ...]) -> Costs:
    points = ((4096, 5.0), (2**20, 200.0), (2**22, 800.0))
    return Costs(codecs=[CodecCosts(spec=spec, device="cpu", encode=points, decode=points) for spec in specs])


@pytest.mark.parametrize("accuracy", ["exact", "safe", "aggressive"])
def test_all_that_auto_may_choose_follows_a_loss_scale(accuracy: str) -> None:
    for ranks in COUNTS:
        assert all(spec.follows_scale for spec in later_specs(accuracy, SCHEDULES, ranks))


@pytest.mark.parametrize("accuracy", ["exact", "safe", "aggressive"])
@pytest.mark.parametrize("gbps", [0.1, 10.0])
def test_offers_are_few_different_and_of_the_class(accuracy: str, gbps: float) -> None:
    specs = specs_of(accuracy, TENSORS, 2)
    made = offers(profile(), cluster(gbps), costs(specs), specs, seconds=0.2)
    digests = [offer.plan.digest() for offer in made]
    assert 1 <= len(made) <= MOST_TRIED + 1 and len(set(digests)) == len(digests)
    assert [offer.candidate.plain for offer in made].count(True) == 1
    used = {spec for offer in made for bucket in offer.plan.buckets for spec in bucket.specs}
    assert used <= {Identity(), *specs}
    compressed = [offer for offer in made if not offer.candidate.plain and offer.candidate.loss > 0]
    assert not compressed if accuracy == "exact" else (compressed or gbps > 1)


@pytest.mark.parametrize(("lanes", "reports"), [(8, True), (2, True), (8, False)])
def test_predictions_follow_the_rules_of_the_live_job(lanes: int, reports: bool) -> None:
    """Its lanes were chosen by the round trips of connections, and DDP's hook has no reports."""
    far = Cluster(nodes=2, ranks_per_node=1, intra=Link(50.0, 10.0), inter=Link(25_000.0, 0.1, message_us=40.0))
    job = SimpleNamespace(lanes=SimpleNamespace(group=SimpleNamespace(grid=None), data=[None] * lanes, offload=0))
    vars(job).update({"device": None, "tensors": TENSORS, "plan_of": None} | ({"ride": print} if reports else {}))
    rules = _rules_of(Live(job), profile(), far)
    assert (rules.lanes, rules.reports) == (lanes, reports)
    every, schedules = costs((*LOCAL_SPECS, ErrorFeedback(QSGD(bits=4)))), [Pipelined(), Delayed(k=None)]
    simulator = PlanningJob(profile(), far, every, [QSGD(bits=4)], rules=rules).simulator
    made = [
        *offers(profile(), far, every, [QSGD(bits=4)], 0.2, schedules=schedules, rules=rules),
        local_offer(profile(), far, every, [QSGD(bits=4)], rules),
    ]
    assert {"backward", "delayed", "local"} <= {offer.plan.schedule.word for offer in made if offer is not None}
    assert all(offer.candidate.predicted_us == simulator.step_us(offer.plan) for offer in made)


@pytest.mark.parametrize("spec", [QSGD(bits=4), WEIGHTED_4], ids=repr)
def test_over_a_far_link_a_spec_is_offered_in_few_buckets(spec: Spec) -> None:
    """Each bucket waits for the latency four times. No search is made in no time, so policies alone are offered."""
    tensors = [
        TensorProfile(name=f"w{index}", shape=(500, 500), dtype="float32", backward_us=8000.0, forward_us=4000.0)
        for index in range(24)
    ]
    job = Profile(model="made up", batch=1, device="cpu", optimizer_us=10_000.0, tensors=tensors)
    best: dict[float, Any] = {}
    for alpha_us in (100.0, 100_000.0):
        link = Link(alpha_us, 0.1, message_us=100.0)
        many = Cluster(nodes=20, ranks_per_node=1, intra=link, inter=link)
        made = offers(job, many, costs((spec,)), (spec,), seconds=0.0)
        best[alpha_us] = next(offer for offer in made if not offer.candidate.plain)
    near, far = (best[alpha_us] for alpha_us in best)
    assert len(far.plan.buckets) <= 3 < len(near.plan.buckets)
    assert not any(bucket.chunk_bytes for bucket in far.plan.buckets), "none is cut"


ONE_PHASE = {
    (1, False): ("comp:cpu", "allgather:inter", "decomp:cpu"),
    (2, False): ("reducescatter:intra", "comp:cpu", "allgather:inter", "decomp:cpu", "allgather:intra"),
    (2, True): ("reduce:intra", "comp:cpu", "allgather:inter", "broadcast:intra", "decomp:cpu"),
}


@pytest.mark.parametrize(("per_node", "uneven"), ONE_PHASE)
@pytest.mark.parametrize(
    ("nodes", "alpha_us", "gbps", "is_faster"),
    [(2, 25_000.0, 0.1, True), (2, 1_000.0, 0.1, False), (3, 50_000.0, 1.0, True), (5, 50_000.0, 1.0, False)],
)
def test_few_far_nodes_give_each_other_whole_payloads(
    per_node: int, uneven: bool, nodes: int, alpha_us: float, gbps: float, is_faster: bool
) -> None:
    """They wait for the distance once. Of more nodes each would send its payload many times, and near ones do not wait long."""
    link = Link(alpha_us, gbps, message_us=40.0)
    shape = Cluster(nodes=nodes, ranks_per_node=per_node, intra=Link(50.0, 10.0), inter=link, uneven=uneven)
    specs, schedules = specs_of("safe", TENSORS, 4), schedules_of("aggressive", ("pipelined", "delayed"), 2)
    every = costs((*specs, ErrorFeedback(QSGD(bits=4)), QSGD(bits=8)))
    made = offers(profile(), shape, every, specs, seconds=0.0, schedules=schedules)
    options = {each.candidate.name: {bucket.option for bucket in each.plan.buckets} for each in made}
    one = [name for name, found in options.items() if ONE_PHASE[per_node, uneven] in found]
    assert bool(one) == is_faster
    assert one == [name for name in options if "in one phase" in name]
    assert not any("pipelined" in name for name in one), "nothing is left to gather in the next forward"
    for schedule in ("backward", "delayed") if is_faster else ():
        own = [each.candidate for each in made if each.plan.schedule.word == schedule and not each.candidate.plain]
        assert not own or min(own, key=lambda each: each.predicted_us).name in one


def test_what_cannot_travel_in_one_phase_keeps_two() -> None:
    """Sums of PowerSGD are made on the wire, and DGC remembers a rank's own gradient, not the sum of a node."""
    far = shared_nodes(Link(50.0, 10.0), Link(25_000.0, 0.1, message_us=40.0))
    for spec in (PowerSGD(rank=4), DGC(0.1)):
        made = offers(profile(), far, costs((spec,)), (spec,), seconds=0.0)
        assert not any("in one phase" in offer.candidate.name for offer in made)


@pytest.mark.parametrize(("gbps", "lossy"), [(0.0001, True), (1.0, False)])
def test_what_needs_more_steps_is_offered_only_where_links_are_so_slow_that_it_pays(gbps: float, lossy: bool) -> None:
    specs = specs_of("aggressive", TENSORS, 2)
    made = offers(profile(), cluster(gbps), costs(specs), specs, seconds=0.2)
    steps = [offer.candidate.steps_for_one for offer in made]
    assert (steps[0] > 1.0) == lossy and set(steps) <= {1.0, *STEPS_FOR_ONE.values()}
    least = min(offer.candidate.predicted_us * each for offer, each in zip(made, steps, strict=True))
    others = [offer for offer in made if not offer.candidate.plain]
    assert all(offer.candidate.predicted_us * offer.candidate.steps_for_one <= 1.5 * least for offer in others)
    plain = next(offer.candidate for offer in made if offer.candidate.plain)
    assert plain.steps_for_one == 1.0


@pytest.mark.parametrize(
    ("links", "hierarchical"),
    [((Link(50.0, 40.0), Link(50.0, 0.1)), True), ((Link(20_000.0, 1.0), Link(50.0, 40.0)), False)],
)
@pytest.mark.parametrize("accuracy", ["exact", "safe"])
def test_where_ranks_share_nodes_the_faster_way_comes_first_and_plain_stays_flat(
    accuracy: str, links: tuple[Link, Link], hierarchical: bool
) -> None:
    specs = specs_of(accuracy, TENSORS, 2)
    made = offers(profile(), shared_nodes(*links), costs(specs), specs, seconds=0.0)
    fastest = min(made, key=lambda offer: offer.candidate.predicted_us)
    assert ("hierarchical" in fastest.candidate.name) == hierarchical
    assert all("hierarchical" not in offer.candidate.name for offer in made if offer.candidate.plain)


def test_a_running_plan_is_offered_once() -> None:
    specs = specs_of("safe", TENSORS, 2)
    first, *_ = offers(profile(), cluster(0.1), costs(specs), specs, seconds=0.0)
    again = offers(profile(), cluster(0.1), costs(specs), specs, seconds=0.0, current=first.plan)
    assert [offer.plan.digest() for offer in again].count(first.plan.digest()) == 1
    plain = next(offer for offer in again if offer.candidate.plain)
    again = offers(profile(), cluster(0.1), costs(specs), specs, seconds=0.0, current=plain.plan)
    assert [offer.candidate.plain for offer in again].count(True) == 1


@pytest.mark.parametrize("gbps", [0.1, 100.0])
def test_a_plan_that_was_seen_keeps_its_time_and_takes_no_turn_of_its_own(gbps: float) -> None:
    specs = specs_of("safe", TENSORS, 2)
    plan = first_policy("safe", TENSORS, 2).plan(TENSORS, 2)
    without = offers(profile(), cluster(gbps), costs(specs), specs, seconds=0.0)
    made = offers(profile(), cluster(gbps), costs(specs), specs, seconds=0.0, seen=Seen(plan, 70_000.0))
    (own,) = [offer for offer in made if offer.plan.digest() == plan.digest()]
    known = plan.digest() in [offer.plan.digest() for offer in without]
    assert own.candidate.seen_us == 70_000.0 and own.candidate.runs == known
    assert len(made) == len(without) + (not known)
    assert [offer.candidate for offer in made if offer is not own and offer.candidate.seen_us] == []


def test_a_plan_that_was_seen_in_a_trial_that_was_broken_off_has_no_time() -> None:
    specs = specs_of("safe", TENSORS, 2)
    plan = on_trial(first_policy("safe", TENSORS, 2).plan(TENSORS, 2), 3)
    without = offers(profile(), cluster(0.1), costs(specs), specs, seconds=0.0)
    made = offers(profile(), cluster(0.1), costs(specs), specs, seconds=0.0, seen=Seen(plan, 70_000.0))
    assert [offer.plan.digest() for offer in made] == [offer.plan.digest() for offer in without]


def test_a_plan_of_the_planner_that_runs_is_offered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner finds it again, with another prediction since times were measured again."""
    specs = specs_of("safe", TENSORS, 2)
    found: list[Any] = []

    def once(*arguments: Any) -> Any:
        found[:] = found or [joint(*arguments)]
        return found[0]

    monkeypatch.setattr("gradwire.auto.planning.joint", once)
    first = offers(profile(), cluster(0.1), costs(specs), specs, seconds=30.0)
    plan = next(offer.plan for offer in first if offer.plan.prediction is not None)
    current = msgspec.structs.replace(plan, prediction=None)
    again = offers(profile(), cluster(0.1), costs(specs), specs, seconds=30.0, current=current)
    digests = [each.plan.digest() for each in again]
    assert digests.count(current.digest()) == 1 and len(set(digests)) == len(digests)


def test_what_compressors_cannot_take_is_never_compressed() -> None:
    wide = [TensorInfo(t.name, t.shape, "float64") for t in TENSORS]
    assert specs_of("safe", wide, 2) == ()
    mixed = [*wide[:4], *TENSORS[4:]]
    plan = first_policy("safe", mixed, 2).plan(mixed)
    assert {plan_spec(plan, t.name) for t in mixed if t.dtype == "float64" or len(t.shape) < 2} == {Identity()}
    assert {plan_spec(plan, t.name) for t in mixed if t.dtype == "float32" and len(t.shape) == 2} == {WEIGHTED_4}


@pytest.mark.parametrize("gbps", [0.01, 0.1, 10.0])
@pytest.mark.parametrize("seconds", [0.0, 5.0])
def test_embeddings_go_by_4_bits_where_a_spec_has_no_code_for_zero(gbps: float, seconds: float) -> None:
    looked_up = [msgspec.structs.replace(each, embedding=each.name == "w7") for each in profile().tensors]
    model = msgspec.structs.replace(profile(), tensors=tuple(looked_up))
    specs = specs_of("safe", model.tensor_infos("cpu"), 4)
    made = [offer.plan for offer in offers(model, cluster(gbps), costs(specs), specs, seconds=seconds)]
    assert any(plan_spec(plan, "w0") == WEIGHTED_4 for plan in made) or gbps > 1
    assert {plan_spec(plan, "w7") for plan in made} <= {FOUR_BITS, Identity()}


def test_a_trial_has_the_specs_of_late_steps_and_the_same_buckets() -> None:
    plan = first_policy("safe", TENSORS, 4).plan(TENSORS, 4)
    tried = on_trial(plan, 3)
    assert {spec for bucket in tried.buckets for spec in bucket.specs} == {WEIGHTED_4.settled, Identity()}
    assert WEIGHTED_4.settled == msgspec.structs.replace(WEIGHTED_4, warm_up_steps=0)
    assert [bucket.tensors for bucket in tried.buckets] == [bucket.tensors for bucket in plan.buckets]
    assert on_trial(plan, 19) == tried and on_trial(plan, 20) is plan
    four = Policy(default=FOUR_BITS).plan(TENSORS, 4)
    assert on_trial(four, 3) is four


def plan_spec(plan, name: str) -> Spec:
    return next(bucket.spec_of(name) for bucket in plan.buckets if name in bucket.tensors)


def test_safe_is_what_the_rows_of_that_number_of_ranks_say() -> None:
    assert specs_of("safe", TENSORS, 2) == specs_of("safe", TENSORS, 3) == specs_of("safe", TENSORS, 4) == (FOUR_BITS, WEIGHTED_4)
    assert specs_of(0.015, TENSORS, 2) == specs_of(0.015, TENSORS, 4) == (FOUR_BITS, WEIGHTED_3)
    assert specs_of("safe", TENSORS, 5) == specs_of("safe", TENSORS, 16) == (WEIGHTED_8, FOUR_BITS)
    assert specs_of("safe", TENSORS, 17) == specs_of("safe", TENSORS, 1024) == (EIGHT_BITS,)
    assert specs_of(0.004, TENSORS, 2) == (FOUR_BITS,) and specs_of(0.001, TENSORS, 2) == (EIGHT_BITS,)
    assert specs_of("exact", TENSORS, 2) == specs_of("safe", TENSORS, 10_000) == ()
    assert set(specs_of("safe", TENSORS, 2)) < set(specs_of("aggressive", TENSORS, 2))
    assert all(spec.law.kind == "unbiased" or spec.feedback for spec in specs_of("aggressive", TENSORS, 2))


@pytest.mark.parametrize("ranks", [2, 16, 32])
def test_the_first_plan_sends_the_fewest_bytes(ranks: int) -> None:
    plan = first_policy("safe", TENSORS, ranks).plan(TENSORS, ranks)
    assert plan_spec(plan, "w0") == {2: WEIGHTED_4, 16: WEIGHTED_8, 32: EIGHT_BITS}[ranks]


@pytest.mark.parametrize(("saved", "ranks"), [(16, 4), (4, 16), (32, 8), (8, 32)])
def test_a_plan_that_loses_too_much_here_is_taken_up_from_other_ranks_and_not_kept(saved: int, ranks: int) -> None:
    plan = first_policy("safe", TENSORS, saved).plan(TENSORS, saved)
    assert Auto("safe", ("backward",), ranks).refuses(plan, plan) == ""
    assert "does not allow" in Auto("exact", ("backward",), ranks).refuses(plan, plan)
    assert _beyond(plan, all_specs("safe", ranks)) and not _beyond(plan, all_specs("safe", saved))


@pytest.mark.parametrize("accuracy", ["safe", "aggressive", 0.02])
def test_a_plan_of_an_earlier_release_is_taken_up_and_not_kept(accuracy: str | float) -> None:
    """As 0.3.0 chose for "aggressive", and 0.2.0 for "safe"."""
    plan = Policy(default=ErrorFeedback(QSGD(bits=2))).plan(TENSORS)
    assert Auto(accuracy, ("backward",), 2).refuses(plan, plan) == ""
    assert "does not allow" in Auto("exact", ("backward",), 2).refuses(plan, plan)
    assert _beyond(plan, all_specs(accuracy, 2))


@pytest.mark.parametrize("wrong", [0.0, -0.1, 1.0, "save", True, float("nan")])
def test_an_accuracy_is_a_class_or_a_share(wrong: Any) -> None:
    with pytest.raises(PlanError, match="accuracy"):
        check_accuracy(wrong)


@pytest.mark.parametrize("ranks", [3, 4, 8, 16, 10_000])
def test_what_has_no_rows_for_so_many_ranks_is_left_out(ranks: int) -> None:
    largest = {spec: max(rows) for spec, rows in ROWS.items() if rows and isinstance(spec, ErrorFeedback)}
    assert all(ranks <= largest[spec] for spec in specs_of("safe", TENSORS, ranks) if isinstance(spec, ErrorFeedback))
    assert schedules_of("safe", ("backward", "pipelined", "delayed"), ranks) == (Pipelined(),)
    plan = first_policy("safe", TENSORS, ranks).plan(TENSORS, ranks)
    assert {spec for bucket in plan.buckets for spec in bucket.specs} <= {*specs_of("safe", TENSORS, ranks), Identity()}
    assert set(specs_of("aggressive", TENSORS, ranks)) == set(specs_of("aggressive", TENSORS, 2))


def test_rows_are_those_of_the_trainings() -> None:
    """The table of losses says what the file of trainings says."""
    trainings = read(RESULTS / "accuracy.jsonl")
    forms = {"QSGD(bits=8)": EIGHT_BITS, "today4": FOUR_BITS}
    for form, spec in (forms | {"weighted3": WEIGHTED_3, "weighted4": WEIGHTED_4, "weighted8": WEIGHTED_8}).items():
        for ranks, jobs in ROWS[spec].items():
            for job, row in jobs.items():
                own = [each for each in trainings if (each["job"], each["ranks"], each["steps"]) == (job, ranks, 200)]
                exact = {each["seed"]: each["loss"] for each in own if each["form"] == "exact"}
                shares = [each["loss"] / exact[each["seed"]] - 1 for each in own if each["form"] == form]
                mean, width = interval(shares)
                assert len(shares) >= 3 and row == LossRow(round(mean, 4), round(mean + width, 4)), (spec, ranks, job)


def test_words_count_widths_rather_than_name_them_all() -> None:
    adaptive = AdaptiveBits()
    plan = with_bits(adaptive.policy.plan(TENSORS), adaptive, {f"w{index}": 2 + index % 4 for index in range(8)})
    assert words_of(plan).startswith("QSGD of several widths in ")


def test_words_say_whether_sums_inside_nodes_are_exact() -> None:
    lossy = "comp:cpu gather:intra decomp:cpu comp:cpu allgather:inter decomp:cpu broadcast:intra"
    for scheme, ends in (("leaders", ", hierarchical"), (lossy, "inside nodes too"), ("flat", "buckets")):
        assert words_of(Uniform(QSGD(bits=4), scheme=scheme, bucket_bytes=2**20).plan(TENSORS)).endswith(ends)


@pytest.mark.parametrize("accuracy", ["exact", "safe", "aggressive"])
def test_schedules_that_are_allowed_are_offered_and_others_foreseen(accuracy: str) -> None:
    specs, schedules = specs_of(accuracy, TENSORS, 2), schedules_of(accuracy, ("backward", "pipelined", "delayed"), 2)
    every = costs((*specs, ErrorFeedback(QSGD(bits=4)), QSGD(bits=8)))
    made = offers(profile(), cluster(0.5), every, specs, seconds=0.2, schedules=schedules)
    kinds = [offer.plan.schedule.word for offer in made]
    possible = {"backward", "pipelined"} | ({"delayed"} if accuracy != "exact" else set())
    assert set(kinds) == possible and len(made) <= MOST_TRIED + len(possible)
    assert {offer.plan.schedule for offer in made} <= {Backward(), *schedules}
    later = [offer.candidate for offer in made if offer.plan.schedule.word == "delayed"]
    others = [offer.candidate for offer in made if offer.plan.schedule.word != "delayed"]
    assert all(one.loss > other.loss for one in later for other in others)
    names = [candidate.name for candidate in foreseen(profile(), cluster(0.5), every, specs, schedules)]
    assert len(names) == len(possible) - 1
    assert max(made, key=lambda offer: offer.candidate.plain).plan.schedule == Backward()


@pytest.mark.parametrize("accuracy", ["safe", "aggressive"])
def test_a_schedule_that_is_not_allowed_is_foreseen_with_its_best_spec(accuracy: str) -> None:
    """On 5 to 16 ranks the specs with the fewest bytes come first, and in "aggressive" the last one needs twice the steps."""
    specs = specs_of(accuracy, TENSORS, 16)
    (found,) = foreseen(profile(), cluster(0.1), costs(specs), specs, [Pipelined()])
    alone = [foreseen(profile(), cluster(0.1), costs((spec,)), [spec], [Pipelined()])[0] for spec in specs]
    assert found.to_loss_us <= 1.02 * min(each.to_loss_us for each in alone) < alone[-1].to_loss_us


def test_safe_delays_only_with_corrections_that_are_nearly_exact() -> None:
    delayed = [schedule for schedule in schedules_of("safe", ("delayed",), 2) if isinstance(schedule, Delayed)]
    assert {(schedule.k, schedule.correction) for schedule in delayed} == {
        (k, correction) for k in (2, 5) for correction in (None, QSGD(bits=8))
    }


@pytest.mark.parametrize("schedule", schedules_of("safe", ("delayed",), 2), ids=repr)
def test_safe_delays_only_as_was_trained(schedule: Delayed) -> None:
    trained = [
        name
        for name, arm in convergence.ARMS.items()
        if arm.plan.schedule == msgspec.structs.replace(schedule, warmup_steps=15) and not arm.skipped
    ]
    finals = json.loads(convergence.PATH.read_text())["finals"]
    assert len(trained) == 1 and all(trained[0] in found for found in finals.values())


def test_delayed_runs_only_with_specs_that_have_a_row_of_losses() -> None:
    specs, schedules = specs_of("safe", TENSORS, 2), schedules_of("safe", ("delayed",), 2)
    four = ErrorFeedback(QSGD(bits=4))
    made = offers(profile(), cluster(0.2), costs((*specs, four, QSGD(bits=8))), specs, seconds=0.2, schedules=schedules)
    later = [offer.plan for offer in made if offer.plan.schedule.word == "delayed"]
    assert later and {spec for plan in later for bucket in plan.buckets for spec in bucket.specs} <= {four, Identity()}


def test_wide_gradients_are_offered_in_all_schedules_but_delayed_as_they_are() -> None:
    schedules = schedules_of("safe", ("pipelined", "delayed"), 2)
    made = offers(profile("float64"), cluster(0.1), costs(()), (), seconds=0.0, schedules=schedules)
    assert {offer.plan.schedule.word for offer in made} == {"backward", "pipelined"}
