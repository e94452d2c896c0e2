"""A compressor of one's own: 8 bits an element on telephone's logarithmic scale, one scale for each tensor.

Installed beside gradwire it is found by its entry points: `plan=gw.ErrorFeedback(MuLaw())`, `--methods "gradwire:MuLaw()"`,
{"id": "mulaw"} in a plan's JSON. Encoding and decoding are plain torch; error feedback, buckets and collectives are gradwire's.
"""

import math
from typing import ClassVar

import torch

import gradwire as gw
from gradwire.compressors.base import Compressor
from gradwire.core import register_spec
from gradwire.core.specs import Law


@register_spec
class MuLaw(gw.Spec, frozen=True):
    """One byte an element, four more a tensor."""

    id: ClassVar[str] = "mulaw"
    mu: float = 255.0

    @property
    def law(self):
        return Law("contractive")

    def payload_bytes(self, runs, itemsize):
        return sum(4 + run.numel for run in runs)


class MuLawCompressor(Compressor):
    def encode(self, src, state, segments, context, payload):
        at, given = 0, src.float() + state[0] if state else src.float()
        for offset, numel, *_ in segments.rows:
            run = slice(offset, offset + numel)
            value = given[run]
            scale = value.abs().max().reshape(1) if numel else value.new_zeros(1)  # tensors may be empty
            steep = torch.log1p(self.spec.mu * value.abs() / scale.clamp(min=1e-30)) / math.log1p(self.spec.mu)
            codes = (value.sign() * (127 * steep).round()).nan_to_num(0).to(torch.int8)
            payload[at : at + 4], payload[at + 4 : at + 4 + numel] = scale.view(torch.uint8), codes.view(torch.uint8)
            if state:  # chosen on the device: the host does not wait for it
                state[0][run] = torch.where(scale.isfinite(), value - self.value(scale, codes), state[0][run])
            at += 4 + numel

    def decode(self, payload, segments, dtype, add, dst, context):
        self.check(payload, segments, dtype)
        at = 0
        for offset, numel, *_ in segments.rows:
            scale = payload[at : at + 4].clone().view(torch.float32)
            codes = payload[at + 4 : at + 4 + numel].view(torch.int8)
            value = self.value(scale, codes)
            dst[offset : offset + numel] = (dst[offset : offset + numel] + value if add else value).to(dst.dtype)
            at += 4 + numel

    def value(self, scale, codes):
        return codes.sign() * scale * torch.expm1(codes.abs().float() / 127 * math.log1p(self.spec.mu)) / self.spec.mu
