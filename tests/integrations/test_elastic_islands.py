"""Islands of two ranks each as members of an elastic job: one is killed and started again."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import elastic_island
import pytest
import torch
from crowd import START_S
from interpreters import Interpreters

import gradwire as gw
from gradwire.testbed import free_port

SCRIPT = Path(elastic_island.__file__)
RANKS = 2


class Island:
    """The processes of one island, and the lines that its first rank wrote."""

    def __init__(self, interpreters: Interpreters, address: str, kind: str, seed: int, folder: Path) -> None:
        self.steps: list[dict[str, Any]] = []
        command = [sys.executable, str(SCRIPT), address, kind, str(seed), str(folder)]
        port, self.log = free_port(), folder / f"island-{seed}.log"
        self.ranks = []
        for rank in range(RANKS):
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            environment = os.environ | {name: str(value) for name, value in own.items()} | {"GLOO_SOCKET_IFNAME": "lo"}
            environment["PYTHONPATH"] = os.pathsep.join([str(SCRIPT.parents[2] / "src"), str(SCRIPT.parent)])
            with self.log.open("a") as log:
                self.ranks.append(interpreters.start(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True))
        for each in self.ranks:
            threading.Thread(target=self._read, args=(each,), daemon=True).start()

    def _read(self, rank: "subprocess.Popen[str]") -> None:
        assert rank.stdout is not None
        for line in rank.stdout:
            self.steps.append(json.loads(line))

    def await_steps(self, more: int) -> None:
        """Wait until its ranks have reported so many rounds more."""
        aim, until = len(self.steps) + RANKS * more, time.monotonic() + START_S
        while len(self.steps) < aim:
            assert time.monotonic() < until, self.log.read_text()[-3000:]
            assert all(each.poll() is None for each in self.ranks), self.log.read_text()[-3000:]
            time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_killed_island_is_a_killed_member(interpreters: Interpreters, tmp_path: Path, kind: str) -> None:
    coordination = pytest.importorskip("torchft.coordination")
    lighthouse = coordination.LighthouseServer(
        bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=60_000, quorum_tick_ms=20, heartbeat_timeout_ms=1000
    )
    address = f"127.0.0.1:{urlsplit(lighthouse.address()).port}"
    all_of_them = [Island(interpreters, address, kind, seed, tmp_path) for seed in range(3)]
    killed, *others = all_of_them
    try:
        for each in all_of_them:
            each.await_steps(2)
        killed.ranks[1].send_signal(signal.SIGKILL)
        for each in others:
            each.await_steps(2)
        assert killed.ranks[0].wait(START_S) != 0, "collectives inside fail"
        again = Island(interpreters, address, kind, 3, tmp_path)
        all_of_them.append(again)
        again.await_steps(2)
        assert again.steps[0]["step"] > killed.steps[-1]["step"]
        last = max(each.steps[-1]["step"] for each in all_of_them) + 10
        (tmp_path / "part").write_text(str(last))
        (tmp_path / "part").rename(tmp_path / "end")
        assert [rank.wait(START_S) for each in (*others, again) for rank in each.ranks] == [0] * 6, again.log.read_text()[-3000:]
        found: dict[int, set[str]] = {}
        for each in (*others, again):
            for said in each.steps:
                found.setdefault(said["step"], set()).add(said["weights"])
        assert [step for step, weights in found.items() if len(weights) > 1] == []
        assert {said["members"] for said in others[0].steps} == {2, 3}
    finally:
        for each in all_of_them:
            for rank in each.ranks:
                rank.kill()
        lighthouse.shutdown()


def test_islands_train_apart_or_are_refused() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(gw.PlanError, match="LocalSteps"):
        gw.elastic(model, optimizer, plan=gw.Identity(), lighthouse="127.0.0.1:1", island=object())  # type: ignore[arg-type]
