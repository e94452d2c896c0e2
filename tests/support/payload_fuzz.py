"""`make fuzz`: a million damaged payloads through every decoder, and some large ones, under AddressSanitizer and
UndefinedBehaviorSanitizer.

    PYTHONPATH=tests/unit/compressors python tests/support/payload_fuzz.py [--payloads 1000000] [--large 100] [--seed 0]

Builds the kernels with -fsanitize=address,undefined, then runs itself with the sanitizers' libraries loaded first. A payload that
was cut, grew or changed is decoded or refused with PayloadError; anything else, and whatever a sanitizer finds, is a failure.
Large payloads have 1 to 64 MB.
"""

import argparse
import random
import sys
import time
from collections import Counter

from sanitizers import ROOT, run_again, use_library

LARGEST_BYTES = 64 * 2**20
MOST_ELEMENTS = 64 * 2**20
"""Most elements of a large gradient. Top-k would need billions of elements to fill a payload."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--payloads", type=int, default=1_000_000)
    parser.add_argument("--large", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if use_library():
        return fuzz(options.payloads, options.large, options.seed)
    return run_again(
        "-fsanitize=address,undefined -fno-sanitize-recover=undefined",
        ["libasan.so", "libubsan.so"],
        {"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0", "UBSAN_OPTIONS": "print_stacktrace=1"},
    )


def fuzz(payloads: int, large: int, seed: int) -> int:
    sys.path.append(str(ROOT))
    import torch
    from test_laws import FEEDBACK, SPECS, codec_of

    from benchmarks.levels import use_level
    from gradwire.core import PowerSGD
    from gradwire.errors import PayloadError
    from gradwire.kernels import cpu

    torch.set_num_threads(1)
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    specs = [spec for spec in dict.fromkeys([*SPECS, *FEEDBACK]) if not isinstance(spec, PowerSGD)]
    ends: Counter[str] = Counter()
    began = reported = time.monotonic()
    done = largest = 0
    while done < payloads + large:
        spec, dtype = chance.choice(specs), chance.choice([torch.float32, torch.bfloat16, torch.float16])
        small = done >= large
        numels = (
            (numel_for(spec, dtype, chance),)
            if not small
            else tuple(chance.choice([0, 1, 5, 8, 33, 128, 300, 1025]) for _ in range(chance.randint(1, 3))) or (1,)
        )
        if not sum(numels):
            continue
        codec = codec_of(spec, numels, dtype)
        level = chance.choice(cpu.levels())
        with use_level(level):
            good = codec.encode(torch.randn(sum(numels), generator=generator).to(dtype)).clone()
            largest = max(largest, good.numel())
            for _ in range(100 if small else 2):
                payload, add = damaged(good, chance, generator), chance.random() < 0.5
                dst = torch.zeros(sum(numels), dtype=torch.float32 if add else dtype)
                try:
                    codec.compressor.decode(payload, codec.segments, dtype, add, dst, codec.context)
                    ends["decoded"] += 1
                except PayloadError:
                    ends["refused"] += 1
                done += 1
        if time.monotonic() - reported > 10:
            reported = time.monotonic()
            print(f"{done} of {payloads} payloads after {reported - began:.0f} s: {dict(ends)}", flush=True)
    took = f"{time.monotonic() - began:.0f} s"
    print(f"{done} payloads of {len(specs)} specs, up to {largest} bytes, {dict(ends)}, nothing found, in {took}")
    return 0


def numel_for(spec: "Spec", dtype: "torch.dtype", chance: random.Random) -> int:  # noqa: F821
    """Return the number of elements with a payload of 1 to 64 MB, up to MOST_ELEMENTS."""
    from test_laws import codec_of

    trial = 2**16
    bytes_per_element = codec_of(spec, (trial,), dtype).payload.numel() / trial
    wanted = LARGEST_BYTES / 64 ** chance.random()
    return min(MOST_ELEMENTS, int(wanted / bytes_per_element)) - chance.randrange(100)


def damaged(good: "torch.Tensor", chance: random.Random, generator: "torch.Generator") -> "torch.Tensor":  # noqa: F821
    """Other bytes, a few other bits, or another length."""
    import torch

    payload = good.clone()
    how = chance.randrange(5)
    if how == 0:
        payload.random_(0, 256, generator=generator)
    elif how == 1 and payload.numel():
        for _ in range(chance.randint(1, 4)):
            payload[chance.randrange(payload.numel())] ^= 1 << chance.randrange(8)
    elif how == 2 and payload.numel():
        at = chance.randrange(payload.numel())
        payload[at:] = chance.choice([0, 255])
    elif how == 3:
        payload = payload[: chance.randint(0, payload.numel())]
    else:
        payload = torch.cat([payload, payload])[: payload.numel() + chance.randint(0, 20)]
    return payload.clone()


if __name__ == "__main__":
    sys.exit(main())
