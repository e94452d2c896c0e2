"""Checks that the same model is learned: the transformer, 300 steps, DDP and 4-bit QSGD, mean loss of steps 281 to 300.

Two ranks on plain loopback; the methods take turns step by step, so one run holds both. The claim: with QSGD the mean over
the seeds is at most 1 % above DDP's. The control: the same with kernels whose scale is deliberately halved where it is found
(compiled from a changed copy of the sources; codes of what is above the halved scale overflow their bits), which must fail
that bound, or the test could not see a broken codec.

    python -m benchmarks learning [--seeds 3] [--steps 300]
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.common import RESULTS, collected, write
from gradwire.bench.loopback import Loopback

BOUND = 0.01
WINDOW = 20


def run(arguments: list[str]) -> int:
    """The runs of all seeds; writes benchmarks/results/learning.json. Returns 1 if the claim or its control fails."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks learning")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args(arguments)
    finals: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        halved = _build_halved(Path(folder))
        for seed in range(options.seeds):
            losses = _losses(seed, options.steps, ["ddp", "qsgd4"]) | {
                "qsgd4-halved": _losses(seed, options.steps, ["qsgd4"], halved)["qsgd4"]
            }
            for method, curve in losses.items():
                finals.setdefault(method, []).append(statistics.mean(curve[-WINDOW:]))
            shown = ", ".join(f"{method} {values[-1]:.4f}" for method, values in finals.items())
            print(f"seed {seed}: {shown}", flush=True)
    means = {method: statistics.mean(values) for method, values in finals.items()}
    above = {method: mean / means["ddp"] - 1 for method, mean in means.items()}
    for method, mean in means.items():
        print(f"{method}: mean loss of the last {WINDOW} steps {mean:.4f}, {above[method]:+.2%} against ddp")
    holds, sees = above["qsgd4"] <= BOUND, above["qsgd4-halved"] > BOUND
    print(f"at most {BOUND:.0%} above ddp: {'yes' if holds else 'NO'}; with the scale halved it fails: {'yes' if sees else 'NO'}")
    write(RESULTS / "learning.json", {"steps": options.steps, "finals": finals, "above_ddp": above})
    return 0 if holds and sees else 1


def _build_halved(folder: Path) -> Path:
    """The kernels with one change: the usual case stores and uses half of each block's scale."""
    root = Path(__file__).parent.parent
    shutil.copy(root / "setup.py", folder)
    shutil.copytree(root / "csrc", folder / "csrc")
    source = folder / "csrc" / "levels.hpp"
    right = "return bound_as_bf16(largest, kTinyBits);"
    wrong = "const u32 bound = bound_as_bf16(largest, kTinyBits); return bound ? bound - 0x80u : 0u;"
    text = source.read_text()
    if text.count(right) != 1:
        raise SystemExit(f"the control cannot be built: {right!r} is not once in levels.hpp any more")
    source.write_text(text.replace(right, wrong))
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", "lib", "--build-temp", "temp"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / "lib" / "gradwire" / "_native.so"


def _losses(seed: int, steps: int, methods: list[str], library: Path | None = None) -> dict[str, list[float]]:
    """Loss at each step, mean over ranks, by method."""
    arguments = [seed, steps, ",".join(methods), *([library] if library else [])]
    with Loopback(2) as ranks:
        return collected(ranks, "benchmarks.learning", arguments, f"seed {seed}")


def _rank(seed: int, steps: int, methods: list[str], library: str | None) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import gradwire as gw
    from gradwire.bench.jobs import make_job
    from gradwire.core import native

    if library is not None:
        native.LIBRARY = Path(library)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = make_job("transformer", seed)
    models = {name: job.make_model(seed) for name in methods}
    optimizers = {name: job.make_optimizer(model) for name, model in models.items()}
    forward: dict[str, torch.nn.Module] = dict(models)
    if "ddp" in models:
        forward["ddp"] = DistributedDataParallel(models["ddp"])
    handle = gw.parallelize(models["qsgd4"], plan=gw.QSGD(bits=4, seed=seed))
    losses: dict[str, list[float]] = {name: [] for name in models}
    for step in range(steps):
        batch = job.batch(dist.get_rank(), dist.get_world_size(), step)
        for name, model in forward.items():
            loss = job.loss(model, batch)
            loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses[name].append(mean.item() / dist.get_world_size())
    handle.detach()
    if dist.get_rank() == 0:
        print(json.dumps(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    _rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3].split(","), sys.argv[4] if len(sys.argv) > 4 else None)
