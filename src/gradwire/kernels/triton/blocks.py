"""Device functions for blocks. A block of n elements has m codes, n rounded up to a multiple of 8. A program holds a block as
eight pieces of m / 8 columns. Elements j and j + m / 2, which share a random word, are in pieces k and k + 4. Each byte of a
plane takes its codes from one column. So only the search for the scale needs several threads.
"""

import triton
import triton.language as tl

from gradwire.kernels.triton.numbers import magnitude, narrow, one_nan, random_fold, random_words, widen

TINY, HUGE = tl.constexpr(0x0D800000), tl.constexpr(0x7E800000)  # bits of 2^-100 and 2^126


@triton.jit
def load_value(src, residual, at, inside, RESIDUAL: tl.constexpr):
    value = widen(tl.load(src + at, mask=inside, other=0.0))
    if RESIDUAL:
        value += tl.load(residual + at, mask=inside, other=0.0)
    return value


@triton.jit
def load_weight(at, inside):
    """Weights, which are stored as the exponents of float32; 1 outside."""
    return (tl.load(at, mask=inside, other=127).to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def load_weighted(src, residual, weights, at, inside, RESIDUAL: tl.constexpr, WEIGHTED: tl.constexpr):
    """`load_value` over the weights."""
    value = load_value(src, residual, at, inside, RESIDUAL)
    if WEIGHTED:
        stored = tl.load(weights + at, mask=inside, other=127).to(tl.int32)
        value *= ((254 - stored) << 23).to(tl.float32, bitcast=True)
    return value


@triton.jit
def load_pieces(
    src, residual, weights, block, present, width, n,
    BLOCK: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHTED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """(values, which are there) of the eight pieces of ROWS blocks, each of shape (ROWS, BLOCK / 8)."""
    column = tl.arange(0, BLOCK // 8)[None, :]
    values, insides = (), ()
    for k in tl.static_range(8):
        j = k * width + column
        inside = present[:, None] & (column < width)
        if not WHOLE:
            inside &= j < n
        insides += (inside,)
        values += (load_weighted(src, residual, weights, block * BLOCK + j, inside, RESIDUAL, WEIGHTED),)
    if RESIDUAL:
        tl.debug_barrier()  # several threads may hold an element of a small block: all have read it before one writes
    return values, insides


@triton.jit
def largest_of(values):
    """Bits of the largest magnitude of each row of pieces."""
    most = magnitude(values[0])
    for k in tl.static_range(1, 8):
        most = tl.maximum(most, magnitude(values[k]))
    return tl.max(most, axis=1)


@triton.jit
def halves(k: tl.constexpr, first, hashed, width, key, SHARED: tl.constexpr, STOCHASTIC: tl.constexpr):
    """16 random bits for each element of piece k and of piece k + 4, or what rounds to nearest. SHARED: the counters of a
    piece all belong to group k, so that the pieces share their hashes, as in a whole block of 128."""
    if STOCHASTIC:
        word = random_fold(hashed, k) if SHARED else random_words(first + k * width, key)
        return (word & 0xFFFF).to(tl.int32), (word >> 16).to(tl.int32)
    else:
        return 0x8000, 0x8000


@triton.jit
def store_scale(at, raw, present):
    """Byte by byte: a payload may begin at an odd one."""
    tl.store(at, (raw & 0xFF).to(tl.uint8), mask=present)
    tl.store(at + 1, ((raw >> 8) & 0xFF).to(tl.uint8), mask=present)


@triton.jit
def load_scale(at, present):
    return load_byte(at, present) | (load_byte(at + 1, present) << 8)


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
def pack_base_3(codes, present, out, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Eight pieces of codes 0, 1 and 2 of ROWS whole blocks, of shape (ROWS, WIDTH); out points to the first byte of each block,
    of shape (ROWS, 1)."""
    column, mask = tl.arange(0, WIDTH)[None, :], present[:, None]
    first = codes[0] + 3 * (codes[1] + 3 * (codes[2] + 3 * (codes[3] + 3 * codes[4])))
    tl.store(out + column, first.to(tl.uint8), mask=mask)
    rest = codes[5] + 3 * (codes[6] + 3 * codes[7])
    low = tl.reshape(rest & 15, [ROWS, 2, WIDTH // 2]) << (4 * tl.arange(0, 2))[None, :, None]
    tl.store(out + WIDTH + tl.arange(0, WIDTH // 2)[None, :], tl.sum(low, axis=1).to(tl.uint8), mask=mask)
    top = tl.reshape(rest >> 4, [ROWS, 8, WIDTH // 8]) << tl.arange(0, 8)[None, :, None]
    place = out + (WIDTH + WIDTH // 2) + tl.arange(0, WIDTH // 8)[None, :]
    tl.store(place, tl.sum(top, axis=1).to(tl.uint8), mask=mask)


@triton.jit
def unpack_base_3(at, column, mask, WIDTH: tl.constexpr):
    """Eight pieces of codes, the opposite of pack_base_3; at points to the first byte of each block."""
    first = load_byte(at + column, mask)
    low = load_byte(at + WIDTH + column % (WIDTH // 2), mask) >> (column // (WIDTH // 2) * 4)
    top = load_byte(at + (WIDTH + WIDTH // 2) + column % (WIDTH // 8), mask) >> (column // (WIDTH // 8))
    rest = (low & 15) | ((top & 1) << 4)
    return (
        first % 3, first // 3 % 3, first // 9 % 3, first // 27 % 3, first // 81, rest % 3, rest // 3 % 3, rest // 9,
    )  # fmt: skip


@triton.jit
def load_byte(at, mask):
    return tl.load(at, mask=mask, other=0).to(tl.int32)


@triton.jit
def store_value(at, value, inside, ADD: tl.constexpr):
    """Write float32 values in the dtype of what `at` points to, or add them to what is there."""
    if ADD:
        value += widen(tl.load(at, mask=inside, other=0.0))
    tl.store(at, narrow(one_nan(value), at.dtype.element_ty), mask=inside)


@triton.jit
def store_piece(to, j, value, mask, n, ADD: tl.constexpr, WHOLE: tl.constexpr):
    """`store_value` of the elements j of blocks of n elements that begin at `to`."""
    inside = mask
    if not WHOLE:
        inside &= j < n
    store_value(to + j, value, inside, ADD)
