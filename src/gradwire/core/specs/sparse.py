"""Specs that send some of the elements."""

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from gradwire.core.checks import number, whole, word
from gradwire.core.payload import index_bytes, kept_of
from gradwire.core.specs.base import (
    ElementRun,
    Kernels,
    Law,
    Spec,
    SpecField,
    as_spec,
    check_block,
    check_momentum,
    check_ratio,
    check_seed,
    of_part,
    register_spec,
)
from gradwire.core.specs.dense import Identity
from gradwire.errors import SpecError

_WARM_UP = (0.25, 0.0625, 0.0156, 0.004, 0.001)
"""The ratios of DGC's warm-up, in order."""


class _Selected(Spec, frozen=True):
    """Values of the selected elements, then their indices, for each tensor or for the whole bucket."""

    schemes: ClassVar[tuple[str, ...]] = ("allgather", "alltoall")
    touches_segments_only: ClassVar[bool] = True

    part: ClassVar[str] = "ratio"
    """The name of the field that holds the sent part of the elements."""

    def _groups(self, runs: Sequence[ElementRun]) -> list[ElementRun]:
        if getattr(self, "per", "tensor") == "bucket":
            return [ElementRun(sum(run.numel for run in runs), runs[0].bits)] if runs else []
        return [ElementRun(run.numel, run.bits) for run in runs]

    def indexed(self, runs: Sequence[ElementRun]) -> int:
        return max((group.numel for group in self._groups(runs)), default=0)

    def payload_bytes(self, runs: Sequence[ElementRun], itemsize: int) -> int:
        groups = self._groups(runs)
        kept = [ElementRun(kept_of(group.numel, getattr(self, self.part)), group.bits) for group in groups]
        values: Spec = getattr(self, "values", Identity())
        indices = sum(index_bytes(sent.numel, group.numel) for sent, group in zip(kept, groups, strict=True))
        return values.payload_bytes(kept, itemsize) + indices


@register_spec
class TopK(_Selected, frozen=True):
    """The elements of largest magnitude, `ratio` of them (Aji and Heafield 2017).

    Biased: give it ErrorFeedback. At 1 % and float32 a sent element takes about 5 bytes, its index one of them; with
    `values=QSGD(bits=2)` 1.3 bytes, with 4 bits 1.6 (SparseLoCo; Sarfi et al. 2025, has 2 bits). `values` gets its best settings
    for feedback. Raises SpecError for a value outside its range, and for `values` with state or without a law.

    >>> TopK(0.01, values=QSGD(bits=2))
    TopK(0.01, values=QSGD(bits=2, block=128, rounding='nearest'))
    """

    id: ClassVar[str] = "topk"
    example: ClassVar[tuple[float]] = (0.01,)
    compressor: ClassVar[str] = "gradwire.compressors.topk:topk_compressor"

    ratio: float
    """The part of the elements that is sent, rounded up, at least one element."""
    selection: str = "exact"
    """exact: search all elements; sampled: take a bound from a sample, and search all elements if the bound was too high.
    Both find the same elements, of equal ones the first; on CPU both are the same kernel."""
    per: str = "tensor"
    """tensor: the largest of each tensor; bucket: the largest of the bucket (Cupcake's fused encoding). With bucket, a tensor
    of small gradients may send nothing for many steps."""
    values: SpecField = Identity()
    """How the values of sent elements travel. Identity: in the gradient's own dtype; QSGD(bits=2): fewer bytes, more error."""

    def __post_init__(self) -> None:
        check_ratio("ratio", self.ratio)
        word("selection", self.selection, ("exact", "sampled"), error=SpecError)
        word("per", self.per, ("tensor", "bucket"), error=SpecError)
        msgspec.structs.force_setattr(self, "values", as_spec("values", self.values).under_feedback())
        values = self.values
        if values.state or values.rounds or not values.granularity or values.law.kind == "none":
            raise SpecError(
                f"values is {values!r}: it must be a spec without state that sends the magnitude of every value by itself. Use "
                "QSGD(bits=4), Cast('bfloat16'), or leave values out."
            )
        values.check_fed_back("values")

    @property
    def touches_segments_only(self) -> bool:  # type: ignore[override]
        return self.per == "tensor"

    random_seed = of_part("values", "random_seed")
    follows_scale = of_part("values", "follows_scale")
    element_bits = of_part("values", "element_bits")

    @property
    def law(self) -> Law:
        of_values = self.values.law
        if of_values.kind == "unbiased":
            return Law("none")  # its error may be larger than the value
        return Law("contractive", self.ratio * (of_values.delta if self.values.encodes else 1.0))

    def kernels(self, part: float = 1.0) -> Kernels:
        """Where values travel in the gradient's own dtype. At least the part `ratio` of a group's squared norm is kept. NaN
        and Inf count as the largest, so they are sent, and their residual stays as it was."""
        settings = self.ratio, self.per == "bucket"
        return Kernels(("topk_encode", *settings, 0.0), ("topk_decode", *settings), typed=True)


@register_spec
class BlockTopK(Spec, frozen=True):
    """The elements of largest magnitude of every block: no search through the tensor, indices of one byte."""

    id: ClassVar[str] = "block_topk"
    example: ClassVar[tuple[float]] = (0.01,)
    schemes: ClassVar[tuple[str, ...]] = ("allgather", "alltoall")
    touches_segments_only: ClassVar[bool] = True

    ratio: float
    """The part that is sent of each block, rounded up, at least one element."""
    block: int = 256
    """A power of two from 32 to 256."""

    def __post_init__(self) -> None:
        check_ratio("ratio", self.ratio)
        check_block(self.block, high=256)

    @property
    def law(self) -> Law:
        return Law("contractive", self.ratio)

    def kernels(self, part: float = 1.0) -> Kernels:
        """A block keeps at least the part `ratio` of its squared norm. NaN and Inf count as the largest, so of a block
        that holds any at least one travels, and the residual there stays as it was."""
        settings = self.ratio, self.block
        return Kernels(("block_topk_encode", *settings), ("block_topk_decode", *settings), typed=True)

    @property
    def granularity(self) -> int:
        return self.block

    def kept(self, numel: int) -> int:
        """Number of elements sent of a run of `numel` elements."""
        full, tail = divmod(numel, self.block)
        return full * kept_of(self.block, self.ratio) + kept_of(tail, self.ratio)

    def payload_bytes(self, runs: Sequence[ElementRun], itemsize: int) -> int:
        return sum(self.kept(run.numel) for run in runs) * (itemsize + 1)


@register_spec
class Threshold(_Selected, frozen=True):
    """The elements of at least a fixed magnitude, up to `capacity` of them, the largest first. Unused places are sent as zeros,
    since payload sizes never depend on values. Biased: give it ErrorFeedback."""

    id: ClassVar[str] = "threshold"
    example: ClassVar[tuple[float]] = (1e-3,)
    part: ClassVar[str] = "capacity"
    follows_scale: ClassVar[bool] = False
    law: ClassVar[Law] = Law("contractive")

    threshold: float
    """The smallest magnitude that is sent, of a rank's own gradient as the script sees it."""
    capacity: float = 0.02
    """The part of each tensor that fits into a payload."""

    def __post_init__(self) -> None:
        number("threshold", self.threshold, "the smallest magnitude that is sent", positive=True, error=SpecError)
        check_ratio("capacity", self.capacity)

    def kernels(self, part: float = 1.0) -> Kernels:
        """Top-k of `capacity`. Elements below the threshold are sent as zeros; the residual keeps them until they grow."""
        settings = self.capacity, False
        return Kernels(("topk_encode", *settings, self.threshold * part), ("topk_decode", *settings), typed=True)


@register_spec
class RandomK(Spec, frozen=True):
    """Random elements, one out of each of k equal runs of a tensor. Indices are not sent: both sides draw the same indices.

    Without error feedback a sent value is multiplied by the length of its run, which makes the mean right.
    """

    id: ClassVar[str] = "randomk"
    example: ClassVar[tuple[float]] = (0.01,)
    touches_segments_only: ClassVar[bool] = True
    law: ClassVar[Law] = Law("unbiased")
    compressor: ClassVar[str] = "gradwire.compressors.randomk:randomk_compressor"

    ratio: float
    """The part of the elements that is sent, rounded up, at least one element."""
    indices: str = "common"
    """common: all ranks draw the same, and values are summed on the wire; own: each draws its own, and payloads are gathered."""
    seed: int = 0
    """Seed of the choice."""

    def __post_init__(self) -> None:
        check_ratio("ratio", self.ratio)
        word("indices", self.indices, ("common", "own"), error=SpecError)
        check_seed(self.seed)

    @property
    def schemes(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("allreduce",) if self.indices == "common" else ("allgather", "alltoall")

    @property
    def rounds(self) -> int:  # type: ignore[override]
        return 1 if self.indices == "common" else 0

    def kernels(self, part: float = 1.0) -> Kernels:
        """Where each rank draws its own: the key of its random stream travels before the values, in the gradient's own dtype."""
        return Kernels(("randomk_encode", self.ratio), ("randomk_decode", self.ratio), random=True, typed=True)

    def indexed(self, runs: Sequence[ElementRun]) -> int:
        return max((run.numel for run in runs), default=0)

    def kept(self, runs: Sequence[ElementRun]) -> int:
        """Number of elements sent of these runs."""
        return sum(kept_of(run.numel, self.ratio) for run in runs)

    def payload_bytes(self, runs: Sequence[ElementRun], itemsize: int) -> int:
        return 4 * self.kept(runs) if self.indices == "common" else 8 + self.kept(runs) * itemsize


@register_spec
class DGC(_Selected, frozen=True):
    """Deep gradient compression (Lin et al. 2018): Top-k of the sum of momenta.

    DGC applies the momentum: u = momentum * u + gradient, v = v + u. The largest of v are sent, and u and v are cleared there.
    Train with an optimizer without momentum.
    """

    id: ClassVar[str] = "dgc"
    state: ClassVar[tuple[str, ...]] = ("residual", "momentum")
    compressor: ClassVar[str] = "gradwire.compressors.dgc:DGCCompressor"

    ratio: float = 0.01
    """The part of each tensor that is sent."""
    momentum: float = 0.9
    """Momentum of the gradients, before selection."""
    clip: float = 0.0
    """The largest norm of a tensor's gradient before momentum, divided by the root of the number of ranks. 0: no clipping. With
    clipping no tensor is cut into pieces or shards, since its norm is that of all its elements: large tensors overlap less."""
    warm_up_steps: int = 0
    """Steps in which the ratio falls from 0.25 to `ratio`, a quarter at a time. 0: no warm-up."""
    selection: str = "exact"
    """exact or sampled, as in TopK."""

    def __post_init__(self) -> None:
        check_ratio("ratio", self.ratio)
        check_momentum(self.momentum)
        number("clip", self.clip, "a norm, 0 for no clipping", error=SpecError)
        whole("warm_up_steps", self.warm_up_steps, "steps of warm-up", error=SpecError)
        word("selection", self.selection, ("exact", "sampled"), error=SpecError)

    @property
    def owns_momentum(self) -> bool:
        return self.momentum > 0

    @property
    def follows_scale(self) -> bool:  # type: ignore[override]
        return not self.clip

    @property
    def granularity(self) -> int:
        return 0 if self.clip else 1

    def at_step(self, step: int) -> "DGC":
        """
        >>> DGC(warm_up_steps=500).at_step(0).ratio, DGC(warm_up_steps=500).at_step(499).ratio
        (0.25, 0.0156)
        """
        stages = [ratio for ratio in _WARM_UP if ratio > self.ratio]
        if step >= self.warm_up_steps or not stages:
            return msgspec.structs.replace(self, warm_up_steps=0)
        return msgspec.structs.replace(self, ratio=stages[step * len(stages) // self.warm_up_steps], warm_up_steps=0)
