"""The page of a run says what is in its record, whatever is in it, and fits a phone."""

import errno
import html
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from fuzz import DOCUMENTS
from hypothesis import HealthCheck, given, settings
from made_up_runs import CLUSTER, COSTS, NASTY, PROFILE, made_up_run
from msgspec.structs import replace
from typer.testing import CliRunner

from gradwire.bench.recorded import method_folder, with_rivals
from gradwire.bench.results import Cell
from gradwire.cli import app
from gradwire.core import LocalSteps
from gradwire.errors import FormatError, GradwireError, WriteError
from gradwire.record.run import Run
from gradwire.record.tensorboard import export, scalars
from gradwire.record.timeline import Moments, Pass, measured_timeline
from gradwire.report.charts import STYLES
from gradwire.report.html import as_html
from gradwire.report.modules import module_rows
from gradwire.report.page import page
from gradwire.report.sections import SECTIONS, summary
from gradwire.report.steps import Predicted, predicted, step_figure
from gradwire.sim.timeline import Event

NOTHING = Predicted(None, "Nobody predicted it.")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page(HTMLParser):
    """What a reader sees: text, headings, and the elements with their attributes."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self._texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(markup)
        assert self._open == []

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))
        if name not in ("meta",):
            self._open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self._open.pop() == name

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self._texts.append((self._open[-1] if self._open else "", data))

    @property
    def text(self) -> str:
        return " ".join("".join(text for _, text in self._texts).split())

    @property
    def texts_of(self) -> list[tuple[str, str]]:
        """Pairs of an element's name and a text in it."""
        return self._texts

    def texts(self, name: str) -> list[str]:
        return [text for within, text in self._texts if within == name]

    def of_class(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for _, attributes in self.elements if name in (attributes.get("class") or "").split()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with all that there can be."""
    folder = tmp_path_factory.mktemp("run")
    made_up_run().save(folder / "run.json")
    PROFILE.save(folder / "profile.json")
    CLUSTER.save(folder / "cluster.json")
    COSTS.save(folder / "costs.json")
    return folder


@pytest.fixture(scope="module")
def markup(folder: Path) -> str:
    result = CliRunner().invoke(app, ["report", str(folder), "-o", str(folder / "page.html")])
    assert result.exit_code == 0, result.output
    assert result.output.startswith("gradwire is 6.27 times as fast as plain DDP") and "page.html" in result.output
    return (folder / "page.html").read_text(encoding="utf-8")


NUMBERS = [
    *("6.27 times as fast", "6.11 to 6.43", "44.2 ms", "277 ms", "1.51 MB", "8.39 MB", "5.57 times fewer bytes"),
    *("120", "2, 2", "the planner of this test", "bucket 1 gains 31 ms.", "4 bits (kept)", "saved 28 s"),
    *("1.00 (95 % interval 0.99 to 1.01)", "197 kB of 1.57 MB", "1.51 MB between nodes", "3.12 bits per element"),
    *("7.86 MB", "3.15 MB", "python train.py --model 'a b'", "nowhere", "2026-01-01", "Made up."),
    *("14 %", "exposed communication", "44.5 ms", "this run 0.9", "5.37 bits on average (3.12 to 32 by tensor)"),
]


def test_the_page_says_what_the_record_holds(markup: str) -> None:
    page = Page(markup)
    assert [number for number in NUMBERS if number not in page.text] == []
    assert page.texts("h2") == [*SECTIONS, "How this was measured"]
    assert page.texts("p")[0] == summary(made_up_run())


def test_numbers_that_no_field_checks_are_finite_too() -> None:
    told = made_up_run().to_dict()
    told["timeline"]["idle_us"] = float("inf")
    with pytest.raises(FormatError, match=r"timeline\.idle_us is inf"):
        Run.from_dict(told)


def test_what_ranks_do_for_an_exchange_is_no_computation() -> None:
    timeline = made_up_run().timeline
    assert timeline is not None
    launch = Event("launch", "compute", 100.0, 30_000.0, 3, 0, 0)
    shown = Page(as_html(step_figure(None, replace(timeline, events=(launch, Event("?", "compute", 0.0, 9e4))))))
    assert [text.strip() for text in shown.texts("span") if text in ("compute ", "codec ")] == ["compute", "codec"]
    assert [a["class"] for a in shown.of_class("wide")] == ["k-other wide", "k-launch wide"]


def test_names_are_text_and_nothing_is_fetched_or_run(markup: str) -> None:
    page = Page(markup)
    assert NASTY.replace("\0", "\N{REPLACEMENT CHARACTER}") in page.text
    names = {name for name, _ in page.elements}
    assert names.isdisjoint({"script", "link", "img", "iframe", "a", "object"})
    assert not re.search(r"https?:|url\(|@import", markup)
    assert [a for _, a in page.elements if any(key.startswith("on") or key in ("src", "href") for key in a)] == []


def test_both_timelines_are_drawn_per_resource(markup: str, folder: Path) -> None:
    page = Page(markup)
    rows = [text for text in page.texts("span") if text.strip() in ("compute", "codec", "inter link")]
    assert [row.strip() for row in rows] == ["compute", "compute", "codec", "codec", "inter link", "inter link"]
    assert page.texts("em") == ["predicted", "measured"] * 3
    told = [str(attributes.get("title")) for _, attributes in page.elements if attributes.get("title")]
    measured = made_up_run().timeline
    assert measured is not None
    for event in measured.events:
        if event.resource == "inter link":
            chunk = f", chunk {event.chunk}" * (event.chunk > 0)
            assert any(each.startswith(f"{event.what}, bucket {event.bucket}{chunk}: ") for each in told)
    simulated = predicted(made_up_run(), folder).timeline
    assert simulated is not None and f"{simulated.step_us / 1e3:.3g} ms" in page.text


@pytest.mark.parametrize("steps", [0, 1])
def test_what_a_short_run_lacks_is_left_out_with_a_word_why(steps: int) -> None:
    run = made_up_run(steps, rivals=False)
    run = replace(run, decision=replace(run.decision, words=(), alternatives=()))
    if steps == 0:
        run = replace(run, tensors=(), notes=())
    shown = Page(page(run, NOTHING))
    assert shown.texts("h2")[: len(SECTIONS)] == list(SECTIONS)
    assert shown.texts("h3") == [], "nothing was tried"
    reasons = ["Nobody predicted it.", "no measured timeline: no whole step was recorded"]
    reasons += ["No step was recorded", "No loss was logged", "No error was measured"] if steps == 0 else ["No other method"]
    assert [reason for reason in reasons if reason not in shown.text] == []
    lines = [attributes["points"] for name, attributes in shown.elements if name == "polyline"]
    assert all(lines) and bool(lines) == bool(steps)
    assert "nan" not in shown.text.lower() and shown.of_class("track") == []


def test_an_uncompressed_run_and_a_slower_one_say_so() -> None:
    run = made_up_run()
    slow = replace(run.rivals[0], speedup=replace(run.rivals[0].speedup, ratio=0.8, low=0.7, high=0.9), again=None)
    text = Page(page(replace(run, rivals=(slow,)), NOTHING)).text
    assert "gradwire is slower than plain DDP, at 0.80 times its speed" in text and "(A/A) is unknown" in text
    same = replace(slow, speedup=replace(slow.speedup, high=1.1))
    assert "not measurably faster or slower than plain DDP" in summary(replace(run, rivals=(same,)))


def test_accumulated_gradients_are_summed_and_not_compared_with_one_batch(folder: Path) -> None:
    run = made_up_run()
    moments = Moments(0.0, [Pass(at + 0.001, at + 0.031, [("w", at + 0.061)]) for at in (0.0, 0.1, 0.2)], [], 0.3)
    run = replace(run, timeline=measured_timeline(moments, "backward", 2, (0, 0, 0)))
    shown = Page(page(run, predicted(run, folder)))
    assert "A step has 3 forwards and backwards" in shown.text and "Predicted over measured" not in shown.text
    cells = shown.texts("td")
    assert cells.count("90 ms") == 2, "forward and backward"


def local_run(recorded_now: bool = True) -> Run:
    """A run of local steps: 40 exchanges of 5 steps. recorded_now: with what records of gradwire 0.3 have not."""
    run = made_up_run(40, rivals=False)
    plan = replace(run.plan, schedule=LocalSteps(every=5))
    if not recorded_now:
        return replace(run, plan=plan)
    timeline = replace(run.timeline, schedule="local", steps=5, step_us=run.timeline.step_us / 5)
    return replace(run, plan=plan, timeline=timeline, steps=tuple(replace(step, local_steps=5) for step in run.steps))


@pytest.mark.parametrize("recorded_now", [True, False])
def test_a_step_of_local_steps_is_one_of_them(folder: Path, recorded_now: bool) -> None:
    run = local_run(recorded_now)
    shown = Page(page(run, predicted(run, folder)))
    assert summary(run) == (
        "A local step takes 8.84 ms (median; most are between 8.67 ms and 9.01 ms) and sends 301 kB per step and rank, for "
        "gradients of 8.39 MB. A round of 5 local steps takes 44.2 ms and sends 1.51 MB."
    )
    facts = [text for name, text in shown.texts_of if name in ("dt", "dd")]
    assert ("steps", "200") in pairwise(facts) and ("local steps a round", "5") in pairwise(facts)
    assert ("step, median", "8.84 ms") in pairwise(facts) and ("sent, a step and rank", "301 kB") in pairwise(facts)
    assert "The schedule is LocalSteps(every=5)." in shown.text and "once in a round of 5 local steps" in shown.text
    assert "A rank sends 1.51 MB in a round of 5 local steps" in shown.text
    ticks = [float(text) for text in shown.texts("span") if re.fullmatch(r"\d+", text)]
    assert max(ticks) > 150, "curves are against optimizer steps"
    ratio = re.search(r"Predicted over measured: ([0-9.]+)\.", shown.text)
    if recorded_now:
        assert ratio is not None and run.timeline is not None
        simulated = predicted(run, folder).timeline
        assert simulated is not None and simulated.steps == 5
        assert float(ratio[1]) == pytest.approx(simulated.step_us / run.timeline.step_us, rel=0.01)
    else:
        assert ratio is None and "measured" not in shown.texts("em")
        assert "no measured timeline: gradwire 0.3 recorded it, and drew a round of 5 local steps as one step." in shown.text
    assert [row.predicted_us is None for row in module_rows(run, predicted(run, folder).timeline)] == [False] * 16


def test_the_rivals_of_local_steps_are_compared_step_by_step() -> None:
    alone, rival = local_run(), made_up_run().rivals[0]
    own = Cell(job="mlp", link="1gbit", gbps=1.0, method="gradwire:auto@local", step_us=[1e3] * 203, loss=list(range(203)))
    run = replace(with_rivals(alone, own, {}, 5, 5), rivals=(replace(rival, loss=(), end_s=()),))
    assert [step.step_us for step in run.steps] == [5e3] * 40 and [step.loss for step in run.steps[:2]] == [4, 9]
    assert "27.8 times fewer bytes than plain DDP. A round of 5 local steps takes 5 ms" in summary(run)
    assert "Over 200 steps this run saved 55.3 s, and saved 1.62 GB" in Page(page(run, NOTHING)).text


def test_more_curves_than_can_be_told_apart_are_named() -> None:
    run = made_up_run()
    rivals = [replace(run.rivals[0], name=f"rival {number}") for number in range(6)]
    for count in (4, 6):
        shown = Page(page(replace(run, rivals=tuple(rivals[:count])), NOTHING))
        lines = [attributes for name, attributes in shown.elements if name == "polyline"]
        assert len([line for line in lines if line.get("stroke") == STYLES[4][0]]) == 2
        assert ("Not drawn: rival 4, rival 5." in shown.text) == (count == 6)


@pytest.mark.parametrize("step_us", [0.0, 5e-324, 1e-9])
def test_a_step_without_length_is_drawn(step_us: float) -> None:
    timeline = made_up_run().timeline
    assert timeline is not None
    shown = Page(as_html(step_figure(None, replace(timeline, step_us=step_us, events=()))))
    assert "milliseconds" in shown.text


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(run=DOCUMENTS[Run])
def test_every_record_that_can_be_read_has_a_page(run: Run) -> None:
    shown = Page(page(run, NOTHING))
    assert shown.texts("h2") == [*SECTIONS, "How this was measured"]


def test_a_profile_of_another_model_is_a_reason_and_no_failure(tmp_path: Path) -> None:
    replace(PROFILE, tensors=PROFILE.tensors[:3]).save(tmp_path / "profile.json")
    CLUSTER.save(tmp_path / "cluster.json")
    told = predicted(made_up_run(), tmp_path)
    assert told.timeline is None and "The step was not predicted" in told.why_not
    assert predicted(made_up_run(), tmp_path / "none").why_not.startswith("The step was not predicted: the folder has no")


@pytest.mark.parametrize(
    "nodes, ranks_per_node, uneven, words",
    [
        (1, 1, False, "cluster.json describes 1 rank on 1 node, and the run had 2 ranks on 2 nodes. Profile again"),
        (1, 2, False, "cluster.json describes 2 ranks on 1 node"),
        (2, 2, False, "cluster.json describes 4 ranks on 2 nodes"),
        (2, 2, True, "cluster.json describes up to 4 ranks on 2 nodes"),
        (2, 1, False, ""),
    ],
)
def test_a_cluster_of_other_ranks_is_a_reason(nodes: int, ranks_per_node: int, uneven: bool, words: str, tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "profile.json")
    COSTS.save(tmp_path / "costs.json")
    replace(CLUSTER, nodes=nodes, ranks_per_node=ranks_per_node, uneven=uneven).save(tmp_path / "cluster.json")
    told = predicted(made_up_run(), tmp_path)
    assert words in told.why_not and (told.timeline is None) == bool(words)


@pytest.mark.parametrize("ranks, is_it", [(2, False), (3, True), (4, True), (5, False)])
def test_uneven_nodes_count_as_many_ranks_as_they_may_have(ranks: int, is_it: bool, tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "profile.json")
    COSTS.save(tmp_path / "costs.json")
    replace(CLUSTER, ranks_per_node=2, uneven=True).save(tmp_path / "cluster.json")
    told = predicted(replace(made_up_run(), world_size=ranks), tmp_path)
    assert ("cluster.json describes" not in told.why_not) == is_it


def test_a_folder_without_a_record_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"run\.json: cannot be read"):
        Run.read(tmp_path / "run.json")
    with pytest.raises(FormatError, match=r"buckets has 5 entries, and plan.buckets has 6"):
        replace(made_up_run(), buckets=made_up_run().buckets[1:])


def test_the_bench_puts_torchs_methods_beside_a_recorded_run() -> None:
    alone = made_up_run(30, rivals=False)
    cell = Cell(job="mlp", link="1gbit", gbps=1.0, method="gradwire:qsgd4")
    ours = replace(cell, step_us=[2000.0] * 30, loss=[1.0 - 0.01 * step for step in range(30)], planned_bytes=100)
    ddp = replace(cell, step_us=[9000.0] * 3 + [6000.0] * 27, loss=[1.1] * 30, planned_bytes=800)
    run = with_rivals(alone, ours, {"gradwire:qsgd4": ours, "floor": ours, "ddp-2mb": ours, "ddp": ddp}, 3, 5)
    assert [rival.name for rival in run.rivals] == ["plain DDP", "DDP, 2 MB buckets"]
    first = run.rivals[0]
    assert (first.speedup.ratio, first.step_us, first.sent_bytes) == (3.0, 6000.0, 800)
    assert first.again is not None and first.again.ratio == 1.0
    assert first.end_s[:4] == pytest.approx((0.009, 0.018, 0.027, 0.033))
    assert run.steps[3].end_s == pytest.approx(0.008) and run.steps[3].loss == pytest.approx(0.97)
    assert {step.step_us for step in run.steps} == {2000.0}


def test_a_rival_of_one_step_is_compared_and_one_of_none_is_left_out() -> None:
    alone = made_up_run(30, rivals=False)
    cell = Cell(job="mlp", link="1mbit", gbps=0.001, method="gradwire:qsgd4")
    ours = replace(cell, step_us=[2000.0] * 30, loss=[1.0] * 30, counted=(3, 30))
    once, never = (replace(cell, step_us=[9e6] * steps, loss=[1.1] * steps, counted=(0, steps)) for steps in (1, 0))
    run = with_rivals(alone, ours, {"gradwire:qsgd4": ours, "ddp": once, "ddp-2mb": never}, 5, 5)
    assert [(rival.name, rival.step_us) for rival in run.rivals] == [("plain DDP", 9e6)]


def test_methods_of_other_names_have_other_folders() -> None:
    names = ["plans/\u00e9.json", "plans/\u00f6.json", "plans/a.json", "plans-a.json", "x" * 300 + "1", "x" * 300 + "2"]
    folders = {method_folder(Path("runs"), f"gradwire:{name}").name for name in names}
    assert len(folders) == len(names) and max(map(len, folders)) < 120


def test_tensorboard_gets_the_numbers_or_its_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made_up_run(3)
    found = [*scalars(run)]
    assert ("loss", run.steps[2].loss, 2) in found and ("exposed_us", 4100.0, 0) in found
    assert ("bits/head.weight", 32.0, 0) in found and len({name for name, *_ in found}) > 30
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(GradwireError, match=r"pip install tensorboard"):
        export(run, tmp_path / "logs")
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("recorded_now", [True, False])
def test_all_scalars_of_local_steps_are_at_optimizer_steps(recorded_now: bool) -> None:
    """Exchange 50 is behind the last step, and a long record has every second step alone."""
    run = local_run(recorded_now)
    for shown in (run, replace(run, steps=run.steps[::2])):
        at = {name: [step for each, _, step in scalars(shown) if each == name] for name, _, _ in scalars(shown)}
        assert at["loss"] == [5 * step.step + 4 for step in shown.steps]
        assert at["bits/blocks.1.linear.weight"] == [4, 254] and at["error/blocks.1.linear.weight"] == [4]
    moved = tuple(replace(tensor, bits=((7, 4.0), (12, 3.0)), error=()) for tensor in run.tensors)
    few = replace(run, tensors=moved, steps=run.steps[::4])
    assert [step for name, _, step in scalars(few) if name == "bits/head.weight"] == [39, 64]


def test_tensorboard_reads_what_was_exported(tmp_path: Path) -> None:
    why = "tensorboard is not installed: what TensorBoard reads cannot be seen"
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason=why)
    run = made_up_run(3)
    export(run, tmp_path)
    read = accumulator.EventAccumulator(str(tmp_path)).Reload()
    losses = [(event.step, event.value) for event in read.Scalars("loss")]
    assert losses == [(step.step, pytest.approx(step.loss)) for step in run.steps]
    assert [event.value for event in read.Scalars("bits/head.weight")] == [32.0]
    assert {"step_us", "exposed_us", "codec_us"} < set(read.Tags()["scalars"])


@pytest.mark.parametrize("place", ["file", "file/logs", "/proc/logs"])
def test_a_folder_for_tensorboard_that_cannot_be_made_is_named_before_anything_is_written(tmp_path: Path, place: str) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: its absence is the error")
    made_up_run(3).save(tmp_path / "run.json")
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--tensorboard", str(tmp_path / place)])
    assert isinstance(result.exception, WriteError) and f"{place}: no folder can be made there" in str(result.exception)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("there", [True, False])
def test_a_full_disk_leaves_the_page_and_no_part_of_the_files_for_tensorboard(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: its absence is the error")
    made_up_run(3).save(tmp_path / "run.json")
    logs = tmp_path / "new" / "logs"
    if there:
        logs.mkdir(parents=True)
    sync = os.fsync

    def full(number: int) -> None:
        if "tfevents" in os.readlink(f"/proc/self/fd/{number}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(number)

    monkeypatch.setattr(os, "fsync", full)
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--tensorboard", str(logs)])
    assert isinstance(result.exception, WriteError) and "No space left on device. Make room" in str(result.exception)
    assert sorted(each.name for each in tmp_path.iterdir()) == [*["new"] * there, "report.html", "run.json"]
    assert not there or not [*logs.iterdir()]


MEASURE = """
<script>onload = () => {
  const told = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument.documentElement, width = frame.clientWidth;
    const wide = [...page.querySelectorAll("body *")].filter(e => e.getBoundingClientRect().right > width + 1).length;
    return width + " " + page.scrollWidth + " " + wide + " " + page.querySelector(".lead").innerText;
  });
  document.body.innerText = told.join("\\n");
}</script>
"""


def in_chromium(markup: str, widths: Sequence[int], tmp_path: Path) -> str:
    """What the script above found of the page in frames of these widths."""
    frame = '<iframe scrolling="no" srcdoc="{}" style="border:0;width:{}px;height:4000px"></iframe>'
    frames = "".join(frame.format(html.escape(markup), width) for width in widths)
    (tmp_path / "frames.html").write_text(f"<!DOCTYPE html><body>{frames}{MEASURE}", encoding="utf-8")
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1400,900",
        f"--user-data-dir={tmp_path}",
    ]
    command = [str(CHROMIUM), *options, "--virtual-time-budget=5000", "--dump-dom", (tmp_path / "frames.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return html.unescape(done.stdout)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here to open the page in")
def test_a_browser_shows_the_numbers_and_nothing_is_wider_than_a_phone(markup: str, tmp_path: Path) -> None:
    seen = in_chromium(markup, (360, 1280), tmp_path)
    for width in (360, 1280):
        assert f"{width} {width} 0 {summary(made_up_run())}" in seen, seen
    broken = markup.replace("<body>", '<body><p style="width:700px">too wide</p>')
    assert "360 360" not in in_chromium(broken, (360,), tmp_path), "this test must see what is too wide"
