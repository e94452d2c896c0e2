"""Ranks that were started differently are told on all ranks, with both values, before anything is exchanged."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from worlds import Worlds, gradwire_threads

import gradwire as gw


class Interrupted(nn.Linear):
    """Somebody presses Ctrl-C when its parameters are looked at for the `after`-th time."""

    def __init__(self, after: int) -> None:
        super().__init__(6, 10)
        self.after = after

    def named_parameters(self, *arguments: Any, **named: Any) -> Any:
        self.after -= 1
        if self.after < 0:
            raise KeyboardInterrupt
        return super().named_parameters(*arguments, **named)


def alone(what: str, odd: int, others: bool) -> tuple[str, str, list[str]]:
    """Rank `odd` alone cannot begin, and its process lives on. The error, and the threads left. others: another handle has lanes
    that this one would share."""
    first = gw.parallelize(nn.Linear(3, 3), plan=gw.Identity()) if others else None
    model, arguments = nn.Linear(6, 10), {"tls": True} if "encrypted" in what else dict[str, Any]()
    if dist.get_rank() == odd:
        if what.startswith("silence"):
            arguments["silence_s"] = 1.0
        elif what == "encryption":
            arguments["tls"] = "on"
        else:
            model = Interrupted(int(what[-1]))
    with pytest.raises(BaseException) as caught:
        gw.parallelize(model, plan=gw.Identity(), **arguments)
    if first is not None:
        first.detach()
    return type(caught.value).__name__, str(caught.value), gradwire_threads()


def no_group(value: Any) -> str:
    with pytest.raises(gw.PlanError) as caught:
        gw.parallelize(nn.Linear(3, 3), plan=gw.Identity(), process_group=value)
    return str(caught.value)


def differ(what: str, odd: int, folder: str) -> tuple[str, str, list[str], bool]:
    """Rank `odd` differs in one thing. The error, the threads left, and whether the parameters are untouched."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model: nn.Module = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 3))
    plan: Any = gw.QSGD(bits=4)
    module = sys.modules["gradwire.engine.prepare"]
    version = module.__version__
    if what == "plan file":
        plan = Path(folder) / "plan.json"
        handle = gw.parallelize(model, plan=gw.QSGD(bits=4))
        handle.detach()
        if rank != odd:
            plan = Path(folder) / f"plan{rank}.json"
            handle.plan.save(plan)
    if rank == odd:
        if what == "shape":
            model = nn.Sequential(nn.Linear(6, 11), nn.Linear(11, 3))
        elif what == "names":
            model = nn.ModuleDict({"0": nn.Linear(6, 10), "head": nn.Linear(10, 3)})
        elif what == "number":
            model = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 3), nn.Linear(3, 3))
        elif what == "dtype":
            model = model.bfloat16()
        elif what == "frozen":
            model[1].bias.requires_grad_(False)
        elif what == "spec":
            plan = gw.QSGD(bits=5)
        elif what == "chunks":
            plan = gw.Uniform(gw.QSGD(bits=4), chunk_bytes=99)
        elif what == "version":
            module.__version__ = "9.9.9"
        elif what == "no parameters":
            model.requires_grad_(False)
        elif what == "plan of another model":
            other = nn.Linear(2, 2)
            infos = [gw.TensorInfo(name, tuple(p.shape), "float32") for name, p in other.named_parameters()]
            plan = gw.Uniform(gw.QSGD(bits=4)).plan(infos)
    before = [p.detach().clone() for p in model.parameters()]
    try:
        gw.parallelize(model, plan=plan)
    except Exception as error:
        caught = error
    finally:
        module.__version__ = version
    untouched = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return type(caught).__name__, str(caught), gradwire_threads(), untouched


DIFFERENCES = {
    "shape": ("[10, 6]", "[11, 6]"),
    "names": ("1.weight", "head.weight"),
    "number": ("4 tensors", "6 tensors"),
    "dtype": ("float32", "bfloat16"),
    "frozen": ("4 tensors", "3 tensors"),
    "spec": ('"bits":4', '"bits":5'),
    "chunks": ("99", "rank"),
    "version": (gw.__version__, "9.9.9"),
}


@pytest.mark.parametrize("what", DIFFERENCES)
@pytest.mark.parametrize("odd", [0, 2])
def test_all_ranks_are_told_both_values(worlds: Worlds, what: str, odd: int, tmp_path: Path) -> None:
    for kind, words, threads, untouched in worlds.run(3, differ, what, odd, str(tmp_path), deadline_s=20):
        assert kind == "DisagreementError"
        assert f"rank {odd} has" in words
        for value in DIFFERENCES[what]:
            assert value in words.replace(" ", "") or value in words
        assert threads == []
        assert untouched


@pytest.mark.parametrize("what", ["plan file", "no parameters", "plan of another model"])
@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_that_cannot_begin_stops_all(worlds: Worlds, what: str, odd: int, tmp_path: Path) -> None:
    results = worlds.run(2, differ, what, odd, str(tmp_path), deadline_s=20)
    own_kind, own_words, *_ = results[odd]
    other_kind, other_words, *_ = results[1 - odd]
    assert own_kind != "DisagreementError"
    assert other_kind == "DisagreementError"
    assert f"rank {odd}: {own_kind}: {own_words}" in other_words
    for _, _, threads, untouched in results:
        assert threads == []
        assert untouched


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("silence", "PlanError: silence_s is 1.0: it must be"),
        ("silence, encrypted", "PlanError: silence_s is 1.0: it must be"),
        ("encryption", "PlanError: tls is 'on': it must be"),
        ("interrupt 0", "KeyboardInterrupt"),
        ("interrupt 1", "KeyboardInterrupt"),
    ],
)
def test_nobody_waits_for_a_rank_whose_arguments_are_wrong(
    worlds: Worlds, what: str, reason: str, odd: int, others: bool
) -> None:
    results = worlds.run(2, alone, what, odd, others, deadline_s=15)
    own_kind, own_words, _ = results[odd]
    other_kind, other_words, _ = results[1 - odd]
    assert f"{own_kind}: {own_words}".startswith(reason)
    assert other_kind == "DisagreementError" and f"rank {odd}: {reason}" in other_words
    assert [threads for *_, threads in results] == [[], []]


@pytest.mark.parametrize("value", ["x", 3, [], object])
def test_what_is_no_group_is_refused(worlds: Worlds, value: Any) -> None:
    for words in worlds.run(2, no_group, value):
        assert "is no group of ranks of this process. Pass what torch.distributed.new_group returned" in words
