"""Trains one model as several ranks would: each step has a gradient of every rank, and the library's own exchanges average them.

Replicas are equal bit for bit, so one model stands for all of them. Its gradients are computed rank by rank, each from the
batch of that rank. The exchanges of all ranks, whose lanes are threads of this process, average them. Encodes, residuals and
sums are those of ranks on several machines.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import gradwire as gw
from benchmarks.accuracy.forms import Form
from benchmarks.accuracy.jobs import MeasuredJob
from benchmarks.accuracy.rivals import RIVALS
from gradwire.compressors import roundtrip
from gradwire.core import Spec, innermost
from gradwire.exchange import Exchange, TensorMeta, embeddings_of, info_of, plan_for
from gradwire.transport.in_process import InProcessGroup, run_ranks

__all__ = ["ElementWeights", "Witness", "policy_of", "train"]

BLOCK = 128
"""Elements of a block of weights."""
HELD_OUT = 8
"""Batches that the last weights are evaluated on."""
NUDGE = 1e-6
DAY_S = 86_400.0


class Witness:
    """What is visible in a running training, added up over its steps, of tensors that are encoded."""

    def __init__(self) -> None:
        self.gradient = self.sent = self.error = self.residual = 0.0

    def see(self, exact: Iterable[Tensor], applied: Iterable[Tensor], residual: float) -> None:
        """Add a step. exact: the mean gradient. applied: what the optimizer got for it."""
        for mean, got in zip(exact, applied, strict=True):
            self.gradient += _square(mean)
            self.sent += _square(got)
            self.error += _square(got - mean)
        self.residual += residual

    def values(self) -> dict[str, float]:
        """Sent energy over gradient energy; norms of the residual and of the applied error over the gradient's."""
        of = max(self.gradient, 1e-30)
        return {
            "sent_energy": self.sent / of,
            "residual_norm": math.sqrt(self.residual / of),
            "error_norm": math.sqrt(self.error / of),
        }


class ElementWeights:
    """The usual size of each element, from decoded means, which all ranks have."""

    def __init__(self, tensors: dict[str, Tensor], form: Form) -> None:
        self._form, self._fade = form, 0.5 ** (1 / form.half_life)
        at, self._where = 0, {}
        counts = []
        for name, tensor in tensors.items():
            blocks = -(-tensor.numel() // BLOCK)
            self._where[name] = slice(at, at + tensor.numel())
            counts += [min(BLOCK, tensor.numel() - BLOCK * each) for each in range(blocks)]
            at += blocks * BLOCK
        self._counts = torch.tensor(counts, dtype=torch.float32).unsqueeze(1)
        self._squares, self._weights = torch.zeros(at), torch.ones(at)
        self.ratio = torch.ones(at)
        """The weights before the last `learn` over those after it."""

    def of(self, name: str, like: Tensor) -> Tensor:
        """The weights of a tensor."""
        return self._weights[self._where[name]].view(like.shape)

    def kept(self, name: str, first: int, end: int) -> tuple[Tensor, Tensor]:
        """The weights and the ratios of elements of a tensor, flat. Both keep their memory."""
        return self._weights[self._where[name]][first:end], self.ratio[self._where[name]][first:end]

    def learn(self, means: dict[str, Tensor]) -> None:
        """Take in the decoded means of a step."""
        for name, mean in means.items():
            part, flat = self._squares[self._where[name]], mean.reshape(-1)
            part.mul_(self._fade).addcmul_(flat, flat, value=1 - self._fade)
        blocks = self._squares.view(-1, BLOCK)
        floor = self._form.floor * blocks.sum(1, keepdim=True) / self._counts
        weights = (blocks + floor).sqrt().view(-1)
        if self._form.weights == "powers":
            weights = torch.exp2(weights.clamp_min(2.0**-100).log2().round())
        weights = torch.where(weights > 1e-20, weights, 1.0)
        torch.div(self._weights, weights, out=self.ratio)
        self._weights.copy_(weights)


def policy_of(form: Form, spec: Spec | None = None) -> gw.Policy:
    """One bucket of one chunk, so that a step has as few messages as possible. spec: in place of the form's."""
    scheme = "alltoall" if form.diffs else "flat"
    return gw.Policy(default=spec or form.planned, scheme=scheme, bucket_bytes=2**40, edge_bytes=2**40, chunk_bytes=0)


class _Kept(NamedTuple):
    """A part of a residual, with its elements' weights and the ratio of the last change of these."""

    residual: Tensor
    weights: Tensor | None
    ratio: Tensor | None


class Training:
    """One model with the exchanges of all ranks."""

    def __init__(self, job: MeasuredJob, form: Form, seed: int, steps: int, exchanges: Sequence[Exchange], model: Any) -> None:
        self.job, self.form, self.steps, self.exchanges, self.model = job, form, steps, exchanges, model
        self.optimizer = job.make_optimizer(model)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.parameters = gradients_of(model)
        encoded = {name for bucket in exchanges[0].plan.buckets for name in bucket.compressed}
        self.encoded = [name for name in self.parameters if name in encoded]
        if form.rival:
            self.encoded = [name for name, parameter in self.parameters.items() if parameter.ndim > 1]
        self.rival = RIVALS[form.rival][0](self) if form.rival else None
        self.weights = ElementWeights({name: self.parameters[name] for name in self.encoded}, form) if form.weights else None
        self.witness, self.trained = Witness(), []
        self._earlier: list[dict[str, Tensor]] = []
        self._applied: dict[str, Tensor] = {}
        self._owners = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self._kept_for: Any = None
        self._kept: list[_Kept] = []

    def step(self, number: int) -> None:
        """Make one step of all ranks."""
        if (spec := self.form.turns.get(number)) is not None:
            self._change_to(spec)
        gradients = self._gradients(number)
        ranks = len(gradients)
        exact = [sum((each[name] for each in gradients[1:]), gradients[0][name]) / ranks for name in self.encoded]
        means = self._averaged(number, gradients) if self.rival is None else self.rival.means(number, gradients)
        self.witness.see(exact, [means[name] for name in self.encoded], self._residual())
        for name, parameter in self.parameters.items():
            parameter.grad = means[name]
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * self.job.rate(number, self.steps)
        if self.form.diffs:
            self._step_owners(number)
        else:
            self.optimizer.step()

    def _change_to(self, spec: Spec) -> None:
        """Send by this spec from now on. What was not sent yet stays, as where `plan='auto'` changes plans."""
        embeddings = embeddings_of(self.model)
        tensors = [info_of(name, each, id(each) in embeddings) for name, each in self.parameters.items()]
        plan, _ = plan_for(policy_of(self.form, spec), tensors, len(self.exchanges))
        for exchange in self.exchanges:
            exchange.change_to(plan)

    def _gradients(self, number: int) -> list[dict[str, Tensor]]:
        """The gradient of each rank. Buffers (running means) become those of rank 0, as after DDP's broadcast."""
        ranks, found, losses = len(self.exchanges), [], []
        first: list[Tensor] = []
        for rank in range(ranks):
            loss = self.job.loss(self.model, self.job.batch(rank, ranks, number))
            found.append(dict(zip(self.parameters, torch.autograd.grad(loss, list(self.parameters.values())), strict=True)))
            losses.append(loss.item())
            if rank == 0:
                first = [buffer.clone() for buffer in self.model.buffers()]
        for buffer, value in zip(self.model.buffers(), first, strict=True):
            buffer.copy_(value)
        self.trained.append(sum(losses) / ranks)
        return found

    @torch.no_grad()
    def _averaged(self, number: int, gradients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """The mean that all ranks apply."""
        if self.form.ef21:
            changes = gradients
            if self._earlier:
                changes = [
                    {name: new[name] - old[name] for name in new} for new, old in zip(gradients, self._earlier, strict=True)
                ]
            self._earlier, gradients = gradients, changes
        if self.weights is not None:
            for each in gradients:
                for name in self.encoded:
                    each[name] = each[name] / self.weights.of(name, each[name])
        means = self._exchanged(gradients)
        if self.weights is not None:
            for name in self.encoded:
                means[name].mul_(self.weights.of(name, means[name]))
        if self.form.ef21:
            means = {name: mean + self._applied[name] if self._applied else mean for name, mean in means.items()}
            self._applied = means
            means = {name: mean.clone() for name, mean in means.items()}
        if self.weights is not None:
            self.weights.learn({name: means[name] for name in self.encoded})
            for residual, _, ratio in self._parts():
                residual.mul_(ratio)
        return means

    def _exchanged(self, gradients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        phases = "reduce" if self.form.diffs else "both"
        for exchange in self.exchanges:
            exchange.begin(phases)
        for exchange, given in zip(self.exchanges, gradients, strict=True):
            for name, gradient in given.items():
                exchange.ready(name, gradient)
        for exchange in self.exchanges:
            exchange.wait()
        means = gradients[0]
        if self.form.diffs:
            for exchange, given in zip(self.exchanges, gradients, strict=True):
                for name, runs in exchange.own_shards.items():
                    for first, end in runs:
                        means[name].view(-1)[first:end] = given[name].view(-1)[first:end]
        return means

    def _step_owners(self, number: int) -> None:
        """Apply the optimizer to the owners' weights, and send replicas what these changed, encoded, and what was lost before."""
        replicas = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self._owners[name])
        self.optimizer.step()
        spec = innermost(self.form.planned.at_step(number))
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                self._owners[name].copy_(parameter)
                if name in self.encoded:
                    decoded, _ = roundtrip(parameter - replicas[name], spec)
                    parameter.copy_(replicas[name] + decoded)

    def _residual(self) -> float:
        """The squared norm of all residuals, as parts of the mean gradient."""
        return sum(_square(part.residual if part.weights is None else part.residual * part.weights) for part in self._parts())

    def _parts(self) -> list[_Kept]:
        """The residuals of all ranks, which move when an exchange goes on with other specs."""
        if self._kept_for is not self.exchanges[0]._buckets:
            self._kept_for = self.exchanges[0]._buckets
            self._kept = [part for exchange in self.exchanges for part in _parts_of(exchange, self.weights)]
        return self._kept

    @torch.no_grad()
    def held_out(self) -> float:
        """The mean loss on data that no rank trains on."""
        self.model.eval()
        losses = [self.job.loss(self.model, batch).item() for batch in self.job.held_out(HELD_OUT)]
        self.model.train()
        return sum(losses) / len(losses)


def gradients_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters by name, the last first: gradients become ready in about this order."""
    return dict(reversed([*model.named_parameters()]))


def _parts_of(exchange: Exchange, weights: ElementWeights | None) -> list[_Kept]:
    memories = [
        (memory, start + memory.start, start + memory.end, buffers.compressed)
        for buffers in exchange._buckets
        for chunk, start in zip(buffers.chunks, buffers.bounds, strict=False)
        for memory in chunk.memory
        if "residual" in memory.names
    ]
    parts = []
    for memory, begin, end, slots in memories:
        for slot in slots:
            low, high = max(begin, slot.offset), min(end, slot.offset + slot.view.numel())
            if low < high:
                within = slot.name, low - slot.offset, high - slot.offset
                of_weights = (None, None) if weights is None else weights.kept(*within)
                parts.append(_Kept(memory.state[0][low - begin : high - begin], *of_weights))
    return parts


def _square(values: Tensor) -> float:
    return float(torch.dot(values.reshape(-1), values.reshape(-1)))


def train(
    job: MeasuredJob, form: Form, seed: int, ranks: int, steps: int, after: Callable[[Training], None] | None = None
) -> dict[str, Any]:
    """Train, and return the loss on held-out data, that of the last steps and the witness values.

    after: called with the training at its end.
    """
    found: dict[str, Any] = {}
    model, over = job.make_model(seed), threading.Event()  # here, since threads share the random state
    embeddings = embeddings_of(model)

    def on_rank(group: InProcessGroup) -> None:
        tensors = {name: TensorMeta.of(each, id(each) in embeddings) for name, each in gradients_of(model).items()}
        exchange = gw.Exchange(tensors, policy_of(form), process_group=group)
        try:
            exchanges = group.gather(exchange)
            if group.rank == 0:
                found.update(_trained(job, form, seed, steps, exchanges, model, after))
        finally:
            if group.rank == 0:
                over.set()
        over.wait()
        exchange.close()

    run_ranks(ranks, on_rank, timeout_s=DAY_S)
    return found


def _trained(
    job: MeasuredJob,
    form: Form,
    seed: int,
    steps: int,
    exchanges: Sequence[Exchange],
    model: torch.nn.Module,
    after: Callable[[Training], None] | None,
) -> dict[str, Any]:
    if form.nudged:
        with torch.no_grad():
            next(model.parameters()).mul_(1 + NUDGE)
    began, work = time.perf_counter(), time.process_time()
    training = Training(job, form, seed, steps, exchanges, model)
    for number in range(steps):
        training.step(number)
    last = training.trained[-20:]
    result = {"loss": training.held_out(), "trained": sum(last) / len(last)} | training.witness.values()
    if after is not None:
        after(training)
    result["seconds"] = round(time.perf_counter() - began, 1)
    result["processor_seconds"] = round(time.process_time() - work, 1)
    return result
