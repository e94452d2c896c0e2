"""The error of a two-phase exchange, derived from gradients and the norm of what arrives, against the exchange itself."""

import pytest
import torch

import gradwire as gw
from gradwire.auto.bit_errors import WIDTHS, columns, measured, of_both_encodes
from gradwire.compressors import compressor_for
from gradwire.compressors.base import Context
from gradwire.kernels.segments import Segment, Segments, tensor_key

NUMEL = 128 * 400
TWO_PHASE = ("comp:cpu", "alltoall:inter", "decomp:cpu", "comp:cpu", "allgather:inter", "decomp:cpu")
ADAPTIVE = gw.AdaptiveBits()


def coded(values: torch.Tensor, bits: int, step: int, rank: int) -> torch.Tensor:
    """Encoded and decoded."""
    compressor, decoded = compressor_for(gw.QSGD(bits=bits)), torch.empty(NUMEL)
    segments = Segments((Segment(0, NUMEL, tensor_key("w"), 0, bits),), values.device)
    payload = torch.empty(compressor.payload_bytes(segments, torch.float32), dtype=torch.uint8)
    context = Context(torch.tensor([0, step, 0, rank]))
    compressor.encode(values, [], segments, context, payload)
    compressor.decode(payload, segments, torch.float32, False, decoded, context)
    return decoded


def exchanged(gradients: list[torch.Tensor], bits: int) -> torch.Tensor:
    """The sum that two ranks get: each owns a half, to which it adds what it decodes of the other."""
    half, (first, second) = NUMEL // 2, (coded(each, bits, 1, rank) for rank, each in enumerate(gradients))
    owned = [gradients[0][:half] + second[:half], first[half:] + gradients[1][half:]]
    return coded(torch.cat(owned), bits, 2, 0)


@pytest.mark.parametrize("alike", [0.0, 0.5, -1.0], ids=["independent", "half alike", "opposite"])
def test_the_error_of_both_encodes_is_that_of_the_exchange_whatever_the_present_bits_are(alike: float) -> None:
    first, other = torch.randn((2, NUMEL), generator=torch.Generator().manual_seed(1))
    gradients = [first, alike * first + (1 - alike * alike) ** 0.5 * other]
    sums = {bits: exchanged(gradients, bits) for bits in WIDTHS}
    true = [float((sums[bits] - sum(gradients)).square().sum()) for bits in WIDTHS]
    both = [measured(ADAPTIVE, "w", gradient, 5, rank) for rank, gradient in enumerate(gradients)]
    row = [a + b for a, b in zip(*both, strict=True)]
    for present in (2, 4, 8):
        arrived = float(sums[present].square().sum())
        whole = [*row, arrived, row[-2], arrived]
        assert len(whole) == columns(ADAPTIVE)
        found = of_both_encodes(whole, TWO_PHASE, 2, WIDTHS.index(present))
        assert found[-2:] == row[-2:]
        assert found[:-2] == pytest.approx(true, rel=0.3), present


def test_options_that_encode_once_have_the_error_of_one() -> None:
    row = [*(4.0**-bits for bits in WIDTHS), 1.0, 0.5, 3.0, 1.0, 3.0]
    assert of_both_encodes(row, ("comp:cpu", "allgather:inter", "decomp:cpu"), 2, 2) == row[:-3]
    still = [0.0] * columns(ADAPTIVE)
    assert of_both_encodes(still, TWO_PHASE, 2, 2) == still[:-3]
