"""Training with one rank: weights beside those of training without gradwire, and no synchronisation inside backward.

In the last backward of each training, `torch.cuda.set_sync_debug_mode("error")` makes an error of every operation for which the
host waits. With one rank, Identity must give the weights of plain training; plans that encode must give finite weights.
"""

import time

import torch

from benchmarks.gpu.findings import DIFFERS, MEASURED, PASSED, SKIPPED, Job
from benchmarks.gpu.training import PLANS, free_port, init_group, trained


def run(job: Job) -> None:
    width, layers = (64, 2) if job.small else (1024, 8)
    if job.small:
        job.write("synchronisation inside backward", SKIPPED, why="a CPU has no queue for which the host could wait")
    init_group(job.device, 0, 1, free_port())
    plain = trained(None, job.device, width, layers)
    job.write("weights without gradwire", MEASURED, sum=float(plain.double().sum()))
    for name, plan in PLANS.items():
        with job.failures(name):
            began = time.perf_counter()
            weights = trained(plan, job.device, width, layers, watch=not job.small)
            off = float((weights - plain).abs().max())
            good = bool(weights.isfinite().all()) and (name != "Identity" or torch.equal(weights, plain))
            took = round(time.perf_counter() - began, 2)
            job.write(name, PASSED if good else DIFFERS, largest_difference=off, s=took)
