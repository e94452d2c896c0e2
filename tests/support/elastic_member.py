"""A member of an elastic job that tests start, kill and restart: it writes a line of JSON for every step that counts.

python elastic_member.py LIGHTHOUSE PLAN SEED FOLDER BATCH TIMEOUT_S

FOLDER/end has two steps. From the first one to the second the learning rate falls to 0, and then the member ends. It leaves
earlier when it gets SIGTERM. Its last line has the held-out loss, and what it held before and after.
"""

import gc
import hashlib
import json
import logging
import os
import signal
import sys
import threading
import time
from itertools import count
from pathlib import Path
from typing import Any

import torch

import gradwire as gw
from gradwire.integrations import members

__all__ = ["PATIENCE_S", "PLANS", "TIMEOUT_S"]

TIMEOUT_S = 8.0
PLANS: dict[str, Any] = {
    "exact": gw.Identity(),
    "4 bits": gw.QSGD(bits=4),
    "2 bits with feedback": gw.ErrorFeedback(gw.QSGD(bits=2, scale="ls", levels="lloyd")),
    "low rank": gw.PowerSGD(rank=2),
    "auto": "auto",
    "local": gw.Uniform(gw.QSGD(bits=4), schedule=gw.LocalSteps.diloco(every=3)),
}
PATIENCE_S = 90.0
PAUSE_S = 0.01
"""The time that a step computes, at least."""


def main() -> None:
    from torchft.coordination import LighthouseServer

    lighthouse, plan, seed, folder, batch, timeout_s = sys.argv[1:]
    torch.set_num_threads(1)
    leaves = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: leaves.set())
    if os.environ.get("VERBOSE"):
        logging.basicConfig(level=logging.INFO, format=f"{os.getpid()} %(asctime)s %(message)s")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 3))
    torch.manual_seed(int(seed))
    with torch.no_grad():  # every member begins with other weights, but so near that losses of two runs can be compared
        for parameter in model.parameters():
            parameter.add_(1e-3 * torch.randn_like(parameter))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    end, step, told, behind = End(Path(folder)), 0, 0, False
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: end.rate(step))
    same = torch.Generator().manual_seed(7)
    teacher = torch.randn(20, 3, generator=same)
    held_out = samples(4000, teacher, same)
    # the runtime of torchft's servers has two sockets until the process ends
    LighthouseServer(bind="127.0.0.1:0", min_replicas=1).shutdown()
    before = held()
    slow_down(float(os.environ["SLOW_S"]))
    die_at(int(os.environ["DIES_AT"]))
    job = gw.elastic(
        model,
        optimizer,
        plan=PLANS[plan],
        min_replicas=2,
        lighthouse=lighthouse,
        also=[scheduler],
        timeout_s=float(timeout_s),
        patience_s=PATIENCE_S,
    )
    try:
        while not leaves.is_set() and not end.is_reached(job.step):
            inputs, targets = samples(int(batch), teacher)
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            optimizer.step()
            step = job.step
            scheduler.step()
            optimizer.zero_grad()
            time.sleep(PAUSE_S)
            if step != told:
                told = step
                with job.global_weights():
                    weights = digest(model)
                who = {"members": job.world_size, "taking_part": job.taking_part}
                say(step=told, weights=weights, loss=loss.item(), decided=job.decision is not None, **who)
    except gw.CommunicationError:
        if not end.is_known:
            raise
        behind = True
    with job.global_weights(), torch.no_grad():
        inputs, targets = held_out
        last = (model(inputs) - targets).square().mean().item()
    job.leave()
    del job
    until = time.monotonic() + 10
    while held() != before and time.monotonic() < until:
        time.sleep(0.1)  # threads of C++ end a little later
    say(before=before, after=held(), loss=last, behind=behind)


class End:
    """The last steps of all members, which the tests write to a file some steps before."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "end"

    @property
    def is_known(self) -> bool:
        return self._file.exists()

    def is_reached(self, step: int) -> bool:
        """Whether so many steps are all."""
        return self.is_known and step >= self._steps[1]

    def rate(self, step: int) -> float:
        """The factor of the learning rate after so many steps: the same on all members."""
        if not self.is_known:
            return 1.0
        first, last = self._steps
        return min(1.0, max(0, last - step) / max(1, last - first))

    @property
    def _steps(self) -> tuple[int, int]:
        first, last = map(int, self._file.read_text().split())
        return first, last


def slow_down(seconds: float) -> None:
    """Let the state of another member come so much later."""
    at_once = members.fetch

    def late(*of_offer: Any) -> bytes:
        time.sleep(seconds)
        return at_once(*of_offer)

    members.fetch = late


def die_at(meeting: int) -> None:
    """Kill this process where it meets the others for this time, when it has reached their store. 0: never."""
    make, numbers = members.Exchange, count(1)

    def make_or_die(*given: Any) -> Any:
        if next(numbers) == meeting:
            os.kill(os.getpid(), signal.SIGKILL)
        return make(*given)

    members.Exchange = make_or_die


def samples(number: int, teacher: torch.Tensor, generator: torch.Generator | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and what the teacher makes of them with some noise."""
    inputs = torch.randn(number, 20, generator=generator)
    return inputs, inputs @ teacher + torch.randn(number, 3, generator=generator)


def digest(model: torch.nn.Module) -> str:
    sha = hashlib.sha256()
    for parameter in model.parameters():
        sha.update(parameter.detach().numpy().tobytes())
    return sha.hexdigest()[:16]


def held() -> dict[str, int]:
    """The sockets and the threads of gradwire that this process has."""
    gc.collect()
    sockets = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            sockets += os.readlink(f"/proc/self/fd/{number}").startswith("socket:")
        except OSError:
            continue
    return {"sockets": sockets, "threads": sum(each.name.startswith("gradwire") for each in threading.enumerate())}


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main()
