"""The settings of the backend "gradwire", which all ranks must make alike."""

import hashlib
import weakref

import torch
import torch.distributed as dist

from gradwire.core import QSGD, Identity, near, whole
from gradwire.errors import DisagreementError, PlanError

__all__ = ["SETTINGS", "compare_ranks", "exclude_layer", "quantise", "register_model", "set_layer_bits"]


class Settings:
    """The settings of all groups of this process."""

    bits, min_numel = 4, 2**14
    changes = 0
    """How often a script has changed them."""

    def __init__(self) -> None:
        self.parameters: dict[str, weakref.ref[torch.nn.Parameter]] = {}
        self.layers: dict[str, QSGD | Identity] = {}  # layers with a spec of their own


SETTINGS = Settings()


def quantise(bits: int = 4, min_numel: int = 2**14) -> None:
    """Quantise all-reduces of at least `min_numel` elements of float32, bfloat16 or float16 to `bits` bits, 2 to 8. Call it on
    every rank, before the first all-reduce. Raises SpecError for other bits, PlanError for a wrong `min_numel`."""
    whole("min_numel", min_numel, "elements of the smallest all-reduce that is quantised", low=1, error=PlanError)
    SETTINGS.bits, SETTINGS.min_numel = QSGD(bits=bits).bits, min_numel
    SETTINGS.changes += 1


def register_model(model: torch.nn.Module) -> None:
    """Quantise only gradients of this model's parameters, each layer by itself: no block crosses a layer, and biases and norms
    stay uncompressed. Call it on every rank, before the first all-reduce. Layers are found by the memory of their gradients: in
    DDP with `gradient_as_bucket_view=True`, or in `all_reduce(p.grad)`."""
    SETTINGS.parameters = {name: weakref.ref(each) for name, each in model.named_parameters() if each.requires_grad}
    SETTINGS.layers = {}
    SETTINGS.changes += 1


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
    SETTINGS.changes += 1


def compare_ranks(group: dist.ProcessGroup) -> None:
    """Compare the settings of all ranks, at the first all-reduce and after each change: with others ranks would make other
    collectives, and wait. Raises DisagreementError on all ranks."""
    layers = repr([(name, SETTINGS.layers.get(name)) for name in SETTINGS.parameters]).encode()
    digest = int.from_bytes(hashlib.blake2s(layers, digest_size=7).digest())
    own = torch.tensor([SETTINGS.bits, SETTINGS.min_numel, len(SETTINGS.parameters), digest])
    everybody = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(everybody, own, group=group)
    whats = "bits", "min_numel", "number of parameters of the registered model", "names or bits of layers"
    ranks = dist.get_process_group_ranks(group)
    for rank, other in zip(ranks, everybody, strict=True):
        for what, value, first in zip(whats, other.tolist(), everybody[0].tolist(), strict=True):
            if value != first:
                raise DisagreementError(
                    f"ranks disagree on the {what} of their all-reduces: rank {ranks[0]} has {first}, rank {rank} has "
                    f"{value}. Call quantise, register_model, exclude_layer and set_layer_bits alike on every rank."
                ).about([ranks[0], rank])
