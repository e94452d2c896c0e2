"""A rank of the local schedule is killed in the middle of an outer exchange, 30 times: survivors say in time which fragment it
was, and a run that takes up the last checkpoint ends as one that nothing interrupted."""

import os
import random
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from worlds import World, Worlds, digest, seeded

import gradwire as gw
from gradwire.core import SHARED_MEMORY

STEPS = 20
TIMEOUT_S, ALLOWANCE_S = 15.0, 10.0
"""Of the process group; and how much later a survivor's error may come."""
AT_A_TIME, KILLS = 3, 5
SCHEDULES = {
    "streaming": gw.LocalSteps(every=6, outer=gw.Nesterov(0.4, 0.9), fragments=3, delay=2, mixing=0.5),
    "plain": gw.LocalSteps(every=4),
    "delayed": gw.LocalSteps(every=5, delay=2, mixing=0.5),
}
SPECS = (
    gw.ErrorFeedback(gw.QSGD(bits=2)),
    gw.QSGD(bits=4),
    gw.Identity(),
    gw.ErrorFeedback(gw.TopK(0.1, values=gw.QSGD(bits=2)), decay=0.95),
    gw.ErrorFeedback(gw.QSGD(bits=3)),
)


@dataclass(frozen=True)
class LocalKill:
    """Which rank dies, in which exchange, and how much of what it sends there arrives."""

    victim: int
    exchange: int
    part: float
    checkpoint_every: int


@dataclass(frozen=True)
class LocalEnd:
    """What a rank told."""

    at: float
    words: str = ""
    weights: str = ""
    """Digest of W."""
    whole: str = ""
    """Digest of W, of the optimizer's state, and of what the handle keeps, in which L is."""
    seen: tuple[str, ...] = ()
    """Digests of W after each step."""


class Killing:
    """Stands between a rank and its connections, and kills the rank when a part of an exchange's bytes has gone out.

    How many bytes an exchange has is what went out in the same exchange of the period before.
    """

    def __init__(self, handle: Any, fragments: int, kill: LocalKill, tells: Path) -> None:
        self._exchange, self._fragments, self._kill, self._tells = 0, fragments, kill, tells
        self._sent, self._lock, self._dying = [0], threading.Lock(), threading.Lock()
        for lane in handle.session.lanes.data:
            link = lane.link
            link.backend = KillingBackend(link.backend, self)
            for peer, real in list(link.wire._sockets.items()):
                near, far = socket.socketpair()
                link.wire._sockets[peer], link.wire._connections[peer].fd = near, near.fileno()
                threading.Thread(target=self._pass_on, args=(far, real, True), daemon=True).start()
                threading.Thread(target=self._pass_on, args=(real, far, False), daemon=True).start()

    def begins(self, exchange: int) -> None:
        """From now on bytes are of this exchange."""
        while len(self._sent) <= exchange:
            self._sent.append(0)
        self._exchange = exchange

    def may_go_out(self, nbytes: int) -> int:
        """How many of these bytes may, before the rank dies."""
        with self._lock:
            sent, self._sent[self._exchange] = self._sent[self._exchange], self._sent[self._exchange] + nbytes
            if self._exchange < self._kill.exchange:
                return nbytes
            return min(nbytes, int(self._kill.part * self._sent[self._exchange - self._fragments]) - sent)

    def die(self) -> None:
        with self._dying:  # two lanes may come here, and one would empty the file as the other kills
            self._tells.write_text(f"{self._exchange} {time.monotonic()}")
            os.kill(os.getpid(), signal.SIGKILL)

    def _pass_on(self, source: socket.socket, target: socket.socket, counts: bool) -> None:
        with suppress(OSError):
            while taken := source.recv(2**16):
                out = self.may_go_out(len(taken)) if counts else len(taken)
                target.sendall(taken[: max(0, out)])
                if out < len(taken):
                    self.die()
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


class KillingBackend:
    """The same for what gloo sends: the rank dies after it has begun to."""

    def __init__(self, backend: Any, killing: Killing) -> None:
        self._backend, self._killing = backend, killing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        return self._after(self._backend.allreduce(tensors, options), tensors[0].nbytes)

    def send(self, parts: list[torch.Tensor], to: int, tag: int) -> Any:
        return self._after(self._backend.send(parts, to, tag), parts[0].nbytes)

    def _allgather_base(self, received: torch.Tensor, sent: torch.Tensor) -> Any:
        return self._after(self._backend._allgather_base(received, sent), sent.nbytes)

    def _after(self, work: Any, nbytes: int) -> Any:
        if self._killing.may_go_out(nbytes) < nbytes:
            self._killing.die()
        return work


# ---- on the ranks


def training(spec: gw.Spec, schedule: gw.LocalSteps) -> Any:
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.Linear(40, 50), torch.nn.Tanh(), torch.nn.Linear(50, 45), torch.nn.Tanh(), torch.nn.Linear(45, 20)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plan = gw.Uniform(spec, schedule=schedule, bucket_bytes=6000, edge_bytes=6000)
    os.environ[SHARED_MEMORY] = "off"  # bytes are counted where they go out by TCP
    handle = gw.parallelize(model, optimizer, plan=plan)
    del os.environ[SHARED_MEMORY]
    return model, optimizer, handle


def one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    inputs = torch.randn(6, 40, generator=seeded(step, dist.get_rank()))
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(spec: gw.Spec, schedule: gw.LocalSteps, folder: str = "", kill: LocalKill | None = None, begin: int = 0) -> LocalEnd:
    """Train to the end or to an error: from the checkpoint of a step, and with a rank that dies."""
    rank, seen = dist.get_rank(), []
    model, optimizer, handle = training(spec, schedule)
    if begin:
        saved = torch.load(Path(folder) / f"{rank}-{begin}.pt", weights_only=True)
        for each, state in zip((model, handle, optimizer), saved, strict=True):
            each.load_state_dict(state)
    killing = None
    if kill is not None and kill.victim == rank:
        killing = Killing(handle, schedule.fragments, kill, Path(folder) / "killed")
    try:
        for step in range(begin, STEPS):
            if killing is not None:
                killing.begins(sum(schedule.begins_after(number) <= step + 1 for number in range(STEPS)) - 1)
            one_step(model, optimizer, step)
            if kill is None:
                seen.append(digest(model.state_dict().values()))
            elif (step + 1) % kill.checkpoint_every == 0:
                states = model.state_dict(), handle.state_dict(), optimizer.state_dict()
                torch.save(states, Path(folder) / f"saving{rank}")
                (Path(folder) / f"saving{rank}").rename(Path(folder) / f"{rank}-{step + 1}.pt")
    except gw.CommunicationError as error:
        return LocalEnd(time.monotonic(), str(error), digest(model.state_dict().values()))
    weights, kept = digest(model.state_dict().values()), handle.state_dict()
    momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
    whole = digest([*model.parameters(), *momenta, *(kept[name] for name in sorted(kept))])
    handle.detach()
    return LocalEnd(time.monotonic(), "", weights, whole, tuple(seen))


# ---- the trials


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_kill_in_an_outer_exchange_is_told_and_loses_nothing(worlds: Worlds, name: str, ranks: int, tmp_path: Path) -> None:
    schedule, chance = SCHEDULES[name], random.Random(f"{name} {ranks}")
    last = sum(schedule.begins_after(number) + schedule.delay <= STEPS for number in range(STEPS)) - 1
    kills = [
        LocalKill(
            victim=chance.randrange(ranks),
            exchange=chance.randint(schedule.fragments, last),
            part=chance.uniform(0.05, 0.95),
            checkpoint_every=chance.randint(2, 4),
        )
        for _ in range(KILLS)
    ]
    folders = [tmp_path / str(number) for number in range(KILLS)]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        told = list(pool.map(killed, SPECS, [schedule] * KILLS, kills, folders, [ranks] * KILLS))
    for spec, kill, folder, ends in zip(SPECS, kills, folders, told, strict=True):
        exchange, at = (folder / "killed").read_text().split()
        # bytes are counted where they leave, which may be an exchange later than they were sent in
        assert kill.exchange <= int(exchange) <= kill.exchange + 1
        expected = worlds.run(ranks, train, spec, schedule)
        assert len({end.seen for end in expected}) == 1
        for end in ends:
            # bytes of the exchange before, which has landed where the rank died, may still have been on their way out
            named = int(end.words.removeprefix("step ").partition(":")[0])
            assert kill.exchange - 1 <= named <= int(exchange), end.words
            before = schedule.begins_after(named) - 2  # W after the last step in which all ranks had the same one
            assert end.at - float(at) <= TIMEOUT_S + ALLOWANCE_S
            assert re.search(r"waited for .*bucket \d+", end.words), end.words
            # a rank that waits for one that waits for the victim names both
            blamed = re.findall(r"ranks? ([\d, ]+?)(?= did not answer|, which may be busy)", end.words)
            assert str(kill.victim) in ", ".join(blamed).split(", "), end.words
            place = f"The exchange was of fragment {1 + named % schedule.fragments} of {schedule.fragments}."
            assert (place in end.words) == (schedule.fragments > 1), end.words
            assert end.weights == expected[0].seen[before], "a survivor has not the weights that all had last"
        begin = max(set.intersection(*(checkpoints(folder, rank) for rank in range(ranks))), default=0)
        resumed = worlds.run(ranks, train, spec, schedule, str(folder), None, begin)
        assert [(end.weights, end.whole) for end in resumed] == [(end.weights, end.whole) for end in expected]


def killed(spec: gw.Spec, schedule: gw.LocalSteps, kill: LocalKill, folder: Path, ranks: int) -> list[LocalEnd]:
    """What the survivors told."""
    folder.mkdir()
    survivors = [rank for rank in range(ranks) if rank != kill.victim]
    with World(ranks, TIMEOUT_S) as world:
        world.start(train, spec, schedule, str(folder), kill)
        outcomes = world.collect(40.0, needed=survivors)
    for rank in survivors:
        assert outcomes[rank].kind == "returned", outcomes[rank].value
    return [outcomes[rank].value for rank in survivors]


def checkpoints(folder: Path, rank: int) -> set[int]:
    """The steps of a rank's whole ones."""
    return {int(path.stem.partition("-")[2]) for path in folder.glob(f"{rank}-*.pt")}
