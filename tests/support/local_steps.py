"""DiLoCo in plain torch (Douillard et al. 2023, algorithm 1, and 2025, algorithm 2), for one process that plays all ranks."""

from collections.abc import Callable

import torch

import gradwire as gw


@torch.no_grad()
def lower_plainly(optimizer: torch.optim.Optimizer, ranks: int) -> None:
    """After a step: Adam's second moment without the noise that the mean gradient of so many ranks would not have."""
    for group in optimizer.param_groups:
        first_kept, second_kept = group["betas"]
        left = (1 - first_kept) / (1 + first_kept)
        for parameter in group["params"]:
            state, squares = optimizer.state[parameter], parameter.grad**2
            mean = state["exp_avg"] / (1 - first_kept ** float(state["step"]))
            signals = ((mean**2 - left * squares) / (1 - left)).clamp(min=0)
            wanted = signals + (squares - signals) / ranks
            state["exp_avg_sq"] += (1 - second_kept) * (wanted - squares)


class LocalReference:
    """The global weights W, and a model and an optimizer of each rank."""

    def __init__(
        self,
        schedule: gw.LocalSteps,
        make_model: Callable[[], torch.nn.Module],
        make_optimizer: Callable[..., torch.optim.Optimizer],
        gradient: Callable[[torch.nn.Module, int, int], None],
        ranks: int,
        fragments: list[list[int]] | None = None,
    ) -> None:
        """`fragments`: the places of their parameters."""
        self.data, self.gradient = schedule, gradient
        self.whole, self.local = make_model(), [make_model() for _ in range(ranks)]
        self.inner = [make_optimizer(model.parameters()) for model in self.local]
        outer = schedule.outer
        self.outer = torch.optim.SGD(self.whole.parameters(), lr=outer.lr, momentum=outer.momentum, nesterov=outer.momentum > 0)
        self.fragments = fragments or [list(range(len(list(self.whole.parameters()))))]
        self.history: list[list[torch.Tensor]] = []
        """W as a look after each local step sees it: with an exchange that has begun."""
        self.exchanges, self.lands_after = 0, -1

    def run(self, steps: int) -> None:
        for step in range(steps):
            for rank, (model, optimizer) in enumerate(zip(self.local, self.inner, strict=True)):
                self.gradient(model, step, rank)
                optimizer.step()
                if self.data.second_moment == "mean" and isinstance(optimizer, torch.optim.Adam):
                    lower_plainly(optimizer, len(self.local))
                optimizer.zero_grad()
            if self.lands_after == step:
                self._mix()
            period, place = divmod(self.exchanges, len(self.fragments))
            if step + 1 == period * self.data.every + (place + 1) * self.data.every // len(self.fragments):
                self._exchange(self.fragments[place])
                self.lands_after = step + self.data.delay
                if not self.data.delay:
                    self._mix()
            self.history.append([p.detach().clone() for p in self.whole.parameters()])

    @torch.no_grad()
    def _exchange(self, fragment: list[int]) -> None:
        self.exchanges, self.landing = self.exchanges + 1, fragment
        columns = list(zip(self.whole.parameters(), *(model.parameters() for model in self.local), strict=True))
        self.outer.zero_grad()
        for weight, *local in (columns[place] for place in fragment):
            weight.grad = torch.stack([(weight - own) / len(local) for own in local]).sum(0)
        before = torch.cat([columns[place][0].flatten() for place in fragment])
        self.outer.step()
        if self.data.outer.radius is not None:
            self._keep_near([columns[place] for place in fragment], before, self.data.outer.radius)

    def _keep_near(self, columns: list[tuple[torch.Tensor, ...]], before: torch.Tensor, radius: float) -> None:
        """A trust region: at most this part of the mean's own step away from the mean, in ten binary digits of what it was."""
        mean = torch.cat([torch.stack(local).mean(0).flatten() for _, *local in columns])
        stepped = torch.cat([weight.flatten() for weight, *_ in columns])
        kept = radius * (mean - before).norm() / (stepped - mean).norm()
        if kept < 1:
            unit = 2.0 ** (torch.floor(torch.log2(kept)) - 9)
            stepped = mean + (stepped - mean) * torch.floor(kept / unit) * unit
        for (weight, *_), own in zip(columns, stepped.split([weight.numel() for weight, *_ in columns]), strict=True):
            weight.copy_(own.view_as(weight))

    @torch.no_grad()
    def _mix(self) -> None:
        for model in self.local:
            pairs = list(zip(model.parameters(), self.whole.parameters(), strict=True))
            for own, weight in (pairs[place] for place in self.landing):
                own.copy_(weight) if self.data.mixing == 1 else own.lerp_(weight, self.data.mixing)
