"""The matrix: what is read from its cells, its checks, its pages, and that it measures only what is missing."""

import io

import numpy as np
import pytest
from rich.console import Console
from silent import silent

from benchmarks.campaigns.matrix import (
    RIVAL_STEPS,
    MatrixRequest,
    expected_seconds,
    measured_cells,
    run_matrix,
)
from benchmarks.campaigns.matrix_cells import (
    AGGRESSIVE,
    CANDIDATES,
    EXACT,
    METHODS,
    POWERSGD,
    SAFE,
    MatrixCell,
    paired_ratio,
    smooth,
)
from benchmarks.campaigns.matrix_checks import checks, verdict_lines
from benchmarks.campaigns.matrix_first import JUDGED_STEPS
from benchmarks.campaigns.matrix_tables import matrix_page, terminal_tables
from gradwire.auto.planning import words_of
from gradwire.bench.jobs import make_job
from gradwire.bench.names import MOST_DECIDING_STEPS
from gradwire.bench.ranks import Ranks
from gradwire.bench.results import BenchRun, Cell, Decided, WorkerOrder
from gradwire.bench.runner import BenchRequest, gbps_of
from gradwire.bench.statistics import step_times
from gradwire.bench.worker import Contest
from gradwire.core import Identity, TensorInfo
from gradwire.core.provenance import Made
from gradwire.errors import GradwireError, TestbedError
from gradwire.plan.policy import Uniform

STEP_MS = {"floor": 100.0, "ddp": 500.0, "ddp-again": 500.0, "ddp-2mb": 400.0, "ddp-fp16": 300.0, EXACT: 400.0}
STEP_MS |= {POWERSGD: 200.0, SAFE: 125.0, AGGRESSIVE: 150.0, **dict.fromkeys(CANDIDATES, 125.0)}
GRADIENT_BYTES = 20_000_000


def curve(steps: int, rate: float) -> list[float]:
    return [float(loss) for loss in 4.0 * np.exp(-rate * np.arange(steps))]


def made_run(request: BenchRequest, step_ms=STEP_MS, plain=False, rates=(), failure=None) -> BenchRun:
    """What a run of this request would leave if every step took just so long, on one job and link. `rates`: how fast the loss
    of some methods falls, others have 0.01."""
    cells = []
    for name in request.methods:
        decides = name in (EXACT, SAFE, AGGRESSIVE) and request.deciding_steps > 0
        first = request.warmup_steps + (40 if decides else 0)
        steps = max(first + request.steps, request.go_on_to.get(name, 0))
        us = [1e3 * step_ms[name]] * steps
        decided = [Decided(chosen="QSGD in 2 buckets", plain=plain, step=12, cost_us=1e6)] if decides else []
        cell = Cell(
            job=request.jobs[0], link=request.links[0], gbps=gbps_of(request.links[0]), method=name, failure=failure,
            step=step_times(us), planned_bytes=GRADIENT_BYTES, attainable_us=100e3, step_us=us, decided=decided,
            counted=(first, first + request.steps), loss=curve(steps, dict(rates).get(name, 0.01)),
            held_out=[(25, 3.0), (steps, 2.0)],
        )  # fmt: skip
        cells.append(cell)
    return BenchRun(
        made=Made(host="h", date="2026-11-22", command="c"), torch="2", cores=2, network="namespaces", nodes=request.nodes,
        ranks_per_node=1, steps=request.steps, warmup_steps=request.warmup_steps, turn_steps=request.turn_steps,
        seed=request.seed, cells=tuple(cells),
    )  # fmt: skip


def made_cell(link="500mbit", nodes=2, job="transformer", **made) -> MatrixCell:
    shape = {"jobs": [job], "nodes": nodes, "turn_steps": 3, "warmup_steps": 3}
    request = BenchRequest(
        links=[link], methods=METHODS, steps=27, deciding_steps=60, go_on_to=dict.fromkeys([POWERSGD, SAFE], 120), **shape
    )  # fmt: skip
    learning = BenchRequest(links=["unlimited"], methods=["floor", "ddp"], steps=10, go_on_to={"ddp": 100}, **shape)
    return MatrixCell(made_run(request, **made), made_run(learning))


def test_ratios_are_of_pairs_and_the_better_ddp_is_chosen_elsewhere():
    cell = made_cell()
    assert cell.pairs == 7
    assert cell.better_ddp == "ddp-2mb"
    assert cell.speedup(SAFE).ratio == pytest.approx(4.0)
    assert cell.speedup(SAFE, cell.better_ddp).ratio == pytest.approx(3.2)
    assert cell.of_attainable(SAFE) == pytest.approx(1.25)
    # what is slow in the comparing rounds alone does not change the choice
    slowed = cell.method("ddp-2mb")
    first = slowed.counted[0]
    slowed.step_us[first : first + 3] = [900e3] * 3
    assert cell.better_ddp == "ddp-2mb"
    assert cell.blocks("ddp-2mb") == [900e3] + [400e3] * 8
    assert cell.speedup("ddp", "ddp-2mb").ratio == pytest.approx(0.8)
    # and what is slow in the choosing rounds does
    slowed.step_us[first + 3 : first + 6] = slowed.step_us[first + 15 : first + 18] = [900e3] * 3
    assert cell.better_ddp == "ddp"


def test_a_drift_that_hits_both_of_a_pair_leaves_the_ratio():
    drift = np.linspace(1.0, 3.0, 7)
    paired = paired_ratio(list(2.0 * drift), list(drift))
    assert (paired.low, paired.ratio, paired.high) == pytest.approx((2.0, 2.0, 2.0))
    noisy = paired_ratio([1.7, 3.0, 1.0, 1.9, 2.0, 4.0, 2.2], [1.0] * 7)
    assert noisy.low < noisy.ratio == 2.0 < noisy.high


def test_seconds_to_a_loss_count_all_steps():
    """DDP's curve falls by a constant factor; what falls twice as fast is there in half the steps, smoothing apart."""
    cell = made_cell(rates={SAFE: 0.02, POWERSGD: 0.001})
    ddp, safe, powersgd = (cell.reached(name) for name in ("ddp", SAFE, POWERSGD))
    assert (ddp.step, ddp.computed) == (100, True)
    assert ddp.seconds == pytest.approx(100 * 0.5)
    assert safe.step is not None and 45 < safe.step < 75 and not safe.computed
    assert safe.seconds == pytest.approx(safe.step * 0.125)
    assert powersgd.step is None
    assert powersgd.seconds == pytest.approx(120 * 0.2)
    assert cell.target == pytest.approx(np.mean(curve(100, 0.01)[-20:]))
    assert cell.apart < 1e-12
    assert cell.held_out("ddp") == 2.0 and cell.held_out(AGGRESSIVE) is None
    assert cell.held_out(SAFE) == pytest.approx(3.0 - 75 / 95)


def test_smoothing_begins_when_there_are_enough():
    assert smooth([1.0] * 19) == []
    assert len(smooth([1.0] * 25)) == 6


def verdicts(cells):
    return {check.wanted: check for check in checks(cells)}


def one(cells, words):
    found = [check for wanted, check in verdicts(cells).items() if words in wanted]
    assert len(found) == 1
    return found[0]


def test_checks_hold_and_fail():
    good, plain = made_cell(), made_cell("unlimited", plain=True)
    assert one([good, plain], "interval").holds
    assert one([good], "geometric mean").holds is None
    assert one([good, plain], "geometric mean").measured == "3.200 over 1 cells"
    assert one([good], "500 Mb/s: auto").holds
    assert one([good], "100 Mb/s: auto").holds is None
    assert one([good], "within 1.15").holds is False
    slower = made_cell("100mbit", 4, "mlp", step_ms=STEP_MS | {SAFE: 440.0}, plain=True)
    assert one([good, slower], "interval").holds is False
    assert "in 1 of 2 cells; lowest 0.909 (mlp, 4 nodes, 100mbit)" in one([good, slower], "median").measured
    assert one([slower], "geometric mean").holds is False
    assert one([], "interval").holds is None


def test_plain_all_reduce_in_other_buckets_is_plain():
    cell = made_cell()
    assert not cell.chose_plain(SAFE) and cell.chose(SAFE) == "QSGD in 2 buckets"
    tensor = TensorInfo("weight", (10, 10), "float32")
    cell.method(SAFE).decided[-1:] = [
        Decided(chosen=words_of(Uniform(Identity()).plan([tensor])), plain=False, step=1, cost_us=0.0)
    ]
    assert cell.chose_plain(SAFE)
    assert not cell.chose_plain("ddp") and cell.chose("ddp") == ""


def test_what_counts_ran_under_the_plan_decided_before_it():
    cell = made_cell()
    first, end = cell.method(SAFE).counted
    for step in (first + 1, end + 20):
        cell.method(SAFE).decided.append(Decided(chosen="another", plain=True, step=step, cost_us=0.0))
    assert cell.chose(SAFE) == "QSGD in 2 buckets" and not cell.chose_plain(SAFE)
    cell.method(SAFE).decided[:1] = []
    assert cell.chose(SAFE) == "", "nothing was decided when they began"


def test_behind_counts_every_step_since_the_first():
    cell = made_cell()
    auto = cell.method(SAFE)
    auto.step_us[:] = [800e3] * 10 + [200e3] * 110
    found = cell.first_steps
    assert (found.plain_us, found.decided_step, found.late) == (400e3, 12, True), "12 steps took 8.4 s of 2"
    assert found.at_first.ratio == found.worst.ratio == pytest.approx((10 * 800 + 10 * 200) / (20 * 400))
    assert found.gain == pytest.approx(2.0) and found.over_best == pytest.approx(200 / 125)
    assert one([cell], "decides in time").measured.count("transformer, 2 nodes") == 3
    auto.step_us[100:] = [4000e3] * 20
    assert cell.first_steps.worst.ratio == pytest.approx((8 + 90 * 0.2 + 20 * 4) / (120 * 0.4))
    assert one([made_cell()], "decides in time").holds


def test_aggressive_has_to_be_there_before_powersgd():
    words = "sooner than"
    before = made_cell(rates={AGGRESSIVE: 0.05, POWERSGD: 0.02})
    assert one([before], words).holds
    after = made_cell("100mbit", rates={AGGRESSIVE: 0.02, POWERSGD: 0.05})
    assert one([before, after], words).holds is False
    assert "in 1 of 2 cells; not in transformer, 2 nodes, 100mbit" in one([before, after], words).measured
    never = made_cell(rates={AGGRESSIVE: 0.0, POWERSGD: 0.0})
    assert one([never], words).holds is False
    assert one([made_cell("1000mbit")], words).holds is None


def test_tables_and_page_show_every_cell():
    cells = [made_cell(), made_cell("unlimited"), made_cell("100mbit", 4, "mlp")]
    console = Console(file=io.StringIO(), width=260, record=True)
    for table in terminal_tables(cells):
        console.print(table)
    shown = console.export_text()
    page = matrix_page(cells)
    for text in (shown, page):
        assert "4.00 (4.00-4.00)" in text and "unlimited" in text and "QSGD in 2 buckets" in text and "~50.0" in text
    assert page.count("| mlp | 100mbit |") == 3 and "12 of 15 steps" in page
    assert all(line.strip() in page for line in verdict_lines(cells))


class FakeBench:
    """In place of the bench: notes what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[BenchRequest] = []
        self.failing = ""

    def __call__(self, request, problem, watch):
        self.asked.append(request)
        failure = "broken" if self.failing == request.links[0] and len(request.methods) > 2 else None
        return made_run(request, failure=failure)

    @property
    def titles(self):
        return [(request.nodes, request.jobs[0], request.links[0], len(request.methods)) for request in self.asked]


@pytest.fixture
def fake(monkeypatch):
    bench = FakeBench()
    monkeypatch.setattr("benchmarks.campaigns.matrix.run_bench", bench)
    return bench


def test_only_what_is_missing_is_measured(fake, tmp_path):
    said: list[str] = []
    request = MatrixRequest(tmp_path, jobs=["mlp"], links=["100mbit", "1gbit"], nodes=[2], loss_steps=100)
    fake.failing = "1gbit"
    cells, failures = run_matrix(request, None, silent(), said.append)
    assert [cell.link for cell in cells] == ["100mbit"]
    assert len(failures) == len(METHODS) and failures[0] == "2 nodes, mlp, 1gbit, floor: broken"
    assert said[1].startswith("2 cells to measure, about ")
    assert fake.titles == [(2, "mlp", "unlimited", 2), (2, "mlp", "100mbit", 11), (2, "mlp", "1gbit", 11)]
    fake.failing, fake.asked = "", []
    cells, failures = run_matrix(request, None, silent(), said.append)
    assert [cell.link for cell in cells] == ["100mbit", "1gbit"] and not failures
    assert measured_cells(request) == cells
    assert fake.titles == [(2, "mlp", "1gbit", 11)]
    fake.asked = []
    run_matrix(request, None, silent(), said.append)
    assert fake.asked == []
    longer = MatrixRequest(tmp_path, ["mlp"], ["100mbit", "1gbit"], [2], 140)
    run_matrix(longer, None, silent(), said.append)
    assert fake.titles == [(2, "mlp", "unlimited", 2), (2, "mlp", "100mbit", 11)], "learners of 1gbit go on to no loss"
    fake.asked = []
    run_matrix(MatrixRequest(tmp_path, ["mlp"], ["1gbit"], [2], 100, again=True), None, silent(), said.append)
    assert fake.titles == [(2, "mlp", "unlimited", 2), (2, "mlp", "1gbit", 11)]


def test_steps_follow_from_how_long_they_take(fake, tmp_path):
    request = MatrixRequest(tmp_path, jobs=["mlp"], links=["100mbit", "unlimited"], nodes=[2], loss_steps=100)
    run_matrix(request, None, silent(), lambda line: None)
    learning, slow, fast = fake.asked
    assert learning.go_on_to == {"ddp": 100} and learning.deciding_steps == 0
    assert (slow.turn_steps, slow.steps, slow.deciding_steps) == (
        1,
        9,
        MOST_DECIDING_STEPS,
    )  # DDP: 100 ms and 1.7 s on the wire
    assert (fast.turn_steps, fast.steps) == (3, 27)
    assert slow.go_on_to == {SAFE: JUDGED_STEPS, AGGRESSIVE: 120, POWERSGD: 120}
    assert fast.go_on_to == {SAFE: JUDGED_STEPS, "ddp": RIVAL_STEPS, "ddp-2mb": RIVAL_STEPS}
    known = made_run(learning)
    wire_s = GRADIENT_BYTES * 8 / 100e6 * 1514 / 1448
    more = expected_seconds(known, 0.1, 2) - expected_seconds(known, 0.1, 1)
    # nine steps of each method: five send what DDP sends or half of it, and none is faster than DDP without a limit
    assert more == pytest.approx(9 * (0.1 + 4 * (0.1 + wire_s) + (0.1 + wire_s / 2) + 5 * 0.5))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"jobs": ["cnn"]}, "'cnn'"),
        ({"links": ["500"]}, "'500'"),
        ({"nodes": [1]}, "nodes is 1"),
        ({"loss_steps": 10}, "loss_steps is 10"),
        ({"jobs": []}, "no job"),
    ],
)
def test_wrong_request_is_named(change, said, tmp_path):
    with pytest.raises(GradwireError, match=said):
        MatrixRequest(tmp_path, **change)


def test_without_links_to_emulate_it_is_refused(tmp_path):
    with pytest.raises(TestbedError, match="no root"):
        run_matrix(MatrixRequest(tmp_path), "no root", silent(), lambda line: None)


class FakeMethod:
    """Decides in its seventh step; its loss falls by one a step."""

    bytes_planned = 100
    crossing_bytes = phases = None
    forward_us = backward_us = 1.0
    wrong_on_purpose = False

    def __init__(self, decides: bool, warm_up_steps: int = 0) -> None:
        self.decides, self.steps, self.turns, self.warm_up_steps = decides, 0, [], warm_up_steps

    @property
    def deciding(self) -> bool:
        return self.decides and self.steps < 7

    @property
    def decided(self) -> list[Decided]:
        return [Decided(chosen="plain", plain=True, step=6, cost_us=0.0)] if self.decides else []

    def step(self, batch: object) -> float:
        self.steps += 1
        return 100.0 - self.steps

    def settle(self) -> None:
        self.turns.append(self.steps)

    def held_out_loss(self, batches: list[object]) -> float:
        return 200.0 - self.steps + len(batches)

    def codec_seconds(self) -> float:
        return 0.0

    def check(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("deciding_steps", "warm_up", "decided", "first"),
    [(18, 0, 7, 10), (8, 0, 7, 10), (5, 0, 5, 8), (8, 9, 7, 10), (18, 20, 7, 20), (18, 500, 7, 25)],
)
def test_methods_decide_first_and_go_on_afterwards(monkeypatch, deciding_steps, warm_up, decided, first):
    """In one turn, which ends with the decision, or when the order says. Then all warm up, as long as their codecs do, within
    the order's steps. All have the same turns, and go on in equal rounds."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("gradwire.bench.worker.gc.collect", lambda: 0)  # of all that tests loaded: seconds
    methods = {"ddp": FakeMethod(False), SAFE: FakeMethod(True, warm_up)}
    order = WorkerOrder(
        job="mlp", methods=("ddp", SAFE), seed=0, steps=4, warmup_steps=3, turn_steps=2, collective_timeout_s=1.0, runner=0,
        result="", deciding_steps=deciding_steps, go_on_to={"ddp": 40, SAFE: 43},
    )  # fmt: skip
    contest = Contest(order, make_job("mlp"), Ranks(1.0, communicating=False), lambda name, *others: methods[name])
    contest.run()
    ddp, safe = contest.records()
    assert ddp.failure is None and safe.failure is None
    assert ddp.counted == (3, 7) and len(ddp.loss[0]) == 40
    assert methods["ddp"].turns == [3, 5, 7, 24, 40]
    assert ddp.held_out == [(24, 184.0), (40, 168.0)]
    assert safe.counted == (first, first + 4) and len(safe.loss[0]) == 43
    assert methods[SAFE].turns[0] == decided and methods[SAFE].turns[-2] == (first + 4 + 44) // 2
    assert [each.plain for each in safe.decided] == [True]
