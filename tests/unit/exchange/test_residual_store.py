"""What ranks had not sent yet is added up."""

import torch

from gradwire.exchange import added_up


def test_residuals_on_two_devices_are_added_up() -> None:
    """As files are loaded that ranks saved on their own GPUs."""
    states = [{"residual/0/w": torch.ones(3, device=device)} for device in ("meta", "cpu")]
    assert added_up(states)["residual/w"].device.type == "meta"
    assert added_up(states[1:] * 2)["residual/w"].tolist() == [2.0] * 3
