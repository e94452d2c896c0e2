"""One tensor encoded and decoded in one call."""

import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.compressors import compressor_for
from gradwire.core import ElementRun, Spec, example_specs
from gradwire.core.specs import Kernels
from gradwire.errors import SpecError
from gradwire.kernels import Context, Segment, Segments

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


@pytest.mark.parametrize(
    ("tensor", "step", "words"),
    [
        ([1.0, 2.0], 0, r"tensor is \[1\.0, 2\.0\], a list.*as_tensor"),
        (None, 0, "tensor is None, a NoneType"),
        (torch.ones(3).to_sparse(), 0, r"tensor is sparse.*to_dense\(\)"),
        (torch.ones(3, device="meta"), 0, "meta device.*no values"),
        (torch.ones(3), 1.5, "step is 1.5, a float.*whole number"),
        (torch.ones(3), 2**63, "step is 9223372036854775808"),
    ],
)
def test_what_is_no_tensor_or_no_step_is_refused(tensor: Any, step: Any, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        gw.roundtrip(tensor, gw.QSGD(), step)


@pytest.mark.parametrize(("size", "words"), [(1.5, "gives 1.5, a float"), (-1, "gives -1, an? int"), (None, "gives None")])
def test_payloads_have_a_whole_number_of_bytes(size: Any, words: str) -> None:
    class Odd(gw.Int8, frozen=True):
        id = "odd"  # type: ignore[misc]

        def payload_bytes(self, runs: Sequence[ElementRun], itemsize: int) -> int:
            return size  # type: ignore[no-any-return]

    with pytest.raises(SpecError, match=f"{words}.*whole number of bytes.*Return an int"):
        gw.roundtrip(torch.ones(3), Odd())


def test_a_spec_without_payload_bytes_is_refused_by_its_name() -> None:
    class Bare(gw.Spec, frozen=True):
        id = "bare"  # type: ignore[misc]

        def kernels(self, part: float = 1.0) -> Kernels:
            return gw.Int8().kernels()  # type: ignore[return-value]

    with pytest.raises(SpecError, match=r"Bare has no payload_bytes.*Define"):
        gw.roundtrip(torch.ones(3), Bare())


def test_the_example_of_an_own_compressor_takes_empty_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.core.specs.base._REGISTRY", {})
    own = runpy.run_path(str(Path(__file__).parents[3] / "examples/own_compressor/gradwire_mulaw.py"))
    segments = Segments((Segment(0, 0, 1, 0, 0), Segment(0, 3, 2, 0, 0)), torch.device("cpu"), ("none", "some"))
    given, decoded, state = torch.tensor([1.0, -0.5, 0.0]), torch.zeros(3), [torch.zeros(3)]
    compressor, context = own["MuLawCompressor"](own["MuLaw"]()), Context(torch.zeros(4, dtype=torch.int64))
    payload = torch.zeros(compressor.payload_bytes(segments, given.dtype), dtype=torch.uint8)
    compressor.encode(given, state, segments, context, payload)
    compressor.decode(payload, segments, given.dtype, False, decoded, context)
    assert payload.numel() == 11 and torch.allclose(decoded + state[0], given) and decoded.any()


def test_a_spec_that_names_its_kernels_needs_no_more() -> None:
    """A class of another package may inherit kernels, bytes and law, or bring its own compressor."""

    class Finer(gw.QSGD, frozen=True):
        id = "finer"  # type: ignore[misc]

    tensor = torch.randn(300)
    assert torch.equal(gw.roundtrip(tensor, Finer())[0], gw.roundtrip(tensor, gw.QSGD())[0])
    assert type(compressor_for(Finer())) is type(compressor_for(gw.QSGD()))
