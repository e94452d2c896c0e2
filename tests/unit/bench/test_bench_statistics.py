"""Numbers, table and summary that follow from what was recorded."""

import io
from types import SimpleNamespace

import msgspec
import pytest
from made_up_runs import made_up_run
from rich.console import Console
from silent import silent

import gradwire as gw
from gradwire.bench import demo
from gradwire.bench.demo import METHODS, DemoSummary, closing_lines, draw_demo, summarise, summary_table
from gradwire.bench.methods import Gradwire
from gradwire.bench.progress import ProgressView, RaceView
from gradwire.bench.recorded import method_folder
from gradwire.bench.results import Alone, BenchRun, MethodRecord, StepEvent, WorkerRecord
from gradwire.bench.statistics import alone_from, cells_from, median_ratio, step_times, wire_us
from gradwire.bench.table import FULL_WIDTH, tables
from gradwire.core import make_folder
from gradwire.core.provenance import Made
from gradwire.record import Run

WARMUP = 1


def method(name, wall_us, planned, sent=None, codec=0.0, failure=None):
    """A record of two ranks, the second a millisecond slower, after one warm-up step of a second."""
    steps = [1e6, *wall_us]
    return MethodRecord(
        method=name,
        failure=failure,
        wall_us=[steps, [us + 2e3 for us in steps]],
        cpu_us=[steps, steps],
        loss=[[4.0 - 0.1 * i for i in range(len(steps))], [5.0 - 0.1 * i for i in range(len(steps))]],
        sent_bytes=[[10**9] + [planned + 100] * len(wall_us)] * 2 if sent is None else sent,
        planned_bytes=[planned, planned],
        codec_us=[codec, codec],
    )


def record():
    return WorkerRecord(
        job="transformer",
        parameters=6_000_000,
        world_size=2,
        ranks_per_interface=1,
        warmup_steps=WARMUP,
        methods=[
            method("floor", [99_000.0, 99_000.0, 99_000.0], 0),
            method("ddp", [499_000.0, 499_000.0, 499_000.0], 24_000_000),
            method("gradwire:qsgd4", [149_000.0, 129_000.0, 199_000.0], 3_000_000, codec=10_000.0),
            method("ddp-fp16", [], 0, failure="rank 1: RuntimeError: broken"),
        ],
    )


def run_of(cells, network="namespaces", alone=()):
    return BenchRun(
        made=Made(host="h", date="2026-01-01", command="test"),
        torch="2.13",
        cores=2,
        network=network,
        nodes=2,
        ranks_per_node=1,
        steps=3,
        warmup_steps=WARMUP,
        turn_steps=5,
        seed=0,
        alone=tuple(alone),
        cells=tuple(cells),
    )


def alone():
    return Alone(job="transformer", parameters=6_000_000, step=step_times([90_000.0, 90_000.0]))


def cells(link="500mbit", gbps=0.5):
    return {cell.method: cell for cell in cells_from(record(), link, gbps, 1, alone())}


def test_bytes_between_nodes_are_those_of_all_ranks() -> None:
    told = record()
    floor, ddp, ours, _ = told.methods
    known = msgspec.structs.replace(ours, crossing_bytes=[2_000_000, 1_000_000], phases=2)
    partly = msgspec.structs.replace(ddp, crossing_bytes=[2_000_000, None])
    made = cells_from(msgspec.structs.replace(told, methods=[floor, partly, known]), "500mbit", 0.5, 1, alone())
    assert [(cell.crossing_bytes, cell.phases) for cell in made] == [(None, None), (None, None), (3_000_000, 2)]


def test_phases_of_a_plan_are_those_between_nodes() -> None:
    def phases_of(policy: gw.Policy) -> int:
        tensors = [gw.TensorInfo("w", (1000, 10), "float32"), gw.TensorInfo("b", (10,), "float32")]
        handle = SimpleNamespace(plan=policy.plan(tensors, 4, 2))
        return Gradwire.phases.fget(SimpleNamespace(handle=handle))  # type: ignore[attr-defined]

    assert phases_of(gw.Uniform(gw.QSGD(bits=4))) == phases_of(gw.Uniform(gw.Identity())) == 2
    one = "reducescatter:intra comp:cpu allgather:inter decomp:cpu allgather:intra"
    assert phases_of(gw.Uniform(gw.QSGD(bits=4), scheme=one)) == 1


def test_cells_follow_their_definitions():
    got = cells()
    ours = got["gradwire:qsgd4"]
    wire = 3_000_000 * 8 / 500 * 1514 / 1448  # bits over bits per microsecond
    assert ours.step.median_us == 150_000.0  # the mean over ranks, without warm-up
    assert ours.step.minimum_us == 130_000.0
    assert ours.exposed_us == 50_000.0
    assert ours.ideal_us == 100_000.0
    assert wire < 100_000.0
    assert ours.attainable_us == 110_000.0
    assert got["ddp"].ideal_us == pytest.approx(24_000_000 * 8 / 500 * 1514 / 1448)
    assert ours.counted_bytes == 3_000_100
    assert ours.counted_over_planned == pytest.approx(3_000_100 / 3_000_000)
    assert ours.scaling_factor == pytest.approx(90_000 / 160_000)
    assert ours.speedup.ratio == pytest.approx(500 / 150)
    assert ours.speedup.low <= ours.speedup.ratio <= ours.speedup.high
    assert ours.loss == pytest.approx([4.5, 4.4, 4.3, 4.2])
    assert len(ours.step_us) == 4
    assert got["ddp-fp16"].failure == "rank 1: RuntimeError: broken"
    assert got["ddp-fp16"].step is None


def test_ranks_that_share_an_interface_share_its_count():
    shared = msgspec.structs.replace(record(), ranks_per_interface=2)
    ours = cells_from(shared, "unlimited", None, 1, None)[1]
    assert ours.counted_bytes == 12_000_050
    assert ours.scaling_factor is None


def test_bytes_of_nodes_with_several_ranks_are_not_compared_with_the_plan():
    """The interface of a node has what leaves the node. Plain loopback has everything."""
    of_nodes = msgspec.structs.replace(record(), world_size=4, ranks_per_interface=2)
    ddp = cells_from(of_nodes, "500mbit", 0.5, 2, None)[1]
    assert ddp.counted_bytes == 12_000_050 and ddp.counted_over_planned is None
    on_loopback = msgspec.structs.replace(record(), world_size=4, ranks_per_interface=4)
    assert cells_from(on_loopback, "unlimited", None, 2, None)[1].counted_over_planned is not None


def test_several_ranks_a_node_have_no_ideal_on_a_limited_link():
    ddp = cells_from(record(), "500mbit", 0.5, 2, None)[1]
    assert ddp.ideal_us is None and ddp.attainable_us is None
    assert cells_from(record(), "unlimited", None, 2, None)[1].ideal_us == 100_000.0


def test_unlimited_link_has_no_wire_time():
    assert wire_us(10**9, None) == 0.0


def test_alone_keeps_its_failure():
    broken = msgspec.structs.replace(record(), methods=[method("floor", [], 0, failure="no")])
    assert alone_from(broken).failure == "no"
    assert alone_from(record()).step.mean_us == 100_000.0


def test_interval_is_wide_for_noise_and_closed_without():
    still = median_ratio([2.0] * 20, [1.0] * 20)
    assert (still.low, still.ratio, still.high) == (2.0, 2.0, 2.0)
    noisy = median_ratio([2.0, 3.0, 1.0] * 7, [1.0, 2.0, 0.5] * 7)
    assert noisy.low < noisy.ratio < noisy.high


def test_results_survive_the_file(tmp_path):
    run = run_of(cells().values(), alone=[alone()])
    run.save(tmp_path / "run.json")
    assert BenchRun.load(tmp_path / "run.json") == run
    assert run.failures == ["transformer, 500mbit, ddp-fp16: rank 1: RuntimeError: broken"]


@pytest.mark.parametrize("width", [FULL_WIDTH, 100, 80])
def test_table_fits_and_shows_failures(width):
    run = run_of(cells().values(), alone=[alone()])
    screen = io.StringIO()
    console = Console(file=screen, width=width)
    for table in tables(run, width):
        console.print(table)
    text = screen.getvalue()
    assert "gradwire:qsgd4" in text and "3.33x" in text and "FAILED" in text
    assert ("scaling" in text) == (width == FULL_WIDTH)


@pytest.mark.parametrize("terminal", [False, True])
def test_names_of_models_and_methods_are_no_markup(terminal):
    model, name = "my[bold]:build", "gradwire:plans[/b].json"
    run = run_of([msgspec.structs.replace(cells()["ddp"], job=model, method=name)])

    def shown(show):
        screen = io.StringIO()
        show(Console(file=screen, width=FULL_WIDTH, force_terminal=terminal))
        return [each in screen.getvalue() for each in (model, name)]

    def watch(view):
        with view.group(model, [name], 3):
            view.step(StepEvent(name, 0, 1e5, 2.0))
            view.step(StepEvent(name, 0, 1e5, 2.0, held_out=2.0))

    assert shown(lambda console: console.print(*tables(run))) == [True, True]
    assert shown(lambda console: watch(ProgressView(console))) == [True, terminal]
    assert shown(lambda console: watch(RaceView(console, 4))) == [True, True]


def race(network="namespaces"):
    """The cells of a race: DDP made 4 steps, gradwire made them too, and passed DDP's last loss after its third."""
    found = cells("unlimited", None) if network == "loopback" else cells()
    ddp = msgspec.structs.replace(found["ddp"], held_out=[(0, 4.0), (2, 3.5), (4, 3.0)])
    held_out = [(0, 4.0), (1, 3.5), (3, 2.9), (4, 2.8)]
    name = "gradwire:qsgd4" if network == "loopback" else METHODS["gradwire"]
    ours = msgspec.structs.replace(found["gradwire:qsgd4"], method=name, held_out=held_out)
    return run_of([found["floor"], ddp, ours], network)


def text_of(summary):
    screen = io.StringIO()
    Console(file=screen, width=100).print(summary_table(summary))
    return " ".join([screen.getvalue(), *closing_lines(summary)])


def test_demo_summary_counts_from_the_first_step(tmp_path):
    summary = summarise(race(), "500mbit", tmp_path / "demo.png", None)
    ddp, ours = summary.methods["ddp"], summary.methods["gradwire"]
    assert (summary.link, summary.nodes, set(summary.methods)) == ("500mbit", 2, set(METHODS))
    assert (ddp.steps, ddp.samples, ddp.seconds) == (4, 4 * 4 * 2, pytest.approx(2.501))
    assert ours.seconds == pytest.approx(1.001 + 0.15 + 0.13 + 0.2)
    assert summary.speedup == pytest.approx(ddp.seconds / ours.seconds)
    assert ours.exposed_ms == pytest.approx(50)
    assert [seconds for seconds, _ in ours.held_out] == pytest.approx([0.0, 1.001, 1.281, 1.481])
    assert summary.passed_s == pytest.approx(1.281)
    summary.save(tmp_path / "summary.json")
    assert DemoSummary.load(tmp_path / "summary.json") == summary
    assert "too few of them for a decision" in text_of(summary)
    assert "3.000, took DDP 3 seconds and gradwire 1.3" in text_of(summary)


def test_demo_that_never_passes_says_so(tmp_path):
    run = race()
    worse = [msgspec.structs.replace(c, held_out=[(0, 4.0), (4, 3.9)]) if "auto" in c.method else c for c in run.cells]
    summary = summarise(msgspec.structs.replace(run, cells=tuple(worse)), "500mbit", tmp_path / "demo.png", None)
    assert summary.passed_s is None and "did not reach DDP's last held-out loss" in text_of(summary)


def test_demo_over_loopback_compares_bytes(tmp_path):
    summary = summarise(race("loopback"), "500mbit", tmp_path / "demo.png", "no permission")
    assert summary.problem == "no permission" and summary.bytes_ratio == pytest.approx(8)
    assert summary.methods["ddp"].step_ms == pytest.approx(500)
    assert "8.0 times fewer bytes" in text_of(summary) and "loopback" in text_of(summary)
    draw_demo(summary, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").stat().st_size > 10_000


@pytest.mark.parametrize("link", ["100mbit", "0.1 gbit"])
def test_the_demo_reads_the_run_that_the_bench_recorded(monkeypatch, tmp_path, link):
    def run_bench(request, *_):
        group = method_folder(request.record, f"transformer-{link}")
        made_up_run().save(make_folder(method_folder(group, METHODS["gradwire"])) / "run.json")
        return race()

    monkeypatch.setattr(demo, "run_bench", run_bench)
    monkeypatch.setattr(demo, "run_profile", lambda *_: ("the line does not fit",))
    assert demo.run_demo(link, 5.0, tmp_path, None, silent()).link == link
    assert Run.read(tmp_path).notes == (*made_up_run().notes, "the line does not fit")
