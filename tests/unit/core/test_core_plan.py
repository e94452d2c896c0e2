"""Fingerprint, digest, and whether a plan fits a model."""

import hashlib
import json
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradwire.core import (
    QSGD,
    Backward,
    Bucket,
    Delayed,
    ErrorFeedback,
    Identity,
    LocalSteps,
    Nesterov,
    Plan,
    Prediction,
    TensorInfo,
    fingerprint,
)
from gradwire.core.schedules import as_schedule
from gradwire.core.strict import plain
from gradwire.errors import FormatError, PlanError
from gradwire.plan import Uniform

MODEL = [TensorInfo("fc.bias", (1000,), "float32"), TensorInfo("fc.weight", (1000, 8), "float32")]


def test_the_fingerprint_hashes_the_documented_bytes() -> None:
    lines = b'["fc.bias",[1000],"float32"]\n["fc.weight",[1000,8],"float32"]\n'
    assert fingerprint(MODEL) == hashlib.sha256(lines).hexdigest()
    assert (
        fingerprint([TensorInfo("größe", (), "bfloat16")]) == hashlib.sha256(b'["gr\\u00f6\\u00dfe",[],"bfloat16"]\n').hexdigest()
    )


def test_the_fingerprint_sees_shape_and_dtype_but_not_order_or_device() -> None:
    changed = [
        MODEL[:1],
        [TensorInfo("fc.bias", (1000, 1), "float32"), MODEL[1]],
        [TensorInfo("fc.bias", (1000,), "float16"), MODEL[1]],
    ]
    assert len({fingerprint(tensors) for tensors in [MODEL, *changed]}) == 4
    assert fingerprint(MODEL[::-1]) == fingerprint(MODEL)
    assert fingerprint([TensorInfo(t.name, t.shape, t.dtype, "gpu") for t in MODEL]) == fingerprint(MODEL)


@pytest.mark.parametrize(
    ("shape", "dtype", "numel", "nbytes"),
    [
        ((), "float32", 1, 4),
        ((0, 5), "float64", 0, 0),
        ((7, 123), "bfloat16", 861, 1722),
        ((4097,), "float16", 4097, 8194),
    ],
)
def test_sizes(shape: tuple[int, ...], dtype: str, numel: int, nbytes: int) -> None:
    tensor = TensorInfo("a", shape, dtype)
    assert (tensor.numel, tensor.nbytes) == (numel, nbytes)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("a", (1,), "complex64"), "tensor 'a': dtype is 'complex64'"),
        (("a", (1,), "float32", "cuda"), "tensor 'a': device is 'cuda': it must be one of cpu, gpu"),
        (("a", (-1,), "float32"), r"tensor 'a': shape\[0\] is -1"),
        (("", (1,), "float32"), "name is ''"),
    ],
)
def test_what_is_no_tensor(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        TensorInfo(*arguments)  # type: ignore[arg-type]


def test_the_digest_leaves_the_prediction_out() -> None:
    plan = Uniform(QSGD()).plan(MODEL)
    prediction = Prediction(
        step_us=1, baseline_step_us=2, lower_bound_us=1, bytes_per_rank=3, extra_bytes_device=4, extra_bytes_host=5
    )
    assert msgspec.structs.replace(plan, prediction=prediction).digest() == plan.digest()
    assert Plan.from_json(plan.to_json()).digest() == plan.digest()
    assert Uniform(QSGD(bits=2)).plan(MODEL).digest() != plan.digest()


def test_a_plan_fits_the_model_it_was_made_for() -> None:
    Uniform(QSGD()).plan(MODEL).check_against(MODEL)


def test_what_differs_is_named_with_both_numbers() -> None:
    plan = Uniform(QSGD()).plan(MODEL)
    cases = [
        ([*MODEL, TensorInfo("new", (1,), "float32")], ["3 trainable", "made for 2", "Only the model has 'new'"]),
        (MODEL[:1], ["1 trainable", "made for 2", "Only the plan has 'fc.weight'", "pass a policy"]),
        ([MODEL[0], TensorInfo("fc.weight", (1024, 8), "float32")], ["bucket 0", "9_192 elements", "made for 9_000"]),
        ([MODEL[0], TensorInfo("fc.weight", (8, 1000), "float32")], ["2 names agree", plan.fingerprint[:12], "shapes"]),
        ([*MODEL, MODEL[0]], ["3 tensors have 2 names"]),
    ]
    for tensors, words in cases:
        with pytest.raises(PlanError) as caught:
            plan.check_against(tensors)
        assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def test_a_plan_with_gpu_codecs_does_not_fit_a_model_on_the_cpu() -> None:
    on_gpu = [TensorInfo(t.name, t.shape, t.dtype, "gpu") for t in MODEL]
    plan = Uniform(QSGD()).plan(on_gpu)
    plan.check_against(on_gpu)
    with pytest.raises(PlanError, match=r"bucket 0 compresses on the gpu, but tensor 'fc.bias' is on the cpu"):
        plan.check_against(MODEL)
    Uniform(Identity()).plan(on_gpu).check_against(MODEL)


@given(nbytes=st.lists(st.integers(0, 1000), min_size=1, max_size=40), k=st.integers(1, 9))
def test_staggered_corrections_are_dealt_out_evenly(nbytes: list[int], k: int) -> None:
    shares = Delayed(k=k).corrected(nbytes)
    assert len(shares) == k
    dealt = [index for share in shares for index in share]
    assert sorted(dealt) == [index for index, size in enumerate(nbytes) if size], "each compressed bucket once"
    sums = [sum(nbytes[index] for index in share) for share in shares]
    assert max(sums) <= sum(nbytes) / k + max(nbytes)
    assert Delayed(k=k, stagger=False).corrected(nbytes) == [tuple(range(len(nbytes))), *[()] * (k - 1)]


def test_schedules_that_never_correct_correct_nothing() -> None:
    for schedule in (Delayed(k=None), Delayed(k=None, stagger=False), Backward(), LocalSteps(every=3)):
        assert schedule.corrected([10, 20]) == [()] * schedule.period


def test_a_file_from_before_staggered_corrections_loads() -> None:
    plan = Uniform(QSGD(), schedule=Delayed(k=2)).plan(MODEL)
    written = json.loads(plan.to_json())
    assert written["schedule"] == {"kind": "delayed", "k": 2}
    assert Plan.from_json(json.dumps(written)).schedule == Delayed(k=2, stagger=True)
    unstaggered = msgspec.structs.replace(plan, schedule=Delayed(k=2, stagger=False))
    assert json.loads(unstaggered.to_json())["schedule"] == {"kind": "delayed", "k": 2, "stagger": False}
    assert Plan.from_json(unstaggered.to_json()) == unstaggered
    assert unstaggered.digest() != plan.digest()


def test_local_steps_average_weights_and_files_name_the_outer_optimizer() -> None:
    assert LocalSteps().outer == Nesterov(lr=1.0, momentum=0.0)
    assert LocalSteps.diloco(every=30).outer == Nesterov(lr=0.7, momentum=0.9)
    for schedule in (LocalSteps(), LocalSteps.diloco()):
        data = plain(schedule)
        assert isinstance(data, dict) and data["outer"] == {"lr": schedule.outer.lr, "momentum": schedule.outer.momentum}
        assert as_schedule(data) == schedule and repr(as_schedule(data)) == repr(schedule)


OF_0_3 = {
    "own": ({"kind": "local", "every": 30, "outer": {"lr": 1.0, "momentum": 0.0}}, LocalSteps(second_moment="own")),
    "diloco": ({"kind": "local", "every": 500, "outer": {"lr": 0.7, "momentum": 0.9}}, LocalSteps.diloco()),
    "streaming": (
        {"kind": "local", "every": 100, "outer": {"lr": 0.4, "momentum": 0.9}, "delay": 5, "mixing": 0.5},
        LocalSteps.streaming(fragments=1),
    ),
}
"""Schedules as gradwire 0.3.0 wrote them."""


@pytest.mark.parametrize("name", OF_0_3)
def test_local_steps_of_0_3_train_as_they_did_and_their_states_fit(name: str) -> None:
    written, schedule = OF_0_3[name]
    assert as_schedule(written) == schedule
    plan = Uniform(QSGD(bits=4), schedule=schedule).plan(MODEL)
    data = plan.to_dict()
    assert Plan.from_dict(json.loads(json.dumps(data))) == plan
    data["schedule"] = written
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    assert plan.state_digest() == hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize(("scheme", "ranks", "counts"), [("grid", 62, True), ("grid", 16, False), ("flat", 62, False)])
def test_states_know_rows_of_unequal_lengths(scheme: str, ranks: int, counts: bool) -> None:
    """0.3 had rows of equal lengths, and 62 ranks in two of them."""
    plan, plain = (Uniform(spec, scheme=scheme).plan(MODEL, ranks) for spec in (ErrorFeedback(QSGD(bits=2)), QSGD(bits=4)))
    assert (plan.state_digest(ranks) != plan.state_digest()) == counts
    assert plain.state_digest(ranks) == plain.state_digest(), "it keeps nothing"


@pytest.mark.parametrize("second_moment", ["mean", "own"])
def test_files_name_the_second_moment_of_local_steps(second_moment: str) -> None:
    schedule = LocalSteps(second_moment=second_moment)
    data = plain(schedule)
    assert isinstance(data, dict) and data["second_moment"] == second_moment
    assert as_schedule(data) == schedule and as_schedule("local") == LocalSteps(second_moment="mean")


@given(shares=st.lists(st.floats(0.01, 9), min_size=1, max_size=9), every=st.integers(6, 200), delay=st.integers(0, 3))
def test_local_steps_follow_shares(shares: list[float], every: int, delay: int) -> None:
    schedule = LocalSteps(every=every, fragments=2, delay=delay).with_shares(shares)
    assert max(schedule.steps_of_ranks) == every
    for rank, share in enumerate(shares):
        wanted = every * share / max(shares)
        assert schedule.steps_of(rank) == max(2 * max(1, delay), round(wanted))
        assert schedule.begins_after(2 * 7 - 1, rank) == 7 * schedule.steps_of(rank)
    assert as_schedule(plain(schedule)) == schedule


def test_a_class_in_place_of_a_schedule_is_told_to_be_called() -> None:
    with pytest.raises(FormatError, match=r"Write LocalSteps\(\.\.\.\)"):
        as_schedule(LocalSteps)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"steps_of_ranks": (30, 0)}, r"steps_of_ranks\[1\] is 0"),
        ({"steps_of_ranks": (30, 31)}, r"steps_of_ranks\[1\] is 31"),
        ({"steps_of_ranks": (20, 10)}, "the largest must be"),
        ({"steps_of_ranks": 30}, "must be a list"),
        ({"steps_of_ranks": torch.tensor(30)}, r"steps_of_ranks is tensor\(30\), a Tensor: it must be a list"),
        ({"steps_of_ranks": (30, 3), "fragments": 4}, "fragments is 4"),
        ({"steps_of_ranks": (30, 3), "delay": 4}, "delay is 4"),
    ],
)
def test_steps_of_ranks_that_cannot_be_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(FormatError, match=words):
        LocalSteps(**fields)


@pytest.mark.parametrize("momentum", [1, 1.5, -0.1, float("nan")])
def test_a_momentum_that_never_decays_is_refused(momentum: float) -> None:
    with pytest.raises(FormatError, match=r"momentum is "):
        Nesterov(momentum=momentum)


def test_the_map_of_a_large_buckets_specs_is_checked_name_by_name() -> None:
    class Counted(str):
        compared = 0

        def __eq__(self, other: object) -> bool:
            Counted.compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    names = tuple(Counted(f"layers.{index}.weight") for index in range(300))
    specs = {str(name): QSGD(bits=2 + index % 2) for index, name in enumerate(names)}
    Bucket(tensors=names, spec=specs, option=("comp:cpu", "allgather:inter", "decomp:cpu"))
    assert Counted.compared <= 20 * len(names), "and not each with all others"
