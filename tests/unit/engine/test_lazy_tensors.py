"""Tensors whose values come later."""

import pytest
import torch

from gradwire.engine.torch_hooks.lazy_tensors import is_later, make_current, raise_later, use_later
from gradwire.errors import StepStateError


def test_a_given_up_wait_keeps_words_alone() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    use_later(parameter, lambda: None)
    raise_later(parameter, StepStateError("the step failed"))
    with pytest.raises(StepStateError, match="the step failed"):
        parameter + 1
    make_current(parameter)
    assert not is_later(parameter) and vars(parameter) == {}


def test_a_wait_that_was_half_begun_is_given_up() -> None:
    """Memory may be short between the two lines of `use_later`; the wait would keep a failed handle alive."""
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter._gradwire_wait = lambda: None  # type: ignore[attr-defined]
    raise_later(parameter, StepStateError("the step failed"))
    assert vars(parameter) == {}
    assert (parameter + 1).sum() == 6
