"""What lanes wait for on a device: each wait and each mark is needed, and none is missing. On a double of streams."""

import ast
import importlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_links import wires
from stream_double import Device, DeviceLink, SeenWire, run_staged_ranks

import gradwire as gw
from gradwire.collectives import ShardedSum, schemes
from gradwire.core import TensorInfo
from gradwire.engine.buffers import BuffersBeside
from gradwire.engine.torch_hooks import loss_scale
from gradwire.engine.witness import Witness, _Squares
from gradwire.exchange import Exchange, host_codec, layout
from gradwire.exchange.exchange import BOTH, GATHER, REDUCE
from gradwire.exchange.host_codec import HostCodec, Staging
from gradwire.integrations import c10d
from gradwire.integrations.fsdp2_comms import Turns
from gradwire.integrations.fsdp2_exchanges import ModuleExchanges
from gradwire.kernels import Compressor, cpu, kernels_for
from gradwire.transport import Grid, Group, Lane, Lanes, Link
from gradwire.transport.shared_lanes import LaneSet
from gradwire.transport.streams import DeviceStreams

SHAPES = ((37, 19), (1,), (13, 23))


class DeviceLanes(Lanes):
    """One lane, as on a GPU, on a link to which nobody answers."""

    def __init__(self, device: Device, ranks: int = 2) -> None:
        nobody: Any = None
        met: Any = SimpleNamespace(close=lambda: None)
        grid = Grid.even(1, ranks, 0)
        self.group = Group(nobody, 0, tuple(range(ranks)), timedelta(seconds=60), grid, meeting=met)
        link: Any = DeviceLink(device, 0, ranks)
        self.control = Lane("gradwire-double", link)
        self.data, self.device = [self.control], torch.device("cuda")
        self.shared = LaneSet("double")
        self.shared.lanes = [self.control]
        self._use("double")
        self._heartbeats = None
        self._timeout = self.group.timeout
        self.offload = 0


@contextmanager
def lanes_of(device: Device, ranks: int = 2) -> Iterator[DeviceLanes]:
    lanes = DeviceLanes(device, ranks)
    try:
        yield lanes
    finally:
        lanes.stop()


def exchange_on(lanes: Lanes, spec: Any, **values: Any) -> Exchange:
    policy = gw.Policy(default=spec, **{"bucket_bytes": 3000, "chunk_bytes": 1000} | values)
    infos = [TensorInfo(f"t{index}", shape, "float32") for index, shape in enumerate(SHAPES)]
    plan = policy.plan(infos, lanes.group.world_size)
    tensors = {info.name: torch.zeros(info.shape) for info in infos}
    return Exchange.on(lanes, tensors, plan, 0)


# ---- what is run on the double. The script's stream writes before and reads after


def fill(exchange: Exchange, step: int, phases: str = BOTH) -> None:
    exchange.begin(phases, step)
    for slot in exchange.slots.values():
        slot.view.fill_(step + 1.0)
        exchange.ready([slot])


def whole_steps(device: Device) -> None:
    specs: list[tuple[Any, dict[str, Any]]] = [
        (gw.QSGD(bits=4), {"scheme": "alltoall"}),
        (gw.ErrorFeedback(gw.QSGD(bits=4)), {"scheme": "allgather"}),
        (gw.QSGD(bits=4), {"scheme": "ring"}),
        (gw.QSGD(bits=4), {"scheme": "grid"}),
        (gw.Identity(), {}),
        (gw.PowerSGD(rank=1, start_step=0), {}),
    ]
    for spec, values in specs:
        with lanes_of(device) as lanes:
            exchange = exchange_on(lanes, spec, **values)
            for step in range(3):
                fill(exchange, step)
                exchange.wait()
                for flat in exchange.flats:
                    flat.mul_(2.0)


def hop_by_hop(device: Device) -> None:
    """Transfers in which a rank receives nothing: at the root of a tree, and without other ranks."""
    for scheme, ranks in (("tree", 1), ("tree", 2), ("tree", 3), ("ring", 1)):
        with lanes_of(device, ranks) as lanes:
            exchange = exchange_on(lanes, gw.QSGD(bits=4), scheme=scheme)
            for step in range(2):
                fill(exchange, step)
                exchange.wait()
                for flat in exchange.flats:
                    flat.mul_(2.0)


def ready_on_two_streams(device: Device) -> None:
    """Tensors of one bucket become ready on two streams of the script, by turns."""
    other = device.stream("another stream of the script")
    with lanes_of(device) as lanes:
        exchange = exchange_on(lanes, gw.QSGD(bits=4), scheme="alltoall")
        for step in range(2):
            exchange.begin(BOTH, step)
            other.timeline.follow(device.current.timeline.after)
            for number, slot in enumerate(exchange.slots.values()):
                with nullcontext() if number % 2 else other:
                    slot.view.fill_(step + 1.0)
                    exchange.ready([slot])
            exchange.wait()
            for flat in exchange.flats:
                flat.mul_(2.0)


def narrow_residuals(device: Device) -> None:
    for spec in (gw.PowerSGD(rank=1, start_step=0), gw.ErrorFeedback(gw.QSGD(bits=4))):
        with lanes_of(device) as lanes:
            exchange = exchange_on(lanes, spec, residual_dtype="bfloat16", bucket_bytes=1000)
            for step in range(2):
                fill(exchange, step)
                exchange.wait()


def step_shard(exchange: Exchange) -> None:
    """Change what the rank holds by its shard, as an optimizer does."""
    for buffers in exchange._buckets:
        for chunk in buffers.chunks:
            assert isinstance(chunk, ShardedSum)
            buffers.flat.add_(chunk.total.sum())


def gathers_later(device: Device) -> None:
    for sharded in (False, True):
        with lanes_of(device) as lanes:
            spec = gw.Identity() if sharded else gw.QSGD(bits=4)
            exchange = exchange_on(lanes, spec, schedule=gw.Pipelined(shard_optimizer=sharded))
            for step in range(2):
                fill(exchange, step)
                exchange.await_gate()
                if sharded:
                    step_shard(exchange)
                exchange.open_gate()
                for bucket, flat in enumerate(exchange.flats):
                    exchange.wait(bucket)
                    flat.mul_(2.0)
                exchange.wait()


def gather_alone(device: Device) -> None:
    with lanes_of(device) as lanes:
        exchange = exchange_on(lanes, gw.QSGD(bits=4), scheme="alltoall")
        fill(exchange, 0, REDUCE)
        exchange.wait()
        exchange.begin(GATHER, 1)
        for buffers in exchange._buckets:
            buffers.flat.mul_(2.0)
            exchange.ready(buffers.slots)
        exchange.wait()


def on_a_lane(device: Device) -> None:
    with lanes_of(device) as lanes:
        values = torch.zeros(9)

        def double(link: Link) -> None:
            values.mul_(2.0)

        for _ in range(2):
            values.add_(1.0)
            lanes.run(lanes.data[0], double)
        values.add_(1.0)


def buffers_beside(device: Device) -> None:
    with lanes_of(device) as lanes:
        model = torch.nn.BatchNorm1d(3)
        beside = BuffersBeside(model, torch.device("cpu"))
        beside.send(lanes.data[0])
        beside.arrived(lanes.data[0])
        beside.put(rank=1)


class OnHost(Compressor):
    """A codec whose work the host does."""

    def __init__(self, codec: Compressor, device: Device) -> None:
        super().__init__(codec.spec)
        self._codec, self._device = codec, device

    def encode(self, *arguments: Any) -> None:
        with self._device.on_host():
            self._codec.encode(*arguments)

    def decode(self, *arguments: Any) -> None:
        with self._device.on_host():
            self._codec.decode(*arguments)


def offloaded(device: Device) -> None:
    with lanes_of(device) as lanes, pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_codec, "_wait_for", lambda tensor: device.synchronize())
        streams = lanes.data[0].link.streams
        exchange = exchange_on(lanes, gw.ErrorFeedback(gw.QSGD(bits=4)), scheme="allgather")
        transfer = exchange._buckets[0].chunks[0].phases[0][0]  # type: ignore[attr-defined]
        given, arrived = transfer.before[0], transfer.arrivals[1][0]
        codec = HostCodec(OnHost(given.codec, device), Staging())
        context, ready = given.context, streams.mark()
        for _ in range(2):
            with streams.encoding(ready):
                codec.encode(given.source, given.memory.state, given.segments, context, given.payload)
            with streams.decoding():
                streams.wait(ready)
                into = torch.empty_like(given.source)
                codec.decode(arrived.payload, arrived.segments, arrived.dtype, False, into, context)


class TwoTowers(torch.nn.Module):
    """Two parameters in one bucket. The second one is used on another stream of the script, which follows the first before."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device, self.other = device, device.stream("another stream of the script")
        self.first, self.second = (torch.nn.Parameter(torch.ones(size)) for size in (30, 20))

    def forward(self) -> torch.Tensor:
        self.other.timeline.follow(self.device.current.timeline.after)
        first = self.first.sum()
        with self.other:
            second = self.second.sum()
        self.device.current.timeline.follow(self.other.timeline.after)
        return first + second


def two_streams_rank(group: Any, device: Device, sharded: bool) -> None:
    """One rank of `two_streams`."""
    model = TwoTowers(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = gw.Uniform(gw.Identity(), schedule=gw.Pipelined(shard_optimizer=sharded))
    handle = gw.parallelize(model, optimizer, plan=plan, process_group=group)
    with torch.enable_grad():
        for _ in range(3):
            model().backward()
            optimizer.step()
            optimizer.zero_grad()
    model.first.sum()
    with model.other:
        handle.flush()
        model.second.sum()
    device.current.timeline.follow(model.other.timeline.after)
    handle.detach()


def two_streams(device: Device) -> None:
    """Parameters that arrive together, and that two streams of the script use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "launches", lambda device: True)
        for sharded in (False, True):
            run_staged_ranks(device, 2, two_streams_rank, 60.0, device, sharded)


STAGED: tuple[tuple[Any, dict[str, Any]], ...] = (
    (gw.QSGD(bits=4), {}),
    (gw.Identity(), {}),
    (gw.Identity(), {"schedule": gw.Pipelined(shard_optimizer=True)}),
)


def staged_rank(group: Any, connected: list[list[list[Any]]], device: Device) -> None:
    """One rank of `staged`. connected: for each plan, lane and rank its wire."""
    infos = [TensorInfo(f"t{index}", shape, "float32") for index, shape in enumerate(SHAPES)]
    tensors = {info.name: torch.zeros(info.shape) for info in infos}
    for (spec, values), of_lanes in zip(STAGED, connected, strict=True):
        policy = gw.Policy(default=spec, bucket_bytes=2000, chunk_bytes=1000, **values)
        plan = policy.plan(infos, 2)
        with closing(gw.Exchange(tensors, plan=plan, process_group=group)) as exchange:
            for lane, of_ranks in zip(exchange.lanes.data, of_lanes, strict=False):
                lane.link.wire = SeenWire(of_ranks[group.rank], device)  # type: ignore[assignment]
            for step in range(3):
                for tensor in tensors.values():
                    tensor.fill_(step + group.rank)
                exchange.average_()
            whole = torch.full((9,), float(group.rank))
            exchange.lanes.run(exchange.lanes.data[0], lambda link, values=whole: link.broadcast(values).wait())
            assert whole.sum() == 0


def staged(device: Device) -> None:
    """Two ranks whose messages go through the host: by the backend, and on two wires."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schemes, "sums_in_c", lambda dtype: True)
        for lanes in (0, 2):
            run_staged_ranks(
                device, 2, staged_rank, 60.0, [[wires(2, timeout_s=30.0) for _ in range(lanes)] for _ in STAGED], device
            )


def scale_of_a_scaler(device: Device) -> None:
    """The scale of a GradScaler is copied to the host, which reads the copy."""
    with lanes_of(device) as lanes:
        scale = torch.ones(1)
        copy = loss_scale._ScaleCopy(torch.empty(1), lanes.data[0].link.streams)
        for _ in range(2):
            scale.mul_(2)
            copy.take(scale, chosen=False)
            scale.mul_(2)  # the script goes on
            with device.on_host():
                copy.value()


def quantised_by_the_backend(device: Device) -> None:
    """An all-reduce of the backend "gradwire", whose worker exchanges while the script goes on."""
    with lanes_of(device) as lanes, pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as worker:
        exchange = exchange_on(lanes, gw.QSGD(bits=4))
        values = torch.zeros(sum(torch.Size(shape).numel() for shape in SHAPES))
        cut = values.split([torch.Size(shape).numel() for shape in SHAPES])
        parts = {f"t{at}": part.view(shape) for at, (part, shape) in enumerate(zip(cut, SHAPES, strict=True))}
        group: Any = c10d.QuantisingGroup.__new__(c10d.QuantisingGroup)
        dist.ProcessGroup.__init__(group, 0, 2)  # type: ignore[call-arg]
        group._worker, group._compared = worker, c10d.SETTINGS.changes
        group._streams = {values.device: lanes.data[0].link.streams.for_thread()}
        worker.submit(group._streams[values.device].enter_thread).result()
        patch.setattr(c10d.QuantisingGroup, "_parts", lambda own, tensor: parts)
        patch.setattr(c10d.QuantisingGroup, "_exchange_of", lambda own, parts: exchange)
        patch.setattr(c10d, "_create_work_from_future", lambda future: future)
        for _ in range(2):
            values.add_(1.0)
            work = group.allreduce(values)
            torch.zeros(9).add_(1.0)  # the script goes on
            work.wait()
            values.mul_(2.0)


class Reduced(torch.autograd.Function):
    """Calls a function in backward."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, call: Callable[[torch.Tensor], None]) -> torch.Tensor:
        context.call = call
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        context.call(gradients[0])
        return gradients[0], None


def reduced_for_fsdp2(device: Device) -> None:
    """Two modules' reduce-scatters, which FSDP2 calls on a stream of its own. The exchange of the last one ends with backward."""
    with lanes_of(device) as lanes, torch.enable_grad():
        turns = Turns(lambda waited_s: None)
        nothing = SimpleNamespace(**dict.fromkeys(("begins", "exchanged", "resumed"), lambda *_: None))
        exchanges = {name: exchange_on(lanes, gw.QSGD(bits=4), scheme="alltoall") for name in "ab"}

        def exchange_of(module: str, tensors: Any, group: Any) -> Exchange:
            turns.settle()
            return exchanges[module]

        own: Any = SimpleNamespace(
            exchange_of=exchange_of,
            _job=nothing,
            _turns=turns,
            _scale=SimpleNamespace(change=lambda specs: loss_scale.ScaleChange()),
            _specs=SimpleNamespace(used=[]),
        )
        stream, outputs = device.stream("the stream of reduce-scatters"), []

        def reduce_scatter(module: str, gradient: torch.Tensor) -> None:
            tensors = {f"t{at}": torch.ones(shape) * gradient for at, shape in enumerate(SHAPES)}
            stream.timeline.follow(device.current.timeline.after)
            with stream:
                output = torch.empty(3)
                outputs.append(output)
                end = lambda: output.copy_(tensors["t0"][0, :3])  # noqa: E731
                ModuleExchanges.run(own, module, tensors, None, "both", end, defer=True)  # type: ignore[arg-type]
            kept = {address for address, on in device.kept if on is stream}
            assert {each.data_ptr() for each in tensors.values()} <= kept

        x = torch.ones((), requires_grad=True)
        for _ in range(2):
            loss = Reduced.apply(Reduced.apply(x, partial(reduce_scatter, "b")), partial(reduce_scatter, "a"))
            loss.backward()  # type: ignore[no-untyped-call]
            for output in outputs:
                output.add_(1.0)
            outputs.clear()


class MadeSession(SimpleNamespace):
    """The parts of a session that a witness needs. It can be referred to weakly."""


def squares_of_a_witness(device: Device) -> None:
    """The witness encodes a sample once more, and reads its squares on the host when they are there."""
    with lanes_of(device) as lanes:
        exchange = exchange_on(lanes, gw.QSGD(bits=4), scheme="alltoall")
        session: Any = MadeSession(lanes=lanes, group=lanes.group)
        witness = Witness(session)
        for step in range(2):
            witness._ask(exchange)
            assert witness._sample is not None
            for slot in exchange.slots.values():
                slot.view.fill_(step + 1.0)
                witness.sends(slot, slot.view)
            witness._coming = witness._measure(witness._sample, step)
            with device.on_host():
                witness._take()
            assert witness._coming is None and witness._squares
            witness._sample, witness._runs = None, {}
            lanes.observe(witness, on=False)


SCENARIOS = (
    *(on_a_lane, scale_of_a_scaler, buffers_beside, offloaded, squares_of_a_witness, gather_alone, gathers_later),
    *(ready_on_two_streams, narrow_residuals, two_streams, reduced_for_fsdp2, quantised_by_the_backend, hop_by_hop),
    *(whole_steps, staged),
)
"""The quickest first."""


@pytest.fixture(autouse=True)
def kernels_in_torch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The double sees operations of torch alone."""
    monkeypatch.setattr(cpu, "available", lambda: "the double sees none of them")
    kernels_for.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    kernels_for.cache_clear()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_nothing_is_touched_out_of_order(scenario: Callable[[Device], None], monkeypatch: pytest.MonkeyPatch) -> None:
    with Device().used(monkeypatch) as device, torch.no_grad():
        scenario(device)


def test_no_thread_waits_where_lanes_only_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    with Device().used(monkeypatch) as device, torch.no_grad():
        for scenario in (whole_steps, hop_by_hop, narrow_residuals, gathers_later, gather_alone):
            scenario(device)
        assert "synchronize" not in {call for _, call in device.waits}
        staged(device)
        assert "synchronize" in {call for _, call in device.waits}, "the copies to the host"


def test_the_witness_reads_its_numbers_when_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with Device().used(monkeypatch) as device, lanes_of(device) as lanes:
        session: Any = MadeSession(lanes=lanes, group=lanes.group)
        witness, streams = Witness(session), lanes.data[0].link.streams
        witness._coming = coming = _Squares(0, 9, torch.ones(6), streams, streams.mark())
        with monkeypatch.context() as patch:
            patch.setattr(DeviceStreams, "is_done", lambda own, mark: False)
            witness._take()
            assert witness._coming is coming and not witness._squares
        with device.on_host():
            witness._take()
        assert witness._coming is None and [*witness._squares[0]] == [[1.0] * 6]
        assert "synchronize" not in {call for _, call in device.waits}


# ---- with one of them taken out

SRC = Path(gw.__file__).parent
MODULES = [path for room in ("collectives", "exchange", "engine", "integrations") for path in sorted((SRC / room).rglob("*.py"))]
MODULES += [SRC / "transport" / name for name in ("lanes.py", "pinned.py", "staged_link.py", "streams.py")]


class TakeOut(ast.NodeTransformer):
    """Takes one wait or mark of a module out, by its number; lists all of them."""

    def __init__(self, name: str, number: int = -1) -> None:
        self.number, self._within = number, list[str]()
        self._has_exchanges = ".collectives." in name or name.endswith(".staged_link")
        self.found: list[tuple[tuple[str, ...], str]] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._inside(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._inside(node)

    def _inside(self, node: Any) -> ast.AST:
        self._within.append(node.name)
        self.generic_visit(node)
        self._within.pop()
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        called = ast.unparse(node.func)
        owner, _, method = called.rpartition(".")
        of_streams = owner.endswith("streams")
        waits = called in ("_wait_for", "mark.synchronize") or method == "wait_event" or called == "event.record"
        begins = of_streams and method == "encoding" and bool(node.args) and ast.unparse(node.args[0]) != "None"
        # of an exchange or a sum that a link has begun; what finishes with arguments is arithmetic
        ends = self._has_exchanges and not of_streams and (method == "wait" or (method == "finish" and not node.args))
        if not (waits or begins or ends or (of_streams and method in ("mark", "wait", "synchronize"))):
            return node
        self.found.append((tuple(self._within), f"{'.'.join(self._within)}: {ast.unparse(node)}"))
        if len(self.found) - 1 != self.number:
            return node
        nothing = ast.copy_location(ast.Constant(None), node)
        if begins:
            node.args[0] = nothing
            return node
        if ends:
            assert isinstance(node.func, ast.Attribute)
            return node.func.value  # it still begins
        return node.args[0] if of_streams and method != "mark" else nothing  # what was waited for still runs


def sites() -> Iterator[Any]:
    for path in MODULES:
        name = ".".join(path.relative_to(SRC.parent).with_suffix("").parts)
        finder = TakeOut(name)
        finder.visit(ast.parse(path.read_text()))
        for number, (place, words) in enumerate(finder.found):
            if "timed_mark" in place:  # it orders nothing
                continue
            yield pytest.param(name, number, id=f"{name.removeprefix('gradwire.')} {words}")


@contextmanager
def taken_out(name: str, number: int) -> Iterator[None]:
    """Without one wait or mark of a module."""
    module = importlib.import_module(name)
    tree, out = ast.parse(inspect.getsource(module)), TakeOut(name, number)
    code: CodeType = compile(ast.fix_missing_locations(out.visit(tree)), str(module.__file__), "exec")
    (first, *rest), _ = out.found[number]
    function: Any = getattr(module, first)
    code = _inner(code, first)
    if inspect.isclass(function):
        function, code = vars(function)[rest[0]], _inner(code, rest[0])
    function = inspect.unwrap(function)
    before, function.__code__ = function.__code__, code
    try:
        yield
    finally:
        function.__code__ = before


def _inner(code: CodeType, name: str) -> CodeType:
    return next(each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == name)


FOUND_LAST: dict[str, Callable[[Device], None]] = {
    "gradwire.collectives.schemes": staged,
    "gradwire.integrations.c10d": quantised_by_the_backend,
    "gradwire.integrations.fsdp2_exchanges": reduced_for_fsdp2,
    "gradwire.transport.pinned": staged,
    "gradwire.transport.staged_link": staged,
}
"""By module the scenario that found its last race. It often finds the next one too, so it comes first."""


@pytest.mark.parametrize(("name", "number"), list(sites()))
def test_each_wait_and_mark_is_needed(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    races: list[str] = []
    with taken_out(name, number), torch.no_grad():
        for scenario in sorted(SCENARIOS, key=lambda each: each is not FOUND_LAST.get(name)):
            device = Device()
            with suppress(Exception), device.used(monkeypatch):
                scenario(device)
            races += device.races
            if races:
                FOUND_LAST[name] = scenario
                break
    assert races, "nothing failed without it"
