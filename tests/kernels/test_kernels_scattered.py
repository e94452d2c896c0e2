"""Kernels on tensors where they lie give the bytes and values that they give on a flat copy, which was scaled first."""

import ctypes

import pytest
import torch

from benchmarks.levels import use_level
from gradwire.compressors import compressor_for
from gradwire.compressors.base import Context
from gradwire.compressors.mixed_precision import BesideCompressor
from gradwire.core.payload import RAW
from gradwire.core.specs import (
    DGC,
    FP8,
    QSGD,
    BlockTopK,
    ErrorFeedback,
    Int8,
    Natural,
    RandomK,
    SignSGD,
    Signum,
    Spec,
    TernGrad,
    Threshold,
    TopK,
    TwoBit,
)
from gradwire.kernels import cpu, run_calls
from gradwire.kernels.reference.weights import ONE
from gradwire.kernels.scattered import Addresses, Scattered
from gradwire.kernels.segments import Segment, Segments

pytestmark = pytest.mark.skipif(cpu.available() is not None, reason="needs the C++ kernels")
LEVELS = cpu.levels() if cpu.available() is None else ()

SPECS = [
    *(QSGD(bits=bits) for bits in (2, 4, 8)),
    *(
        ErrorFeedback(QSGD(bits=4)),
        QSGD(bits=3, scale="minmax"),
        QSGD(bits=4, block=32),
        QSGD(bits=3, levels="exponential"),
        ErrorFeedback(QSGD(bits=2, scale="ls")),
        QSGD(bits=3, scale="ls", levels="lloyd"),
        ErrorFeedback(QSGD(bits=2, scale="ls"), weights=0.98),
        ErrorFeedback(QSGD(bits=2, scale="ls", levels="lloyd"), weights=0.98),
    ),
    *(Int8(), FP8(), Natural(), TernGrad(), ErrorFeedback(TernGrad()), TwoBit(), ErrorFeedback(TopK(0.05)), TopK(0.05)),
    *(DGC(0.05), BlockTopK(0.1), ErrorFeedback(RandomK(0.1, indices="own")), Threshold(0.1), SignSGD(), Signum()),
]
NUMELS = (1, 7, 123, 20_000, 4097, 129)
"""Of the rows, the longest more than a tile."""
BEFORE, AFTER = 8192, 5
"""Elements of a row's tensor around the row, as where a chunk or a shard cuts it."""


def set_all(addresses: Addresses, tensors: list[torch.Tensor]) -> None:
    addresses.set(0, tensors, [tensor.data_ptr() for tensor in tensors])


class Apart:
    """The same elements twice: in a flat buffer, and in tensors of their own."""

    def __init__(self, dtype: torch.dtype, bits: int, factor: float, vectors: bool, weighted: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        offset, rows, self.tensors = 0, [], []
        for number, numel in enumerate(NUMELS):
            width = RAW if vectors and numel < 1000 else bits
            rows.append(Segment(offset, numel, 100 + number, BEFORE, width))
            offset += numel
            self.tensors.append((3 * torch.randn(BEFORE + numel + AFTER, generator=generator)).to(dtype))
        self.tensors[3][BEFORE + 300] = float("inf")
        weights = (torch.arange(offset) * 7 % 19 + ONE - 9).to(torch.uint8) if weighted else None
        self.segments = Segments(tuple(rows), torch.device("cpu"), weights=weights)
        self.flat = torch.cat([tensor[BEFORE:-AFTER] for tensor in self.tensors]) * factor
        self.before = [tensor.clone() for tensor in self.tensors]
        addresses = Addresses(row.key for row in rows)
        set_all(addresses, self.tensors)
        self.addresses, self.elements = addresses, Scattered(addresses, dtype, offset, factor)

    def gathered(self) -> torch.Tensor:
        return torch.cat([tensor[BEFORE:-AFTER] for tensor in self.tensors])

    def assert_around_is_as_before(self) -> None:
        for before, tensor in zip(self.before, self.tensors, strict=True):
            assert torch.equal(before[:BEFORE], tensor[:BEFORE]) and torch.equal(before[-AFTER:], tensor[-AFTER:])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("vectors", [False, True], ids=["alone", "beside vectors"])
@pytest.mark.parametrize("factor", [0.5, 1 / 3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_payloads_and_values_are_those_of_a_scaled_copy(
    spec: Spec, dtype: torch.dtype, factor: float, vectors: bool, level: str
) -> None:
    apart = Apart(dtype, spec.element_bits, factor, vectors, spec.element_weights is not None)
    codec = compressor_for(spec)
    if vectors:
        assert spec.carries_uncompressed
        codec = BesideCompressor(codec)
    context, numel = Context(torch.tensor([1, 2, 3, 4])), apart.elements.numel()
    generator = torch.Generator().manual_seed(1)
    state = [torch.randn(numel, generator=generator) for _ in codec.state]
    states = [state, [each.clone() for each in state]]
    payloads = torch.zeros(2, codec.payload_bytes(apart.segments, dtype), dtype=torch.uint8)
    own = [payloads[0].clone(), payloads[1].clone()]
    with use_level(level):
        codec.encode(apart.flat, states[0], apart.segments, context, own[0])
        run_calls(codec.encode_calls(apart.elements, states[1], apart.segments, context, own[1]))
        assert torch.equal(*own)
        assert all(same(*each) for each in zip(*states, strict=True))
        for add in (False, True) if dtype is torch.float32 else (False,):
            expected = apart.gathered()
            codec.decode(own[0], apart.segments, dtype, add, expected, context)
            run_calls(codec.decode_calls(own[1], apart.segments, dtype, add, apart.elements, context))
            assert same(apart.gathered(), expected)
            apart.assert_around_is_as_before()


@pytest.mark.parametrize("wide", [False, True], ids=["own dtype", "float32"])
@pytest.mark.parametrize("factor", [0.5, 1 / 3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_gathered_scaled_and_rounded_as_torch_does(dtype: torch.dtype, factor: float, wide: bool) -> None:
    apart = Apart(dtype, 0, factor, False)
    into = torch.ones(apart.elements.numel(), dtype=torch.float32 if wide else dtype)
    cpu.run([cpu.call("gather_rows", apart.elements, apart.segments, False, into)])
    assert same(into, apart.flat.to(into.dtype))
    if into.dtype is torch.float32:
        cpu.run([cpu.call("gather_rows", apart.elements, apart.segments, True, into)])
        assert same(into, apart.flat.float() + apart.flat.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_energies_come_from_rows_where_they_lie(dtype: torch.dtype) -> None:
    apart = Apart(dtype, 2, 1.0, False)
    energies = [torch.linspace(0, 1, apart.elements.numel()) for _ in range(2)]
    run_calls([("learn_energy", apart.elements, apart.segments, 0.9, energies[0])])
    run_calls([("learn_energy", apart.flat, apart.segments, 0.9, energies[1])])
    assert torch.equal(*energies)
    assert int((energies[0] == torch.linspace(0, 1, apart.elements.numel())).sum()) == 1  # an infinite mean


def test_rows_are_scaled_where_they_lie() -> None:
    apart = Apart(torch.float32, 0, 1 / 3, False)
    cpu.run([cpu.call("scale_rows", apart.elements, apart.segments)])
    assert same(apart.gathered(), apart.flat)
    apart.assert_around_is_as_before()
    half = Apart(torch.float16, 0, 1 / 3, False)
    with pytest.raises(RuntimeError, match="in float32"):
        cpu.run([cpu.call("scale_rows", half.elements, half.segments)])


def test_calls_made_once_follow_the_tensors() -> None:
    apart = Apart(torch.float32, 4, 0.5, False)
    into = torch.empty(apart.elements.numel())
    calls = [cpu.call("gather_rows", apart.elements, apart.segments, False, into)]
    for _ in range(2):
        apart.tensors = [torch.randn(tensor.numel()) for tensor in apart.tensors]
        set_all(apart.addresses, apart.tensors)
        cpu.run(calls)
        assert torch.equal(into, 0.5 * apart.gathered())


def test_what_lies_nowhere_or_askew_is_refused() -> None:
    apart = Apart(torch.float32, 4, 0.5, False)
    calls = [cpu.call("gather_rows", apart.elements, apart.segments, False, torch.empty(apart.elements.numel()))]
    askew = bytearray(4 * (BEFORE + 7) + 10)
    set_all(apart.addresses, [apart.tensors[0], torch.frombuffer(askew, dtype=torch.uint8)[2:]])
    with pytest.raises(RuntimeError, match="segment 1 lies between two elements"):
        cpu.run(calls)
    apart.addresses.clear()
    with pytest.raises(RuntimeError, match="segment 0 is of a tensor that was not given in this step"):
        cpu.run(calls)


def test_kernels_that_take_whole_buffers_refuse_what_lies_apart() -> None:
    apart = Apart(torch.float32, 4, 0.5, False)
    payload = torch.zeros(2 * apart.elements.numel(), dtype=torch.uint8)
    with pytest.raises(ctypes.ArgumentError, match="takes a tensor"):
        cpu.cast_encode(apart.elements, None, torch.bfloat16, payload)
