"""Buffers that rank 0 sent together with an exchange."""

import pytest
import torch

from gradwire.engine.buffers import ModelBuffers


class OnDevice(torch.Tensor):
    """A tensor of a device."""

    is_cpu = False  # type: ignore[assignment]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("given", [False, True])
def test_buffers_are_taken_where_rank_0_had_any(given: bool, on_device: bool) -> None:
    ours, theirs = (torch.nn.BatchNorm1d(3) for _ in range(2))
    for at, model in enumerate((ours, theirs)):
        model.running_mean.fill_(at + 1.0)  # type: ignore[union-attr]
    copy = ModelBuffers(ours, torch.device("cpu")).copy(ours)
    sent = ModelBuffers(theirs, torch.device("cpu")).copy(theirs if given else None)
    assert copy is not None and sent is not None
    copy._packed = sent._packed.as_subclass(OnDevice) if on_device else sent._packed  # as a broadcast leaves it
    copy.put_into(ours)
    assert ours.running_mean.tolist() == [2.0 if given else 1.0] * 3  # type: ignore[union-attr]


def test_the_host_reads_nothing_of_a_device() -> None:
    device = torch.device("meta")  # whose values nobody can read
    model = torch.nn.BatchNorm1d(3, device=device)
    copy = ModelBuffers(model, device).copy(model)
    assert copy is not None
    copy.put_into(model)
