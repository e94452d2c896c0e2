"""The delayed schedule's recurrences (docs/papers/cd-sgd.md) in a few plain lines, for one process that plays all ranks.

W(i) are the global weights that hold all updates through step i-1, L(i) a rank's own, on which step i computes:

    L(i+1) = W(i) - local_lr * g(i)
    W(i+1) = W(i) - update(mean over ranks of g(i))
"""

from collections.abc import Callable, Sequence

import torch

import gradwire as gw

Optimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
Gradient = Callable[[torch.nn.Module, int, int], None]
"""Runs forward and backward of a model, for a step and a rank."""
Gradients = list[torch.Tensor]
Mean = Callable[[int, list[Gradients]], Gradients]
"""What ranks get of everybody's gradients in a step."""


def exact_mean(step: int, gradients: list[Gradients]) -> Gradients:
    return [torch.stack([g / len(gradients) for g in column]).sum(0) for column in zip(*gradients, strict=True)]


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
            if not self.schedule.local_update or step < self.schedule.warmup_steps:
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
                    rate = rates[id(parameter)] if self.schedule.local_lr is None else self.schedule.local_lr
                    mine.copy_(self._moved(parameter, gradient, rate))

    def _moved(self, parameter: torch.nn.Parameter, gradient: torch.Tensor, rate: float) -> torch.Tensor:
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
