"""The profile: measured times of a model's backward and forward, tensor by tensor."""

from typing import ClassVar

from gradwire.core.checks import DTYPE_BYTES, each, flags, freeze, numbers, only_version, text, unique, whole, wholes, word
from gradwire.core.provenance import Made
from gradwire.core.strict import Document
from gradwire.core.tensors import Shaped, TensorInfo
from gradwire.errors import FormatError


class TensorProfile(Shaped, frozen=True, kw_only=True):
    """One tensor of a profile."""

    omit_at_default: ClassVar[tuple[str, ...]] = ("forward_us", "backward_iqr_us", "forward_iqr_us", "embedding")

    backward_us: float
    """Microseconds from the previous gradient-ready event to this one."""
    forward_us: float | None = None
    """Microseconds of the forward that uses the tensor. The planner needs them for the pipelined schedule."""
    backward_iqr_us: float | None = None
    """Interquartile range of backward_us over the measured steps; None if unknown."""
    forward_iqr_us: float | None = None
    """Interquartile range of forward_us over the measured steps; None if unknown."""
    embedding: bool = False
    """Whether its rows are looked up, as in `TensorInfo`."""

    def __post_init__(self) -> None:
        text("name", self.name, "a parameter's name")
        freeze(self, "shape")
        for index, extent in enumerate(self.shape):
            whole(f"shape[{index}]", extent, "an extent")
        word("dtype", self.dtype, tuple(DTYPE_BYTES))
        flags(self, "embedding")
        numbers(self, "a time in microseconds", "backward_us", "forward_us", "backward_iqr_us", "forward_iqr_us")


class Profile(Document, frozen=True, kw_only=True):
    """Times of a model on one device at one batch size, tensors in gradient-ready order, first ready first.

    >>> tensor = TensorProfile(name="fc.bias", shape=(10,), dtype="float32", backward_us=3.5)
    >>> profile = Profile(model="mlp", batch=32, device="V100", tensors=(tensor,))
    >>> Profile.from_json(profile.to_json()) == profile
    True
    """

    what: ClassVar[str] = "profile"
    remedy: ClassVar[str] = (
        "A profile is made by `gradwire profile` or `handle.profile(FOLDER)`: see docs/how-to/plan-a-cluster.md."
    )
    omit_at_default: ClassVar[tuple[str, ...]] = ("steps", "optimizer_us", "loaded_backward_us", "processor_part", "made")

    version: int = 1
    model: str
    batch: int
    """Samples per rank and step."""
    device: str
    """The name of the processor, such as V100."""
    steps: int | None = None
    """The number of steps of which the times are medians; None if unknown."""
    optimizer_us: float | None = None
    """Microseconds from the end of a step's exchange to the next forward: the optimizer and the loop. None counts as 0."""
    loaded_backward_us: float | None = None
    """Microseconds of the whole backward while exchanges run; backward_us was measured without exchanges. The difference is the
    time that codecs and messages take from computation. For display; no prediction uses this field."""
    processor_part: float | None = None
    """The part of forward and backward for which a processor of the host is needed, also while another rank has it: about 1 on
    one thread of a CPU, and near 0 on a device of its own. None counts as 1 on CPUs."""
    made: Made | None = None
    tensors: tuple[TensorProfile, ...]

    def __post_init__(self) -> None:
        only_version(self.version)
        text("model", self.model, "the model's name")
        text("device", self.device, "the name of what computed")
        wholes(self, "samples per rank and step", "batch", low=1)
        wholes(self, "steps measured", "steps", low=1)
        numbers(self, "a time in microseconds", "optimizer_us", "loaded_backward_us")
        numbers(self, "a part of a time", "processor_part")
        freeze(self, "tensors")
        each("tensors", self.tensors, TensorProfile)
        if not self.tensors:
            raise FormatError(f"tensors is []: a profile has at least one tensor. {self.remedy}")
        unique("tensors", [tensor.name for tensor in self.tensors], ".name")

    @property
    def compute_us(self) -> float:
        """Microseconds of a step without exchanges: forward, backward and optimizer, as far as they are known."""
        tensors_us = sum(tensor.backward_us + (tensor.forward_us or 0.0) for tensor in self.tensors)
        return tensors_us + (self.optimizer_us or 0.0)

    def tensor_infos(self, device: str) -> tuple[TensorInfo, ...]:
        """The tensors as a planner expects them, all on `device` (cpu or gpu), in gradient-ready order."""
        return tuple(TensorInfo(t.name, t.shape, t.dtype, device, t.embedding) for t in self.tensors)
