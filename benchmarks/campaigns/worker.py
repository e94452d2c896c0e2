"""One rank of a cell group, as `gradwire.bench.worker`, with the methods that only the repository has.

Executed once per rank as `python -m benchmarks.campaigns.worker ORDER.json`.
"""

import sys

import torch.distributed as dist

from benchmarks.campaigns.hivemind_mean import HivemindMean
from benchmarks.campaigns.islands_method import IslandsMethod
from benchmarks.campaigns.left_out import PartOfStep
from benchmarks.campaigns.parts import WRONG_PREFIX
from benchmarks.campaigns.rivals import HIVEMIND, ISLANDS_PREFIX, RIVAL_PREFIX
from benchmarks.campaigns.torchft_diloco import TorchftDiLoCo
from gradwire.bench import methods, worker
from gradwire.bench.jobs import Job

__all__ = ["build"]


def build(name: str, job: Job, seed: int, process_group: dist.ProcessGroup | None) -> methods.Method:
    """Build a method by its name, as `gradwire.bench.methods.build` does."""
    if name.startswith(WRONG_PREFIX):
        return PartOfStep(job, seed, process_group, name)
    if name.startswith(RIVAL_PREFIX):
        rival = HivemindMean if name.startswith(f"{RIVAL_PREFIX}{HIVEMIND}@") else TorchftDiLoCo
        return rival(job, seed, process_group, name)
    if name.startswith(ISLANDS_PREFIX):
        return IslandsMethod(job, seed, process_group, name)
    return methods.build(name, job, seed, process_group)


if __name__ == "__main__":
    worker.main(sys.argv[1], build)
