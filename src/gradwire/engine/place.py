"""The memory of a bucket, and the script that may still look at it.

A script gets its gradients as tensors over the bucket's memory. One that keeps a view of a gradient (`p.grad.view(-1)`), sets
`p.grad` to None and goes on expects the view to stay as it is, as under DDP, where new gradients are in new memory. So before
anything is written the uses of the memory are counted, and where the script has one left the bucket moves elsewhere.
"""

import torch

__all__ = ["Place"]


class Place:
    """The flat buffer of a bucket and all tensors of ours that lie in its memory."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self._ours: list[torch.Tensor] = []
        self._handed: dict[int, torch.Tensor] = {}
        """What the script got and has not taken leave of, by id."""
        self._storage = flat.untyped_storage()
        self._uses = 0

    def settle(self, ours: list[torch.Tensor]) -> None:
        """Called once, when all tensors of ours over the memory have been made: these."""
        self._ours = list({id(tensor): tensor for tensor in [self.flat, *ours]}.values())
        self._uses = self._count()

    def hand_out(self, view: torch.Tensor) -> torch.Tensor:
        """A tensor of its own, and no view, over a part of the memory."""
        alias = torch.empty(0, dtype=view.dtype, device=view.device)
        alias.set_(view.untyped_storage(), view.storage_offset(), view.shape, view.stride())
        self._handed[id(alias)] = alias
        return alias

    def take_back(self, alias: torch.Tensor) -> None:
        """The script has another gradient now, and this part is about to be written."""
        self._handed.pop(id(alias), None)

    def leave_to_script(self) -> None:
        """Move, if the script has a use of the memory that is none of the tensors handed out."""
        if self._uses and self._count() > self._uses + len(self._handed):
            self._move()

    def _count(self) -> int:
        uses: int = torch._C._storage_Use_Count(self._storage._cdata)
        return uses

    def _move(self) -> None:
        elsewhere = self.flat.clone()
        for tensor in [*self._ours, *self._handed.values()]:
            if tensor.untyped_storage().data_ptr() == self._storage.data_ptr():
                tensor.data = elsewhere.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        self._storage = self.flat.untyped_storage()
