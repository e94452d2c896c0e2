"""A spec is configuration, registry key, repr, equality and JSON at once."""

from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.core import QSGD, Cast, ErrorFeedback, Identity, Spec, register_spec, spec_from_dict
from gradwire.errors import SpecError

qsgd = st.builds(
    QSGD,
    bits=st.integers(2, 8),
    block=st.sampled_from([2**power for power in range(5, 14)]),
    scale=st.sampled_from(["max", "minmax", "l2"]),
    rounding=st.sampled_from(["stochastic", "nearest"]),
    seed=st.integers(0, 2**63 - 1),
)
cast = st.builds(Cast, dtype=st.sampled_from(["float16", "bfloat16"]))
specs = st.one_of(st.just(Identity()), cast, qsgd, st.builds(ErrorFeedback, st.one_of(cast, qsgd)))


@given(specs)
def test_repr_is_code_and_json_round_trips(spec: Spec) -> None:
    again = eval(repr(spec), {"QSGD": QSGD, "Cast": Cast, "ErrorFeedback": ErrorFeedback, "Identity": Identity})
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


def test_specs_are_frozen() -> None:
    with pytest.raises(AttributeError, match="immutable"):
        QSGD().bits = 3  # type: ignore[misc]


WRONG_VALUES = [
    (lambda: QSGD(bits=1), ["bits is 1", "from 2 to 8"]),
    (lambda: QSGD(bits=9), ["bits is 9", "from 2 to 8"]),
    (lambda: QSGD(bits=True), ["bits is True, a bool"]),
    (lambda: QSGD(bits=4.0), ["bits is 4.0, a float"]),  # type: ignore[arg-type]
    (lambda: QSGD(block=100), ["block is 100", "power of two", "64 or 128"]),
    (lambda: QSGD(block=16), ["block is 16", "from 32 to 8192"]),
    (lambda: QSGD(scale="maximum"), ["scale is 'maximum'", "max, minmax, l2"]),
    (lambda: QSGD(rounding="nearst"), ["rounding is 'nearst'", "did you mean 'nearest'"]),
    (lambda: QSGD(seed=-1), ["seed is -1"]),
    (lambda: Cast(dtype="float32"), ["dtype is 'float32'", "float16, bfloat16"]),
    (lambda: ErrorFeedback(Identity()), ["inner is Identity()", "loses nothing", "alone"]),
    (lambda: ErrorFeedback(ErrorFeedback(QSGD())), ["inner is ErrorFeedback", "already carries"]),
    (lambda: ErrorFeedback(4), ["inner is 4", "must be a spec"]),  # type: ignore[arg-type]
    (lambda: spec_from_dict({"id": "qgsd"}), ["id is 'qgsd'", "did you mean 'qsgd'", "register_spec"]),
    (lambda: spec_from_dict({"id": ["qsgd"]}), ["id is ['qsgd']"]),
    (lambda: spec_from_dict({"bits": 4}), ["id is missing", "'bits': 4", "qsgd"]),
    (lambda: spec_from_dict([]), ["[] is not a spec"]),  # type: ignore[arg-type]
    (lambda: spec_from_dict({"id": "qsgd", "bit": 4}), ["bit is not a field", "4", "did you mean 'bits'"]),
    (lambda: spec_from_dict({"id": "qsgd", "bits": "4"}), ["bits is '4'", "whole number", "'qsgd'"]),
    (lambda: spec_from_dict({"id": "error_feedback"}), ["inner is missing"]),
    (lambda: spec_from_dict({"id": "error_feedback", "inner": {"id": "qsgd", "bits": 9}}), ["inner.bits is 9"]),
]


@pytest.mark.parametrize(("make", "words"), WRONG_VALUES)
def test_wrong_values_are_refused_by_name(make, words) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SpecError) as caught:
        make()
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def test_a_third_party_spec_is_read_from_json_once_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.core.specs._REGISTRY", {})

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
