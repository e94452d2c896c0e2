"""States that are wrong: refused with a ValueError that names the key, and the handle goes on as if nothing had been."""

import re
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fuzz import fuzzed
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradwire as gw

STATE_BYTES = 2**20
"""Python's own memory for reading a state of some hundred bytes; of lists that a tensor of any size is turned into."""


class Trained:
    """A handle in the middle of a run, and what the next step makes of it."""

    def __init__(self, plan: Any) -> None:
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
        self.handle = gw.parallelize(self.model, plan=plan)
        for _ in range(3):
            step(self.model)
        self.state = {key: value.clone() for key, value in self.handle.state_dict().items()}
        step(self.model)
        self.after = seen(self.model, self.handle)


def step(model: nn.Module) -> None:
    model.zero_grad()
    inputs = torch.linspace(-1, 1, 6).reshape(2, 3)
    model(inputs).square().sum().backward()


def seen(model: nn.Module, handle: gw.Handle) -> dict[str, torch.Tensor]:
    """The state and the gradients, copied."""
    gradients = {f"grad of {name}": parameter.grad for name, parameter in model.named_parameters()}
    everything = handle.state_dict() | {name: grad for name, grad in gradients.items() if grad is not None}
    return {key: value.clone() for key, value in everything.items()}


def same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        a.dtype == other[key].dtype and a.shape == other[key].shape and raw(a) == raw(other[key]) for key, a in one.items()
    )


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="module")
def handles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Trained]]:
    """One that follows a policy, and makes its plan again from a state, and one that runs a plan."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    policy = gw.Policy(default=gw.ErrorFeedback(gw.QSGD()), rules=[("0.bias", gw.Identity())])
    by_policy = Trained(policy)
    made = {"policy": by_policy, "plan": Trained(by_policy.handle.plan)}
    yield made
    for each in made.values():
        each.handle.detach()
    dist.destroy_process_group()


# ---- what is wrong with a state

KINDS: list[Callable[[torch.Tensor], Any]] = [
    lambda value: value.float(),
    lambda value: value.double(),
    lambda value: value.to(torch.int32),
    lambda value: value.to(torch.int64),
    lambda value: value.to(torch.uint8),
    lambda value: value.to(torch.bool),
    lambda value: value.to(torch.complex64),
    lambda value: value.to(torch.bfloat16),
    lambda value: value.to("meta"),
    lambda value: value.reshape(-1).to_sparse(),
    lambda value: value.float().clone().requires_grad_(),
    lambda value: value.reshape(1, -1),
    lambda value: value.reshape(-1, 1),
    lambda value: value.reshape(-1)[:0],
    lambda value: value.reshape(-1)[:1],
    lambda value: value.reshape(-1)[0],
    lambda value: value.reshape(-1)[:-1],
    lambda value: torch.cat([value.reshape(-1), value.reshape(-1)[:1]]),
    lambda value: value.reshape(-1).flip(0),
    lambda value: value.reshape(-1)[:1].expand(3_000_000),
    lambda value: torch.zeros((), dtype=value.dtype).expand(2, 1_500_000),
    lambda value: torch.zeros_like(value),
    lambda value: torch.ones_like(value),
    lambda value: -torch.ones_like(value.float()).to(value.dtype),
    lambda value: value + 1,
    lambda value: torch.full_like(value.float(), torch.nan),
    lambda value: torch.full_like(value.float(), -torch.inf),
    lambda value: torch.full_like(value.float(), 1e30),
    lambda value: torch.full_like(value.long(), 2**63 - 1),
    lambda value: torch.full_like(value.long(), -(2**63)),
    lambda value: value.tolist(),
    lambda value: value.numpy(),
    lambda value: int(value.reshape(-1)[0]),
    lambda value: None,
    lambda value: "3",
    lambda value: b"\x80\x04.",
    lambda value: {},
    lambda value: [10**30],
    lambda value: nn.Parameter(value.float().clone()),
]
NEW_KEYS: list[Any] = [
    "rank0/residual/0/9.weight", "rank0/residual/2/1.weight", "rank0/residual", "rank0/residual/", "rank0/", "rank0/colour",
    "rank0/residual/0/", "rank0/residual/-1/1.weight", "rank0/STEP", "rank0/\ud800", "rank0/" + "x" * 10_000, "rank0//step",
]  # fmt: skip


def of_another_group(state: dict[str, torch.Tensor], ranks: list[int]) -> dict[str, torch.Tensor]:
    """What the last of these ranks would have saved."""
    moved = {key.replace("rank0/", f"rank{ranks[-1]}/"): value for key, value in state.items()}
    return moved | {f"rank{ranks[-1]}/ranks": torch.tensor(ranks)}


@st.composite
def broken(draw: st.DrawFn, state: dict[str, torch.Tensor]) -> tuple[dict[Any, Any], set[str]]:
    """A state with one or two wrong keys, and the words of which a refusal must have one."""
    wrong: dict[Any, Any] = dict(state)
    words: set[str] = set()
    # of a rank of which there is but one key, what is missing first is named
    half = {"the state has no rank1/", *(["the state has no rank0/"] if "rank0/step" not in state else [])}
    for _ in range(draw(st.sampled_from([1, 1, 2]))):
        key = draw(st.sampled_from(sorted(state)))
        words |= words_of(key)
        kind = draw(st.sampled_from(["drop", "rename", "add", "value", "value", "value", "swap"]))
        if kind == "drop":
            wrong.pop(key, None)
        elif kind == "rename" and key in wrong:
            others = [key + "x", re.sub(r"rank\d", "rank1", key), key.partition("/")[2]]
            new = draw(st.sampled_from([*NEW_KEYS, *others]))
            wrong[new] = wrong.pop(key)
            words |= words_of(new) | half
        elif kind == "add":
            new = draw(st.sampled_from(NEW_KEYS))
            wrong[new] = draw(st.sampled_from(KINDS))(state[key])
            words |= words_of(new) | half
        elif kind == "swap":
            other = draw(st.sampled_from(sorted(state)))
            wrong[key], wrong[other] = state[other], state[key]
            words |= words_of(other)
        else:
            wrong[key] = draw(st.sampled_from(KINDS))(state[key])
    return wrong, words


def words_of(key: str) -> set[str]:
    field = key.partition("/")[2] or key
    if field == "order":
        return {"order", "plan", "saved together"}  # a policy makes another plan of another order
    if field.startswith("residual/") and field.count("/") > 1:
        return {field.split("/", 2)[2] or "''", field}  # the tensor, of which there may be another residual
    return {field[:40], repr(field)[1:30]}


def load(handle: gw.Handle, state: Any) -> tuple[str | None, int]:
    """The message of the refusal, or None, and the most memory that Python took. Any other exception fails the test."""
    tracemalloc.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is lost when ranks are missing
            handle.load_state_dict(state)
        return None, tracemalloc.get_traced_memory()[1]
    except ValueError as error:
        return str(error), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["policy", "plan"])
@fuzzed
@given(data=st.data())
def test_a_broken_state_is_refused_by_key_and_leaves_no_trace(
    handles: dict[str, Trained], kind: str, data: st.DataObject
) -> None:
    here = handles[kind]
    model, handle, state, after = here.model, here.handle, here.state, here.after
    handle.load_state_dict(state)
    before, plan = seen(model, handle), handle.plan
    saved = data.draw(st.sampled_from([state] * 3 + [of_another_group(state, ranks) for ranks in ([3], [0, 3], [3, 0])]))
    wrong, words = data.draw(broken(saved))
    message, peak = load(handle, wrong)
    if peak >= STATE_BYTES:  # a table of Python's own may have grown just then
        message, peak = load(handle, wrong)
    assert peak < STATE_BYTES
    if message is None:
        ranks = wrong.get("rank0/ranks")
        if ranks is None or ranks.tolist() != [0]:
            return  # a state of other ranks, from whose residuals it begins
        loaded = handle.state_dict()
        given = {key: wrong[key].detach().clone() for key in loaded}
        if kind == "plan":  # which does not follow from an order
            assert sorted(given["rank0/order"].tolist()) == sorted(state["rank0/order"].tolist())
            given["rank0/order"] = loaded["rank0/order"]
        assert same_bits(loaded, {key: value.reshape(loaded[key].shape) for key, value in given.items()})
        if all(value.isfinite().all() for value in loaded.values()):
            step(model)
            seen(model, handle)
        return
    assert any(word in message for word in words), f"{message}\nhas none of {words}"
    assert len(message) < 1000
    message.encode()
    assert same_bits(seen(model, handle), before)
    assert handle.plan == plan
    step(model)
    assert same_bits(seen(model, handle), after)


@pytest.mark.parametrize("kind", ["policy", "plan"])
def test_what_is_no_state_is_refused(handles: dict[str, Trained], kind: str) -> None:
    model, handle, state = handles[kind].model, handles[kind].handle, handles[kind].state
    handle.load_state_dict(state)
    before = seen(model, handle)
    for wrong in (
        {},
        {5: torch.zeros(1)},
        {"": None},
        {"model.weight": torch.zeros(3)},
        {"rank0": state["rank0/step"]},
    ):
        message, _ = load(handle, wrong)
        assert message is not None and "rank0/" in message
    assert same_bits(seen(model, handle), before)


@pytest.mark.parametrize("kind", ["policy", "plan"])
@pytest.mark.parametrize(
    ("version", "words"),
    [
        (None, ["rank0/version", "older"]),
        (torch.tensor(0), ["rank0/version is 0"]),
        (torch.tensor(2), ["rank0/version is 2", "Update gradwire"]),
        (torch.tensor(-1), ["rank0/version is -1"]),
        (torch.tensor(1.0), ["rank0/version is", "float32"]),
        (torch.tensor(True), ["rank0/version is", "bool"]),
        (1, ["rank0/version is", "int"]),
        ("1", ["rank0/version is", "str"]),
    ],
)
def test_other_versions_are_refused_with_the_cure(handles: dict[str, Trained], kind: str, version: Any, words: list[str]) -> None:
    model, handle, state = handles[kind].model, handles[kind].handle, handles[kind].state
    handle.load_state_dict(state)
    before = seen(model, handle)
    wrong: dict[str, Any] = state | {"rank0/version": version}
    if version is None:
        del wrong["rank0/version"]
    message, _ = load(handle, wrong)
    assert message is not None
    assert [word for word in words if word not in message] == [], message
    assert same_bits(seen(model, handle), before)


@pytest.mark.parametrize("kind", ["policy", "plan"])
@pytest.mark.parametrize("order", [[], [0], [0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 4], [-1, 0, 1, 2], [0, 1, 2, 3, 3]])
def test_an_order_that_is_none_is_refused(handles: dict[str, Trained], kind: str, order: list[int]) -> None:
    model, handle, state = handles[kind].model, handles[kind].handle, handles[kind].state
    handle.load_state_dict(state)
    before = seen(model, handle)
    message, _ = load(handle, state | {"rank0/order": torch.tensor(order, dtype=torch.int64)})
    assert message is not None and "order" in message
    assert same_bits(seen(model, handle), before)


@pytest.mark.parametrize("kind", ["policy", "plan"])
@pytest.mark.parametrize("number", [-1, -(2**63), 2**63 - 1])
def test_a_step_from_which_no_step_can_be_counted_is_refused(handles: dict[str, Trained], kind: str, number: int) -> None:
    model, handle, state = handles[kind].model, handles[kind].handle, handles[kind].state
    handle.load_state_dict(state)
    before = seen(model, handle)
    message, _ = load(handle, state | {"rank0/step": torch.tensor(number)})
    assert message is not None and f"rank0/step is {number}" in message
    assert same_bits(seen(model, handle), before)
