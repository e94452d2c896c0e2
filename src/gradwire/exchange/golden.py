"""Digests of what this rank's kernels make of a golden gradient under each spec. Ranks compare them before the first exchange.

Versions alone do not tell: one rank may lack the C++ library, or run another build of it. Most kernels of the reference give the
same bytes; where one does not, ranks would add up what does not belong together, or decode it differently.
"""

import hashlib
from collections.abc import Iterable, Sequence

import torch

from gradwire.collectives import Energies, Learn, Weigh
from gradwire.compressors import SoleRank, compressor_for
from gradwire.core import Plan, Spec
from gradwire.kernels import Segment, Segments, is_float, run_calls, tensor_key
from gradwire.transport import Raised

_SHAPES = ((96, 64), (300,))


def golden_digests(
    plan: Plan, dtypes: Iterable[torch.dtype], device: torch.device, others: Sequence[Spec] = ()
) -> list[list[str]]:
    """Return the name and the digest of each spec of the plan, and of other specs that may follow it, for each dtype."""
    specs = {spec for bucket in plan.buckets for spec in bucket.specs} | {*others}
    if plan.schedule.correction is not None:
        specs.add(plan.schedule.correction)
    changed = {each for spec in specs for each in (spec.at_step(0), spec.settled) if each.encodes}
    encoded = [dtype for dtype in dict.fromkeys(dtypes) if is_float(dtype)]
    return sorted(
        [f"{spec!r} of {str(dtype).removeprefix('torch.')} on {device.type}", _digest(spec, dtype, device)]
        for spec in changed
        for dtype in encoded
    )


def _digest(spec: Spec, dtype: torch.dtype, device: torch.device) -> str:
    """Digest the payloads, decoded values and states of two steps. A compressor that draws numbers of its own is not compared."""
    try:
        first, again = (_two_steps(spec, dtype, device) for _ in range(2))
    except Exception as error:  # where all ranks raise the same, the first step tells whether it matters
        return Raised.by(error)
    return first if first == again else "not the same twice"


@torch.no_grad()
def _two_steps(spec: Spec, dtype: torch.dtype, device: torch.device) -> str:
    values = _gradient().to(device, dtype)
    rows, at = [], 0
    for number, shape in enumerate(_SHAPES):
        numel = torch.Size(shape).numel()
        rows.append(Segment(at, numel, tensor_key(f"golden{number}"), 0, spec.element_bits))
        at += numel
    energies = Energies.zeros(at, device, spec.element_weights)
    weights = None if energies is None else energies.weights
    segments = Segments(tuple(rows), device, tuple(f"golden{n}" for n in range(len(rows))), _SHAPES, weights)
    state = [torch.zeros(at, dtype=torch.float32, device=device) for _ in spec.state]
    rank, sha = SoleRank(compressor_for(spec), segments, dtype, state), hashlib.sha256()
    for step in range(2):
        decoded = rank.step([spec.random_seed, step, 0, 0], values.to(torch.float32, copy=True))
        for tensor in (*rank.payloads, decoded, *state):
            sha.update(bytes(tensor.cpu().view(torch.uint8).numpy()))
        if energies is not None:
            run_calls([*Learn(energies, decoded, segments).calls(), *Weigh(energies, segments).calls()])
    return sha.hexdigest()[:16]


def _gradient() -> torch.Tensor:
    """Numbers of float32 that are equal on every machine, of many magnitudes."""
    mixed = torch.arange(sum(torch.Size(shape).numel() for shape in _SHAPES)) * 2654435761 % 2**32
    return (((mixed >> 8).double() * 2.0**-24 - 0.5) * torch.exp2(-(mixed % 11).double())).float()
