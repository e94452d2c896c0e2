"""The counter-based random stream: 32-bit words as a pure function of key and counter. See csrc/random.hpp."""

from collections.abc import Iterable
from functools import reduce

import torch
from torch import Tensor

from gradwire.kernels.reference.numbers import M32

_MULTIPLY = (1, 0x915F77F5, 0x93D765DD, 0xADB4A92D)
_ADD = (0, 0x9E3779B9, 0x3C6EF372, 0xDAA66D2B)
_M64 = 0xFFFFFFFFFFFFFFFF


def mix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _M64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _M64
    return x ^ (x >> 31)


def stream_key(words: Iterable[int], key: int = 0) -> int:
    """The key of the random numbers of (seed, step, encode, rank, tensor). key: the key of the words before `words`."""
    return reduce(lambda key, word: mix64(key ^ (word & _M64)), words, key)


def random_words(counter: Tensor, key: int) -> Tensor:
    """Random 32-bit words. Counters 64k + l, + 16, + 32 and + 48 share one hash; a further step derives each but the first."""
    group = counter // 16 % 4
    hashed = random_hash(counter - 16 * group, key)
    x = (hashed * torch.tensor(_MULTIPLY, device=hashed.device)[group]) & M32
    x = (x + torch.tensor(_ADD, device=hashed.device)[group]) & M32
    return torch.where(group == 0, x, x ^ (x >> 16))


def random_hash(counter: Tensor, key: int) -> Tensor:
    x = (counter & M32) ^ (key & M32)
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & M32
    x = (x + (key >> 32)) & M32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & M32
    return x ^ (x >> 16)
