"""Nodes of graphs that accumulate gradients are kept on devices, so that no stream of a forward decides where gradients lie."""

import pytest
import torch

from gradwire.engine.torch_hooks.hooks import Arrivals, GradientHooks, kept_nodes


class Owner:
    """Hears of gradients."""


def mark(parameters: list[torch.nn.Parameter]) -> int:
    """Mark the nodes that a graph would have now. How many there are."""
    nodes = kept_nodes(parameters)
    for node in nodes:
        node.metadata["kept"] = True
    return len(nodes)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_the_nodes_of_all_parameters_are_kept_on_a_device(device: str) -> None:
    """Not on CPUs, where the memory of a parameter may get another shape between two backwards."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, device=device), torch.nn.Linear(3, 2, device=device))
    parameters, owner, arrivals = list(model.parameters()), Owner(), Arrivals()
    hooks = GradientHooks(owner, lambda *_: False, lambda *_: None, parameters, arrivals=arrivals)
    arrivals.attach([[3, 2, 1, 0]], hear_all=False)
    hooks.renew(arrivals.last_ones)
    assert mark(parameters) == (4 if device == "meta" else 0)
    model(torch.ones(1, 3, device=device)).sum().backward()
    assert all("kept" in node.metadata for node in kept_nodes(parameters))
    hooks.remove()
    assert not any("kept" in node.metadata for node in kept_nodes(parameters))
