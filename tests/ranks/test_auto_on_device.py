"""plan="auto" on a device that queues work, on the double of streams: times come from events, and watching waits for nothing."""

import logging
import threading
from typing import Any

import pytest
import torch
from fake_links import wires
from foretold import foretold
from stream_double import Device, SeenWire, run_staged_ranks
from test_staging import kernels_in_torch
from worlds import Given

import gradwire as gw
from gradwire.auto import live, measuring
from gradwire.auto.trial import MOST_STEPS, Candidate, Trial
from gradwire.collectives import schemes
from gradwire.core import CodecCosts, Costs
from gradwire.exchange import DeviceTimes, Exchange, layout
from gradwire.profiler import links
from gradwire.transport import Lanes, Wire
from gradwire.transport.streams import Streams

WATCHED = 6


def encodes(plan: gw.Plan) -> bool:
    return any(spec.encodes for bucket in plan.buckets for spec in bucket.specs)


class Trained:
    """What a rank's training under auto came to."""

    def __init__(self, group: Any, device: Device, cannot: int | None = None) -> None:
        """cannot: the rank whose script's thread cannot make timed events."""
        self.waits: list[int] = []
        """The waits of the script's thread for the device, inside each backward."""
        self.exposed_us: list[float] = []
        if group.rank == cannot:
            device.untimed.add(threading.get_ident())
        sizes: Any = [(30, 10), (20, 4), (50,)]
        model = Given(sizes, seed=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = gw.parallelize(model, optimizer, process_group=group)
        self.timed: list[DeviceTimes | None] = []
        steps, has_decided = MOST_STEPS + 2, False
        while steps:
            optimizer.zero_grad()
            loss = model(model.random_gradients(group.rank, steps))
            before = len(device.waits)
            loss.backward()
            own = [call for thread, call in device.waits[before:] if thread == threading.get_ident()]
            self.waits.append(own.count("synchronize"))
            self.timed.append(handle.session.reports[-1].device)
            optimizer.step()
            steps -= 1
            if handle.decision is not None and not has_decided:
                steps, has_decided = WATCHED, True
        self.decision, self.plan = handle.decision, handle.plan
        self.recorded = handle.session.driver.recorded() if handle.session.driver is not None else None
        handle.detach()


def train(monkeypatch: pytest.MonkeyPatch, cannot: int | None = None) -> list[Trained]:
    """Two ranks. Compression is predicted to be fast; what it costs to encode is not measured."""
    monkeypatch.setattr(layout, "launches", lambda device: True)
    curve = ((4096, 1.0), (2**20, 100.0))

    def codecs_of(live: Any, specs: Any, seconds: float) -> Costs:
        return Costs(codecs=tuple(CodecCosts(spec=spec, device="cpu", encode=curve, decode=curve) for spec in specs))

    monkeypatch.setattr("gradwire.auto.driver.codecs_of", codecs_of)
    with (
        kernels_in_torch(),
        foretold(lambda plan: 1.0 if encodes(plan) else 1e6),
        Device().used(monkeypatch) as device,
    ):
        return run_staged_ranks(device, 2, Trained, 60.0, device, cannot)


def test_it_decides_by_times_of_the_device_and_then_waits_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in train(monkeypatch):
        assert found.decision is not None and encodes(found.plan)
        decided = len(found.waits) - WATCHED
        assert all(found.waits[:decided]), "a step that measures waits for its end"
        assert found.waits[decided + 1 :] == [0] * (WATCHED - 1)
        times = [each for each in found.timed if each is not None]
        assert len(times) >= len(found.timed) - 1, "all steps but the first are timed"
        for each in times:
            assert each.exposed_s >= 0 and each.busy_s > 0 and each.tasks


def test_where_one_rank_cannot_time_its_device_all_say_so_and_keep_a_plan(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "gradwire"):
        ranks = train(monkeypatch, cannot=1)
    for found in ranks:
        assert found.decision is None and not any(found.waits[1:]) and not any(found.timed)
        assert encodes(found.plan) and found.plan.digest() == ranks[0].plan.digest()
        assert found.recorded is not None and "could not measure" in found.recorded.by
    (line,) = [record.getMessage() for record in caplog.records if "cannot measure" in record.getMessage()]
    assert "RuntimeError: no timed events here" in line and "Pass plan=" in line


# ---- the parts


def measured_as_on_a_gpu(group: Any, connected: list[Wire], device: Device) -> tuple[int, list[float]]:
    """How many lists of operations the exchanges of one size made, and the sums of an all-reduce."""
    lanes, cpu = Lanes(group), torch.device("cpu")
    lanes.open({}, cpu)
    link: Any = lanes.data[0].link
    link.wire = SeenWire(connected[group.rank], device)

    def refuse(*arguments: Any) -> None:
        raise AssertionError("a plan's all-reduce does not pass here")

    def measure(link: Any) -> tuple[int, list[float]]:
        exchanges = links._Exchanges(link, range(2), cpu)
        exchanges._on_wire = False
        exchanges.announce(1000, 6)
        for _ in range(6):
            exchanges.perform()
        sums, link.all_reduce = links._AllReduces(link, lanes.group.grid, cpu), refuse
        sums.announce(4000, 2)
        sums._device = torch.device("cuda")
        for _ in range(2):
            sums._tensor.add_(1.0)
            sums.perform()
        return len(link._lists), sums._tensor.unique().tolist()

    try:
        return lanes.data[0].submit(measure).result()
    finally:
        lanes.stop()


def test_links_are_measured_with_what_steps_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemes, "sums_in_c", lambda dtype: True)
    with kernels_in_torch(), Device().used(monkeypatch) as device:
        # of two ranks: 1 + 1, then 3 + 3
        assert run_staged_ranks(device, 2, measured_as_on_a_gpu, 60.0, wires(2), device) == [(2, [6.0])] * 2


def exchanged(group: Any, device: Device) -> tuple[DeviceTimes | None, list[tuple[float, float]]]:
    """One step that is timed, after one that is not."""
    tensors = {f"t{at}": torch.ones(700) for at in range(3)}
    exchange = Exchange(tensors, gw.Policy(default=gw.QSGD(bits=4), bucket_bytes=1000, exempt_vectors=False), group)
    exchange.average_()
    before = exchange.device_times
    assert before is None
    exchange.lanes.observe(live._TIMER)
    exchange.average_()
    times = exchange.device_times
    assert times is not None and len(times.tasks) == sum(map(len, exchange._executor.tasks))
    exchange.close()
    return times, [
        (times.streams.elapsed_s(times.began, begin), times.streams.elapsed_s(begin, end)) for begin, end in times.tasks
    ]


def test_each_task_is_timed_from_its_encode_to_its_last_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "launches", lambda device: True)
    with kernels_in_torch(), Device().used(monkeypatch) as device:
        for times, tasks in run_staged_ranks(device, 2, exchanged, 60.0, device):
            assert all(took > 0 for _, took in tasks)
            assert times.busy_s <= sum(took for _, took in tasks) + 1e-9
            assert all(begin + took <= times.exposed_s + 1e-9 for begin, took in tasks)


class MadeUpStreams(Streams):
    """Streams whose marks are moments."""

    def elapsed_s(self, start: Any, end: Any) -> float:
        return float(end - start)


def test_tasks_that_overlap_count_once() -> None:
    marks: Any = [(1.0, 3.0), (2.0, 4.0), (6.0, 7.0), (6.2, 6.5)]
    began: Any = 3.5
    ended: Any = 7.0
    times = DeviceTimes(MadeUpStreams(), began, ended, marks)
    assert times.busy_s == pytest.approx(4.0) and times.exposed_s == pytest.approx(3.5)
    assert DeviceTimes(MadeUpStreams(), began, ended, ()).busy_s == 0.0


@pytest.mark.parametrize("compiles", [False, True])
def test_steps_that_compile_count_nowhere(compiles: bool) -> None:
    """Each candidate's first step takes four seconds longer than its others."""
    real_us = {"A": 50e3, "B": 40e3, "plain": 100e3}
    trial = Trial([Candidate(name, us, plain=name == "plain") for name, us in real_us.items()], None, 3, 0.0, compiles)
    begun = set()
    while (turn := trial.turn) is not None:
        name = trial.candidates[turn.candidate].name
        trial.took(real_us[name] + 4e6 * (name not in begun))
        begun.add(name)
    assert trial.chosen is not None
    assert (trial.candidates[trial.chosen].name == "B") == compiles
    assert (trial.cost_us < 1e6) == compiles


def test_sizes_show_the_slope_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch takes 20 us on both kinds of links, and a megabyte 10 us."""
    seen: list[tuple[int, ...]] = []
    monkeypatch.setattr(measuring, "cached_codecs", lambda specs, device, sizes, seconds: seen.append(sizes))
    for kind in ("cpu", "cuda"):
        ranks: Any = type("Ranks", (), {"device": torch.device(kind)})
        measuring.codecs_of(ranks, [], 0.3)
    assert [sizes[-1] for sizes in seen] == [2**20, 2**26]

    def run(link: Any, traffic: Any, nbytes: int, messages: int, device: Any) -> Any:
        return links._Batches([20.0 + nbytes / 1e5] * 3, [1.0] * 3, [0.0] * 3)

    monkeypatch.setattr(links, "_run", run)
    nobody: Any = None
    for kind, largest in (("cpu", 2**24), ("cuda", 2**26)):
        points, _, _ = links._sweep(nobody, nobody, 1, torch.device(kind), 0.3)
        assert points[-1][0] == largest
