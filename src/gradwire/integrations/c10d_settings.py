"""Settings of the backend "gradwire" of torch.distributed, for all groups of a process: what it quantises, with which bits."""

import weakref

import torch

from gradwire.core import QSGD, Identity, near, whole
from gradwire.errors import PlanError

__all__ = ["SETTINGS", "exclude_layer", "quantise", "register_model", "set_layer_bits"]


class QuantiserSettings:
    """The settings of all groups of this process."""

    bits, min_numel = 4, 2**14

    def __init__(self) -> None:
        self.parameters: dict[str, weakref.ref[torch.nn.Parameter]] = {}
        self.layers: dict[str, QSGD | Identity] = {}  # layers with a spec of their own


SETTINGS = QuantiserSettings()


def quantise(bits: int = 4, min_numel: int = 2**14) -> None:
    """Quantise all-reduces of at least `min_numel` elements of float32, bfloat16 or float16 to `bits` bits, 2 to 8. Call it on
    every rank, before the first all-reduce. Raises SpecError for other bits, PlanError for a wrong `min_numel`."""
    whole("min_numel", min_numel, "elements of the smallest all-reduce that is quantised", low=1, error=PlanError)
    SETTINGS.bits, SETTINGS.min_numel = QSGD(bits=bits).bits, min_numel


def register_model(model: torch.nn.Module) -> None:
    """Quantise only gradients of this model's parameters, each layer by itself: no block crosses a layer, and biases and norms
    stay uncompressed. Call it on every rank, before the first all-reduce. Layers are found by the memory of their gradients: in
    DDP with `gradient_as_bucket_view=True`, or in `all_reduce(p.grad)`."""
    SETTINGS.parameters = {name: weakref.ref(each) for name, each in model.named_parameters() if each.requires_grad}
    SETTINGS.layers = {}


def exclude_layer(name: str) -> None:
    """Send layers of the registered model whose names contain `name` uncompressed. Raises PlanError if there is none."""
    _set(name, Identity())


def set_layer_bits(name: str, bits: int) -> None:
    """Send layers of the registered model whose names contain `name` with `bits` bits, 2 to 8. Raises PlanError if there is no
    such layer, SpecError for other bits."""
    _set(name, QSGD(bits=bits))


def _set(name: str, spec: QSGD | Identity) -> None:
    found = [each for each in SETTINGS.parameters if name in each]
    if not found:
        raise PlanError(f"no layer is named {name!r}{near(name, SETTINGS.parameters)}. Call register_model first.")
    SETTINGS.layers |= dict.fromkeys(found, spec)
