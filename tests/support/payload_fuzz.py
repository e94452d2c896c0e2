"""`make fuzz`: a million damaged payloads through every decoder, under AddressSanitizer.

    PYTHONPATH=tests/unit/compressors python tests/support/payload_fuzz.py [--payloads 1000000] [--seed 0]

Builds the kernels with -fsanitize=address, then runs itself with the sanitizer's library loaded first. A payload that was
cut, grew or changed is decoded or refused with PayloadError; anything else, and whatever the sanitizer finds, is a failure.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
INSIDE = "GRADWIRE_FUZZ_LIBRARY"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--payloads", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if library := os.environ.get(INSIDE):
        return fuzz(Path(library), options.payloads, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "setup.py",
            "-q",
            "build_ext",
            "--build-lib",
            folder,
            "--build-temp",
            f"{folder}/temp",
        ]
        flags = os.environ | {"GRADWIRE_CXXFLAGS": "-fsanitize=address -fno-omit-frame-pointer -g1"}
        subprocess.run(command, cwd=ROOT, env=flags, check=True, stderr=subprocess.DEVNULL)
        libraries = [  # the sanitizer looks for the thrower of exceptions when it starts
            subprocess.run(
                ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
            ).stdout.strip()
            for name in ("libasan.so", "libstdc++.so")
        ]
        environment = os.environ | {
            INSIDE: f"{folder}/gradwire/_native.so",
            "LD_PRELOAD": " ".join(libraries),
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0",
        }
        return subprocess.run([sys.executable, *sys.argv], env=environment).returncode


def fuzz(library: Path, payloads: int, seed: int) -> int:
    from gradwire.core import native
    from gradwire.kernels import cpu

    native.LIBRARY = library
    if problem := cpu.available():
        print(problem, file=sys.stderr)
        return 1
    sys.path.append(str(ROOT))
    import torch
    from test_laws import FEEDBACK, SPECS, codec_of

    from benchmarks.levels import use_level
    from gradwire.core import PowerSGD
    from gradwire.errors import PayloadError

    torch.set_num_threads(1)
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    specs = [spec for spec in dict.fromkeys([*SPECS, *FEEDBACK]) if not isinstance(spec, PowerSGD)]
    ends: Counter[str] = Counter()
    began = told = time.monotonic()
    done = 0
    while done < payloads:
        spec, dtype = chance.choice(specs), chance.choice([torch.float32, torch.bfloat16, torch.float16])
        numels = tuple(chance.choice([0, 1, 5, 8, 33, 128, 300, 1025]) for _ in range(chance.randint(1, 3))) or (1,)
        if not sum(numels):
            continue
        codec = codec_of(spec, numels, dtype)
        level = chance.choice(cpu.levels())
        with use_level(level):
            good = codec.encode(torch.randn(sum(numels), generator=generator).to(dtype)).clone()
            for _ in range(100):
                payload, add = damaged(good, chance, generator), chance.random() < 0.5
                dst = torch.zeros(sum(numels), dtype=torch.float32 if add else dtype)
                try:
                    codec.compressor.decode(payload, codec.segments, dtype, add, dst, codec.context)
                    ends["decoded"] += 1
                except PayloadError:
                    ends["refused"] += 1
                done += 1
        if time.monotonic() - told > 10:
            told = time.monotonic()
            print(f"{done} of {payloads} payloads after {told - began:.0f} s: {dict(ends)}", flush=True)
    print(f"{done} payloads of {len(specs)} specs, {dict(ends)}, nothing found, in {time.monotonic() - began:.0f} s")
    return 0


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
