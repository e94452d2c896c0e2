"""The delayed schedule's recurrences (docs/papers/cd-sgd.md) in a few plain lines, for one process that plays all ranks.

W(i) are the global weights that hold all updates through step i-1, L(i) a rank's own, on which step i computes:

    L(i+1) = W(i) - local_lr * g(i)
    W(i+1) = W(i) - update(mean over ranks of g(i))
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch
from threads import here
from worlds import seeded

import gradwire as gw

Optimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
Gradient = Callable[[torch.nn.Module, int, int], None]
"""Runs forward and backward of a model, for a step and a rank."""
Gradients = list[torch.Tensor]
Mean = Callable[[int, list[Gradients]], Gradients]
"""A function from a step and the gradients of all ranks to the mean that ranks get."""


def tanh_layers(*widths: int) -> torch.nn.Sequential:
    """The model that these schedules train: linear layers with tanh between them. It takes inputs of 6 features, and gives 3."""
    generator, model = seeded(7), torch.nn.Sequential()
    for before, after in itertools.pairwise(widths):
        model.extend([torch.nn.Tanh()] * bool(len(model)) + [torch.nn.Linear(before, after)])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return model


def gradient(model: torch.nn.Module, step: int, rank: int) -> None:
    """Forward and backward of a rank's step."""
    generator = seeded(step, rank)
    inputs, targets = torch.randn(5, 6, generator=generator), torch.randn(5, 3, generator=generator)
    torch.nn.functional.mse_loss(model(inputs), targets).backward()


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9, weight_decay=0.01)


def exact_mean(step: int, gradients: list[Gradients]) -> Gradients:
    share = 1 / len(gradients)
    return [torch.stack([g * share for g in column]).sum(0) for column in zip(*gradients, strict=True)]


class Reference:
    """W and every rank's L, in models of their own."""

    def __init__(
        self,
        schedule: gw.Delayed,
        make_model: Callable[[], torch.nn.Module],
        make_optimizer: Optimizer,
        gradient: Gradient,
        ranks: int,
        mean: "Mean | None" = None,
    ) -> None:
        self.schedule, self.gradient, self.mean = schedule, gradient, mean or exact_mean
        self.whole, self.local = make_model(), [make_model() for _ in range(ranks)]
        self.optimizer = make_optimizer(list(self.whole.parameters()))
        self.history: list[list[torch.Tensor]] = []
        """W with all updates through each step."""

    def run(self, steps: int, each: Callable[[int], None] = lambda step: None) -> None:
        """`each(step)` is called before each step, to change the optimizer's rates, say."""
        for step in range(steps):
            each(step)
            gradients = [self._gradients(rank, step) for rank in range(len(self.local))]
            mean = self.mean(step, gradients)
            rates = {id(p): group["lr"] for group in self.optimizer.param_groups for p in group["params"]}
            synchronous = self.schedule.warmup_steps - (0 if self.schedule.warmup_lands else 1)
            if not self.schedule.local_update or step < synchronous:
                self._update(mean)  # synchronous: W(i+1) is what everybody computes on next
                self._set_local([[None] * len(mean)] * len(self.local), rates)
                self.history.append([p.detach().clone() for p in self.whole.parameters()])
                continue
            # W(i) is in place: form L(i+1) of it, and only then W(i+1)
            self._set_local(gradients, rates)
            self._update(mean)
            self.history.append([p.detach().clone() for p in self.whole.parameters()])

    def _gradients(self, rank: int, step: int) -> list[torch.Tensor]:
        model = self.local[rank]
        model.zero_grad()
        self.gradient(model, step, rank)
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    def _update(self, mean: Sequence[torch.Tensor]) -> None:
        for parameter, gradient in zip(self.whole.parameters(), mean, strict=True):
            parameter.grad = gradient
        self.optimizer.step()

    @torch.no_grad()
    def _set_local(self, gradients: Sequence[Sequence[torch.Tensor | None]], rates: dict[int, float]) -> None:
        for model, own in zip(self.local, gradients, strict=True):
            for mine, parameter, gradient in zip(model.parameters(), self.whole.parameters(), own, strict=True):
                mine.copy_(parameter)
                if gradient is not None:
                    own = rates[id(parameter)] * self.schedule.local_ratio
                    rate = own if self.schedule.local_lr is None else self.schedule.local_lr
                    mine.copy_(self._moved(parameter, gradient, rate))

    def _moved(self, parameter: torch.nn.Parameter, gradient: torch.Tensor, rate: float) -> torch.Tensor:
        if self.schedule.local_step == "sgd":
            return parameter - gradient * rate
        if isinstance(self.optimizer, torch.optim.SGD):
            buffer = self.optimizer.state[parameter].get("momentum_buffer")
            kept = self.optimizer.param_groups[0]["momentum"]
            return parameter - (gradient if buffer is None else gradient + buffer * kept) * rate
        state, group = self.optimizer.state[parameter], self.optimizer.param_groups[0]
        if not state or not rate:
            return parameter  # no estimates yet
        first, second = group["betas"]
        steps = state["step"].item() + 1
        of_mean, of_squares = 1 - first**steps, 1 - second**steps
        squares = state["exp_avg_sq"] * (second / of_squares) + gradient * gradient * ((1 - second) / of_squares)
        along = gradient * (1 - first) + state["exp_avg"] * first
        return parameter - along * (rate * (1 / of_mean)) / (squares.double().sqrt().float() + group["eps"])


def dealt_out(plan: gw.Plan, k: int) -> list[set[str]]:
    """Return the tensors that are corrected in each step of a period: the largest bucket first, each to the lightest
    step."""
    held, shares = [0] * k, [set[str]() for _ in range(k)]
    for bucket in sorted(plan.buckets, key=lambda bucket: bucket.numel, reverse=True):
        step = held.index(min(held))
        held[step] += bucket.numel
        shares[step].update(bucket.tensors)
    return shares


class Sent:
    """Computes the mean that ranks get of gradients that a handle with the backward schedule sends with a spec. Every
    rank calls it. The plan's tensors are float32, and all are compressed."""

    def __init__(self, schedule: gw.Delayed, plan: gw.Plan, make_model: Callable[[], torch.nn.Module]) -> None:
        self.schedule, self.carrier = schedule, make_model()
        self.names = [name for name, _ in self.carrier.named_parameters()]
        k = schedule.k or 1
        self.shares = dealt_out(plan, k) if schedule.stagger else [set(self.names), *[set[str]()] * (k - 1)]
        backward = msgspec.structs.replace(plan, schedule=gw.Backward())
        self.handle = gw.parallelize(self.carrier, plan=backward, process_group=here.group)

    def mean(self, step: int, gradients: list[Gradients]) -> Gradients:
        count, k = step - self.schedule.warmup_steps, self.schedule.k
        corrected = set(self.names) if count < 0 else self.shares[count % k] if k else set[str]()
        residuals = {key: value for key, value in self.handle.state_dict().items() if "/residual/" in key}
        exact = self._flushed(gradients, residuals) if self.schedule.flush else exact_mean(step, gradients)
        means = self._compressed(step, gradients[here.rank])
        # the residual of a corrected tensor waits, or was flushed
        waiting = {key: value for key, value in residuals.items() if key.split("/", 3)[3] in corrected}
        if self.schedule.flush:
            waiting = {key: torch.zeros_like(value) for key, value in waiting.items()}
        self.handle.load_state_dict(self.handle.state_dict() | waiting)
        return [e if name in corrected else m for name, e, m in zip(self.names, exact, means, strict=True)]

    def _compressed(self, step: int, own: Gradients) -> Gradients:
        state = self.handle.state_dict()
        self.handle.load_state_dict(state | {f"rank{here.rank}/step": torch.tensor(step)})  # random streams depend on it
        self.carrier.zero_grad()
        torch.stack([(p * g).sum() for p, g in zip(self.carrier.parameters(), own, strict=True)]).sum().backward()
        return [p.grad.clone() for p in self.carrier.parameters() if p.grad is not None]

    def _flushed(self, gradients: list[Gradients], residuals: dict[str, torch.Tensor]) -> Gradients:
        """The exact mean with what was kept back, which is a part of the mean."""
        everybody = here.gather(residuals)
        totals = []
        for index, (name, parameter) in enumerate(self.carrier.named_parameters()):
            # each rank adds its own, all encodes together, before ranks are added up
            parts = [sum(v for key, v in kept.items() if key.endswith(f"/{name}")) for kept in everybody]
            pairs = zip(gradients, parts, strict=True)
            shares = [g[index] * (1 / len(gradients)) + part.view(parameter.shape) for g, part in pairs]
            totals.append(torch.stack(shares).sum(0))
        return totals
