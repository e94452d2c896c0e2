"""One launch for the payloads of several shards or ranks gives the bytes of a launch for each."""

from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from test_kernels import payload_bytes
from triton_processes import INEXACT, Compile, Interpreter

import gradwire as gw
from gradwire import kernels as all_kernels
from gradwire.collectives import Transfer
from gradwire.core import TensorInfo
from gradwire.exchange import layout
from gradwire.kernels import Batch, BatchPart
from gradwire.kernels.segments import Segment, Segments
from gradwire.transport import Grid, Group, Streams

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (pip install triton)")

BLOCK = 128
ROWS = ([Segment(0, 300, 1, 0, 4), Segment(300, 5000, 2, 128, 3)], [Segment(0, 1, 2, 5248, 3)], [Segment(0, 2000, 3, 0, 4)])
BOUNDS = (0, 5300, 5301, 7301)


def values(seed: int, numel: int = BOUNDS[-1]) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def run_batch(kernels: Any, scale: str, with_residual: bool, without: int) -> dict[str, torch.Tensor]:
    """Encode and decode all shards but one, by a launch if the kernels take batches."""
    shards = [Segments.of(rows) for rows in ROWS]
    parts, at = [], 0
    for number, segments in enumerate(shards):
        if number != without:
            size = payload_bytes(segments, BLOCK, scale)
            parts.append(BatchPart(segments, BOUNDS[number], BOUNDS[number + 1], at, at + size))
            at += -(-size // 16) * 16
    batch, source, stream = Batch.of_parts(parts), values(0), torch.tensor((5, 6, 0, 1))
    payload, decoded = torch.full((batch.nbytes,), 170, dtype=torch.uint8), values(1)
    residual = values(2) if with_residual else None
    if hasattr(kernels, "TAKES_BATCHES"):
        kernels.qsgd_encode(source, residual, batch, stream, BLOCK, scale, "stochastic", payload)
        kernels.qsgd_decode(payload, batch, BLOCK, scale, True, decoded)
    else:
        for segments, first, end, byte, end_byte in parts:
            one, of_residual = payload[byte:end_byte], None if residual is None else residual[first:end]
            kernels.qsgd_encode(source[first:end], of_residual, segments, stream, BLOCK, scale, "stochastic", one)
            kernels.qsgd_decode(one, segments, BLOCK, scale, True, decoded[first:end])
    made = {"payload": payload, "decoded": decoded}
    return made if residual is None else made | {"residual": residual}


@pytest.mark.parametrize("without", [0, 1, 2, 3])
def test_a_batch_has_the_bytes_of_its_parts(interpreter: Interpreter, without: int) -> None:
    interpreter.check(run_batch, ("max", "minmax")[without % 2], without < 2, without)


def run_sum(kernels: Any, scale: str, rank: int, size: int, own_first: bool, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Add up the payloads of all ranks, by a launch if the kernels can."""
    segments, numel = Segments.of(ROWS[0]), BOUNDS[1]
    nbytes, stream = payload_bytes(segments, BLOCK, scale), torch.tensor((5, 6, 0, 1))
    stride = -(-nbytes // 16) * 16
    payloads, own, total = torch.full((size * stride,), 170, dtype=torch.uint8), values(rank, numel).to(dtype), values(9, numel)
    terms: list[Any] = []
    for source in range(size):
        one = payloads[source * stride : source * stride + nbytes]
        if source != rank:
            kernels.qsgd_encode(values(source, numel), None, segments, stream, BLOCK, scale, "nearest", one)
            terms.append(("qsgd_decode", one, segments, BLOCK, scale, own_first or source > 0, total))
        elif not own_first:
            terms.append(("add_into" if source else "copy_into", total, own))
    if hasattr(kernels, "TAKES_BATCHES"):
        kernels.decode_sum(terms, payloads, stride, rank, size - 1 - rank, None if own_first else own)
    else:
        for name, *arguments in terms:
            if name == "add_into":
                total += own
            elif name == "copy_into":
                total.copy_(own)
            else:
                getattr(kernels, name)(*arguments)
    return {"total": total}


SUMS = [
    ("max", 0, 2, True, torch.float32),
    ("minmax", 1, 4, True, torch.float32),
    ("max", 2, 4, False, torch.float32),
    ("max", 3, 4, False, torch.bfloat16),
    ("max", 0, 3, False, torch.bfloat16),
    ("minmax", 5, 8, False, torch.float32),
]


@pytest.mark.parametrize(("scale", "rank", "size", "own_first", "dtype"), SUMS)
def test_a_sum_in_one_launch_has_the_bits_of_its_terms(
    interpreter: Interpreter, scale: str, rank: int, size: int, own_first: bool, dtype: torch.dtype
) -> None:
    interpreter.check(run_sum, scale, rank, size, own_first, dtype)


def run_phase(transfers: Sequence[Transfer]) -> None:
    """One exchange of all ranks, one rank after another."""
    streams = Streams()
    for work in [work for each in transfers for work in each.before]:
        work.run(streams, None)
    for rank, each in enumerate(transfers):
        for source, part in each.used(each.received):
            part.copy_(transfers[source].sent[rank])
    for each in transfers:
        for work in [*(work for works in each.arrivals.values() for work in works), *each.after]:
            work.run(streams, None)


def run_scheme(kernels: Any, scheme: str, nodes: int, local: int, spec: gw.Spec, exempt_vectors: bool) -> dict[str, torch.Tensor]:
    """All ranks: the means, and what is remembered in the end; a second step uses what the first one left."""
    shapes, ranks = {"u": (2, 150), "v": (70,), "w": (3, 100)}, nodes * local
    tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
    policy = gw.Policy(default=spec, scheme=scheme, exempt_vectors=exempt_vectors, edge_bytes=2**20)
    plan = policy.plan([TensorInfo(name, shape, "float32") for name, shape in shapes.items()], ranks, local)
    found = dict[str, torch.Tensor]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "launches", lambda device: True)
        patch.setattr(all_kernels, "kernels_for", lambda device: kernels)
        of_ranks: list[Any] = []
        for rank in range(ranks):
            group = Group(None, rank, tuple(range(ranks)), timedelta(seconds=1), Grid.even(nodes, local, rank))  # type: ignore[arg-type]
            random = layout.random_streams(plan, rank, torch.device("cpu"))
            (built,) = layout.build_buckets(plan, tensors, group, random, 0)
            of_ranks += built.chunks
        for step in range(1 + any(each.state for own in of_ranks for each in own.memory)):
            for rank, own in enumerate(of_ranks):
                own.piece.flat.copy_(values(10 * step + rank, 670))
            for phase in range(len(of_ranks[0].phases)):
                run_phase([transfer for own in of_ranks for transfer in own.phases[phase]])
        for rank, own in enumerate(of_ranks):
            found[f"mean of {rank}"] = own.piece.flat
            found |= {f"{place} of {rank}": tensor for place, each in enumerate(own.memory) for tensor in each.state}
    return found


BATCHED = [
    ("grid", 6, 1, gw.QSGD(bits=4), False),
    ("grid", 4, 1, gw.QSGD(bits=4), True),
    ("grid", 4, 1, gw.ErrorFeedback(gw.QSGD(bits=3, scale="minmax")), True),
    ("alltoall", 3, 1, gw.ErrorFeedback(gw.QSGD(bits=4)), True),
    ("hierarchical", 3, 2, gw.ErrorFeedback(gw.QSGD(bits=4)), False),
    ("hierarchical", 2, 2, gw.QSGD(bits=4), True),
]


@pytest.mark.parametrize(("scheme", "nodes", "local", "spec", "exempt_vectors"), BATCHED)
def test_schemes_with_batches_have_the_bits_of_single_payloads(
    interpreter: Interpreter, scheme: str, nodes: int, local: int, spec: gw.Spec, exempt_vectors: bool
) -> None:
    interpreter.check(run_scheme, scheme, nodes, local, spec, exempt_vectors)


def compiled(arch: int, own: bool, dtype: str, ternary: bool = False) -> Compile:
    types = {
        "payload": "*u8",
        "table": "*i64",
        "own": f"*{dtype}",
        "dst": "*fp32",
        "stride": "i32",
        "before": "i32",
        "after": "i32",
    }
    # fewer rows than in earnest compile faster, to the same operations
    constants = {"ROWS": 4, "BLOCK": 64, "CODE": 0, "FACTOR": 0.0, "OWN": own, "TERNARY": ternary, "ALIGNED": True}
    return Compile("coded_sum_kernel", types, constants, arch)


COMPILED = {
    "sm_80": compiled(80, True, "bf16"),
    "sm_90": compiled(90, True, "fp32", ternary=True),
    "own first": compiled(90, False, "u8"),
}


@pytest.mark.parametrize("name", COMPILED)
def test_sums_compile_for_cuda_to_exact_arithmetic(ptx: dict[str, Future[str]], name: str) -> None:
    found = ptx[name].result(timeout=120)
    assert f".target sm_{COMPILED[name].arch}" in found and "coded_sum_kernel" in found
    assert INEXACT.findall(found) == []
