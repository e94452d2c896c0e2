"""Encode, and decode-and-add, of every spec as the engine calls them, beside a copy on the device that is timed in turn."""

from functools import partial

import torch

from benchmarks.catalogue import ENTRIES
from benchmarks.codec_calls import codec_calls
from benchmarks.gpu.findings import MEASURED, Job
from benchmarks.gpu.timing import beside_copy


def run(job: Job) -> None:
    if job.small:
        torch.set_num_threads(1)
    pairs, calls = (3, 1) if job.small else (9, 8)
    for megabytes in job.megabytes:
        numel = megabytes * 2**18
        source, target = torch.randn(numel, device=job.device), torch.zeros(numel, device=job.device)
        copy = partial(target.copy_, source)
        for entry in ENTRIES:
            with job.failures(f"{entry.spec!r}, {megabytes} MB"):
                codec = codec_calls(entry.spec, numel, job.device)
                codec.encode()  # so that decode has a payload
                for call, timed in (("encode", codec.encode), ("decode and add", codec.decode)):
                    times = beside_copy(timed, copy, job.device, pairs, calls)
                    found = {name: round(value, 3) for name, value in times._asdict().items()}
                    gbps = round(numel * 4e-3 / times.us, 1)
                    job.write(
                        f"{entry.spec!r} {call}", MEASURED, mb=megabytes, spec=repr(entry.spec), call=call, gbps=gbps, **found
                    )
