"""Predictions beside measurements: what is profiled, predicted and measured, with a testbed and ranks made up."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from silent import silent

import gradwire as gw
from benchmarks.campaigns import predict
from benchmarks.campaigns.predict import PLANNED, PredictRequest, predictable, run_predict
from benchmarks.campaigns.predictions import PredictRun, prediction_table
from gradwire.bench import runner
from gradwire.bench.loopback import Loopback
from gradwire.bench.results import BenchRun, Cell
from gradwire.bench.runner import BenchRequest
from gradwire.bench.statistics import step_times
from gradwire.core import Cluster, CodecCosts, Costs, Link, Plan, Profile, TensorProfile
from gradwire.core.provenance import Made
from gradwire.errors import FormatError, TestbedError

SPECS = [gw.QSGD(bits=4), gw.ErrorFeedback(gw.TopK(0.01))]
ORDER = ("head", "body", "stem")


def files(folder: Path) -> None:
    """What a profiling leaves: three tensors of 4 MB, 10 ms of backward each, on a link of 0.1 Gb/s."""
    tensors = [TensorProfile(name=name, shape=(1024, 1024), dtype="float32", backward_us=1e4, forward_us=0.0) for name in ORDER]
    curve = [(4096, 10.0), (2**24, 3000.0)]
    codecs = [CodecCosts(spec=spec, device="cpu", encode=curve, decode=curve) for spec in SPECS]
    links = {"intra": Link(100.0, 0.1), "inter": Link(100.0, 0.1), "allreduce": Link(100.0, 0.08)}
    folder.mkdir()
    Profile(model="m", batch=1, device="cpu", optimizer_us=5000.0, tensors=tensors).save(folder / "profile.json")
    Cluster(nodes=2, ranks_per_node=1, launch_us=100.0, **links).save(folder / "cluster.json")
    Costs(codecs=codecs).save(folder / "costs.json")


class FakeTestbed:
    """Runs no ranks; writes what they would have written."""

    def __init__(self, nodes: int, ranks_per_node: int, inter: str | None, intra: str | None, *_: object) -> None:
        self.failed = False

    def set_inter(self, inter: str | None) -> None:
        self.failed = inter == "1kbit"

    def __enter__(self) -> "FakeTestbed":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def run(self, argv: Sequence[str], *, env: Any, on_line: Any, timeout: float) -> int:
        specs = [argv[at + 1] for at, word in enumerate(argv) if word == "--spec"]
        assert specs == [repr(spec) for spec in SPECS] and "profile" in argv
        for rank in (0, 1):
            on_line(rank, "stderr", "words.py:1: UserWarning: the line does not fit")
        if not self.failed:
            for number in range(runner.FAILURE_LINES):
                on_line(0, "stdout", f"line {number}")
            files(Path(argv[argv.index("--out") + 1]))
        return int(self.failed)


def measured(request: BenchRequest, problem: str | None, watch: object) -> BenchRun:
    """Every method takes 2 s, but the planner's, which fails."""
    cells = []
    for method in request.methods:
        planned = method.endswith("plan.json")
        if planned:
            assert set(Plan.load(method.removeprefix("gradwire:")).tensors) == set(ORDER)
        times = {"failure": "boom"} if planned else {"step": step_times([1.9e6, 2e6, 2.1e6])}
        cells.append(Cell(job=request.jobs[0], link=request.links[0], gbps=0.1, method=method, **times))
    made = Made(host="h", date="d", command="c")
    numbers = {"nodes": 2, "ranks_per_node": 1, "steps": 3, "warmup_steps": 3, "turn_steps": 1, "seed": 0}
    return BenchRun(made=made, torch="2", cores=2, network="namespaces", cells=tuple(cells), **numbers)


@pytest.fixture
def testbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "EmulatedCluster", FakeTestbed)
    monkeypatch.setattr(predict, "run_bench", measured)


def asked(links: Sequence[str], methods: Sequence[str] = ("ddp", "gradwire:qsgd4")) -> PredictRequest:
    return PredictRequest(BenchRequest(jobs=["mlp"], links=links, methods=methods), SPECS)


def test_each_cell_has_its_prediction_and_its_measurement(testbed: None, tmp_path: Path) -> None:
    run = run_predict(asked(["100mbit", "500mbit"]), None, silent(), tmp_path / "out.json")
    assert PredictRun.load(tmp_path / "out.json") == run
    assert [(cell.link, cell.method) for cell in run.cells[:3]] == [
        ("100mbit", "ddp"), ("100mbit", "gradwire:qsgd4"), ("100mbit", PLANNED),
    ]  # fmt: skip
    ddp, quantised, planned = run.cells[:3]
    # optimizer and backward of the first tensor, whose bucket is above 1 MiB; two exchanges one after the other, the
    # launch of each on compute; 4 and 8 MiB at 0.08 Gb/s and 2 alpha each
    wire_us = 3 * 2**22 * 8 / 80 + 4 * 100
    assert ddp.wire_us == pytest.approx(wire_us)
    assert ddp.predicted_us == pytest.approx(5e3 + 1e4 + 100 + wire_us)
    assert ddp.error == pytest.approx((ddp.predicted_us - 2e6) / 2e6)
    assert quantised.codec_us > 0 and planned.predicted_us <= ddp.predicted_us
    assert (planned.measured_us, planned.failure) == (None, "boom")
    assert run.worst_error == pytest.approx(max(abs(cell.error or 0) for cell in run.cells))
    assert run.fits[0].said == ("the line does not fit",) and run.fits[0].allreduce_gbps == 0.08
    assert prediction_table(run).row_count == 6


def test_what_cannot_be_predicted_is_refused_by_name(testbed: None) -> None:
    assert predictable(["floor", "ddp", "ddp-fp16", "gradwire:qsgd4"]) == ["ddp", "gradwire:qsgd4"]
    with pytest.raises(FormatError, match="'ddp-fp16' cannot be predicted"):
        asked(["100mbit"], ["ddp-fp16"])
    with pytest.raises(TestbedError, match="links of known rates: no namespaces"):
        run_predict(asked(["100mbit"]), "no namespaces", silent())
    with pytest.raises(TestbedError, match=r"profiling mlp over 1kbit: the ranks ended with exit code 1:\n\[0\] words.py"):
        run_predict(asked(["1kbit"]), None, silent())


@pytest.mark.slow
@pytest.mark.thorough
def test_the_command_profiles_a_job(tmp_path: Path) -> None:
    said: list[str] = []
    argv = [sys.executable, "-m", "gradwire", "profile", "--job", "mlp", "--steps", "1", "--out", str(tmp_path)]
    code = Loopback(2).run(argv, env={"OMP_NUM_THREADS": "1"}, on_line=lambda *line: said.append(line[2]), timeout=120)
    assert code == 0, said
    profile, cluster = Profile.load(tmp_path / "profile.json"), Cluster.load(tmp_path / "cluster.json")
    assert len(profile.tensors) == 10 and profile.tensors[0].name in ("8.weight", "8.bias")
    assert cluster.launch_us and cluster.allreduce
    assert Costs.load(tmp_path / "costs.json").codecs[0].spec == gw.QSGD(bits=4)
    text = "\n".join(said)
    assert "10 tensors, 22.10 MB of gradients, batch 384" in text and "allreduce" in text and "Written to" in text
