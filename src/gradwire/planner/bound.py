"""A step that no plan can beat, whatever its buckets, options, specs and launch order are, if buckets are not cut into chunks.

All bytes that tensor k and the later ones put on a link travel after k's gradient is ready, and backward alone says when that
is at the earliest. A bucket that holds earlier tensors too is ready later still. Of each tensor the least link time of all
choices is counted, without its share of latencies, since fusion may make that as small as it likes; one exchange's latency is
left.

And the tasks of one tensor's bucket follow each other: after its gradient is ready the step takes at least what the quickest
choice takes for it alone, since no task of a larger bucket is shorter.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

from gradwire.core.profile import TensorProfile
from gradwire.core.specs import Identity, Spec
from gradwire.planner.programs import Bytes, Pricer, bytes_of
from gradwire.sim.events import INTER, INTRA
from gradwire.sim.simulator import FS_PER_US

_SHARED_BYTES = 64
"""Of a payload, what several tensors in one bucket may share: headers, rounding."""

_LATEST = 4
"""Of so many tensors it is looked at how long their own tasks take."""


def least_step_us(
    pricer: Pricer,
    after: Sequence[int],
    tensors: Sequence[tuple[TensorProfile, bool]],
    specs: Sequence[Spec],
    plain: Sequence[tuple[str, ...]],
    coded: Mapping[Spec, Sequence[tuple[str, ...]]],
) -> float:
    """Microseconds.

    after: femtoseconds until each gradient can be ready, the forward first. tensors: in gradient-ready order, each with whether
    it must stay uncompressed. plain, coded: the options of uncompressed buckets, and of compressed ones by spec.
    """
    ready_us = [time / FS_PER_US for time in after]
    bound = ready_us[-1]
    for link in (INTER, INTRA):
        ways: list[tuple[Spec, float, tuple[float, float, float]]] = []
        for spec in (Identity(), *specs):
            options = coded[spec] if spec.encodes else plain
            ways += [(spec, *way) for way in pricer.link_loads(options, spec.rounds, link)]
        known: dict[tuple[object, ...], float] = {}
        least = []
        for tensor, exempt in tensors:
            key = (tensor.shape, tensor.dtype, exempt)
            if key not in known:
                allowed = [spec for spec in (Identity(), *specs) if not (exempt and spec.encodes)]
                sizes = {spec: _least_bytes(tensor, spec) for spec in allowed}
                known[key] = min(
                    sum(factor * size for factor, size in zip(factors, sizes[spec][:3], strict=True))
                    for spec, _, factors in ways
                    if spec in sizes
                )
            least.append(known[key])
        latency_us = min(latency for _, latency, _ in ways)
        still = list(accumulate(reversed(least)))[::-1]
        bound = max(bound, *(r + s + latency_us for r, s in zip(ready_us[1:], still, strict=True)))
    for place in _latest_and_largest(tensors):
        tensor, exempt = tensors[place]
        quickest = min(pricer.sequence_us(option, Identity(), _least_bytes(tensor, Identity())) for option in plain)
        for spec in () if exempt else specs:
            size = _least_bytes(tensor, spec)
            quickest = min([quickest, *(pricer.sequence_us(option, spec, size) for option in coded[spec])])
        bound = max(bound, ready_us[place + 1] + quickest)
    return bound * (1 - 1e-12)


def _latest_and_largest(tensors: Sequence[tuple[TensorProfile, bool]]) -> list[int]:
    """Tensors than which none that is ready later is larger, the last four of them; exempt ones apart."""
    found: dict[bool, list[int]] = {True: [], False: []}
    largest = {True: -1, False: -1}
    for place in reversed(range(len(tensors))):
        tensor, exempt = tensors[place]
        if tensor.nbytes > largest[exempt] and len(found[exempt]) < _LATEST:
            largest[exempt] = tensor.nbytes
            found[exempt].append(place)
    return found[True] + found[False]


def _least_bytes(tensor: TensorProfile, spec: Spec) -> Bytes:
    """What the tensor adds to a bucket's Bytes, at least."""
    size = bytes_of([tensor], spec)
    first, later = (max(0.0, nbytes - _SHARED_BYTES) for nbytes in (size.first, size.later))
    return size._replace(first=first, later=later)
