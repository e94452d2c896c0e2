"""Does the same model get learned? The transformer, 300 steps, DDP beside 4-bit QSGD, mean loss of steps 281 to 300.

Two ranks on plain loopback; the methods take turns step by step, so one run holds all of them. The claim: with QSGD the
mean over the seeds is at most 1 % above DDP's. The control: the same with the codec's scale deliberately halved, which
must fail that bound, or the test could not see a broken codec.

    python -m benchmarks learning [--seeds 3] [--steps 300]
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable

import torch

from benchmarks.common import RESULTS, write
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
    for seed in range(options.seeds):
        losses = _losses(seed, options.steps)
        for method, curve in losses.items():
            finals.setdefault(method, []).append(statistics.mean(curve[-WINDOW:]))
        print(f"seed {seed}: " + ", ".join(f"{method} {values[-1]:.4f}" for method, values in finals.items()), flush=True)
    means = {method: statistics.mean(values) for method, values in finals.items()}
    above = {method: mean / means["ddp"] - 1 for method, mean in means.items()}
    for method, mean in means.items():
        print(f"{method}: mean loss of the last {WINDOW} steps {mean:.4f}, {above[method]:+.2%} against ddp")
    holds, sees = above["qsgd4"] <= BOUND, above["qsgd4-halved"] > BOUND
    print(f"at most {BOUND:.0%} above ddp: {'yes' if holds else 'NO'}; with the scale halved it fails: {'yes' if sees else 'NO'}")
    write(RESULTS / "learning.json", {"steps": options.steps, "finals": finals, "above_ddp": above})
    return 0 if holds and sees else 1


def _losses(seed: int, steps: int) -> dict[str, list[float]]:
    """Loss at each step, mean over ranks, by method."""
    collected: dict[str, list[float]] = {}

    def on_line(rank: int, stream: str, line: str) -> None:
        if stream == "stdout" and rank == 0:
            collected.update(json.loads(line))
        elif stream == "stderr":
            print(line, file=sys.stderr)

    command = [sys.executable, "-u", "-m", "benchmarks.learning", str(seed), str(steps)]
    with Loopback(2) as ranks:
        if code := ranks.run(command, env={"OMP_NUM_THREADS": "1"}, on_line=on_line):
            raise SystemExit(f"the ranks ended with exit code {code}")
    return collected


def _rank(seed: int, steps: int) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import gradwire as gw
    from gradwire.bench.jobs import make_job

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = make_job("transformer", seed)
    models = {name: job.make_model(seed) for name in ("ddp", "qsgd4", "qsgd4-halved")}
    optimizers = {name: job.make_optimizer(model) for name, model in models.items()}
    forward: dict[str, torch.nn.Module] = dict(models)
    forward["ddp"] = DistributedDataParallel(models["ddp"])
    plan = gw.Uniform(gw.QSGD(bits=4, seed=seed))
    handles = [gw.parallelize(models[name], plan=plan) for name in ("qsgd4", "qsgd4-halved")]
    restore = None
    losses: dict[str, list[float]] = {name: [] for name in models}
    for step in range(steps):
        batch = job.batch(dist.get_rank(), dist.get_world_size(), step)
        for name, model in forward.items():
            if name == "qsgd4-halved":
                restore = _halve_scales()
            loss = job.loss(model, batch)
            loss.backward()
            if restore is not None:
                restore()
                restore = None
            optimizers[name].step()
            optimizers[name].zero_grad()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses[name].append(mean.item() / dist.get_world_size())
    for handle in handles:
        handle.detach()
    if dist.get_rank() == 0:
        print(json.dumps(losses))
    dist.destroy_process_group()


def _halve_scales() -> Callable[[], None]:
    """Break the codec: every block is encoded with half of its scale, so that its larger values do not fit."""
    from gradwire.compressors.qsgd import QSGDCompressor

    whole = QSGDCompressor.encode

    def encode(self, src, residual, segments, context, payload):  # type: ignore[no-untyped-def]
        # values beyond half of the block's largest are clipped to it, as a scale of half the size would have it
        clipped = src.clone()
        for row in segments.rows:
            part = clipped[row.offset : row.offset + row.numel]
            for start in range(0, row.numel, 1 << 20):
                run = part[start : start + (1 << 20)]
                padded = torch.nn.functional.pad(run, (0, -run.numel() % self.block)).reshape(-1, self.block)
                half = padded.abs().amax(dim=1, keepdim=True) / 2
                run.copy_(torch.clamp(padded, -half, half).reshape(-1)[: run.numel()])
        whole(self, clipped, residual, segments, context, payload)

    QSGDCompressor.encode = encode  # type: ignore[method-assign]

    def restore() -> None:
        QSGDCompressor.encode = whole  # type: ignore[method-assign]

    return restore


if __name__ == "__main__":
    _rank(int(sys.argv[1]), int(sys.argv[2]))
