"""A spec is configuration, registry key, repr, equality and JSON at once."""

from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

import gradwire.core as core
from gradwire.core import (
    DGC,
    FP8,
    QSGD,
    BlockTopK,
    Cast,
    EFSignSGD,
    ErrorFeedback,
    Identity,
    Int8,
    Natural,
    OneBit,
    PowerSGD,
    RandomK,
    SignSGD,
    Signum,
    Spec,
    TernGrad,
    Threshold,
    TopK,
    Truncate,
    TwoBit,
    register_spec,
    spec_from_dict,
)
from gradwire.core.specs import ElementRun, example_specs, innermost, registered_specs, spec_from_text
from gradwire.errors import SpecError

blocks = st.sampled_from([2**power for power in range(5, 14)])
seeds = st.integers(0, 2**63 - 1)
ratios = st.floats(0, 1, exclude_min=True, allow_subnormal=False)
qsgd = st.builds(
    QSGD,
    bits=st.integers(2, 8),
    block=blocks,
    scale=st.sampled_from(["max", "minmax"]),
    rounding=st.sampled_from(["auto", "stochastic", "nearest"]),
    seed=seeds,
)
of_norms = st.builds(
    QSGD, bits=st.integers(2, 8), block=blocks, scale=st.just("l2"), levels=st.sampled_from(["uniform", "exponential"])
)
fed_back = st.one_of(
    qsgd,
    st.builds(QSGD, bits=st.integers(7, 8), block=blocks, scale=st.just("l2")),
    st.builds(QSGD, bits=st.integers(2, 8), levels=st.just("exponential")),
    st.builds(QSGD, bits=st.integers(2, 4), block=blocks, scale=st.just("ls"), levels=st.sampled_from(["uniform", "lloyd"])),
    st.builds(Cast, dtype=st.sampled_from(["float16", "bfloat16"])),
    st.builds(FP8, format=st.sampled_from(["e4m3", "e5m2"]), block=blocks),
    st.builds(Natural, block=blocks, seed=seeds),
    st.builds(Int8, block=blocks),
    st.builds(TernGrad, block=blocks, clip=st.sampled_from([0.0, 1.0, 2.5]), seed=seeds),
    st.builds(TopK, ratios, st.sampled_from(["exact", "sampled"]), st.sampled_from(["tensor", "bucket"])),
    st.builds(TopK, ratios, values=st.builds(QSGD, st.integers(2, 8)) | st.just(Cast("bfloat16"))),
    st.builds(BlockTopK, ratios, st.sampled_from([32, 64, 128, 256])),
    st.builds(Threshold, st.floats(1e-9, 10), ratios),
    st.builds(RandomK, ratios, st.sampled_from(["common", "own"]), seeds),
    st.builds(Truncate, st.floats(1, 1e6), st.booleans()),
)
lossy = st.one_of(fed_back, of_norms)
remembering = st.one_of(
    st.builds(TwoBit, st.floats(0, 1), st.floats(0.1, 10), blocks),
    st.builds(SignSGD),
    st.builds(Signum, st.floats(0, 0.999)),
    st.builds(EFSignSGD, blocks | st.just(0)),
    st.builds(OneBit, blocks | st.just(0)),
    st.builds(DGC, ratios, st.floats(0, 0.999), st.floats(0, 10), st.integers(0, 10**6)),
    st.builds(PowerSGD, st.integers(1, 64), st.floats(0.1, 10), st.booleans(), seeds, st.integers(0, 1000)),
)
specs = st.one_of(
    st.just(Identity()),
    lossy,
    remembering,
    st.builds(ErrorFeedback, fed_back),
    st.builds(ErrorFeedback, qsgd, st.floats(0.1, 1)),
)


@given(specs)
def test_repr_is_code_and_json_round_trips(spec: Spec) -> None:
    again = eval(repr(spec), vars(core))
    assert spec_from_text(repr(spec)) == spec
    assert again == spec == spec_from_dict(spec.to_dict())
    assert hash(again) == hash(spec)
    assert repr(again) == repr(spec)


@given(specs, specs)
def test_equal_specs_are_those_with_equal_json(one: Spec, other: Spec) -> None:
    assert (one == other) == (one.to_dict() == other.to_dict())


def test_the_designs_json_is_written_as_it_was_read() -> None:
    data = {"id": "qsgd", "bits": 4, "block": 128}
    assert list(spec_from_dict(data).to_dict().items()) == list(data.items())
    assert spec_from_dict({"id": "qsgd"}).to_dict() == data
    assert QSGD(seed=7).to_dict() == {**data, "seed": 7}
    assert repr(QSGD(rounding="nearest")) == "QSGD(bits=4, block=128, rounding='nearest')"


def test_a_family_ignores_bits_and_nothing_else() -> None:
    assert QSGD(bits=2).family == QSGD(bits=8).family
    others = [QSGD(block=64), QSGD(scale="l2"), QSGD(rounding="nearest"), QSGD(seed=1), ErrorFeedback(QSGD())]
    others += [Identity(), Cast(), Cast(dtype="bfloat16"), ErrorFeedback(Cast())]
    assert len({spec.family for spec in [QSGD(), *others]}) == len(others) + 1
    assert ErrorFeedback(QSGD(bits=2)).family == ErrorFeedback(QSGD(bits=3)).family


@given(specs, st.integers(0, 2**62))
def test_what_runs_in_a_step_is_of_the_same_kind_and_stays(spec: Spec, step: int) -> None:
    now = spec.at_step(step)
    assert now == now.at_step(step)
    assert type(innermost(now)) is type(innermost(spec))
    assert (now.state, now.schemes, now.rounds) == (spec.state, spec.schemes, spec.rounds)


@given(specs, st.lists(st.integers(0, 10**6), max_size=4), st.sampled_from([2, 4]))
def test_sizes_are_whole_numbers_that_grow_with_the_tensors(spec: Spec, numels: list[int], itemsize: int) -> None:
    runs = [ElementRun(numel, spec.element_bits, (numel,)) for numel in numels]
    size = spec.payload_bytes(runs, itemsize)
    assert isinstance(size, int) and size >= 0
    assert spec.payload_bytes([*runs, ElementRun(1000, spec.element_bits, (1000,))], itemsize) >= size


def test_every_registered_spec_is_drawn_and_declares_how_it_travels() -> None:
    drawn = {QSGD, Cast, FP8, Natural, Int8, TernGrad, TopK, BlockTopK, Threshold, RandomK, Truncate, Identity}
    drawn |= {TwoBit, SignSGD, Signum, EFSignSGD, OneBit, DGC, PowerSGD, ErrorFeedback}
    registered = set(registered_specs().values())
    missing = sorted(cls.__name__ for cls in registered - drawn)
    assert not missing, f"add to `drawn`, and a strategy to `lossy` or `remembering`: {', '.join(missing)}"
    bare = sorted(cls.__name__ for cls in registered - {type(spec) for spec in example_specs()})
    assert not bare, f"give {', '.join(bare)} an `example`: values of the fields without a default"
    assert drawn == registered
    for spec in (Identity(), QSGD(), TopK(0.01), RandomK(0.01), RandomK(0.01, indices="own"), PowerSGD(), SignSGD()):
        assert set(spec.schemes) <= {"allreduce", "alltoall", "allgather"}
        assert ("allreduce" in spec.schemes) == (spec.rounds > 0 or spec == Identity())


def test_dgc_comes_down_to_its_ratio_a_quarter_at_a_time() -> None:
    spec = DGC(0.01, warm_up_steps=300)
    assert [spec.at_step(step).ratio for step in (0, 99, 100, 199, 200, 299, 300)] == [
        0.25, 0.25, 0.0625, 0.0625, 0.0156, 0.0156, 0.01,
    ]  # fmt: skip
    assert DGC(0.5, warm_up_steps=300).at_step(0).ratio == 0.5


def test_specs_are_frozen() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        QSGD().bits = 3  # type: ignore[misc]


def nested(depth: int, name: str = "error_feedback", field: str = "inner") -> dict[str, object]:
    """A spec in a spec, `depth` in all; the innermost has no id."""
    data: dict[str, object] = {}
    for _ in range(depth - 1):
        data = {"id": name, field: data}
    return data


WRONG_VALUES = [
    (lambda: QSGD(bits=1), ["bits is 1", "from 2 to 8"]),
    (lambda: QSGD(bits=9), ["bits is 9", "from 2 to 8"]),
    (lambda: QSGD(bits=True), ["bits is True, a bool"]),
    (lambda: QSGD(bits=4.0), ["bits is 4.0, a float"]),  # type: ignore[arg-type]
    (lambda: QSGD(block=100), ["block is 100", "power of two", "64 or 128"]),
    (lambda: QSGD(block=16), ["block is 16", "from 32 to 8192"]),
    (lambda: QSGD(scale="maximum"), ["scale is 'maximum'", "max, minmax, l2, ls"]),
    (lambda: QSGD(bits=5, scale="ls"), ["scale and bits are 'ls' and 5", "scale='max'"]),
    (lambda: QSGD(scale="ls", rounding="stochastic"), ["'ls' and 'stochastic'", "Leave rounding out"]),
    (lambda: QSGD(scale="ls", levels="exponential"), ["levels and scale are 'exponential' and 'ls'", "scale='max'"]),
    (lambda: QSGD(bits=2, levels="lloyd"), ["levels and scale are 'lloyd' and 'max'", "scale='ls'"]),
    (lambda: QSGD(rounding="nearst"), ["rounding is 'nearst'", "did you mean 'nearest'"]),
    (lambda: QSGD(seed=-1), ["seed is -1"]),
    (lambda: Cast(dtype="float32"), ["dtype is 'float32'", "float16, bfloat16"]),
    (lambda: ErrorFeedback(Identity()), ["inner is Identity()", "lossless", "alone"]),
    (lambda: ErrorFeedback(ErrorFeedback(QSGD())), ["inner is ErrorFeedback", "keeps all of the error"]),
    (lambda: ErrorFeedback(EFSignSGD()), ["inner is EFSignSGD()", "keeps all of the error"]),
    (lambda: ErrorFeedback(SignSGD()), ["inner is SignSGD()", "no magnitude", "EFSignSGD"]),
    (lambda: ErrorFeedback(Signum()), ["inner is Signum()", "EFSignSGD"]),
    (lambda: QSGD(levels="exponential", scale="minmax"), ["levels and scale are 'exponential'", "scale='max'"]),
    (
        lambda: ErrorFeedback(QSGD(bits=2, scale="l2")),
        ["inner is QSGD(bits=2", "1/2 of a block's norm", "'max' or 'ls'", "at least 4 bits."],
    ),
    (lambda: ErrorFeedback(QSGD(bits=3, scale="l2")), ["128 like elements have 1/11.31", "4 bits, or blocks of at most 32"]),
    (lambda: ErrorFeedback(QSGD(bits=6, block=8192, scale="l2")), ["scale='max', at least 7 bits, or blocks of at most 2048"]),
    (lambda: ErrorFeedback(QSGD(bits=3, block=64, scale="l2", levels="exponential")), ["scale='max', at least 4 bits"]),
    (lambda: ErrorFeedback(QSGD(bits=2, scale="l2", rounding="stochastic")), ["1/2 of a block's norm"]),
    (lambda: TopK(0.1, values=QSGD(bits=2, scale="l2")), ["values is QSGD(bits=2", "at least 4 bits"]),
    (lambda: TopK(0), ["ratio is 0"]),
    (lambda: TopK(2), ["ratio is 2", "0.01"]),
    (lambda: TopK(0.1, values=4), ["values is 4", "must be a spec"]),  # type: ignore[arg-type]
    (lambda: TopK(0.1, values=SignSGD()), ["values is SignSGD()", "magnitude"]),
    (lambda: TopK(0.1, values=PowerSGD()), ["values is PowerSGD(rank=4)", "QSGD(bits=4)"]),
    (lambda: TopK(0.1, selection="fast"), ["selection is 'fast'", "exact, sampled"]),
    (lambda: BlockTopK(0.1, block=512), ["block is 512", "from 32 to 256"]),
    (lambda: DGC(momentum=1.0), ["momentum is 1.0", "0.9"]),
    (lambda: DGC(warm_up_steps=-1), ["warm_up_steps is -1"]),
    (lambda: PowerSGD(rank=0), ["rank is 0", "from 1 to 1024"]),
    (lambda: PowerSGD(warm_start=1), ["warm_start is 1", "True or False"]),  # type: ignore[arg-type]
    (lambda: Truncate(0.5), ["ratio is 0.5", "at least 1"]),
    (lambda: Truncate(4, unsafe="no"), ["unsafe is 'no'", "True or False"]),  # type: ignore[arg-type]
    (lambda: TernGrad(clip=0.5), ["clip is 0.5", "2.5"]),
    (lambda: FP8("e3m4"), ["format is 'e3m4'", "e4m3, e5m2"]),
    (lambda: TwoBit(multiple=0), ["multiple is 0"]),
    (lambda: Threshold(0), ["threshold is 0"]),
    (lambda: RandomK(0.1, indices="shared"), ["indices is 'shared'", "common, own"]),
    (lambda: ErrorFeedback(QSGD(), decay=0), ["decay is 0", "above 0"]),
    (lambda: ErrorFeedback(QSGD(), decay=1.1), ["decay is 1.1", "at most 1"]),
    (lambda: ErrorFeedback(RandomK(0.01), decay=0.9), ["decay is 0.9", "summed on the wire"]),
    (lambda: ErrorFeedback(QSGD(bits=2), weights=0.98), ["weights is 0.98 and inner is QSGD", "scale='ls'"]),
    (lambda: ErrorFeedback(QSGD(bits=2, scale="ls", blocks="bucket"), weights=0.98), ["blocks of one tensor"]),
    (lambda: ErrorFeedback(TopK(0.1), weights=0.98), ["weights is 0.98 and inner is TopK(0.1)"]),
    (lambda: ErrorFeedback(QSGD(scale="ls"), weights=1.0), ["weights is 1.0", "below 1", "0.98"]),
    (lambda: ErrorFeedback(QSGD(scale="ls"), weights=0.1), ["weights is 0.1", "at least 0.5"]),
    (lambda: ErrorFeedback(QSGD(scale="ls"), weights=-1), ["weights is -1"]),
    (lambda: ErrorFeedback(QSGD(scale="ls"), weights=0.98, floor=0.0), ["floor is 0.0", "1e-6"]),
    (lambda: ErrorFeedback(QSGD(scale="ls"), warm_up_steps=20), ["warm_up_steps is 20", "4 bits", "2 or 3 bits"]),
    (lambda: ErrorFeedback(TopK(0.1), warm_up_steps=20), ["warm_up_steps is 20 and inner is TopK(0.1)"]),
    (lambda: ErrorFeedback(QSGD(bits=2), warm_up_steps=-1), ["warm_up_steps is -1"]),
    (lambda: ErrorFeedback(4), ["inner is 4", "must be a spec"]),  # type: ignore[arg-type]
    (lambda: spec_from_text("TopK()"), ["ratio is missing", "TopK(ratio=...)"]),
    (lambda: spec_from_text("TopX(0.1)"), ["no spec 'TopX'", "did you mean 'TopK'"]),
    (lambda: spec_from_text("TopK(0.1, k=3)"), ["k is not a field of TopK", "ratio, selection, per, values"]),
    (lambda: spec_from_text("TopK(0.1, ratio=0.2)"), ["ratio is given twice"]),
    (lambda: spec_from_text("TopK(0.1, 'exact', 'tensor', QSGD(), 4)"), ["at most 4 values", "not 5"]),
    (lambda: spec_from_text("TopK(1 + 1)"), ["1 + 1", "neither a number"]),
    (lambda: spec_from_text("QSGD(bits=x)"), ["bits is 'x'", "whole number"]),
    (lambda: spec_from_text("QSGD(4, 128, middle)"), ["scale is 'middle'", "max"]),
    (lambda: spec_from_text("TopK(0.1, values=QSDG)"), ["no spec 'QSDG'", "did you mean 'QSGD'"]),
    (lambda: spec_from_text("__import__('os')"), ["no spec '__import__'"]),
    (lambda: spec_from_text("QSGD(bits=4"), ["is no spec", "QSGD(bits=4)"]),
    (lambda: spec_from_text("ErrorFeedback(TopK(2))"), ["ratio is 2"]),
    (lambda: spec_from_dict({"id": "qgsd"}), ["id is 'qgsd'", "did you mean 'qsgd'", "register_spec"]),
    (lambda: spec_from_dict({"id": ["qsgd"]}), ["id is ['qsgd']"]),
    (lambda: spec_from_dict({"bits": 4}), ["id is missing", "'bits': 4", "qsgd"]),
    (lambda: spec_from_dict([]), ["[] is not a spec"]),  # type: ignore[arg-type]
    (lambda: spec_from_dict({"id": "qsgd", "bit": 4}), ["bit is not a field", "4", "did you mean 'bits'"]),
    (lambda: spec_from_dict({"id": "qsgd", "bits": "4"}), ["bits is '4'", "whole number", "'qsgd'"]),
    (lambda: spec_from_dict({"id": "error_feedback"}), ["inner is missing"]),
    (lambda: spec_from_dict(nested(9)), ["a spec is nested 9 deep", "at most 7 others"]),
    (lambda: spec_from_dict(nested(2000, "topk", "values")), ["a spec is nested 2000 deep", "at most 7 others"]),
    (lambda: spec_from_dict(nested(8)), ["id is missing"]),
    (lambda: spec_from_dict({"id": "error_feedback", "inner": {"id": "qsgd", "bits": 9}}), ["inner.bits is 9"]),
]


@pytest.mark.parametrize(("make", "words"), WRONG_VALUES)
def test_wrong_values_are_refused_by_name(make, words) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SpecError) as caught:
        make()
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def test_a_third_party_spec_is_read_from_json_once_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.core.specs.base._REGISTRY", {})

    class Halve(Spec, frozen=True):
        id: ClassVar[str] = "halve"
        ratio: int = 2

    assert register_spec(Halve) is Halve
    assert spec_from_dict({"id": "halve"}) == Halve()
    assert Halve(ratio=3).to_dict() == {"id": "halve", "ratio": 3}
    assert repr(Halve(ratio=3)) == "Halve(ratio=3)"

    class Other(Spec, frozen=True):
        id: ClassVar[str] = "halve"

    with pytest.raises(SpecError, match=r"'halve' of .*Other belongs to .*Halve"):
        register_spec(Other)

    class Nameless(Spec, frozen=True):
        pass

    with pytest.raises(SpecError, match=r"Nameless\.id is ''"):
        register_spec(Nameless)
