"""The state of a member of an elastic job: its model, its optimizers, and the other objects of its script."""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from gradwire.core import show
from gradwire.errors import DisagreementError, PlanError
from gradwire.integrations.handles import from_bytes, to_bytes
from gradwire.integrations.shards import reshard, shard_of

__all__ = ["MemberState", "check_forms", "state_of"]


class MemberState(NamedTuple):
    """The state of a member without residuals: how a donor saves it, and how a joiner loads it."""

    save: Callable[[], dict[str, Any]]
    load: Callable[[dict[str, Any]], None]


def state_of(model: torch.nn.Module, without: Collection[str], others: Sequence[Any]) -> MemberState:
    """The state of a model, without the tensors of these names, and of other objects. Raises PlanError for an object with a state
    that a joiner could not read."""
    for each in others:
        _check_readable(each)

    def tensors() -> dict[str, torch.Tensor]:
        named = [*model.named_parameters(), *model.named_buffers()]
        return {name: shard_of(each) for name, each in named if name not in without}

    def labels() -> list[str]:
        names = {id(each): name for name, each in model.named_parameters()}
        return [_label(each, names) for each in others]

    def save() -> dict[str, Any]:
        reshard(model)
        return {"tensors": tensors(), "others": [each.state_dict() for each in others], "labels": labels()}

    def load(state: dict[str, Any]) -> None:
        reshard(model)
        if state["labels"] != (own := labels()):
            label, in_place = next((a, b) for a, b in zip_longest(state["labels"], own, fillvalue="nothing") if a != b)
            raise DisagreementError(
                f"another member sent the state of {label}, and this one has {in_place} in its place. Pass the same optimizers, "
                "with the same parameters, and the same `also` in the same order on every member."
            )
        mine, theirs = tensors(), state["tensors"]
        for name in sorted(mine.keys() | theirs.keys()):
            if (sent := form_of(theirs.get(name))) != (has := form_of(mine.get(name))):
                raise DisagreementError(
                    f"another member sent {sent} for the tensor {name!r} of the model, and this one has {has}. Start every "
                    "member with the same model."
                )
        for name, each in mine.items():
            each.copy_(theirs[name])
        for each, saved in zip(others, state["others"], strict=True):
            each.load_state_dict(saved)

    return MemberState(save, load)


def check_forms(what: str, saved: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Raises ValueError where the tensors of a saved state have other names, shapes or dtypes than those of this rank."""
    for name in sorted(expected.keys() | saved.keys()):
        if (found := form_of(saved.get(name))) != (has := form_of(expected.get(name))):
            raise ValueError(
                f"the {what} of the state have {found} for {name!r}, and this rank has {has}. Load the state of the same model "
                "and plan, which as many ranks saved."
            )


def form_of(tensor: torch.Tensor | None) -> str:
    """The shape and dtype in words."""
    return "nothing" if tensor is None else f"{tensor.dtype} of shape {[*tensor.shape]}"


def _check_readable(each: Any) -> None:
    state = pytree.tree_map_only(torch.Tensor, lambda _: None, each.state_dict())  # tensors can be read, and may be large
    if _is_readable(state):
        return
    path, value = _unreadable_part(state)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise PlanError(
        f"the state of {type(each).__name__}{path} is {show(value)}, a {kind}: joiners get states from another "
        "member, and for safety read only tensors, numbers, texts, lists and dictionaries. Let its state_dict() have no other "
        "values, or leave the object out of `also`."
    )


def _unreadable_part(value: Any, path: str = "") -> tuple[str, Any]:
    """The smallest part of an unreadable value that is not readable either, and where it is."""
    parts: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        parts = [(f"[{key!r}]", each) for key, each in value.items()] + [(".keys()", key) for key in value]
    elif isinstance(value, list | tuple):
        parts = [(f"[{index}]", each) for index, each in enumerate(value)]
    elif isinstance(value, set | frozenset):
        parts = [("", each) for each in value]
    for key, part in parts:
        if not _is_readable(part):
            return _unreadable_part(part, path + key)
    return path, value


def _is_readable(value: Any) -> bool:
    try:
        from_bytes(to_bytes({"value": value}))
    except Exception:  # of pickle, torch, or the value itself
        return False
    return True


def _label(each: Any, names: Mapping[int, str]) -> str:
    """The kind of an object with a state; of an optimizer also its parameters, since its state has them by number."""
    groups = each.param_groups if isinstance(each, torch.optim.Optimizer) else []
    stepped = [[names.get(id(parameter), "?") for parameter in group["params"]] for group in groups]
    return type(each).__name__ + (f" of {stepped}" if groups else "")
