"""Weights after 20 steps under every schedule, and digests of plans: bit for bit those that `golden/weights.json` keeps.

The gradients are given numbers, and the optimizer multiplies by powers of two only, so the bits are the same on every
processor. `GRADWIRE_WRITE_GOLDEN=1` writes the file anew: do that only for a change that is meant to change bits.
"""

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch

import gradwire as gw
from gradwire.core import schedule_kinds

PATH = Path(__file__).parents[1] / "golden" / "weights.json"
STEPS = 20
SHAPES = {"a": (37, 129), "b": (129,), "c": (64, 33), "d": (1,), "e": (300, 70), "f": (7,), "g": (123, 41)}
FOUR_BITS, TOP_K = gw.QSGD(bits=4), gw.ErrorFeedback(gw.TopK(ratio=0.05))
SMALL = {"bucket_bytes": 64 * 1024, "chunk_bytes": 16 * 1024}
PLANS = {
    "backward, 4 bits": gw.Policy(default=FOUR_BITS),
    "backward, 4 bits in chunks": gw.Uniform(FOUR_BITS, **SMALL),
    "backward, all-reduce": gw.Uniform(gw.Identity()),
    "backward, Top-k with feedback": gw.Uniform(TOP_K, **SMALL),
    "backward, PowerSGD": gw.Policy(default=gw.PowerSGD(rank=2)),
    "backward, 1 bit, narrow residuals": gw.Uniform(gw.EFSignSGD(), residual_dtype="int8", **SMALL),
    "backward, ring": gw.Uniform(FOUR_BITS, scheme="ring", **SMALL),
    "backward, tree": gw.Uniform(FOUR_BITS, scheme="tree", **SMALL),
    "pipelined, 4 bits": gw.Uniform(FOUR_BITS, schedule="pipelined", **SMALL),
    "pipelined, uncompressed": gw.Uniform(gw.Identity(), schedule="pipelined", **SMALL),
    "pipelined, shards": gw.Uniform(gw.Identity(), schedule=gw.Pipelined(shard_optimizer=True), **SMALL),
    "delayed, k=2": gw.Uniform(gw.ErrorFeedback(gw.QSGD(bits=2)), schedule=gw.Delayed(k=2, stagger=False), **SMALL),
    "delayed, k=3, staggered, flush": gw.Uniform(
        gw.ErrorFeedback(gw.QSGD(bits=2)), schedule=gw.Delayed(k=3, flush=True), **SMALL
    ),
    "delayed, k=5, 8 bits, flush, warm-up": gw.Uniform(
        gw.ErrorFeedback(gw.QSGD(bits=2)),
        schedule=gw.Delayed(k=5, correction=gw.QSGD(bits=8), flush=True, warmup_steps=3, stagger=False),
        **SMALL,
    ),
    "delayed, no corrections": gw.Uniform(FOUR_BITS, schedule=gw.Delayed(k=None), **SMALL),
    "delayed, no local update": gw.Uniform(gw.TwoBit(), schedule=gw.Delayed(k=None, local_update=False), **SMALL),
    "local, 4 bits": gw.Uniform(FOUR_BITS, schedule=gw.LocalSteps(every=4, outer=gw.Nesterov(0.5, 0.5)), **SMALL),
    "local, 2 bits with feedback, delay": gw.Uniform(
        gw.ErrorFeedback(gw.QSGD(bits=2)),
        schedule=gw.LocalSteps(3, gw.Nesterov(0.5, 0.5), delay=2, mixing=0.5),
        **SMALL,
    ),
    "local, fragments": gw.Uniform(
        gw.ErrorFeedback(gw.QSGD(bits=2)), schedule=gw.LocalSteps(4, gw.Nesterov(0.5, 0.5), 2, 1, mixing=0.5), **SMALL
    ),
}


class Given(torch.autograd.Function):
    """Adds 0 to its input; the gradient of the weight is what is given."""

    @staticmethod
    def forward(ctx, x, weight, gradient):
        ctx.save_for_backward(gradient)
        return x + 0 * weight.sum()

    @staticmethod
    def backward(ctx, grad):
        (gradient,) = ctx.saved_tensors
        return grad, gradient, None


class Layer(torch.nn.Module):
    def __init__(self, shape, generator):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(shape, generator=generator))

    def forward(self, x, gradient):
        return Given.apply(x, self.weight, gradient)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = torch.nn.ModuleDict({name: Layer(shape, generator) for name, shape in SHAPES.items()})

    def forward(self, gradients):
        x = torch.zeros(1, requires_grad=True)
        for name, layer in self.layers.items():
            x = layer(x, gradients[name])
        return x


def run(name):
    """Digests of the plan that ran and of the weights at the end."""
    rank = torch.distributed.get_rank()
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-5, momentum=0.5)
    handle = gw.parallelize(model, optimizer, plan=PLANS[name])
    generator = torch.Generator().manual_seed(1 + rank)
    for _ in range(STEPS):
        model({each: torch.randn(shape, generator=generator) for each, shape in SHAPES.items()}).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.flush()
    total = hashlib.sha256()
    for weight in model.parameters():
        total.update(weight.detach().contiguous().numpy().tobytes())
    plan = handle.plan.digest()
    handle.detach()
    return {"plan": plan, "weights": total.hexdigest()}


@pytest.mark.parametrize("name", PLANS)
def test_weights_and_plans_have_the_bits_they_always_had(worlds, name):
    first, second = worlds.run(2, run, name)
    assert first == second
    if os.environ.get("GRADWIRE_WRITE_GOLDEN"):
        kept = json.loads(PATH.read_text()) if PATH.exists() else {}
        PATH.write_text(json.dumps(kept | {name: first}, indent=1, sort_keys=True) + "\n")
    kept = json.loads(PATH.read_text())
    assert name in kept, "run it with GRADWIRE_WRITE_GOLDEN=1 in the environment, which writes the weights of a new row"
    assert first == kept[name]


def test_every_schedule_has_a_row():
    missing = {*schedule_kinds()} - {plan.schedule.word for plan in PLANS.values()}
    assert not missing, f"add a row to PLANS for {sorted(missing)}"
