"""Telling a backward that runs inside another one (reentrant activation checkpointing) from an outermost one."""

import sys
from collections.abc import Iterable

import torch

from gradwire.errors import StepStateError

_MARK = "CheckpointFunctionBackward"


def in_graph(outputs: Iterable[torch.Tensor]) -> bool:
    """Whether the graph of these tensors holds a reentrant checkpoint. Walks the whole graph: not for every step."""
    seen: set[object] = set()
    todo = [output.grad_fn for output in outputs if output.grad_fn is not None]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == _MARK:
            return True
        todo.extend(parent for parent, _ in node.next_functions if parent is not None)
    return False


def inside() -> bool:
    """Whether the running backward was started from a Python autograd function's backward, on this thread."""
    frame = sys._getframe(1)
    engine_seen = False
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_engine_run_backward":
            engine_seen = True
        elif engine_seen and code.co_name == "apply" and code.co_filename.endswith("autograd/function.py"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def refusal(name: str) -> StepStateError:
    """The error to raise where the first gradient of a step, of the parameter of this name, came from such a backward."""
    return StepStateError(
        f"the first gradient of the step, {name!r}, came from a backward inside the backward (reentrant checkpointing), and "
        "gradwire cannot see where the outer one ends. Nothing was sent. Call the model itself rather than its parts, or use "
        "checkpoint(..., use_reentrant=False)."
    )
