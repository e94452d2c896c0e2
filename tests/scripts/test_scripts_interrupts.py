"""Ctrl-C in every phase ends all ranks within seconds, and worker processes of a DataLoader leave nothing behind.

Real interpreters, since only these run what happens at exit.
"""

import signal

import pytest
from interpreters import Interpreters
from sampling import values_that_run
from script_ends import End, ends_of

SCRIPT = """
import hashlib, os, sys, time
import torch, torch.distributed as dist
import gradwire as gw

torch.set_num_threads(1)
dist.init_process_group("gloo")
phase, rank = sys.argv[1], dist.get_rank()


def here(now):
    if now == phase:
        print("interrupt me", flush=True)
        time.sleep(60)


class Slow(torch.nn.Module):
    def forward(self, x):
        if self.training:
            here("forward")
            x.register_hook(lambda gradient: here("backward"))
        return x


class SlowEnd:
    def __del__(self):
        time.sleep(3)  # the interpreter is at its end then


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        if index >= 16 and phase == "loading":
            time.sleep(60)
        return torch.randn(300, generator=torch.Generator().manual_seed(100 * index + rank))


def loader(persistent):
    return torch.utils.data.DataLoader(Samples(), batch_size=4, num_workers=2, persistent_workers=persistent)


def new_model():
    torch.manual_seed(rank)
    return torch.nn.Sequential(torch.nn.Linear(300, 20), Slow(), torch.nn.Linear(20, 1))


def train(run, model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for batch in batches:
            run(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return hashlib.sha256(torch.cat([p.detach().reshape(-1) for p in model.parameters()]).numpy()).hexdigest()


model = new_model()
if phase.startswith("workers"):
    reference = new_model()
    wrapped = torch.nn.parallel.DistributedDataParallel(reference)
    of_ddp = train(wrapped, reference, loader(persistent=False))
    gw.parallelize(model, plan=gw.Identity())
    batches = loader(persistent="persistent" in phase)
    print("as DDP" if train(model, model, batches) == of_ddp else "not as DDP", flush=True)
else:
    handle = gw.parallelize(model, plan=gw.QSGD(bits=4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if phase == "step":
        optimizer.register_step_pre_hook(lambda *arguments: here("step"))
    if phase == "loading":
        for number, batch in enumerate(loader(persistent=False)):
            model(batch).mean().backward()
            if number == 3:
                print("interrupt me", flush=True)
    model(torch.ones(2, 300)).mean().backward()
    if phase in ("waiting", "waiting for a peer that ends later"):
        print("interrupt me", flush=True)
        if rank == 1 and phase == "waiting":
            time.sleep(60)
        if rank == 1:
            try:
                time.sleep(60)
            finally:
                time.sleep(4.5)
                os._exit(130)
        sys.kept = SlowEnd()
        model(torch.ones(2, 300)).mean().backward()
    optimizer.step()
    here("between steps")
"""

PHASES = ["forward", "backward", "waiting", "step", "between steps", "loading"]
ENDED = (1, -signal.SIGINT, 128 + signal.SIGINT)
LATE = "waiting for a peer that ends later"
WORKERS = ["workers", "workers, persistent"]


@pytest.fixture(scope="module")
def ends(interpreters: Interpreters, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, End]:
    """Of those scripts that a test looks at."""
    phases = sorted(values_that_run(request, "phase", of="ends"))
    return ends_of(interpreters, SCRIPT, [*phases, LATE], tmp_path_factory.mktemp("interpreters"))


@pytest.mark.parametrize("phase", PHASES)
def test_ctrl_c_ends_every_rank(ends: dict[str, End], phase: str) -> None:
    for rank in range(2):
        end = ends[f"{phase}.{rank}"]
        assert end["out"] == "interrupt me\n", end["err"]
        assert end["exit"] in ENDED, end
        assert end["seconds"] < 20  # up to 18 interpreters end at once here
        assert "KeyboardInterrupt" in end["err"]
        assert end["left"] == []


def test_ctrl_c_ends_a_rank_in_order_when_its_peer_ends_later(ends: dict[str, End]) -> None:
    end = ends[f"{LATE}.0"]
    assert "KeyboardInterrupt" in end["err"]
    assert end["exit"] in ENDED, end


@pytest.mark.parametrize("phase", WORKERS)
def test_worker_processes_that_are_forked_afterwards(ends: dict[str, End], phase: str) -> None:
    """The script ends by itself, with DDP's weights, and no process is left."""
    for rank in range(2):
        end = ends[f"{phase}.{rank}"]
        assert end["out"] == "as DDP\n", end["err"]
        assert end["exit"] == 0, end
        assert "Error" not in end["err"]
        assert end["left"] == []
