"""No call of a Triton kernel makes the host wait for the device, or sends it anything, once the tables of programs are there."""

import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from stream_double import WAITS
from torch.utils._python_dispatch import TorchDispatchMode
from triton_processes import Interpreter

from gradwire.compressors import compressor_for
from gradwire.compressors.base import Context
from gradwire.core.specs import (
    DGC,
    FP8,
    QSGD,
    BlockTopK,
    Cast,
    EFSignSGD,
    ElementRun,
    ErrorFeedback,
    Natural,
    RandomK,
    Signum,
    Spec,
    TernGrad,
    Threshold,
    TopK,
    TwoBit,
)
from gradwire.kernels import kernels_for
from gradwire.kernels.reference.weights import ONE
from gradwire.kernels.segments import Segment, Segments

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (pip install triton)")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SPECS: list[Spec] = [
    *(
        Cast("float16"),
        FP8("e5m2"),
        Natural(),
        QSGD(bits=4),
        QSGD(bits=4, levels="exponential"),
        QSGD(bits=2, scale="ls", levels="lloyd"),
        ErrorFeedback(QSGD(bits=2, scale="ls", levels="lloyd"), weights=0.98),
        TernGrad(clip=2.5),
        TwoBit(),
    ),
    *(
        Signum(),
        EFSignSGD(),
        EFSignSGD(block=0),
        ErrorFeedback(TopK(0.01, per="bucket")),
        ErrorFeedback(Threshold(0.1)),
    ),
    *(DGC(), ErrorFeedback(BlockTopK(0.01)), ErrorFeedback(RandomK(0.01, indices="own"))),
]
NUMEL = 700


def codec_calls(spec: Spec, device: str) -> list[Callable[[], None]]:
    """An encode, and a decode that adds, of what lies on the device."""
    weights = None if spec.element_weights is None else torch.full((NUMEL,), ONE, dtype=torch.uint8, device=device)
    rows = (Segment(0, NUMEL, 1, 0, spec.element_bits),)
    compressor, segments = compressor_for(spec), Segments(rows, torch.device(device), weights=weights)
    x, total = torch.linspace(-1, 1, NUMEL, device=device), torch.zeros(NUMEL, device=device)
    state = [torch.zeros(NUMEL, device=device) for _ in spec.state]
    context = Context(torch.tensor([0, 1, 0, 0], device=device))
    size = spec.payload_bytes([ElementRun(NUMEL, spec.element_bits)], 4)
    payload = torch.zeros(size, dtype=torch.uint8, device=device)
    return [
        lambda: compressor.encode(x, state, segments, context, payload),
        lambda: compressor.decode(payload, segments, torch.float32, True, total, context),
    ]


def program_calls(kernels: Any, device: str) -> list[Callable[[], None]]:
    """Those that are no part of an encode: the products, Random-k with common elements, and weights of elements."""
    segments, stream = Segments.of([Segment(0, 600, 1, 0, 0)], device), torch.tensor([0, 1, 0, 0], device=device)
    x, residual, values = (torch.ones(n, device=device) for n in (600, 600, 6))
    p, q = torch.ones(40, device=device), torch.ones(60, device=device)
    matrices, weights = torch.tensor([[0, 20, 30, 0, 0]], device=device), torch.ones(600, dtype=torch.uint8, device=device)
    return [
        lambda: kernels.project(x, residual, matrices, 2, q, p),
        lambda: kernels.orthogonalise(matrices, 2, p),
        lambda: kernels.back_project(x, residual, matrices, 2, p, q),
        lambda: kernels.reconstruct(x, residual, matrices, 2, p, q, q),
        lambda: kernels.gather_random(x, residual, segments, stream, 0.01, values),
        lambda: kernels.scatter_random(values, segments, stream, 0.01, True, x),
        lambda: kernels.learn_energy(x, segments, 0.98, residual),
        lambda: kernels.weigh_elements(residual, segments, 128, 0.01, weights),
    ]


class Waits(TorchDispatchMode):
    """Notes what would wait on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        masks = (
            [each for each in args[1] if each is not None and each.dtype == torch.bool]
            if name.startswith(("aten.index.", "aten.index_put"))
            else []
        )
        if any(word in name for word in WAITS) or masks:
            self.found.append(name)
        return function(*args, **(kwargs or {}))


def waits(kernels: Any, spec: Spec | None) -> dict[str, torch.Tensor]:
    """Nothing, unless a second call waits: then an error that says for what."""
    patch = pytest.MonkeyPatch()
    for name, module in list(sys.modules.items()):
        if name.startswith(("gradwire.compressors.", "gradwire.kernels")) and hasattr(module, "kernels_for"):
            patch.setattr(module, "kernels_for", lambda device: kernels)
    try:
        calls = program_calls(kernels, "cpu") if spec is None else codec_calls(spec, "cpu")
        for call in calls:
            call()
        with Waits() as noted:
            for call in calls:
                call()
    finally:
        patch.undo()
    assert noted.found == []
    return {}


@pytest.mark.parametrize("spec", [None, *SPECS], ids=repr)
def test_no_call_waits(interpreter: Interpreter, spec: Spec | None) -> None:
    interpreter.run(waits, spec)


@pytest.mark.parametrize(
    "call",
    [lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: x + torch.tensor([1.0]), lambda x: x.nonzero()],
    ids=["a value", "a mask", "from the host", "a size"],
)
def test_the_watch_sees_what_waits(call: Callable[[torch.Tensor], object]) -> None:
    with Waits() as noted:
        call(torch.ones(3))
    assert noted.found


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("spec", [None, *SPECS], ids=repr)
def test_no_call_waits_for_a_gpu(spec: Spec | None) -> None:
    calls = program_calls(kernels_for("cuda"), "cuda") if spec is None else codec_calls(spec, "cuda")
    for call in calls:
        call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for call in calls:
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
