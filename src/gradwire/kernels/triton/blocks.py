"""What a program of QSGD does with its blocks. A block of m codes (n elements, m rounded up to a multiple of 8) is held as eight
pieces of m / 8 columns: elements j and j + m / 2, which share a random word, are in pieces k and k + 4, and every byte of a
plane takes its codes from one column. So all that needs several threads is the search for the scale.
"""

import triton
import triton.language as tl

from gradwire.kernels.triton.numbers import (
    bf16_towards,
    bf16_up,
    bf16_value,
    magnitude,
    narrow,
    ordered,
    random_fold,
    random_hash,
    random_words,
    widen,
)

__all__ = [
    "L2",
    "MAX",
    "MINMAX",
    "decode_blocks",
    "encode_blocks",
    "load_byte",
    "load_scale",
    "load_value",
    "store_scale",
]

MAX, MINMAX, L2 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
TINY, HUGE = tl.constexpr(0x0D800000), tl.constexpr(0x7E800000)  # bits of 2^-100 and 2^126
LARGEST = tl.constexpr(2.0**128 - 2.0**120)  # the largest bfloat16
UNIT = tl.constexpr(65536.0 - 2.0**-6)  # codes have 16 fractional bits, and stay just below the largest one


@triton.jit
def load_value(src, residual, at, inside, RESIDUAL: tl.constexpr):
    value = widen(tl.load(src + at, mask=inside, other=0.0))
    if RESIDUAL:
        value += tl.load(residual + at, mask=inside, other=0.0)
    return value


@triton.jit
def norm_of(src, residual, row, blocks, n, ROWS: tl.constexpr, BLOCK: tl.constexpr, RESIDUAL: tl.constexpr):
    """float32 bits of the l2 norms of ROWS blocks: 16 lanes of float64 sums, folded, in the reference's order."""
    lane, block = tl.arange(0, 16)[None, :], row[:, None]
    total = tl.zeros([ROWS, 16], tl.float64)
    for at in range(0, n, 16):
        inside = (at + lane < n) & (block < blocks)
        value = load_value(src, residual, block * BLOCK + at + lane, inside, RESIDUAL)
        wide = tl.where(magnitude(value) < HUGE, value, 0.0).to(tl.float64)
        total += wide * wide
    for fold in tl.static_range(4):
        total = tl.sum(tl.reshape(total, [ROWS, 2, 8 >> fold]), axis=1)
    norm = tl.minimum(tl.sqrt(tl.reshape(total, [ROWS])), LARGEST).to(tl.float32)
    tl.debug_barrier()  # a thread may change the residual only after all have read it here
    return magnitude(norm)


@triton.jit
def grid_of(low, high, bits, SCALE: tl.constexpr):
    """(base, inverse, origin, zero, step) of blocks with these scales, bits of bfloat16 as int32; low: of minmax only."""
    if SCALE == MINMAX:
        base, zero, levels = bf16_value(low), 0, (1 << bits) - 1
        span, top = bf16_value(high) - base, levels.to(tl.float32)
        origin = 0.0
    else:
        zero = (1 << (bits - 1)) - 1
        span, top = bf16_value(high), zero.to(tl.float32)
        base, origin = tl.zeros_like(span), top * 65536.0
    known = (magnitude(span) >= TINY) & (span > 0)
    inverse = tl.where(known, tl.div_rn(top * UNIT, tl.where(known, span, 1.0)), 0.0)
    return base, inverse, origin, zero, tl.div_rn(span, tl.zeros_like(span) + top)


@triton.jit
def encode_blocks(
    src, residual, scales, codes, blocks, n, counter, key, bits,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr, STOCHASTIC: tl.constexpr, RESIDUAL: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Up to ROWS blocks of n elements; WHOLE: n is BLOCK. All pointers are to the first block's; bits is a number."""
    row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK // 8)[None, :]
    block, present = row[:, None], row < blocks
    width = BLOCK // 8 if WHOLE else (n + 7) // 8
    values, insides = (), ()
    for k in tl.static_range(8):
        j = k * width + column
        inside = present[:, None] & (column < width)
        if not WHOLE:
            inside &= j < n
        insides += (inside,)
        values += (load_value(src, residual, block * BLOCK + j, inside, RESIDUAL),)

    most = magnitude(values[0])
    for k in tl.static_range(1, 8):
        most = tl.maximum(most, magnitude(values[k]))
    largest = tl.max(most, axis=1)
    finite = present & (largest < HUGE)
    low = tl.zeros_like(largest)
    if SCALE == MINMAX:
        least, most = (
            tl.full([ROWS, BLOCK // 8], 0x7FFFFFFF, tl.int32),
            tl.full([ROWS, BLOCK // 8], -0x80000000, tl.int32),
        )
        for k in tl.static_range(8):
            place = ordered(values[k].to(tl.int32, bitcast=True))
            least = tl.minimum(least, tl.where(insides[k], place, 0x7FFFFFFF))
            most = tl.maximum(most, tl.where(insides[k], place, -0x80000000))
        low = tl.where(finite, bf16_towards(ordered(tl.min(least, axis=1)), False), 0)
        high = tl.where(finite, bf16_towards(ordered(tl.max(most, axis=1)), True), 0)
    else:
        if SCALE == L2:
            largest = norm_of(src, residual, row, blocks, n, ROWS, BLOCK, RESIDUAL)
        high = tl.where(finite & (largest >= TINY), bf16_up(largest), 0)
    if SCALE == MINMAX:
        store_scale(scales + row * 4, tl.where(finite, low, 0x7FC0), present)
        store_scale(scales + row * 4 + 2, tl.where(finite, high, 0x7FC0), present)
    else:
        store_scale(scales + row * 2, tl.where(finite, high, 0x7FC0), present)

    base, inverse, origin, zero, step = grid_of(low, high, bits, SCALE)
    base, inverse, step, finite = base[:, None], inverse[:, None], step[:, None], finite[:, None]
    first = counter.to(tl.uint32) + (block * (BLOCK // 2) + column).to(tl.uint32)
    hashed = random_hash(first, key)
    lower, upper = (), ()
    for k in tl.static_range(4):
        if not STOCHASTIC:
            even, odd = 0x8000, 0x8000
        else:
            # in a block of 128 the counters of piece k all belong to group k, and the pieces share their hashes
            word = random_fold(hashed, k) if WHOLE and BLOCK == 128 else random_words(first + k * width, key)
            even, odd = (word & 0xFFFF).to(tl.int32), (word >> 16).to(tl.int32)
        a = quantise(tl.where(finite, values[k], 0.0), base, inverse, origin, even)
        b = quantise(tl.where(finite, values[k + 4], 0.0), base, inverse, origin, odd)
        if RESIDUAL:
            at = residual + block * BLOCK + k * width + column
            lost = values[k] - value_of(a, base, zero, step)
            tl.store(at, lost, mask=insides[k] & finite)
            lost = values[k + 4] - value_of(b, base, zero, step)
            tl.store(at + 4 * width, lost, mask=insides[k + 4] & finite)
        lower += (tl.where(insides[k] & finite, a, 0),)
        upper += (tl.where(insides[k + 4] & finite, b, 0),)
    out = codes + block * (BLOCK // 8 * bits) + column
    pack(lower + upper, bits, width, out, present[:, None] & (column < width))


@triton.jit
def store_scale(at, raw, present):
    """Byte by byte: a payload may begin at an odd one."""
    tl.store(at, (raw & 0xFF).to(tl.uint8), mask=present)
    tl.store(at + 1, ((raw >> 8) & 0xFF).to(tl.uint8), mask=present)


@triton.jit
def load_scale(at, present):
    return load_byte(at, present) | (load_byte(at + 1, present) << 8)


@triton.jit
def quantise(value, base, inverse, origin, u):
    return (((value - base) * inverse + origin).to(tl.int32) + u) >> 16


@triton.jit
def value_of(code, base, zero, step):
    return (code - zero).to(tl.float32) * step + base


@triton.jit
def pack(codes, bits, width, out, mask):
    """Eight pieces of codes to planes; out points to the block's bytes, and the column's place among them."""
    if bits == 8:
        for k in tl.static_range(8):
            tl.store(out + k * width, codes[k].to(tl.uint8), mask=mask)
    if bits & 4:
        for k in tl.static_range(4):
            byte = (codes[k] & 15) | ((codes[k + 4] & 15) << 4)
            tl.store(out + k * width, byte.to(tl.uint8), mask=mask)
    if bits & 2:
        shift = bits & 4
        for k in tl.static_range(2):
            byte = (codes[k] >> shift) & 3
            for part in tl.static_range(1, 4):
                byte |= ((codes[k + 2 * part] >> shift) & 3) << (2 * part)
            tl.store(out + ((bits & 4) + k) * width, byte.to(tl.uint8), mask=mask)
    if bits & 1:
        shift = bits & 6
        byte = (codes[0] >> shift) & 1
        for part in tl.static_range(1, 8):
            byte |= ((codes[part] >> shift) & 1) << part
        tl.store(out + (bits & 6) * width, byte.to(tl.uint8), mask=mask)


@triton.jit
def unpack(at, bits, width, column, mask):
    """Eight pieces of codes from planes, the opposite of pack. The planes that codes of so many bits lack are not read."""
    whole, four, two = (), (), ()
    for k in tl.static_range(8):
        whole += (load_byte(at + k * width, mask & (column < width * (bits >> 3))),)
    for k in tl.static_range(4):
        four += (load_byte(at + k * width, mask & (column < width * (bits >> 2 & 1))),)
    for k in tl.static_range(2):
        two += (load_byte(at + ((bits & 4) + k) * width, mask & (column < width * (bits >> 1 & 1))),)
    one = load_byte(at + (bits & 6) * width, mask & (column < width * (bits & 1)))
    codes = ()
    for k in tl.static_range(8):
        code = whole[k] | ((four[k % 4] >> (k // 4 * 4)) & 15)
        code |= ((two[k % 2] >> (k // 2 * 2)) & 3) << (bits & 4)
        codes += (code | (((one >> k) & 1) << (bits & 6)),)
    return codes


@triton.jit
def load_byte(at, mask):
    return tl.load(at, mask=mask, other=0).to(tl.int32)


@triton.jit
def decode_blocks(
    dst, scales, codes, blocks, n, bits,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr, ADD: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """As encode_blocks."""
    row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK // 8)[None, :]
    block, present = row[:, None], row < blocks
    width = BLOCK // 8 if WHOLE else (n + 7) // 8
    mask = present[:, None] & (column < width)
    if SCALE == MINMAX:
        low, high = load_scale(scales + row * 4, present), load_scale(scales + row * 4 + 2, present)
    else:
        high = load_scale(scales + row * 2, present)
        low = high
    base, _, _, zero, step = grid_of(low, high, bits, SCALE)
    pieces = unpack(codes + block * (BLOCK // 8 * bits) + column, bits, width, column, mask)
    for k in tl.static_range(8):
        value = value_of(pieces[k], base[:, None], zero, step[:, None])
        j = k * width + column
        at, inside = dst + block * BLOCK + j, mask
        if not WHOLE:
            inside &= j < n
        if ADD:
            value += widen(tl.load(at, mask=inside, other=0.0))
        tl.store(at, narrow(value, dst.dtype.element_ty), mask=inside)
