"""Casts to 16-bit floats."""

import torch
from torch import Tensor

from gradwire.kernels.reference.numbers import narrow
from gradwire.kernels.segments import State


def cast_encode(src: Tensor, residual: State, wire: torch.dtype, payload: Tensor) -> None:
    """Encode src (+ residual) as `wire` (bfloat16 or float16), rounded to nearest even. Overflowing values leave no residual."""
    v = src.to(torch.float32) if residual is None else src.to(torch.float32) + residual
    sent = narrow(v, wire)
    payload.copy_(sent.view(torch.uint8))
    if residual is not None:
        lost = v - sent.to(torch.float32)
        residual.copy_(torch.where(lost.isfinite(), lost, residual))


def cast_decode(payload: Tensor, wire: torch.dtype, add: bool, dst: Tensor) -> None:
    """Write the values of payload to dst (flat), or add them to dst."""
    value = payload.clone().view(wire).to(torch.float32)
    dst.copy_(narrow(dst.to(torch.float32) + value if add else value, dst.dtype))
