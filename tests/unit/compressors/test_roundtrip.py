"""One tensor encoded and decoded in one call."""

from collections.abc import Callable

import pytest
import torch

import gradwire as gw
from gradwire.compressors import compressor_for
from gradwire.core import ElementRun, Spec, example_specs
from gradwire.errors import SpecError

SPECS = [spec for spec in example_specs() if not isinstance(spec, gw.Truncate)] + [gw.Truncate(4.0, unsafe=True)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_every_spec_gives_back_shape_dtype_and_its_bytes(spec: Spec, dtype: torch.dtype) -> None:
    tensor = torch.randn(40, 33, generator=torch.Generator().manual_seed(1)).to(dtype)
    given = tensor.clone()
    decoded, nbytes = gw.roundtrip(tensor, spec)
    assert torch.equal(tensor, given)
    assert (decoded.shape, decoded.dtype) == (tensor.shape, dtype)
    assert decoded.isfinite().all() and decoded.any()
    run = ElementRun(tensor.numel(), spec.element_bits, tuple(tensor.shape))
    assert nbytes == spec.payload_bytes([run], dtype.itemsize)
    assert torch.equal(gw.roundtrip(tensor, spec)[0], decoded)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.law.kind in ("exact", "contractive")], ids=repr)
def test_the_error_obeys_the_law(spec: Spec) -> None:
    tensor = torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    error = (gw.roundtrip(tensor, spec)[0] - tensor).square().sum()
    assert error == 0.0 if spec.law.kind == "exact" else 0.0 < error <= tensor.square().sum()


def test_it_is_a_first_step_with_its_residual() -> None:
    decoded, _ = gw.roundtrip(torch.ones(1000), gw.ErrorFeedback(gw.RandomK(0.01)))
    assert sorted(set(decoded.tolist())) == [0.0, 1.0]


def test_another_step_draws_other_numbers() -> None:
    tensor = torch.randn(1000)
    first, second = (gw.roundtrip(tensor, gw.QSGD(bits=4), step=step)[0] for step in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("around", [lambda spec: spec, gw.ErrorFeedback, lambda spec: gw.TopK(1.0, values=spec)])
def test_another_seed_draws_other_numbers(around: Callable[[gw.Spec], gw.Spec]) -> None:
    tensor = torch.randn(1000)
    specs = [around(gw.QSGD(bits=4, rounding="stochastic", seed=seed)) for seed in range(2)]
    first, second = (gw.roundtrip(tensor, spec)[0] for spec in specs)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("shape", [(0,), (), (1,), (7, 3)])
def test_every_shape_comes_back(shape: tuple[int, ...]) -> None:
    tensor = torch.full(shape, 0.5)
    decoded, nbytes = gw.roundtrip(tensor, gw.Cast("bfloat16"))
    assert torch.equal(decoded, tensor) and nbytes == 2 * tensor.numel()


def test_a_view_is_read_in_the_order_of_its_elements() -> None:
    tensor = torch.randn(6, 4)
    decoded, _ = gw.roundtrip(tensor.t(), gw.Identity())
    assert torch.equal(decoded, tensor.t()) and decoded.is_contiguous()


def test_a_gradient_is_not_recorded() -> None:
    decoded, _ = gw.roundtrip(torch.ones(3, requires_grad=True), gw.Identity())
    assert not decoded.requires_grad


def test_what_cannot_be_encoded_is_refused() -> None:
    with pytest.raises(SpecError, match=r"tensor is torch\.int64.*float\(\)"):
        gw.roundtrip(torch.arange(3), gw.QSGD())
    with pytest.raises(SpecError, match="must be a spec"):
        gw.roundtrip(torch.ones(3), "qsgd")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="unsafe=True"):
        gw.roundtrip(torch.ones(3), gw.Truncate(4.0))


def test_a_spec_that_names_its_kernels_needs_no_more() -> None:
    """A class of another package may inherit kernels, bytes and law, or bring its own compressor."""

    class Finer(gw.QSGD, frozen=True):
        id = "finer"  # type: ignore[misc]

    tensor = torch.randn(300)
    assert torch.equal(gw.roundtrip(tensor, Finer())[0], gw.roundtrip(tensor, gw.QSGD())[0])
    assert type(compressor_for(Finer())) is type(compressor_for(gw.QSGD()))
