"""The residuals of all buckets, by tensor name: to save, to load, and to carry over to another set of buckets.

Encode 0 is the rank's own: its residual is as large as the gradient. Encode 1 is the owner's, of the sum: its residual
covers the rank's shards. A residual of encode 1 is a part of the mean gradient that was not sent, and so is one of
encode 0: when shards change owners, adding the one to the other loses nothing.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from gradwire.collectives import TwoPhase
from gradwire.engine.layout import BucketBuffers

__all__ = ["Residuals"]


class Residuals:
    """Views of the residuals of one set of buckets."""

    def __init__(self, buckets: list[BucketBuffers], rank: int) -> None:
        self._buckets, self._rank = buckets, rank

    def _runs(self) -> Iterator[tuple[int, str, int, torch.Tensor, torch.Tensor]]:
        """(encode, tensor name, first element, elements of the tensor, the residual's run) of every residual."""
        for buffers in self._buckets:
            for chunk, start in zip(buffers.chunks, buffers.bounds, strict=False):
                for encode, residual in enumerate(chunk.residuals):
                    begin = start
                    if encode == 1 and isinstance(chunk, TwoPhase):
                        begin += chunk.piece.bounds[self._rank]
                    for slot in buffers.slots:
                        low = max(slot.offset, begin)
                        high = min(slot.offset + slot.view.numel(), begin + residual.numel())
                        if low < high:
                            yield encode, slot.name, low - slot.offset, slot.view, residual[low - begin : high - begin]

    def state(self) -> dict[str, torch.Tensor]:
        """`residual/{encode}/{tensor}`: one-dimensional float32, as long as the tensor, zero where nothing is kept."""
        state: dict[str, torch.Tensor] = {}
        for encode, name, first, tensor, run in self._runs():
            key = f"residual/{encode}/{name}"
            if key not in state:
                state[key] = torch.zeros(tensor.numel(), dtype=run.dtype, device=run.device)
            state[key][first : first + run.numel()] = run
        return state

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Raises ValueError for a tensor that is missing, unknown or of another size."""
        expected = {f"residual/{encode}/{name}": tensor.numel() for encode, name, _, tensor, _ in self._runs()}
        for key in expected.keys() ^ state.keys():
            where = "the state has no" if key in expected else "this plan keeps no"
            raise ValueError(f"{where} {key}: it was saved under another plan. Use the plan it was saved with.")
        for key, numel in expected.items():
            if state[key].numel() != numel:
                raise ValueError(f"{key} has {state[key].numel()} elements where the model's tensor has {numel}.")
        for encode, name, first, _, run in self._runs():
            run.copy_(state[f"residual/{encode}/{name}"].reshape(-1)[first : first + run.numel()])

    def carried(self) -> dict[str, torch.Tensor]:
        """What this rank has not sent yet of each tensor, both encodes added up."""
        carried: dict[str, torch.Tensor] = {}
        for key, value in self.state().items():
            name = key.split("/", 2)[2]
            carried[name] = carried[name] + value if name in carried else value
        return carried

    def take_over(self, carried: Mapping[str, torch.Tensor]) -> None:
        """Begin with what another set of buckets left. Of the own shard the second encode takes it: the first has none."""
        for _, name, first, _, run in self._runs():
            if name in carried:
                run.copy_(carried[name][first : first + run.numel()])
        for buffers in self._buckets:
            for chunk in buffers.chunks:
                if isinstance(chunk, TwoPhase) and (own := chunk.sent_residuals[self._rank]) is not None:
                    own.zero_()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What happens inside leaves no trace in the residuals."""
        tensors = [residual for buffers in self._buckets for chunk in buffers.chunks for residual in chunk.residuals]
        copies = [tensor.clone() for tensor in tensors]
        try:
            yield
        finally:
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)
