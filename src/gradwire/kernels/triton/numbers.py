"""Device functions that kernels share: conversions as integer arithmetic, and the random stream. See reference/."""

import triton
import triton.language as tl


@triton.jit
def magnitude(x):
    """The bits of |x| of a float32, as int32: in the order of the magnitudes, Inf and NaN last."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def negated(x):
    """-x of a float32, also of 0.0: `-x` is 0.0 - x in Triton, which loses the sign."""
    return (x.to(tl.int32, bitcast=True) ^ -0x80000000).to(tl.float32, bitcast=True)


@triton.jit
def one_nan(x):
    """x, with the bits 0x7FC00000 for every NaN: arithmetic on a GPU makes others than on a processor."""
    return tl.where(magnitude(x) > 0x7F800000, float("nan"), x)


@triton.jit
def ordered(bits):
    """Bits of a float32 to an int32 in the order of the floats, -0.0 below 0.0, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def widen_u16(raw, BF16: tl.constexpr):
    """Bits of a bfloat16 or float16 to float32."""
    if BF16:
        return (raw.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return raw.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def widen(x):
    """float32, bfloat16 or float16 to float32."""
    if x.dtype == tl.float32:
        return x
    else:
        return widen_u16(x.to(tl.uint16, bitcast=True), x.dtype == tl.bfloat16)


@triton.jit
def narrow_u16(x, BF16: tl.constexpr):
    """float32 to the bits of a bfloat16 or float16, to nearest even, with one bit pattern for NaN."""
    if BF16:
        bits = x.to(tl.uint32, bitcast=True)
        raw = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.uint16)
        quiet = tl.full(raw.shape, 0x7FC0, tl.uint16)
    else:
        raw = x.to(tl.float16).to(tl.uint16, bitcast=True)
        quiet = tl.full(raw.shape, 0x7E00, tl.uint16)
    return tl.where(magnitude(x) > 0x7F800000, quiet, raw)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 to float32, bfloat16 or float16."""
    if dtype == tl.float32:
        return x
    else:
        return narrow_u16(x, dtype == tl.bfloat16).to(dtype, bitcast=True)


@triton.jit
def load_u16(at, mask, BYTES: tl.constexpr):
    """Two bytes as a number; BYTES: `at` points to uint8 and need not be even."""
    if BYTES:
        low, high = tl.load(at, mask=mask, other=0), tl.load(at + 1, mask=mask, other=0)
        return low.to(tl.uint16) | (high.to(tl.uint16) << 8)
    else:
        return tl.load(at, mask=mask, other=0).to(tl.uint16, bitcast=True)


@triton.jit
def store_u16(at, value, mask, BYTES: tl.constexpr):
    """The opposite of load_u16, of uint16."""
    if BYTES:
        tl.store(at, (value & 0xFF).to(tl.uint8), mask=mask)
        tl.store(at + 1, (value >> 8).to(tl.uint8), mask=mask)
    else:
        tl.store(at, value.to(tl.int16, bitcast=True), mask=mask)


@triton.jit
def bf16_up(bits):
    """Bits (int32) of a finite float32 >= 0 to those of the smallest bfloat16 that is no smaller, at most the largest."""
    return tl.minimum((bits + 0xFFFF) >> 16, 0x7F7F)


@triton.jit
def bf16_towards(bits, UP: tl.constexpr):
    """Bits (int32) of a finite float32 to those of the nearest bfloat16 above (below) it or equal to it."""
    size, negative = bits & 0x7FFFFFFF, bits < 0
    away = negative != UP
    return tl.where(away, bf16_up(size), size >> 16) | tl.where(negative, 0x8000, 0)


@triton.jit
def bf16_value(raw):
    """Bits (int32) of a bfloat16 to float32."""
    return (raw << 16).to(tl.float32, bitcast=True)


@triton.jit
def mix64(x):
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def stream_key(stream, tensor):
    """The 64-bit key of a tensor's random numbers; stream: pointer to int64 (seed, step, encode, rank)."""
    key = mix64(tl.load(stream).to(tl.uint64, bitcast=True))
    for word in tl.static_range(1, 4):
        key = mix64(key ^ tl.load(stream + word).to(tl.uint64, bitcast=True))
    return mix64(key ^ tensor.to(tl.uint64, bitcast=True))


@triton.jit
def random_hash(counter, key):
    x = counter ^ key.to(tl.uint32)
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D + (key >> 32).to(tl.uint32)
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def random_fold(hashed, GROUP: tl.constexpr):
    """The word of a counter whose `counter // 16 % 4` is GROUP, from the hash that four share."""
    if GROUP == 0:
        return hashed
    else:
        if GROUP == 1:
            x = hashed * 0x915F77F5 + 0x9E3779B9
        elif GROUP == 2:
            x = hashed * 0x93D765DD + 0x3C6EF372
        else:
            x = hashed * 0xADB4A92D + 0xDAA66D2B
        return x ^ (x >> 16)


@triton.jit
def random_words(counter, key):
    """Random words (uint32) of any counters."""
    group = (counter >> 4) & 3
    hashed = random_hash(counter & 0xFFFFFFCF, key)
    low = tl.where(group == 0, hashed, random_fold(hashed, 1))
    return tl.where(group < 2, low, tl.where(group == 2, random_fold(hashed, 2), random_fold(hashed, 3)))
