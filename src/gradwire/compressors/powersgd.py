"""PowerSGD: matrices as two factors of rank r, summed on the wire in two rounds (Vogels et al. 2019, algorithms 1 and 2).

Round 1 sums P = M Q' and the uncompressed tensors; P's columns are made orthonormal. Round 2 sums Q = P' M. P Q is the sum of
gradients, and Q begins the next step. Law: each rank keeps M - P P' M, which is no longer than M (P's columns are orthonormal),
and the sum over ranks of what was kept and what was sent is the sum of what was given.

The residual is that of the rank's own factor, not the difference to the mean of all (as in PyTorch's hook): both sum up
to the same, but the difference between ranks' gradients, which compression did not cause, is not carried.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.compressors.base import Compressor, Context
from gradwire.core import PowerSGD
from gradwire.errors import PlanError
from gradwire.kernels import Segments, kernels_for, runs_of
from gradwire.kernels.reference.random import random_words, stream_key


class PowerSGDCompressor(Compressor):
    """Has no payload: a program sums the factors."""

    def __init__(self, spec: PowerSGD) -> None:
        super().__init__(spec)
        self.power = spec

    def program(self, flat: Tensor, state: Sequence[Tensor], segments: Segments) -> "PowerProgram":
        """The work on one flat buffer of whole tensors."""
        return PowerProgram(self.power, flat, state[0] if state else None, segments)

    def encode(self, *arguments: Any) -> None:
        raise PlanError(f"{self.spec!r} has no payload that can be gathered: its factors are summed. Use scheme='allreduce'.")

    def decode(self, *arguments: Any) -> None:
        self.encode()


class PowerProgram:
    """See `gradwire.kernels.Program`."""

    def __init__(self, spec: PowerSGD, flat: Tensor, residual: Tensor | None, segments: Segments) -> None:
        self.spec, self.flat, self.residual = spec, flat, residual
        runs, rank, device = runs_of(segments), spec.rank, flat.device
        rows: list[tuple[int, int, int, int, int]] = []
        self._whole: list[slice] = []
        """The places of uncompressed tensors in the flat buffer. In the first round they follow each other at the end."""
        self.names: list[tuple[str, int, slice]] = []
        row_lengths: list[int] = []
        p_at = q_at = 0
        for index, (row, run) in enumerate(zip(segments.rows, runs, strict=True)):
            if matrix := spec.factors(run.shape):
                rows.append((row.offset, *matrix, p_at, q_at))
                name = segments.names[index] if segments.names else str(index)
                self.names.append((name, row.key, slice(q_at, q_at + matrix[1] * rank)))
                p_at, q_at = p_at + matrix[0] * rank, q_at + matrix[1] * rank
                row_lengths += [matrix[1]] * rank
        whole_at = p_at
        for row, run in zip(segments.rows, runs, strict=True):
            if not spec.factors(run.shape):
                self._whole.append(slice(row.offset, row.offset + row.numel))
                p_at += row.numel
        self.matrices = torch.tensor(rows, dtype=torch.int64, device=device).reshape(-1, 5)
        first, self.q_sum = (torch.zeros(at, dtype=torch.float32, device=device) for at in (p_at, q_at))
        assert (p_at, q_at) == spec.round_numels(runs)
        self.payloads = [first, self.q_sum]
        self._numels = [place.stop - place.start for place in self._whole]
        self._first = first[whole_at:]
        self._firsts = list(self._first.split(self._numels)) if self._whole else []
        self._row_lengths = torch.tensor(row_lengths, dtype=torch.int64, device=device)
        self._rows = list(self.q_sum.split(row_lengths)) if row_lengths else []
        self.q_own, self.q_next = torch.zeros_like(self.q_sum), torch.zeros_like(self.q_sum)
        self.shared = {name: self.q_next[where] for name, _, where in self.names} if spec.warm_start else {}
        self._draw(0)

    def _draw(self, step: int) -> None:
        """Factors of random numbers between -1 and 1, the same on all ranks."""
        for _, key, where in self.names:
            stream = stream_key([self.spec.seed, step, 0, 0, key])
            words = random_words(torch.arange(where.stop - where.start), stream)
            self.q_next[where] = ((words.double() + 0.5) * 2.0**-31 - 1).float().to(self.q_next.device)

    def fill(self, round_number: int, context: Context) -> None:
        kernels, rank = kernels_for(self.flat.device.type), self.spec.rank
        first = self.payloads[0]
        if round_number == 0:
            if not self.spec.warm_start:
                self._draw(int(context.random[1]))
            kernels.project(self.flat, self.residual, self.matrices, rank, self.q_next, first)
            if self._whole:
                torch._foreach_copy_(self._firsts, self._parts(self.flat))
                if self.residual is not None:
                    torch._foreach_add_(self._firsts, self._parts(self.residual))
        else:
            kernels.orthogonalise(self.matrices, rank, first)
            kernels.back_project(self.flat, self.residual, self.matrices, rank, first, self.q_own)
            self.q_sum.copy_(self.q_own)

    def finish(self, context: Context) -> None:
        kernels, first = kernels_for(self.flat.device.type), self.payloads[0]
        kernels.reconstruct(self.flat, self.residual, self.matrices, self.spec.rank, first, self.q_sum, self.q_own)
        if self._whole:
            torch._foreach_copy_(self._parts(self.flat), self._firsts)
            if self.residual is not None:
                residuals = self._parts(self.residual)
                kept = torch.where(self._first.isfinite(), 0.0, torch.cat(residuals))
                torch._foreach_copy_(residuals, list(kept.split(self._numels)))
        if self.spec.warm_start and self._rows:
            self._begin_next()

    def _parts(self, flat: Tensor) -> list[Tensor]:
        """The uncompressed tensors in a buffer. Not kept: its memory may change."""
        return [flat[place] for place in self._whole]

    def _begin_next(self) -> None:
        """Begin the next step with the sums, scaled to length one. A row of zeros, or with a NaN, leaves the old row."""
        norms = torch.stack(torch._foreach_norm(self._rows, dtype=torch.float64))
        norms = norms.repeat_interleave(self._row_lengths, output_size=self.q_sum.numel())
        usable = norms.isfinite() & (norms > 0)
        self.q_next.copy_(torch.where(usable, (self.q_sum / norms).float(), self.q_next))
