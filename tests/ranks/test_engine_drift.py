"""Weights that should be equal on all ranks are compared, and the first that is not is named."""

import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stream_double import Device
from threads import Threads, here
from worlds import Given

import gradwire as gw
from gradwire.engine.control import DriftWatch, checksums


def train(steps: int, every: int, spoil_at: int | None, dtype: torch.dtype) -> str | None:
    """Train; before step `spoil_at` rank 1 changes the sign of one element of its second tensor. What the ranks are told."""
    model = Given([300, 7, 1], dtype, seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = gw.parallelize(model, optimizer, plan=gw.QSGD(bits=3), process_group=here.group, drift_check_steps=every)
    for step in range(steps):
        if step == spoil_at and here.rank == 1:
            model.p1.data[3].neg_()
        optimizer.zero_grad()
        try:
            model(model.random_gradients(here.rank, step)).backward()
        except gw.GradwireError as error:
            handle.detach()
            return f"{type(error).__name__}: {error}"
        optimizer.step()
    handle.detach()
    return None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_weights_raise_no_alarm(threads: Threads, dtype: torch.dtype) -> None:
    assert threads.run(3, train, 6, 1, None, dtype) == [None] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bit_on_one_rank_is_found_at_the_next_check_on_all(threads: Threads, dtype: torch.dtype) -> None:
    for told in threads.run(3, train, 9, 4, 5, dtype):
        assert told is not None
        assert told.startswith("DisagreementError")
        assert "rank 0 and rank 1" in told
        assert "step 8" in told
        assert "'p1'" in told


def test_it_can_be_switched_off(threads: Threads) -> None:
    assert threads.run(2, train, 4, 0, 1, torch.float32) == [None] * 2


def impossible(every: object) -> str:
    with pytest.raises(gw.GradwireError) as caught:
        gw.parallelize(Given([3]), plan=gw.Identity(), process_group=here.group, drift_check_steps=every)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize("every", [-1, 2.5, True])
def test_impossible_values_are_refused(threads: Threads, every: object) -> None:
    for told in threads.run(1, impossible, every):
        assert "drift_check_steps is" in told


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=50), st.data())
def test_a_change_of_one_word_changes_the_sum(values: list[int], data: st.DataObject) -> None:
    before = torch.tensor(values, dtype=torch.int32)
    after = before.clone()
    at = data.draw(st.integers(0, len(values) - 1))
    after[at] = data.draw(st.integers(-(2**31), 2**31 - 1).filter(lambda value: value != values[at]))
    assert checksums([before]) == checksums([before.clone()])
    assert checksums([before]) != checksums([after])


def test_a_device_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [torch.arange(3), torch.ones(0), torch.randn(5, 7)]
    alone = [checksums([weight])[0] for weight in weights]
    with Device().used(monkeypatch) as device:
        assert checksums(weights) == alone
        assert device.waits == [], "a value alone was read"
    assert checksums([]) == []


def test_places_and_borders_of_pieces_count() -> None:
    long = torch.arange(2**21 + 3, dtype=torch.int32)
    assert checksums([long]) != checksums([long.flip(0)])
    odd = torch.arange(7, dtype=torch.uint8)
    assert checksums([odd[1:]]) == checksums([odd[1:].clone()])
    assert checksums([long.view(torch.float32).reshape(-1, 1)]) == checksums([long])
    watch, a, b = DriftWatch(1), torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.zeros(1))
    assert watch.digest([weakref.ref(a), weakref.ref(b)]) != watch.digest([weakref.ref(b), weakref.ref(a)])
