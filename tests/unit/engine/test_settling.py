"""What a script can see or change of weights settles first, and nothing else does."""

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from gradwire.engine.torch_hooks.settling import SettleFirst


class Guarded:
    """A model, its optimizer, and how often they settled."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Sequential(torch.nn.Linear(4, 2)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.before = [*map(dict, self.instances())]
        self.settled = 0
        self.guard = SettleFirst(self.model, [self.optimizer], self._settle)

    def instances(self) -> list[dict[str, Any]]:
        return [vars(each) for each in (*self.model.modules(), self.optimizer)]

    def _settle(self) -> None:
        self.settled += 1
        list(self.model.parameters())  # what settling itself looks at does not settle


def pickled(model: torch.nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


def saved_whole(model: torch.nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


LOOKS: dict[str, Callable[[Guarded], Any]] = {
    "parameters": lambda g: list(g.model.parameters()),
    "named_parameters": lambda g: list(g.model.named_parameters()),
    "buffers": lambda g: list(g.model.buffers()),
    "state_dict": lambda g: g.model.state_dict(),
    "eval": lambda g: g.model.eval(),
    "train(False)": lambda g: g.model.train(False),
    "requires_grad_": lambda g: g.model.requires_grad_(),
    "load_state_dict": lambda g: g.model.load_state_dict({}, strict=False),
    "half": lambda g: g.model.half(),
    "apply": lambda g: g.model.apply(lambda module: None),
    "clip_grad_norm_": lambda g: torch.nn.utils.clip_grad_norm_(g.model.parameters(), 1.0),
    "average": lambda g: AveragedModel(g.model),
    "a layer's parameters": lambda g: list(g.model[1].parameters()),
    "a layer's state_dict": lambda g: g.model[0].state_dict(),
    "parameters of an outer module": lambda g: list(torch.nn.Sequential(g.model).parameters()),
    "state_dict of an outer module": lambda g: torch.nn.Sequential(g.model).state_dict(),
    "loading into an outer module": lambda g: torch.nn.Sequential(g.model).load_state_dict({}, strict=False),
    "moving an outer module": lambda g: torch.nn.Sequential(g.model).double(),
    "deepcopy": lambda g: copy.deepcopy(g.model),
    "deepcopy of a layer": lambda g: copy.deepcopy(g.model[0]),
    "pickle": lambda g: pickled(g.model),
    "torch.save": lambda g: saved_whole(g.model),
    "the optimizer's state_dict": lambda g: g.optimizer.state_dict(),
    "loading the optimizer's state": lambda g: g.optimizer.load_state_dict(g.optimizer.state_dict()),
    "deepcopy of the optimizer": lambda g: copy.deepcopy(g.optimizer),
    "zeroing gradients in place": lambda g: g.model.zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("look", LOOKS)
def test_looks_settle(look: str) -> None:
    guarded = Guarded()
    LOOKS[look](guarded)
    assert guarded.settled > 0


def test_what_touches_no_weights_does_not_settle() -> None:
    guarded = Guarded()
    model, optimizer = guarded.model, guarded.optimizer
    model.train()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.zero_grad()
    with guarded.guard.passing():
        model.state_dict()
    assert guarded.settled == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved_whole])
def test_copies_are_without_guards(copied: Callable[[torch.nn.Module], Any]) -> None:
    guarded = Guarded()
    other = copied(guarded.model)
    settled = guarded.settled
    assert [vars(m).keys() for m in other.modules()] == [before.keys() for before in guarded.before[:-1]]
    assert other.state_dict().keys() == dict(other.named_parameters()).keys()
    assert guarded.settled == settled > 0


class CopiesItself(torch.nn.Linear):
    """As some modules do, in a way of their own."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "CopiesItself":
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied


def test_copies_of_modules_that_copy_themselves_show_their_own_weights() -> None:
    model = CopiesItself(2, 2)
    guard = SettleFirst(model, [], lambda: None)
    other = copy.deepcopy(model)
    with torch.no_grad():
        model.weight.zero_()
    assert other.state_dict()["weight"].abs().sum() > 0
    assert next(other.parameters()) is other.weight
    guard.remove()


def test_remove_undoes_everything() -> None:
    guarded = Guarded()
    guarded.guard.remove()
    assert [*map(dict, guarded.instances())] == guarded.before
    guarded.model.state_dict()
    assert guarded.settled == 0


def test_what_a_script_put_there_itself_is_kept() -> None:
    model = torch.nn.Linear(2, 2)
    model.state_dict = own = lambda: "before"  # type: ignore[assignment,method-assign]
    settled: list[int] = []
    guard = SettleFirst(model, [], lambda: settled.append(1))
    assert model.state_dict() == "before" and settled == [1]  # type: ignore[comparison-overlap]
    guarded = model.parameters
    model.parameters = later = lambda: guarded()  # type: ignore[method-assign,misc]
    guard.remove()
    assert model.state_dict is own and model.parameters is later
    assert len(list(model.parameters())) == 2 and settled == [1]


def test_nothing_is_kept_alive() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = SettleFirst(model, [optimizer], lambda: None)
    of_model, of_optimizer = weakref.ref(model), weakref.ref(optimizer)
    gc.disable()
    try:
        del model
        assert of_model() is None
    finally:
        gc.enable()
    del optimizer
    gc.collect()  # torch's optimizers are in cycles of their own
    assert of_optimizer() is None
    guard.remove()


def test_an_error_of_settling_reaches_who_looks() -> None:
    def settle() -> None:
        raise ValueError("the exchange failed")

    model = torch.nn.Linear(2, 2)
    guard = SettleFirst(model, [], settle)
    with pytest.raises(ValueError, match="the exchange failed"):
        model.state_dict()
    with guard.passing():
        model.state_dict()


def test_finding_parameters_can_be_told_from_looking_at_them() -> None:
    model = torch.nn.Linear(2, 2)
    did: list[str] = []
    guard = SettleFirst(model, [], lambda: did.append("settle"), walk=lambda: did.append("walk"))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert set(did) == {"walk"}
    model.state_dict()
    assert set(did) == {"walk", "settle"}
    guard.remove()


def test_a_guard_names_the_function_that_torch_compile_looks_for() -> None:
    model = torch.nn.Linear(2, 2)
    guard = SettleFirst(model, [], lambda: None)
    assert model.named_parameters.__func__ is torch.nn.Module.named_parameters  # type: ignore[attr-defined]
    guard.remove()
