"""The plan after the first step, when it is known in which order gradients come."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.engine import Session
from gradwire.transport.in_process import run_ranks


class Layers(torch.nn.Module):
    """Two layers, registered in the order of the forward or the other way around."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in range(2))
        self._order = (1, 0) if turned else (0, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for at in self._order:
            inputs = self.layers[at](inputs)
        return inputs


@pytest.mark.parametrize(("turned", "plans"), [(False, 0), (True, 1)])
def test_a_plan_is_made_again_only_for_another_order_than_the_guess(
    turned: bool, plans: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, plan_of = Counter[int](), Session.plan_of

    def counted(session: Session, policy: gw.Policy, order: Sequence[int] | None = None) -> gw.Plan:
        made[session.group.rank] += 1
        return plan_of(session, policy, order)

    monkeypatch.setattr(Session, "plan_of", counted)

    def live(group: Any) -> list[int]:
        model = Layers(turned)
        handle = gw.parallelize(model, plan=gw.QSGD(bits=4), process_group=group)
        for _ in range(3):
            model(torch.ones(3, 4)).sum().backward()
        order = list(handle.session.order)
        handle.detach()
        return order

    assert run_ranks(2, live) == [[0, 1] if turned else [1, 0]] * 2
    assert [made[rank] for rank in range(2)] == [plans] * 2
