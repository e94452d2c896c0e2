"""Signs and ternary codes: what the C++ kernels refuse, in words."""

from collections.abc import Callable

import pytest
import torch
from test_kernels import NAN, STREAM, built

from gradwire.kernels import cpu
from gradwire.kernels.segments import Segment, Segments

X, WHOLE = torch.ones(300), Segments.of([Segment(0, 300, 1, 0, 2)])


def bytes_of(size: int) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


REFUSED: dict[str, tuple[Callable[[], None], str]] = {
    "signs too short": (lambda: cpu.sign_encode(X, None, 0.0, WHOLE, bytes_of(37)), "37 bytes .* take 38"),
    "signs too long to decode": (lambda: cpu.sign_decode(bytes_of(39), WHOLE, 0, 0, True, X), "39 bytes .* take 38"),
    "no means": (lambda: cpu.mean_sign_encode(X, None, WHOLE, 0, 0, bytes_of(38)), "1 or 2 means"),
    "three means": (lambda: cpu.sign_decode(bytes_of(54), WHOLE, 0, 3, True, X), "0, 1 or 2 means"),
    "one mean too few": (lambda: cpu.mean_sign_encode(X, None, WHOLE, 32, 2, bytes_of(70)), "70 bytes .* take 86"),
    "block of 48": (lambda: cpu.mean_sign_encode(X, None, WHOLE, 48, 1, bytes_of(54)), "block of 48"),
    "block of 96": (lambda: cpu.mean_sign_encode(X, None, WHOLE, 96, 1, bytes_of(54)), "block of 96"),
    "block of -32": (lambda: cpu.sign_decode(bytes_of(54), WHOLE, -32, 1, True, X), "block of -32"),
    "block of 16384": (lambda: cpu.sign_decode(bytes_of(54), WHOLE, 16384, 1, True, X), "block of 16384"),
    "thresholds of runs": (lambda: cpu.threshold_encode(X, None, WHOLE, 0, 0.0, 1.0, bytes_of(92)), "block of 0"),
    "thresholds too short": (lambda: cpu.threshold_encode(X, None, WHOLE, 128, 0.0, 1.0, bytes_of(91)), "take 92"),
    "fixed threshold's scales": (lambda: cpu.threshold_decode(bytes_of(92), WHOLE, 128, 0.5, True, X), "take 76"),
    "negative threshold": (lambda: cpu.threshold_decode(bytes_of(76), WHOLE, 128, -0.5, True, X), "threshold of -0.5"),
    "threshold of NaN": (lambda: cpu.threshold_decode(bytes_of(76), WHOLE, 128, NAN, True, X), "threshold of"),
    "threshold below float32": (lambda: cpu.threshold_decode(bytes_of(76), WHOLE, 128, 1e-60, True, X), "is zero"),
    "no multiple": (lambda: cpu.threshold_encode(X, None, WHOLE, 128, 0.0, 0.0, bytes_of(92)), "multiple of 0"),
    "no clip": (lambda: cpu.terngrad_encode(X, None, WHOLE, STREAM, 128, 0.0, bytes_of(92)), "clipping at 0"),
    "terngrad of runs": (lambda: cpu.terngrad_encode(X, None, WHOLE, STREAM, 0, 2.5, bytes_of(92)), "block of 0"),
    "terngrad's bits": (
        lambda: cpu.terngrad_encode(X, None, Segments.of([Segment(0, 300, 1, 0, 0)]), STREAM, 128, 2.5, bytes_of(80)),
        "impossible bits",
    ),
    "short stream": (lambda: cpu.terngrad_encode(X, None, WHOLE, STREAM[:3], 128, 2.5, bytes_of(80)), "four int64"),
    "short momentum": (lambda: cpu.sign_encode(X, X[:9], 0.9, WHOLE, bytes_of(38)), "residual must be float32"),
    "past the end": (lambda: cpu.sign_encode(X[:299], None, 0.9, WHOLE, bytes_of(38)), "reaches past"),
    "cut inside a block": (
        lambda: cpu.mean_sign_encode(X, None, Segments.of([Segment(0, 300, 1, 32, 0)]), 128, 1, bytes_of(54)),
        "impossible start",
    ),
    "float64": (lambda: cpu.sign_encode(X.double(), None, 0.9, WHOLE, bytes_of(38)), "float32, bfloat16 and float16"),
    "add to bfloat16": (lambda: cpu.sign_decode(bytes_of(38), WHOLE, 0, 0, True, X.bfloat16()), "sums in float32"),
}


@built
@pytest.mark.parametrize("case", REFUSED)
def test_wrong_sizes_and_values_are_refused_in_words(case: str) -> None:
    call, words = REFUSED[case]
    with pytest.raises(RuntimeError, match=words):
        call()
