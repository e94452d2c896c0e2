"""Steps of which a part is left out on purpose: what they do, that nothing takes them for training, and what is told of them."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from silent import silent
from threads import Threads, here

import gradwire as gw
from benchmarks.campaigns.left_out import exchange_alone, keep_only
from benchmarks.campaigns.parts import WRONG_PREFIX
from benchmarks.campaigns.phases import phases_methods, phases_tables
from benchmarks.campaigns.requests import RepositoryRequest
from benchmarks.papers.closed_forms import max_speedup
from gradwire.bench.names import parse_policy
from gradwire.bench.results import Alone, BenchRun, MethodRecord, WorkerRecord
from gradwire.bench.runner import run_bench
from gradwire.bench.statistics import cells_from, step_times
from gradwire.core import QSGD, Delayed
from gradwire.core.provenance import Made
from gradwire.errors import FormatError, StepStateError

SIZE = 300
ALONE = Alone(job="mlp", parameters=10**6, step=step_times([90e3, 90e3]), backward_us=60e3)


# ---- on ranks


def trained(schedule: str, part: str) -> list[list[float]]:
    """Of two steps with the gradients rank + 1 and 10 (rank + 1), what ends in grad."""
    weight = torch.nn.Parameter(torch.zeros(SIZE))
    model, optimizer = torch.nn.ParameterList([weight]), torch.optim.SGD([weight], lr=0.0)
    plan = gw.Uniform(gw.Identity(), scheme="alltoall", schedule=schedule)
    handle = gw.parallelize(model, optimizer, plan=plan, process_group=here.group)
    found = []
    for size in (1.0, 10.0):
        keep_only(part, handle.session.reducer.running)
        (weight * size * (here.rank + 1)).sum().backward()
        handle.flush()
        assert weight.grad is not None
        found.append(weight.grad.tolist())
        optimizer.step()
        optimizer.zero_grad()
    handle.detach()
    return found


@pytest.mark.parametrize("schedule", ["backward", "pipelined"])
def test_what_is_left_out_is_not_in_gradients(threads: Threads, schedule: str) -> None:
    half = SIZE // 2
    for rank, found in enumerate(threads.run(2, trained, schedule, "compute-only")):
        own = (rank + 1) / 2  # its share of the mean, of nobody else's
        assert found == [[own] * SIZE, [10 * own] * SIZE]
    for rank, found in enumerate(threads.run(2, trained, schedule, "reduce-only")):
        shards = [[(rank + 1) / 2] * half, [(rank + 1) / 2] * half]
        shards[rank] = [1.5] * half  # the mean, of which nobody else hears
        whole = [*shards[0], *shards[1]]
        assert found == [whole, [10 * each for each in whole]]
    for found in threads.run(2, trained, schedule, "gather-only"):
        for size, grad in zip((1.0, 10.0), found, strict=True):
            # each rank's shard stands for the sum, on all ranks
            assert grad == [0.5 * size] * half + [1.0 * size] * half


def alone() -> tuple[float, str]:
    model = torch.nn.Linear(30, 30)
    plan = gw.Uniform(gw.Identity(), scheme="alltoall")
    handle = gw.parallelize(model, plan=plan, process_group=here.group)
    executor = handle.session.reducer.running
    exchange_alone(executor, 0)
    exchange_alone(executor, 1)
    flats = [buffers.flat for buffers in executor._buckets]
    generator = torch.Generator().manual_seed(0)
    wrong = max((4 * torch.empty_like(flat).normal_(generator=generator) - flat).abs().max().item() for flat in flats)
    handle.detach()
    plan = gw.Uniform(gw.Identity(), scheme="allreduce")
    whole = gw.parallelize(model, plan=plan, process_group=here.group)
    with pytest.raises(StepStateError) as caught:
        keep_only("reduce-only", whole.session.reducer.running)
    whole.detach()
    return wrong, str(caught.value)


def test_an_exchange_alone_is_a_whole_one(threads: Threads) -> None:
    for wrong, said in threads.run(2, alone):
        assert wrong == 0.0  # both ranks drew the same numbers: twice them, and twice that
        assert "allreduce" in said and "scheme alltoall" in said


@pytest.mark.slow
@pytest.mark.thorough
def test_a_run_has_times_and_nothing_of_training(tmp_path: Path) -> None:
    parts = ["gather-only:qsgd4@pipelined", "exchange-only:qsgd4@delayed1"]
    methods = ["floor", *(WRONG_PREFIX + part for part in parts)]
    few = {"steps": 2, "warmup_steps": 3, "turn_steps": 2, "alone_steps": 0}
    request = RepositoryRequest(jobs=["mlp"], links=["unlimited"], methods=methods, record=tmp_path, **few)
    run = run_bench(request, "this test asks for plain loopback", silent())
    assert not run.failures
    floor, *wrong = run.cells
    assert not floor.wrong_on_purpose and len(floor.loss) == 5
    assert floor.backward_us > 0 and floor.forward_us > 0
    assert floor.measured_gbps > 0
    for cell in wrong:
        assert cell.wrong_on_purpose and cell.step is not None
        assert not cell.loss and cell.speedup is cell.scaling_factor is cell.max_speedup is cell.planned_bytes is None
    gathered, exchanged = wrong
    # no upper bound: whatever else on this machine uses loopback is counted too; and a rank may begin to count when the other one
    # has sent some megabytes already
    assert exchanged.counted_bytes > 0.8 * 4 * 5_523_850  # a correction: float32
    assert gathered.counted_bytes > 4 * 5_523_850 / 8 / 2
    assert exchanged.backward_us == 0.0
    assert not list(tmp_path.rglob("run.json"))


# ---- names


def wanted(methods: list[str]) -> RepositoryRequest:
    """A request for these methods; raises FormatError for a wrong name."""
    return RepositoryRequest(jobs=["mlp"], links=["unlimited"], methods=methods)


def test_names_of_parts_and_of_corrections() -> None:
    assert wanted(phases_methods()).methods == phases_methods()
    correcting = parse_policy("qsgd4@delayed5+qsgd8")
    assert not isinstance(correcting, str)
    assert correcting.schedule == Delayed(k=5, correction=QSGD(bits=8))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wrong-on-purpose:scatter-only:qsgd4", "'scatter-only'"),
        ("wrong-on-purpose:reduce-only", "''"),
        ("wrong-on-purpose:reduce-only:auto", "'auto'"),
        ("wrong-on-purpose:compute-only:qsgd4@delayed5", "@delayednone"),
        ("gradwire:reduce-only:qsgd4", "is no policy"),
        ("gradwire:qsgd4@delayed5+qsgd", "'qsgd'"),
    ],
)
def test_wrong_names_are_named(name: str, said: str) -> None:
    with pytest.raises(FormatError) as caught:
        wanted([name])
    assert said in str(caught.value)


# ---- numbers


def measured(method: str, step_us: float, planned: int | None) -> MethodRecord:
    def both(value: Any) -> list[list[Any]]:
        return [[value] * 3] * 2

    return MethodRecord(
        method=method,
        failure=None,
        wall_us=both(step_us),
        cpu_us=both(step_us),
        forward_us=both(30e3),
        backward_us=both(60e3),
        loss=both(1.0),
        sent_bytes=both(0),
        planned_bytes=[planned] * 2,
        codec_us=[0.0] * 2,
        wrong_on_purpose=method.startswith(WRONG_PREFIX),
    )


def made_up() -> BenchRun:
    """A link of 0.4 Gb/s, on which a phase of 2 MB takes 40 ms, and one of 4 MB 80 ms."""
    steps = {"floor": (100e3, 0), "ddp": (200e3, 4_000_000)}
    records = []
    for method in phases_methods():
        usual = (112e3, None) if "reduce-only" in method else (145e3, None) if "gather-only" in method else (150e3, 8_000_000)
        records.append(measured(method, *steps.get(method, usual)))
    record = WorkerRecord(
        job="mlp",
        parameters=10**6,
        world_size=2,
        ranks_per_interface=1,
        warmup_steps=1,
        measured_gbps=0.4,
        methods=records,
    )
    return BenchRun(
        made=Made(host="h", date="2026-01-01", command="test"),
        torch="2.13",
        cores=2,
        network="namespaces",
        nodes=2,
        ranks_per_node=1,
        steps=2,
        warmup_steps=1,
        turn_steps=5,
        seed=0,
        alone=(ALONE,),
        cells=tuple(cells_from(record, "500mbit", 0.5, 1, ALONE)),
    )


def test_speedups_are_those_of_equation_6() -> None:
    run = made_up()
    ddp = run.cell("mlp", "500mbit", "ddp")
    # forward and update 30 ms under a gather of 40, backward 60 ms over a reduce of 40
    assert ddp is not None and ddp.max_speedup == pytest.approx(2 * 90 / (40 + 60))
    assert ddp.max_speedup == pytest.approx(max_speedup(2, 30e3, 60e3, 40e3, 40e3))
    assert ddp.speedup_alone == pytest.approx(2 * 90 / 200)
    twice = run.cell("mlp", "500mbit", phases_methods()[2])
    assert twice is not None and twice.max_speedup == pytest.approx(2 * 90 / (80 + 80))


def test_the_table_marks_what_is_wrong_on_purpose() -> None:
    screen = io.StringIO()
    ((table, words),) = phases_tables(made_up())
    Console(file=screen, width=150).print(table)
    rows = [[part.strip() for part in line.split("│")[1:-1]] for line in screen.getvalue().splitlines() if "│" in line]
    assert rows[0] == ["float32", "plain DDP", "-", "-", "100", "200", "1.00x", "0.90 of 1.80, 50%"]
    assert rows[2] == ["float32", "pipelined", "12.0", "45.0", "50.0", "150", "1.33x", "1.20 of 1.12, 107%"]
    assert len(rows) == 5
    assert "reduce*" in screen.getvalue() and "* WRONG ON PURPOSE" in words
    assert "forward 30.0 ms, backward 60.0 ms, the optimizer's step 10.0 ms" in words
