"""The numbers that codes stand for, in blocks with one or two bfloat16 scales: uniform levels (QSGD, TernGrad), FP8 and powers of
two (Natural, exponential levels of QSGD), thresholds, of each block or fixed, and levels with a scale by least squares.
"""

import triton
import triton.language as tl

from gradwire.kernels.triton.blocks import HUGE, TINY, largest_of, load_weighted
from gradwire.kernels.triton.numbers import bf16_towards, bf16_up, bf16_value, magnitude, narrow_u16, negated, ordered
from gradwire.kernels.triton.sums import LANES, LARGEST, folded, norm_of, sum_of

MAX, MINMAX, CLIPPED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # uniform levels first
E4M3, E5M2, NATURAL, EXPONENTIAL = tl.constexpr(3), tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
THRESHOLD, FIXED = tl.constexpr(7), tl.constexpr(8)
FITTED, LLOYD = (tl.constexpr(9), tl.constexpr(10))  # uniform levels whose payload is one of MAX, and those of Lloyd and Max
UNIT = tl.constexpr(65536.0 - 2.0**-6)  # uniform codes have 16 fractional bits, and stay just below the largest one
SQUARE_LOW, SQUARE_HIGH = tl.constexpr(0x2B800000), tl.constexpr(0x58800000)
"""Bits of 2^-40 and 2^50. A block whose largest magnitude lies between these has squares that float32 can add up; others are
brought there."""
FP8_TINY = tl.constexpr(0x08800000)
"""Bits of 2^-110. A block whose largest magnitude is below it counts as zero: its factor would overflow."""


@triton.jit
def bound_of(
    src, residual, row, blocks, n, largest,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, FACTOR: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """float32 bits of the smaller of FACTOR times the root mean square and the largest magnitude, of ROWS blocks."""
    exponent, usual = tl.maximum(largest >> 23, 7), (largest >= SQUARE_LOW) & (largest < SQUARE_HIGH)
    by = tl.where(usual, 1.0, ((254 - exponent) << 23).to(tl.float32, bitcast=True))
    total = sum_of(src, residual, src, row, blocks, n, by, ROWS, BLOCK, True, RESIDUAL, False)
    # a factor of its own and not a division by `by`, which Triton 3.6 fails to compile for some block sizes
    back = tl.where(usual, 1.0, (exponent << 23).to(tl.float32, bitcast=True))
    limit = tl.sqrt(total / n) * FACTOR * back.to(tl.float64)
    return tl.minimum(magnitude(limit.to(tl.float32)), largest)


@triton.jit
def level_of(number, bits, CODE: tl.constexpr):
    """float32 levels of one sign, in units, by their numbers (int32)."""
    if CODE == FITTED:
        return number.to(tl.float32)
    else:
        two = tl.where(number == 0, 464.0, 1547.0)
        three = tl.where(number < 2, tl.where(number == 0, 251.0, 774.0), tl.where(number == 2, 1376.0, 2204.0))
        low = tl.where(number < 2, tl.where(number == 0, 131.0, 397.0), tl.where(number == 2, 673.0, 965.0))
        high = tl.where(number < 6, tl.where(number == 4, 1286.0, 1657.0), tl.where(number == 6, 2119.0, 2798.0))
        four = tl.where(number < 4, low, high)
        return tl.where(bits == 2, two, tl.where(bits == 3, three, four)) * (1.0 / 1024)


@triton.jit
def number_of(size, unit, bits, CODE: tl.constexpr):
    """The numbers of the levels that are nearest to magnitudes."""
    number, last = tl.zeros(size.shape, tl.int32), (1 << (bits - 1)) - 1
    for k in range(last):
        here = tl.zeros(unit.shape, tl.int32) + k
        bound = unit * ((level_of(here, bits, CODE) + level_of(here + 1, bits, CODE)) * 0.5)
        number += (size > bound).to(tl.int32)
    return number


@triton.jit
def fitted_scale(
    src, residual, weights, row, blocks, n, largest, bits,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CODE: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """(which of ROWS blocks are finite, bits of the first units, bits of the scales by least squares). largest: bits of the
    largest magnitudes."""
    if bits == 2:
        statistic = sum_of(src, residual, weights, row, blocks, n, None, ROWS, BLOCK, False, RESIDUAL, WEIGHTED)
        share = tl.full([ROWS], 1.7 if CODE == FITTED else 1.375, tl.float64) / n
    else:
        statistic = largest.to(tl.float32, bitcast=True).to(tl.float64)
        three = tl.full([ROWS], 0.227 if CODE == FITTED else 0.351, tl.float64)
        share = tl.where(bits == 3, three, tl.full([ROWS], 0.124 if CODE == FITTED else 0.34, tl.float64))
    unit, lane, block = (statistic * share).to(tl.float32), tl.arange(0, LANES)[None, :], row[:, None]
    products, squares = tl.zeros([ROWS, LANES], tl.float32), tl.zeros([ROWS, LANES], tl.float32)
    for at in range(0, n, LANES):
        inside = (at + lane < n) & (block < blocks)
        size = tl.abs(load_weighted(src, residual, weights, block * BLOCK + at + lane, inside, RESIDUAL, WEIGHTED))
        level = tl.where(inside, level_of(number_of(size, unit[:, None], bits, CODE), bits, CODE), 0.0)
        products += size * level
        squares += level * level
    tl.debug_barrier()  # a thread may change the residual only after all have read it here
    below = folded(squares, ROWS)
    fitted = folded(products, ROWS) / tl.where(below == 0, 1.0, below)
    units = (1 << (bits - 1)) - 1 if CODE == FITTED else 1
    scale = (fitted * units).to(tl.float32)
    finite = (row < blocks) & (statistic < 2.0**110)
    sends = finite & (magnitude(scale) >= TINY)
    raw = narrow_u16(tl.where(finite, scale, 0.0), True).to(tl.int32)
    return finite, magnitude(tl.where(sends, unit, float("inf"))), tl.where(sends, raw, 0)


@triton.jit
def scales_of(
    src, residual, weights, row, blocks, n, values, insides, bits,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CODE: tl.constexpr, NORM: tl.constexpr, FACTOR: tl.constexpr,
    RESIDUAL: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """(which of ROWS blocks are finite, bits of their low scales, of minmax only, bits of their high or only ones): bfloat16, 0
    for a block of zeros. Of fitted levels the first are float32 bits of the units that codes are found with. FACTOR: the bound
    in root mean squares (CLIPPED), or the threshold in mean magnitudes."""
    largest = largest_of(values)
    finite = (row < blocks) & (largest < HUGE)
    low = tl.zeros_like(largest)
    if CODE == MINMAX:
        least = tl.full([ROWS, BLOCK // 8], 0x7FFFFFFF, tl.int32)
        most = tl.full([ROWS, BLOCK // 8], -0x80000000, tl.int32)
        for k in tl.static_range(8):
            place = ordered(values[k].to(tl.int32, bitcast=True))
            least = tl.minimum(least, tl.where(insides[k], place, 0x7FFFFFFF))
            most = tl.maximum(most, tl.where(insides[k], place, -0x80000000))
        low = tl.where(finite, bf16_towards(ordered(tl.min(least, axis=1)), False), 0)
        high = tl.where(finite, bf16_towards(ordered(tl.max(most, axis=1)), True), 0)
    elif CODE == THRESHOLD:
        total = sum_of(src, residual, src, row, blocks, n, None, ROWS, BLOCK, False, RESIDUAL, False)
        finite = total < 2.0**126
        mean = tl.where(finite, (total / n * FACTOR).to(tl.float32), 0.0)
        high = magnitude(tl.minimum(bf16_value(narrow_u16(mean, True).to(tl.int32)), LARGEST)) >> 16
    elif CODE == FIXED:
        finite, high = row < blocks, low
    elif CODE >= FITTED:
        finite, low, high = fitted_scale(
            src, residual, weights, row, blocks, n, largest, bits, ROWS, BLOCK, CODE, RESIDUAL, WEIGHTED
        )
    else:
        if NORM:
            largest = norm_of(src, residual, row, blocks, n, ROWS, BLOCK, RESIDUAL)
        elif CODE == CLIPPED:
            largest = bound_of(src, residual, row, blocks, n, largest, ROWS, BLOCK, FACTOR, RESIDUAL)
        raw = (largest + 0x7FFFFF) >> 23 << 7 if CODE == NATURAL else bf16_up(largest)
        least = TINY if CODE <= CLIPPED or CODE >= NATURAL else FP8_TINY
        high = tl.where(finite & (largest >= least), raw, 0)
    return finite, low, high


@triton.jit
def grid_of(low, high, bits, CODE: tl.constexpr, FACTOR: tl.constexpr):
    """The values that code_of and value_of need of blocks with these scales, bits of bfloat16 as int32. Uniform
    levels: base, inverse, origin, code of zero, step. Others: what values are multiplied with to be coded, biased
    exponent of the lowest power, what codes are multiplied with, exponent that codes of powers begin after, nothing.
    Thresholds: the threshold. FITTED: as uniform
    levels, with the unit of the codes in second place. LLOYD: the scale, and this unit."""
    scale, one = bf16_value(high), tl.full(high.shape, 1.0, tl.float32)
    if CODE <= CLIPPED:
        if CODE == MINMAX:
            base, zero, levels = bf16_value(low), 0, (1 << bits) - 1
            span, top = scale - base, levels.to(tl.float32)
            origin = 0.0
        else:
            zero = (1 << (bits - 1)) - 1
            span, top = scale, zero.to(tl.float32)
            base, origin = tl.zeros_like(span), top * 65536.0
        known = (magnitude(span) >= TINY) & (span > 0)
        inverse = tl.where(known, tl.div_rn(top * UNIT, tl.where(known, span, 1.0)), 0.0)
        return base, inverse, origin, zero, tl.div_rn(span, tl.zeros_like(span) + top)
    elif CODE == NATURAL:
        exponent = (high >> 7) & 0xFF
        return one, tl.maximum((high >> 7) - 126, 1), tl.where(exponent == 0xFF, float("nan"), 1.0), exponent - 127, 0
    elif CODE == EXPONENTIAL:
        offset = tl.zeros_like(high) + 128 - (1 << (bits - 1))
        return tl.div_rn(one, scale), tl.maximum(134 - (high >> 7), offset + 1), scale, offset, 0
    elif CODE == FITTED:
        zero = (1 << (bits - 1)) - 1
        unit = low.to(tl.float32, bitcast=True)
        return tl.zeros_like(scale), unit, 0, zero, tl.div_rn(scale, tl.zeros_like(scale) + zero.to(tl.float32))
    elif CODE == LLOYD:
        return scale, low.to(tl.float32, bitcast=True), 0, 0, 0
    elif CODE >= THRESHOLD:
        return (one * FACTOR if CODE == FIXED else scale), 0, 0, 0, 0
    else:
        largest = one * (448.0 if CODE == E4M3 else 57344.0)
        return tl.div_rn(largest, scale), high, tl.div_rn(scale, largest), high, 0


@triton.jit
def fp8_code(x, M: tl.constexpr):
    """The code nearest to x. |x| exceeds the largest number by rounding errors at most, which are rounded off."""
    SHIFT: tl.constexpr = 23 - M
    BIAS: tl.constexpr = 7 if M == 3 else 15
    size = magnitude(x)
    normal = (size - ((127 - BIAS) << 23) + ((1 << (SHIFT - 1)) - 1) + ((size >> SHIFT) & 1)) >> SHIFT
    # in this sum the last bit of a float32 is the smallest number of the format, so that the addition rounds
    ALIGNING: tl.constexpr = (128 - BIAS - M + 23) << 23
    aligning = tl.full(size.shape, ALIGNING, tl.int32).to(tl.float32, bitcast=True)
    subnormal = magnitude(tl.abs(x) + aligning) - ALIGNING
    code = tl.where(size < ((128 - BIAS) << 23), subnormal, normal)
    return code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def fp8_value(code, M: tl.constexpr):
    # the exponent is moved by a multiplication, which is exact and makes subnormal numbers normal
    MOVED: tl.constexpr = 2.0**120 if M == 3 else 2.0**112
    size = ((code & 0x7F) << (23 - M)).to(tl.float32, bitcast=True) * MOVED
    return tl.where(code > 0x7F, negated(size), size)


@triton.jit
def power_code(size, lowest, offset, u, CODE: tl.constexpr):
    """Which power of two a size becomes, 0 for zero; u: 16 random bits, added to the mantissa."""
    mantissa = magnitude(size)
    if CODE == EXPONENTIAL:
        # below the lowest power, the floor, the mantissa of size + floor is size / floor; above it this is less than size
        floor = (lowest << 23).to(tl.float32, bitcast=True)
        mantissa = tl.maximum(mantissa, magnitude(size + floor) - (1 << 23))
    power = (mantissa + (u << 7)) >> 23
    return tl.where(power >= lowest, power - offset, 0)


@triton.jit
def power_value(code, offset, bits):
    size = code & ((1 << (bits - 1)) - 1)
    power = size + offset
    value = tl.where((size > 0) & (power > 0), power << 23, 0).to(tl.float32, bitcast=True)
    return tl.where(code >> (bits - 1) == 1, negated(value), value)


@triton.jit
def code_of(x, grid, bits, u, CODE: tl.constexpr):
    """u: 16 random bits, or what rounds to nearest."""
    if CODE <= CLIPPED:
        if CODE == CLIPPED:
            x = tl.clamp(x, -grid[4], grid[4])
        return (((x - grid[0]) * grid[1] + grid[2]).to(tl.int32) + u) >> 16
    elif CODE == FITTED:
        number = number_of(tl.abs(x), grid[1], bits, CODE)
        return grid[3] + tl.where(x < 0, -number, number)
    elif CODE == LLOYD:
        return number_of(tl.abs(x), grid[1], bits, CODE) | (((x.to(tl.int32, bitcast=True) >> 31) & 1) << (bits - 1))
    elif CODE < NATURAL:
        return fp8_code(x * grid[0], 3 if CODE == E4M3 else 2)
    elif CODE >= THRESHOLD:
        t = grid[0]
        code = tl.where((x >= t) & (t > 0), 1, tl.where((x <= -t) & (t > 0), 2, 0))
        return tl.where(magnitude(x) < HUGE, code, 3) if CODE == FIXED else code
    else:
        size = tl.abs(x)
        if CODE == EXPONENTIAL:
            size = tl.minimum(size * grid[0], 1.0)
        sign = (x.to(tl.int32, bitcast=True) >> 31) & 1
        return power_code(size, grid[1], grid[3], u, CODE) | (sign << (bits - 1))


@triton.jit
def value_of(code, grid, bits, CODE: tl.constexpr):
    if CODE <= CLIPPED or CODE == FITTED:
        return (code - grid[3]).to(tl.float32) * grid[4] + grid[0]
    elif CODE == LLOYD:
        size = level_of(code & ((1 << (bits - 1)) - 1), bits, CODE) * grid[0]
        return tl.where(code >> (bits - 1) == 1, negated(size), size)
    elif CODE < NATURAL:
        return fp8_value(code, 3 if CODE == E4M3 else 2) * grid[2]
    elif CODE >= THRESHOLD:
        t = grid[0]
        return tl.where(code == 1, t, tl.where(code == 2, negated(t), tl.where(code == 3, float("nan"), t - t)))
    else:
        return power_value(code, grid[3], bits) * grid[2]
