"""Arguments of a launch other than tensors: the table of programs, checks of sizes, the options."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.core import code_bytes, coded_bytes
from gradwire.kernels import is_float
from gradwire.kernels.segments import Batch, Segments

OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}
"""Options of every launch: a * b + c is rounded twice, as in the reference."""

ELEMENTS = 4096
"""Elements of a program, where its blocks are no larger."""

P = ParamSpec("P")
T = TypeVar("T")


@triton.jit
def program(table, ALIGNED: tl.constexpr):
    """(first element, elements, first scale, padding, first code, counter, key, bits) of this program: its row of the table."""
    row = table + tl.program_id(0) * 8
    first, code = tl.load(row), tl.load(row + 4)
    if ALIGNED:
        first, code = tl.multiple_of(first, 16), tl.multiple_of(code, 16)
    numel, padding, bits = tl.load(row + 1).to(tl.int32), tl.load(row + 3).to(tl.int32), tl.load(row + 7).to(tl.int32)
    return first, numel, tl.load(row + 2), padding, code, tl.load(row + 5), tl.load(row + 6), bits


class Programs(NamedTuple):
    """The work of each program of a launch."""

    table: Tensor
    """int64 of shape (programs, 8) on the device. A program has equal blocks that follow each other, or one partial block.
    Columns: first element in the flat buffer; elements; byte of its first scale; zero bytes to write after its scales; byte
    of its first code; counter of its first random word; key of the tensor; bits."""
    aligned: bool
    """Whether first elements and first codes are multiples of 16."""
    numel: int
    """Elements that the flat buffer has at least."""
    payload_bytes: int

    @staticmethod
    def of(table: Tensor, segments: Segments, payload_bytes: int) -> "Programs":
        """A table of CPU, put on the segments' device."""
        aligned = not bool((table[:, [0, 4]] % 16).any())
        return Programs(put_on(segments.device, table), aligned, reach_of(segments), payload_bytes)


def put_on(device: torch.device, table: Tensor) -> Tensor:
    """Copy a table of the host to the device. The host does not wait until the device has done its work so far."""
    return table.to(device, non_blocking=True)


def blocks_each(block: int) -> int:
    """Blocks of a program at most."""
    return max(1, ELEMENTS // block)


def made_once(make: Callable[Concatenate[Segments, P], T]) -> Callable[Concatenate[Segments, P], T]:
    """Make the value of a function of segments once, and keep it with the segments."""

    @wraps(make)
    def of(segments: Segments, /, *args: P.args, **kwargs: P.kwargs) -> T:
        key = make, args
        if key not in segments.launches:
            segments.launches[key] = make(segments, *args, **kwargs)
        made: T = segments.launches[key]
        return made

    return of


def reach_of(segments: Segments) -> int:
    """Elements that a flat buffer with these segments has at least. Raises RuntimeError if one begins before it."""
    for index, row in enumerate(segments.rows):
        if row.offset < 0 or row.numel < 0:
            raise RuntimeError(f"segment {index} reaches past the flat buffer: {row}")
    return max((row.offset + row.numel for row in segments.rows), default=0)


def table_of(rows: Sequence[tuple[int, ...]], columns: int, segments: Segments) -> Tensor:
    """The rows as int64 on the segments' device."""
    return put_on(segments.device, torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, columns))


@made_once
def programs_of(segments: Segments, block: int, scales: int, bits: int, ternary: bool = False) -> Programs:
    """The programs of these segments; bits 0: an element has those of its segment. ternary: as for `coded_bytes`."""
    if isinstance(segments, Batch):
        return _programs_of_parts(segments, block, scales, bits, ternary)
    if block & (block - 1) or not 32 <= block <= 8192:
        raise RuntimeError(f"a block of {block} elements is not a power of two from 32 to 8192")
    reach_of(segments)
    each, scale_bytes = blocks_each(block), 2 * scales
    for index, row in enumerate(segments.rows):
        if not 2 <= (bits or row.bits) <= 8 or row.first < 0 or row.first % block:
            raise RuntimeError(f"segment {index} has impossible bits or start: {row}")
    sizes = coded_bytes([(row.numel, bits or row.bits) for row in segments.rows], block, scales, ternary)
    rows: list[Tensor] = []
    scale_at, code_at = 0, sizes.scales
    for row in segments.rows:
        full, tail = divmod(row.numel, block)
        start = torch.arange(0, full, each)
        if tail:
            start = torch.cat([start, torch.tensor([full])])
        columns, width = torch.zeros(len(start), 8, dtype=torch.int64), bits or row.bits
        columns[:, 0] = row.offset + start * block
        columns[:, 1] = torch.where(start < full, (full - start).clamp(max=each) * block, tail)
        columns[:, 2] = scale_at + start * scale_bytes
        block_bytes = code_bytes(block, block, width, ternary)
        columns[:, 4] = code_at + start * block_bytes
        columns[:, 5] = (row.first + start * block) // 2
        columns[:, 6], columns[:, 7] = row.key, width
        rows.append(columns)
        scale_at += (full + (tail > 0)) * scale_bytes
        code_at += full * block_bytes + code_bytes(tail, 0, width, False)
    table = torch.cat(rows) if rows else torch.zeros(0, 8, dtype=torch.int64)
    if len(table):
        table[-1, 3] = sizes.scales - scale_at
    return Programs.of(table, segments, sum(sizes))


def _programs_of_parts(batch: Batch, *settings: Any) -> Programs:
    tables = []
    for part in batch.parts:
        made = programs_of(part.segments, *settings)
        if made.payload_bytes != part.end_byte - part.byte:
            raise RuntimeError(f"a part of a batch has {part.end_byte - part.byte} bytes where it takes {made.payload_bytes}")
        shift = torch.tensor([part.first, 0, part.byte, 0, part.byte, 0, 0, 0])
        tables.append(made.table.cpu() + shift)
    return Programs.of(torch.cat(tables), batch, batch.parts[-1].end_byte)


def check_flat(flat: Tensor, numel: int, remembered: Sequence[Tensor | None] = ()) -> None:
    """Raise RuntimeError unless kernels may read and write `numel` elements of a flat buffer and what is remembered of it."""
    if not is_float(flat.dtype):
        raise RuntimeError(f"gradwire kernels take float32, bfloat16 and float16 tensors, not {flat.dtype}")
    if not flat.is_contiguous() or flat.numel() < numel:
        raise RuntimeError(f"segments reach element {numel} of a contiguous flat buffer; this one has {flat.numel()}")
    for state in remembered:
        if state is not None and not (state.is_contiguous() and state.dtype == torch.float32 and state.numel() == flat.numel()):
            raise RuntimeError("the residual must be float32, contiguous and as long as the flat buffer")


def check_weights(weights: Tensor | None, flat: Tensor) -> None:
    """Raise RuntimeError unless kernels may read the weights of a flat buffer."""
    if weights is not None and not (weights.is_contiguous() and weights.dtype == torch.uint8 and weights.numel() == flat.numel()):
        raise RuntimeError("the weights must be uint8, contiguous and as long as the flat buffer")


def check_dst(dst: Tensor, numel: int, add: bool) -> None:
    """Raise RuntimeError unless kernels may write `numel` elements of dst, or add to them."""
    check_flat(dst, numel)
    if add and dst.dtype != torch.float32:
        raise RuntimeError(f"sums in float32, not in {dst.dtype}: decode to a float32 buffer to add")


def check_stream(stream: Tensor) -> None:
    """Raise RuntimeError unless kernels may read the stream's four numbers."""
    if stream.numel() != 4 or stream.dtype != torch.int64 or not stream.is_contiguous():
        raise RuntimeError("the stream is four int64: seed, step, encode, rank")


def check_payload(payload: Tensor, expected: int) -> None:
    """Raise RuntimeError unless the payload is that many bytes."""
    if payload.dtype != torch.uint8 or not payload.is_contiguous():
        raise RuntimeError("the payload must be uint8 and contiguous: a uint8 payload")
    if payload.numel() != expected:
        raise RuntimeError(f"the payload has {payload.numel()} bytes where the segments take {expected}")


def launch(kernel: Any, grid: int | tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Queue the programs of a grid on the device of the first argument; a grid of 0 queues none.

    The first argument stands in for an argument that is None, which a kernel does not read.
    """
    if grid:
        arguments = tuple(arguments[0] if each is None else each for each in arguments)
        with torch.cuda.device_of(arguments[0]):
            kernel[grid if isinstance(grid, tuple) else (grid,)](*arguments, **constants, **OPTIONS)
