"""The papers' systems: their plans, what is read from a cell, the bounds over cells, and that only missing cells are measured."""

import dataclasses
import io
import random

import msgspec
import pytest
from rich.console import Console
from silent import silent

from benchmarks.campaigns import papers_run
from benchmarks.campaigns.papers_cells import SystemRow, median_block_us, papers_table, papers_verdict
from benchmarks.campaigns.papers_plans import JOINT, OWN_SPECS, PAPERS_SPECS, SHARED_SPECS, SYSTEM_NAMES, plans_of
from benchmarks.campaigns.papers_run import PapersRequest, run_papers
from benchmarks.campaigns.predict import Profiled
from benchmarks.side_by_side import side_by_side_page
from gradwire.bench.names import parse_spec
from gradwire.bench.results import BenchRun, Cell
from gradwire.bench.runner import run_bench
from gradwire.bench.statistics import step_times
from gradwire.core import Cluster, CodecCosts, Costs, Delayed, Link, Pipelined, Profile, TensorProfile
from gradwire.core.provenance import Made
from gradwire.errors import FormatError, TestbedError
from gradwire.exchange.options import scheme_of
from gradwire.sim.timeline import simulate

SPECS = [parse_spec(text) for text in SHARED_SPECS]
GATHERED = ("comp:cpu", "allgather:inter", "decomp:cpu")
PLANNED = ("GRACE", "HiPress", "BytePS-Compress", "HiTopKComm", "ByteComp")


def found_of(nodes=4, ranks_per_node=1, specs=SPECS) -> Profiled:
    rng = random.Random(0)
    rows = [
        TensorProfile(
            name=f"t{place}",
            shape=(1000, 256) if place % 2 else (256,),
            dtype="float32",
            backward_us=4000 * rng.random(),
            forward_us=1000.0,
        )
        for place in range(12)
    ]
    curves = {"encode": [(4096, 20.0), (2**24, 5000.0)], "decode": [(4096, 15.0), (2**24, 3500.0)]}
    codecs = [CodecCosts(spec=spec, device="cpu", **curves) for spec in dict.fromkeys([*specs, *OWN_SPECS])]
    cluster = Cluster(nodes=nodes, ranks_per_node=ranks_per_node, intra=Link(20.0, 10.0), inter=Link(100.0, 0.2), launch_us=300.0)
    return Profiled(Profile(model="m", batch=1, device="cpu", tensors=rows), cluster, Costs(codecs=codecs), ())


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(4, 1), (2, 2)])
def test_each_system_has_the_plan_of_its_paper(nodes, ranks_per_node):
    found = found_of(nodes, ranks_per_node)
    plans = plans_of(found, SPECS)
    assert tuple(plans) == SYSTEM_NAMES
    names = [tensor.name for tensor in found.profile.tensors]
    for plan in plans.values():
        assert sorted(name for bucket in plan.buckets for name in bucket.tensors) == sorted(names)
        for index, bucket in enumerate(plan.buckets):
            scheme_of(index, bucket, "cpu")  # raises for what the engine cannot run
    steps = {name: simulate(plan, found.profile, found.cluster, found.costs).step_us for name, plan in plans.items()}
    assert all(steps[JOINT] <= steps[name] * (1 + 1e-9) for name in PLANNED)
    for name in (*PLANNED, "CD-SGD"):
        assert [len(bucket.tensors) for bucket in plans[name].buckets] == [1] * 12
    for name in ("GRACE", "HiTopKComm", "BytePS-Compress", "Cupcake"):
        assert all(bucket.main_spec.encodes for bucket in plans[name].buckets)
    assert {bucket.option for bucket in plans["Cupcake"].buckets} == {GATHERED}
    assert {bucket.option for bucket in plans["DDP"].buckets} == {("allreduce:inter",)}
    assert plans["CD-SGD"].schedule == Delayed.cd_sgd(k=5)
    assert plans["DeAR"].schedule == Pipelined()
    assert not any(bucket.main_spec.encodes for bucket in plans["DeAR"].buckets)
    inside = {name: plans[name].buckets[0].option[0] == "reducescatter:intra" for name in ("HiTopKComm", "CGX")}
    assert set(inside.values()) == {ranks_per_node > 1}
    for bucket in plans["CGX"].buckets:
        for name in bucket.tensors:
            assert bucket.spec_of(name).encodes == (names.index(name) % 2 == 1)


@pytest.mark.parametrize("compressor", PAPERS_SPECS)
@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(4, 1), (2, 2)])
def test_the_papers_compressors_are_the_one_spec_of_all_systems_that_choose(compressor, nodes, ranks_per_node, tmp_path):
    request = PapersRequest(tmp_path, SPECS, links=["200mbit"], shapes=[(nodes, ranks_per_node)], compressors=[compressor])
    (key,) = request.cells()
    (spec,) = request.specs_of(key)
    assert key.file == f"{nodes}x{ranks_per_node}-transformer-200mbit-{compressor}.json"
    plans = plans_of(found_of(nodes, ranks_per_node, [spec]), [spec], key.systems)
    exact = ("DDP", "Horovod", "MG-WFBP", "DeAR", JOINT)
    assert tuple(plans) == (("DDP", *PLANNED[:4], "Cupcake", "ByteComp", JOINT) if spec.encodes else exact)
    for name, plan in plans.items():
        used = {bucket.main_spec for bucket in plan.buckets if bucket.main_spec.encodes}
        # what owns the momentum, as DGC does, cannot encode the sums of a node
        assert used <= {spec} and (used or name != "GRACE")
        if name in ("Horovod", "MG-WFBP"):
            assert {bucket.option for bucket in plan.buckets} == {("allreduce:inter",)}
        for index, bucket in enumerate(plan.buckets):
            scheme_of(index, bucket, "cpu")  # raises for what the engine cannot run
    named = msgspec.structs.replace(CELL, compressor=compressor, specs=(repr(spec),))
    assert named.name == f"mlp, 4 x 1 ranks, 100mbit, {spec!r}"
    assert "cells of this kind below: 1" in " ".join(side_by_side_page([CELL, named]).split())
    with pytest.raises(FormatError, match="there is no compressor 'topk' of the papers"):
        PapersRequest(tmp_path, SPECS, compressors=["topk"])


def row(system, predicted_ms, measured_ms, failure=None) -> SystemRow:
    return SystemRow(
        system=system, schedule="backward", buckets=1, encoded=0, specs=(), bytes_per_rank=1.0,
        predicted_us=1e3 * predicted_ms, blocks_us=tuple(1e3 * ms for ms in measured_ms), failure=failure,
    )  # fmt: skip


def cell_of(rows):
    return msgspec.structs.replace(CELL, rows=tuple(rows))


CELL = papers_run.PapersCell(
    made=Made(host="h", date="2026-11-25", command="c"), torch="2", cores=2, job="mlp", link="100mbit", nodes=4,
    ranks_per_node=1, steps=15, turn_steps=5, profile_steps=20, seed=0, specs=(), fit=found_of().fit("mlp", "100mbit"),
    rows=(),
)  # fmt: skip


def test_rows_are_compared_by_pairs_of_blocks():
    cell = cell_of([row("DDP", 210, [100, 200, 400]), row("GRACE", 90, [50, 100, 200]), row(JOINT, 9, [], "it broke")])
    over = cell.speedup("GRACE", "DDP")
    assert over is not None and (over.low, over.ratio, over.high) == pytest.approx((2.0, 2.0, 2.0))
    assert cell.speedup("GRACE", "HiPress") is None and cell.speedup(JOINT, "DDP") is None
    assert cell.rows[0].error == pytest.approx(0.05) and cell.rows[2].error is None
    step = median_block_us(cell.rows[0])
    assert (step.low, step.ratio, step.high) == pytest.approx((100e3, 200e3, 400e3))
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(papers_table(cell))
    table = console.export_text()
    assert "+5.0 %" in table and "2.00x (2.00-2.00)" in table and "FAILED" in table
    assert cell.failures == [f"mlp, 4 x 1 ranks, 100mbit, {JOINT}: it broke"]


def test_the_page_has_every_cell_and_what_papers_claim_beside_it():
    slower = cell_of([row("DDP", 210, [200] * 3), row("Cupcake", 90, [100] * 3), row(JOINT, 9, [], "it broke")])
    faster = msgspec.structs.replace(slower, link="500mbit", rows=(row("DDP", 90, [300] * 3), row("Cupcake", 90, [75] * 3)))
    page = side_by_side_page([slower, faster])
    assert "| Cupcake over DDP | 2.03 | abstract: BERT-base, 8 x 8 GPUs, 25 Gb/s | 4.00 | " + faster.name + " | 3.00 |" in page
    assert "| ByteComp over HiPress | 1.77 | section 5.2.3: LSTM, PCIe | - | - | - |" in page
    assert "| Cupcake | 90 | 75 | 75 to 75 | +20 % | 4.00 | - | - |" in page
    assert f"| {JOINT} | 9 | failed | - | - | - | - | - |" in page
    assert "The machine had 2 processors for 4 ranks." in " ".join(page.split())


def test_a_rate_inside_nodes_is_part_of_a_cell(tmp_path):
    request = PapersRequest(folder=tmp_path, specs=SPECS, links=["500mbit"], intra="1gbit")
    files = [key.file for key in request.cells()]
    assert files == ["4x1-transformer-500mbit.json", "2x2-transformer-500mbit-intra-1gbit.json"]
    assert [request.bench(key, ["ddp"]).intra for key in request.cells()] == [None, "1gbit"]
    with pytest.raises(TestbedError, match="'fast'"):
        PapersRequest(folder=tmp_path, specs=SPECS, shapes=[(2, 2)], intra="fast")
    with pytest.raises(TestbedError, match="1gbit inside a node cannot be emulated here: no namespaces"):
        run_bench(next(request.bench(key, ["ddp"]) for key in request.cells() if key.intra), "no namespaces", silent())
    inside = msgspec.structs.replace(CELL, intra="1gbit")
    assert inside.name == "mlp, 4 x 1 ranks, 100mbit, 1gbit inside nodes"
    assert "intra" not in CELL.to_json() and papers_run.PapersCell.from_json(inside.to_json()) == inside


def test_the_bounds_over_cells():
    good = cell_of([row("DDP", 100, [100] * 3), row("CGX", 52, [50] * 3), row(JOINT, 50, [50, 49, 52])])
    assert [line[:3] for line in papers_verdict([good])] == ["yes"] * 4
    bad = cell_of([row("DDP", 130, [100] * 3), row("CGX", 60, [50] * 3), row(JOINT, 58, [56] * 3)])
    median, worst, picked, joint = papers_verdict([good, bad])
    assert median.startswith("yes") and "3.8% of 6 rows" in median
    assert worst.startswith("NO") and "30.0%, DDP in mlp" in worst
    assert picked.startswith("NO") and f"1 of 2 (mlp, 4 x 1 ranks, 100mbit: {JOINT} takes 1.12 times" in picked
    assert joint.startswith("NO") and "1 of 2" in joint and "as long as CGX" in joint
    assert papers_verdict([]) == ["Nothing was measured."]


def made_run(request, broken=None) -> BenchRun:
    cells = []
    for place, method in enumerate(request.methods):
        us = [1e6] * request.warmup_steps + [1e5 * (place + 1)] * request.steps
        cells.append(
            Cell(job=request.jobs[0], link=request.links[0], gbps=0.1, method=method, step=step_times(us), step_us=us,
                 counted=(request.warmup_steps, len(us)), failure=broken if method == "ddp" else None)
        )  # fmt: skip
    sizes = {name: getattr(request, name) for name in ("nodes", "ranks_per_node", "steps", "warmup_steps", "turn_steps")}
    return BenchRun(made=CELL.made, torch="2", cores=2, network="namespaces", seed=request.seed, cells=tuple(cells), **sizes)


def test_only_what_is_missing_or_failed_is_measured(tmp_path, monkeypatch):
    asked, broken = [], None

    def measure(request, problem, watch):
        asked.append(request)
        return made_run(request, broken)

    monkeypatch.setattr(papers_run, "run_bench", measure)
    monkeypatch.setattr(papers_run, "profiled", lambda asked, *others: found_of(asked.nodes, asked.ranks_per_node))
    request = PapersRequest(tmp_path, SPECS, jobs=["mlp"], links=["100mbit", "200mbit"], shapes=[(4, 1)], steps=10)
    first = run_papers(request, None, silent(), str)
    assert [each.links for each in asked] == [["100mbit"], ["200mbit"]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4x1-mlp-100mbit.json", "4x1-mlp-200mbit.json"]
    assert [row.measured_us for row in first[0].rows] == [1e5 * (place + 1) for place in range(len(SYSTEM_NAMES))]
    assert len(first[0].rows[0].blocks_us) == 2  # of 5 steps each, without the warm-up
    assert run_papers(request, None, silent(), str) == first and len(asked) == 2
    broken = "it broke"
    again = dataclasses.replace(request, again=True, links=["100mbit"])
    assert run_papers(again, None, silent(), str)[0].failures
    broken = None
    assert not run_papers(request, None, silent(), str)[0].failures and len(asked) == 4
    assert len(run_papers(dataclasses.replace(request, steps=15), None, silent(), str)) == 2 and len(asked) == 6
    with pytest.raises(TestbedError, match="no namespaces"):
        run_papers(request, "no namespaces", silent(), str)


def test_runs_of_a_cell_are_pooled(tmp_path, monkeypatch):
    monkeypatch.setattr(papers_run, "run_bench", lambda request, problem, watch: made_run(request))
    monkeypatch.setattr(papers_run, "profiled", lambda asked, *others: found_of(asked.nodes, asked.ranks_per_node))
    request = PapersRequest(tmp_path, SPECS, jobs=["mlp"], links=["100mbit"], shapes=[(4, 1)], steps=10)
    run_papers(request, None, silent(), str)
    (both,) = run_papers(dataclasses.replace(request, again=True), None, silent(), str)
    assert (both.runs, both.steps) == (2, 20) and [len(row.blocks_us) for row in both.rows] == [4] * len(SYSTEM_NAMES)
    assert run_papers(request, None, silent(), str) == [both]
    later = cell_of([row("DDP", 300, [200]), row("CGX", 50, [50])])
    pooled = later.pooled(cell_of([row("CGX", 80, [90, 100]), row("DDP", 150, [100, 110])]))
    assert [each.predicted_us for each in pooled.rows] == pytest.approx([200e3, 70e3])
    assert [each.blocks_us for each in pooled.rows] == [(100e3, 110e3, 200e3), (90e3, 100e3, 50e3)]
    assert "### mlp, 4 x 1 ranks, 100mbit, 2 runs" in side_by_side_page([pooled])


def test_a_slow_turn_of_the_machine_does_not_change_who_is_fastest():
    turns = row("CGX", 60, [100, 101, 300, 303]), row(JOINT, 59, [98, 300, 301, 310])
    assert papers_verdict([cell_of([*turns, row("DDP", 900, [900] * 4)])])[2].startswith("yes")


def test_parts_of_cd_sgds_period_are_refused(tmp_path):
    with pytest.raises(FormatError, match="steps is 12, but CD-SGD sends everything in one of 5 steps"):
        PapersRequest(tmp_path, SPECS, steps=12)
    with pytest.raises(FormatError, match="there is no spec"):
        PapersRequest(tmp_path, [])
    assert len(list(PapersRequest(tmp_path, SPECS).cells())) == 6
