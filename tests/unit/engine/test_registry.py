"""Handles live as long as their models, and no longer."""

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch

from gradwire.engine.registry import Registry
from gradwire.engine.torch_hooks.hooks import ModelHook, leave_hooks_behind


class Kept:
    """Stands for a handle."""

    error: BaseException | None = None


def script(registry: Registry) -> tuple["weakref.ref[Any]", "weakref.ref[Any]"]:
    """A script whose step failed. Its frame is in the error that the handle keeps, and has the model."""
    model, handle = torch.nn.Linear(2, 2), Kept()
    registry.add(model, model.parameters(), handle)
    try:
        raise ConnectionError
    except ConnectionError as error:
        handle.error = error
    return weakref.ref(model), weakref.ref(handle)


def test_a_handle_that_keeps_an_error_of_the_script_goes_with_the_model() -> None:
    model, handle = script(Registry())
    gc.collect()
    assert model() is None and handle() is None


def test_a_handle_lives_as_long_as_its_model() -> None:
    registry, model, handle = Registry(), torch.nn.Linear(2, 2), Kept()
    registry.add(model, model.parameters(), handle)
    alive = weakref.ref(handle)
    del handle
    gc.collect()
    assert alive() is not None and all(registry.owns(each) for each in model.parameters())
    assert registry.forget(model, model.parameters()) is alive()
    assert not any(registry.owns(each) for each in model.parameters())
    assert registry.forget(model, model.parameters()) is None
    assert vars(model).keys() == vars(torch.nn.Linear(2, 2)).keys()


@pytest.mark.parametrize("parametrized", [False, True])
def test_copies_have_no_handle(parametrized: bool) -> None:
    registry, model = Registry(), torch.nn.Linear(2, 2)
    if parametrized:
        torch.nn.utils.parametrizations.weight_norm(model)
    leave_hooks_behind(model)
    registry.add(model, model.parameters(), Kept())
    copied = copy.deepcopy(model)
    assert registry.forget(copied, copied.parameters()) is None
    if not parametrized:  # torch refuses to pickle those
        assert b"gradwire" not in pickle.dumps(model)


def nothing(*_: object) -> None: ...


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_the_hooks_of_scripts_and_none_of_ours(copied: Any) -> None:
    """One before `state_dict()` is there where lanes queue, as on GPUs. Torch gives numbers of hooks again in another process:
    a number that stayed would let a hook of a script be called with arguments that it does not take."""
    model, owner = torch.nn.Linear(2, 2), Kept()
    leave_hooks_behind(model)
    for hook in (ModelHook(owner, nothing), nothing):
        model.register_forward_pre_hook(hook, with_kwargs=True)
        model.register_forward_hook(hook, with_kwargs=True, always_call=True)
        model.register_state_dict_pre_hook(hook)
    found = {name: list(kept) for name, kept in vars(copied(model)).items() if "hooks" in name and kept}
    assert {name: len(numbers) for name, numbers in found.items()} == dict.fromkeys(
        [
            *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs"),
            *("_forward_hooks_always_called", "_state_dict_pre_hooks"),
        ],
        1,
    )
    assert found["_forward_hooks"] == found["_forward_hooks_with_kwargs"] == found["_forward_hooks_always_called"]
    assert found["_forward_pre_hooks"] == found["_forward_pre_hooks_with_kwargs"]
