"""Faults of what ranks saved: the file of one rank is missing, or is of an earlier step than the others'."""

import time
from pathlib import Path

import torch.distributed as dist
from worlds import digest

from gradwire.integrations.handles import load_handle, save_handle
from soak.settings import HOOK, Job, Trainee
from soak.stage import TIMEOUT_S, Stage, expect
from soak.training import Batches, End
from soak.trials import KINDS, LEFT_OUT


def missing_file(stage: Stage) -> str:
    """The file of one rank is missing: all ranks resume alike, or all are told, at once."""
    return damaged_set(stage, "missing")


def stale_set(stage: Stage) -> str:
    """The file of one rank is of an earlier save: the same."""
    return damaged_set(stage, "stale")


def damaged_set(stage: Stage, what: str) -> str:
    victim = stage.chance.randrange(stage.size)
    ends: list[End] = stage.run(resumed, stage.job, victim, what)
    stage.notes.fired = f"the file of rank {victim} was {what}"
    kinds = {end.kind for end in ends}
    expect(len(kinds) == 1, f"not all ranks ended alike: {ends}")
    expect(kinds <= {"finished", "ValueError"}, f"{ends}")
    expect(len({end.weights for end in ends}) == 1, f"weights differ: {ends}")
    stage.in_time(ends)
    return kinds.pop()


def resumed(job: Job, victim: int, what: str) -> End:
    """Train, save twice, damage the second save on this machine, and resume from it."""
    import gradwire as gw

    folder, rank = Path(job.folder), dist.get_rank()
    trainee = Trainee(job)
    batches = Batches(job, trainee.model)

    def steps(first: int, last: int) -> None:
        for step in range(first, last):
            trainee.optimizer.zero_grad()
            trainee.run(batches[step]).square().mean().backward()
            trainee.optimizer.step()
        trainee.handle.flush()

    steps(0, 3)
    save_handle(trainee.handle, folder / "first")
    steps(3, 6)
    save_handle(trainee.handle, folder / "second")
    weights = {name: value.clone() for name, value in trainee.model.state_dict().items()}
    trainee.end()
    dist.barrier()
    if rank == 0:
        own = folder / "second" / f"gradwire-rank{victim}.pt"
        own.unlink()
        if what == "stale":
            (folder / "first" / own.name).rename(own)
    dist.barrier()
    trainee = Trainee(job)
    trainee.model.load_state_dict(weights)
    began = time.monotonic()
    kind, words = "finished", ""
    try:
        load_handle(trainee.handle, folder / "second")
        steps(6, 9)
    except (ValueError, gw.GradwireError) as error:
        kind, words = type(error).__name__, str(error)
    seconds = time.monotonic() - began
    # after an error the handle is as before: training goes on without what was saved
    if kind == "ValueError":
        steps(6, 9)
    own_weights = digest(trainee.model.parameters()) if job.schedule not in ("delayed", "local") else ""
    trainee.end()
    return End(kind, words, time.monotonic(), 9, own_weights, longest_s=seconds, timeout_s=TIMEOUT_S)


KINDS |= {"missing file": missing_file, "stale set": stale_set}
LEFT_OUT |= {(kind, HOOK): "a script keeps the hook's state itself" for kind in ("missing file", "stale set")}
