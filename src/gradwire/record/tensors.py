"""Measures the bits and the compression error of each tensor over a run."""

import math
from collections import defaultdict
from collections.abc import Iterable

import torch

from gradwire.compressors import Context, compressor_for
from gradwire.core import DTYPE_BYTES, Bucket, Plan, TensorInfo
from gradwire.core import ElementRun as Elements
from gradwire.kernels import Segment, Segments, tensor_key
from gradwire.record.run import TensorRecord
from gradwire.transport import Group

MOST_ELEMENTS = 2**20
"""Most elements of one measurement. Later measurements take the other tensors, and other parts of larger ones."""
MOST_POINTS = 200
"""Most errors of each tensor, and most changes of its bits. Beyond, every second one is dropped, except the last."""


class Tensors:
    """Bits and errors by tensor, kept step by step."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._numels: dict[str, int] = {}
        self._bits: dict[str, list[tuple[int, float]]] = defaultdict(list)
        self._errors: dict[str, list[tuple[int, float]]] = defaultdict(list)
        self._exchange: object = None
        self._plan: Plan | None = None
        self._next = self._asked = 0
        self._wanted: set[str] = set()
        self._gradients: dict[str, torch.Tensor] = {}

    def use(self, exchange: object, plan: Plan, tensors: Iterable[TensorInfo], step: int) -> bool:
        """Note the bits of a plan that is in use from this step on. exchange: another object after each change. Returns whether
        the plan has other buckets than the one before."""
        if exchange is self._exchange:
            return False
        before, self._exchange, self._plan = self._plan, exchange, plan
        infos = {tensor.name: tensor for tensor in tensors}
        for bucket in plan.buckets:
            for info in map(infos.__getitem__, bucket.tensors):
                self._numels[info.name] = info.numel
                spec = bucket.spec_of(info.name).at_step(step)
                nbytes = spec.payload_bytes([Elements(info.numel, spec.element_bits, info.shape)], DTYPE_BYTES[info.dtype])
                bits = 8 * nbytes / max(1, info.numel)
                known = self._bits[info.name]
                if not known or known[-1][1] != bits:
                    known.append((step, bits))
                    if len(known) > MOST_POINTS:
                        del known[1:-1:2]
        return before is not None and [each.tensors for each in before.buckets] != [each.tensors for each in plan.buckets]

    def forget_from(self, step: int) -> None:
        """Drop the values of this step and of later steps."""
        for found in (self._bits, self._errors):
            for name, points in found.items():
                if points and points[-1][0] >= step:
                    found[name] = [point for point in points if point[0] < step]
                    if found is self._bits:
                        self._exchange = None  # note the bits again

    def ask(self) -> None:
        """Choose tensors for `gradient` and `measure` in this step."""
        names = list(self._numels)
        self._wanted, self._gradients, elements = set(), {}, 0
        for turn in range(len(names)):
            name = names[(self._next + turn) % len(names)]
            elements += min(self._numels[name], MOST_ELEMENTS)
            if self._wanted and elements > MOST_ELEMENTS:
                break
            self._wanted.add(name)
        self._next = (self._next + len(self._wanted)) % max(1, len(names))
        self._asked += 1

    def gradient(self, name: str, gradient: torch.Tensor | None) -> None:
        """Keep this rank's gradient of a chosen tensor, or a part of a large one, before the exchange."""
        if name in self._wanted and gradient is not None and not gradient.is_sparse:
            parts = gradient.detach().reshape(-1).split(MOST_ELEMENTS)
            self._gradients[name] = parts[self._asked % len(parts)].clone()

    @torch.no_grad()
    def measure(self, step: int) -> None:
        """Encode and decode the kept gradients. Sends nothing and changes no state of the run."""
        for bucket in self._plan.buckets if self._plan is not None and self._gradients else ():
            for name in bucket.tensors:
                if (gradient := self._gradients.pop(name, None)) is not None:
                    error = self._error(bucket, name, gradient, step)
                    if error is not None:
                        self._errors[name].append((step, error))
                    if len(self._errors[name]) > MOST_POINTS:
                        del self._errors[name][1:-1:2]
        self._wanted = set()

    def records(self) -> tuple[TensorRecord, ...]:
        return tuple(
            TensorRecord(name=name, numel=numel, bits=tuple(self._bits[name]), error=tuple(self._errors[name]))
            for name, numel in self._numels.items()
        )

    def _error(self, bucket: Bucket, name: str, gradient: torch.Tensor, step: int) -> float | None:
        """Return |decoded - gradient| / |gradient|. None for specs with rounds, zero gradients and infinite errors."""
        spec = bucket.spec_of(name).at_step(step)
        if spec.rounds:
            return None
        ranks = self._group.world_size
        codec, flat = compressor_for(spec).summing(1, ranks), gradient / ranks
        row = Segment(0, flat.numel(), tensor_key(name), 0, spec.element_bits)
        segments = Segments((row,), flat.device, (name,), (tuple(gradient.shape),))
        context = Context(torch.tensor([0, step, 0, self._group.rank], dtype=torch.int64, device=flat.device))
        payload = torch.zeros(codec.payload_bytes(segments, flat.dtype), dtype=torch.uint8, device=flat.device)
        decoded = torch.zeros(flat.numel(), dtype=getattr(torch, bucket.reduce_dtype), device=flat.device)
        codec.encode(flat, (), segments, context, payload)
        codec.decode(payload, segments, flat.dtype, False, decoded, context)
        lost, whole = (torch.linalg.vector_norm(each.double()).item() for each in (decoded.double() - flat, flat))
        return lost / whole if whole > 0 and math.isfinite(lost) else None
