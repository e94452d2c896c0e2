"""Gradients where they are: in place of a flat buffer, a table of where each tensor lies in this step."""

import ctypes
from collections.abc import Iterable, Sequence
from ctypes import c_void_p
from dataclasses import dataclass
from typing import Any

import torch

from gradwire.kernels.segments import Segments


class Addresses:
    """Where tensors lie. C++ reads the table in every call: calls that were made once find each step's tensors."""

    def __init__(self, keys: Iterable[int]) -> None:
        """keys: as in segments. Tensors are numbered in their order."""
        self._at = {key: number for number, key in enumerate(keys)}
        self._table = (c_void_p * len(self._at))()
        self.tensors: list[torch.Tensor | None] = [None] * len(self._at)
        """They are kept alive: a lane may still work when its exchange is dropped."""

    def set(self, first: int, tensors: Sequence[torch.Tensor], addresses: list[int]) -> None:
        """Set the addresses of these tensors, numbered from `first` on, until `clear`."""
        self._table[first : first + len(tensors)] = [*addresses]
        self.tensors[first : first + len(tensors)] = tensors

    def clear(self) -> None:
        """No tensor lies anywhere: kernels refuse to touch them."""
        ctypes.memset(self._table, 0, ctypes.sizeof(self._table))
        self.tensors = [None] * len(self.tensors)

    def of_rows(self, segments: Segments) -> Any:
        """For each row the place in this table where C++ finds the address of its tensor."""
        begin, each = ctypes.addressof(self._table), ctypes.sizeof(c_void_p)
        return (c_void_p * len(segments.rows))(*[begin + each * self._at[row.key] for row in segments.rows])


@dataclass(frozen=True)
class Scattered:
    """A run of elements of several tensors, which stands where the C++ kernels otherwise take a flat buffer.

    The segments of a call say which elements: a row begins at element `first` of its tensor. Kernels read the elements times
    `factor`, rounded to their dtype, and write them as they are.
    """

    addresses: Addresses
    dtype: torch.dtype
    count: int
    """Elements, from which the rows' offsets are counted."""
    factor: float

    device = torch.device("cpu")
    is_cpu = True

    def numel(self) -> int:
        return self.count

    def __getitem__(self, run: slice) -> "Scattered":
        start, end, _ = run.indices(self.count)
        return Scattered(self.addresses, self.dtype, end - start, self.factor)
