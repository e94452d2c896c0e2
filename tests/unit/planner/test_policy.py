"""Policies: rules in, plan out."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from test_core_formats import schedules
from test_core_specs import specs

import gradwire.core as core
from gradwire.core import (
    QSGD,
    Backward,
    Delayed,
    ErrorFeedback,
    Identity,
    LocalSteps,
    Pipelined,
    Plan,
    PowerSGD,
    RandomK,
    TensorInfo,
    TopK,
)
from gradwire.core.payload import RAW
from gradwire.errors import FormatError, PlanError, SpecError
from gradwire.plan import Policy, Uniform, Where

TWO_PHASES = ("comp:cpu", "alltoall:inter", "decomp:cpu", "comp:cpu", "allgather:inter", "decomp:cpu")


def tensor(name: str, numel: int, dtype: str = "float32", device: str = "cpu") -> TensorInfo:
    return TensorInfo(name, (numel, 1), dtype, device)


def test_the_default_may_be_given_without_its_name() -> None:
    assert Policy(QSGD(), scheme="flat") == Policy(default=QSGD(), scheme="flat")


def test_uniform_is_the_policy_without_rules() -> None:
    assert Uniform(QSGD()) == Policy(default=QSGD(), exempt_vectors=False)
    assert Uniform(QSGD(), schedule="pipelined", bucket_bytes=7) == Policy(
        default=QSGD(), exempt_vectors=False, schedule=Pipelined(), bucket_bytes=7
    )
    (bucket,) = Uniform(QSGD()).plan([tensor("fc.bias", 10)]).buckets
    assert bucket.spec == QSGD()


def test_identity_travels_by_all_reduce_in_its_own_dtype() -> None:
    plan = Uniform(Identity()).plan([tensor("a", 10, "bfloat16"), tensor("b", 10, "float64"), tensor("c", 2)])
    assert [bucket.reduce_dtype for bucket in plan.buckets] == ["bfloat16", "float64", "float32"]
    assert {bucket.option for bucket in plan.buckets} == {("allreduce:inter",)}
    assert plan.launch == ((0, "allreduce"), (1, "allreduce"), (2, "allreduce"))
    assert plan.schedule == Backward()


@pytest.mark.parametrize(
    ("spec", "scheme", "option"),
    [
        (QSGD(), None, TWO_PHASES),
        (QSGD(), "alltoall", TWO_PHASES),
        (QSGD(), "allgather", ("comp:cpu", "allgather:inter", "decomp:cpu")),
        (Identity(), "allgather", ("allgather:inter",)),
        (Identity(), "alltoall", ("alltoall:inter", "allgather:inter")),
        (Identity(), "allreduce", ("allreduce:inter",)),
    ],
)
def test_schemes(spec: core.Spec, scheme: str | None, option: tuple[str, ...]) -> None:
    (bucket,) = Uniform(spec, scheme=scheme).plan([tensor("a", 10)]).buckets
    assert bucket.option == option
    assert bucket.reduce_dtype == "float32"


@pytest.mark.parametrize(
    ("scheme", "compressed", "exempt"),
    [
        ("ring", "comp:cpu reducescatter:inter allgather:inter decomp:cpu", "reducescatter:inter allgather:inter"),
        ("tree", "comp:cpu reduce:inter broadcast:inter decomp:cpu", "reduce:inter broadcast:inter"),
        ("GRACE", "comp:cpu allgather:inter decomp:cpu", "allreduce:inter"),
        (
            "HiTopKComm",
            "reducescatter:intra comp:cpu allgather:inter decomp:cpu allgather:intra",
            "reducescatter:intra allreduce:inter allgather:intra",
        ),
        (
            "comp:gpu gather:intra decomp:gpu comp:gpu alltoall:inter allgather:inter broadcast:intra decomp:gpu",
            "comp:cpu gather:intra decomp:cpu comp:cpu alltoall:inter allgather:inter broadcast:intra decomp:cpu",
            "reduce:intra reducescatter:inter allgather:inter broadcast:intra",
        ),
    ],
)
def test_any_option_can_be_a_policy_s_scheme(scheme: str, compressed: str, exempt: str) -> None:
    """By name or by its tasks; on the CPU everything is encoded there; what is not compressed takes the same links."""
    policy = Policy(default=QSGD(), rules=[("b", core.Identity())], scheme=scheme)
    plan = policy.plan([tensor("w", 10), TensorInfo("b", (3, 1), "float32")])
    found = {bucket.tensors[0]: " ".join(bucket.option) for bucket in plan.buckets}
    assert found == {"w": compressed, "b": exempt}
    assert Policy.from_json(Policy(default=QSGD(), scheme=scheme).to_json()).scheme == scheme


def test_buckets_grow_with_the_ranks_they_are_cut_for() -> None:
    tensors = [tensor(f"layers.{i}", 2**18) for i in range(64)]  # of 1 MiB

    def largest(ranks: int, **fields: int) -> int:
        return max(len(bucket.tensors) for bucket in Uniform(QSGD(), **fields).plan(tensors, ranks).buckets)

    assert [largest(ranks) for ranks in (1, 2, 3, 4, 8, 16)] == [2, 2, 3, 4, 8, 8]
    assert largest(8, bucket_bytes=3 * 2**20) == 3


def test_an_identity_sum_never_loses_bits() -> None:
    for dtype, expected in [("float64", "float64"), ("float32", "float32"), ("bfloat16", "float32")]:
        (bucket,) = Uniform(Identity(), scheme="alltoall").plan([tensor("a", 10, dtype)]).buckets
        assert bucket.reduce_dtype == expected


def test_codec_tasks_run_where_the_tensor_is() -> None:
    (bucket,) = Uniform(QSGD()).plan([tensor("a", 10, device="gpu")]).buckets
    assert bucket.option == tuple(task.replace("cpu", "gpu") for task in TWO_PHASES)


def test_a_bucket_closes_with_the_tensor_that_reaches_the_threshold() -> None:
    tensors = [tensor(name, numel) for name, numel in [("a", 6), ("b", 3), ("c", 1), ("d", 99), ("e", 0), ("f", 1)]]
    plan = Uniform(QSGD(), bucket_bytes=40).plan(tensors)
    assert [bucket.tensors for bucket in plan.buckets] == [("a", "b", "c"), ("d",), ("e", "f")]
    assert [bucket.numel for bucket in plan.buckets] == [10, 99, 1]


def test_buckets_are_smaller_at_both_ends_of_backward() -> None:
    tensors = [tensor(str(position), 1) for position in range(32)]
    policy = Uniform(QSGD(), bucket_bytes=32, edge_bytes=4)
    assert [bucket.numel for bucket in policy.plan(tensors).buckets] == [1, 1, 2, 4, 8, 8, 4, 2, 1, 1]
    alike = Uniform(QSGD(), bucket_bytes=32, edge_bytes=32)
    assert [bucket.numel for bucket in alike.plan(tensors).buckets] == [8, 8, 8, 8]


def test_buckets_come_in_order_of_readiness_with_their_tasks_together() -> None:
    tensors = [
        tensor("a.weight", 5),
        tensor("a.bias", 5),
        tensor("b.weight", 5),
        tensor("b.bias", 5),
        tensor("c.weight", 5),
    ]
    plan = Policy(default=QSGD(), rules=[("*.bias", Identity())], bucket_bytes=40).plan(tensors)
    assert [bucket.tensors for bucket in plan.buckets] == [
        ("a.weight", "b.weight"),
        ("a.bias", "b.bias"),
        ("c.weight",),
    ]
    assert plan.launch == ((0, "alltoall"), (0, "allgather"), (1, "allreduce"), (2, "alltoall"), (2, "allgather"))


def test_classes_are_dtype_device_and_family() -> None:
    tensors = [tensor("a", 5), tensor("b", 5, "float16"), tensor("c", 5, device="gpu"), tensor("d", 5), tensor("e", 5)]
    plan = Policy(default=QSGD(bits=4), rules=[("d", QSGD(bits=8)), ("e", QSGD(block=64))]).plan(tensors)
    assert [bucket.tensors for bucket in plan.buckets] == [("b",), ("c",), ("a", "d"), ("e",)]
    assert plan.buckets[2].spec == {"a": QSGD(bits=4), "d": QSGD(bits=8)}
    assert plan.buckets[2].specs == (QSGD(bits=4), QSGD(bits=8))
    assert Plan.from_json(plan.to_json()) == plan


def test_the_first_rule_that_matches_wins() -> None:
    tensors = [tensor("bn.bias", 5), tensor("fc.bias", 5), tensor("fc.weight", 5)]
    rules = [("bn.*", QSGD(bits=8)), ("*.bias", QSGD(bits=2))]
    (bucket,) = Policy(default=QSGD(bits=4), rules=rules).plan(tensors).buckets
    assert [spec.bits for spec in bucket.specs if isinstance(spec, QSGD)] == [8, 2, 4]


VECTORS = [
    TensorInfo("head.bias", (10,), "float32"),
    TensorInfo("head.weight", (10, 64), "float32"),
    TensorInfo("norm.scale", (64,), "float32"),
    TensorInfo("embed.weight", (1000, 64), "float32"),
    TensorInfo("temperature", (), "float32"),
]


def test_vectors_travel_as_they_are_in_the_payloads_of_others() -> None:
    (bucket,) = Policy(default=QSGD(bits=4)).plan(VECTORS).buckets
    assert bucket.tensors == tuple(tensor.name for tensor in VECTORS)
    compressed = {name for name in bucket.tensors if bucket.spec_of(name) == QSGD(bits=4)}
    assert compressed == {"head.weight", "embed.weight"} and bucket.main_spec == QSGD(bits=4)
    assert {name for name in bucket.tensors if bucket.bits_of(name) == RAW} == set(bucket.tensors) - compressed
    (whole,) = Policy(default=QSGD(bits=4), exempt_vectors=False).plan(VECTORS).buckets
    assert len(whole.tensors) == 5
    named = Policy(default=QSGD(bits=4), rules=[("head.bias", QSGD(bits=8))]).plan(VECTORS)
    assert {spec for spec in named.buckets[0].specs if spec.encodes} == {QSGD(bits=4), QSGD(bits=8)}
    as_is = [("*weight", QSGD(bits=4)), ("*", Identity())]
    assert Policy(default=QSGD(bits=8), rules=as_is).plan(VECTORS).buckets == (bucket,)


def test_vectors_join_the_next_bucket_that_becomes_ready() -> None:
    layers = [(f"{i}.{kind}", shape) for i in range(40) for kind, shape in (("weight", (256, 256)), ("bias", (256,)))]
    plan = Policy(default=QSGD()).plan([TensorInfo(name, shape, "float32") for name, shape in layers])
    for bucket in plan.buckets[:-1]:
        assert bucket.tensors[-1].endswith("weight")  # no bucket is ready later for its vectors
    assert list(plan.tensors) == [name for name, _ in layers]
    assert all(bucket.main_spec.encodes for bucket in plan.buckets)


@pytest.mark.parametrize(
    ("policy", "ranks"),
    [
        (Policy(default=PowerSGD(rank=2)), 2),
        (Policy(default=RandomK(0.1)), 2),
        (Policy(default=ErrorFeedback(TopK(0.01))), 5),
        (Policy(default=QSGD(bits=4), schedule=Delayed(k=2, correction=TopK(0.1, per="bucket"))), 2),
    ],
)
def test_vectors_that_no_payload_carries_travel_together(policy: Policy, ranks: int) -> None:
    plan = policy.plan(VECTORS, ranks)
    assert {b.tensors: b.spec for b in plan.buckets} == {
        ("head.weight", "embed.weight"): policy.default,
        ("head.bias", "norm.scale"): Identity(),
        ("temperature",): Identity(),  # all but a crumb has left before the last gradient
    }


@pytest.mark.parametrize("shape", [(64, 64), (1024, 1024)])
def test_fragments_get_buckets_enough_and_nearly_equal_parts(shape: tuple[int, int]) -> None:
    schedule = LocalSteps.streaming(fragments=6)
    layers = [TensorInfo(f"{i}.{kind}", s, "float32") for i in range(24) for kind, s in (("w", shape), ("b", shape[:1]))]
    plan = Policy(default=QSGD(), schedule=schedule).plan(layers)
    numels = [bucket.numel for bucket in plan.buckets]
    parts = [sum(numels[index] for index in fragment) for fragment in schedule.fragments_of(numels)]
    assert sum(parts) == sum(numels)
    assert max(parts) < 1.6 * sum(numels) / 6


def test_no_bucket_becomes_ready_later_for_a_vector() -> None:
    """The only bucket that could carry the norms is ready first."""
    layers = [(f"{i}.{kind}", shape) for i in range(9) for kind, shape in (("weight", (512, 512)), ("norm", (512,)))]
    tensors = [TensorInfo("head", (512, 512), "float32")]
    tensors += [TensorInfo(name, shape, "float32" if len(shape) == 1 else "bfloat16") for name, shape in layers]
    plan = Policy(default=QSGD()).plan(tensors)
    (head,) = (bucket for bucket in plan.buckets if "head" in bucket.tensors)
    assert head.tensors == ("head",)
    assert {b.spec for b in plan.buckets if any("norm" in name for name in b.tensors)} == {Identity()}


def test_a_large_vector_is_summed_without_a_copy() -> None:
    tensors = [TensorInfo("large", (2**18 + 1,), "float32"), TensorInfo("small", (2**18,), "float32"), tensor("w", 10)]
    plan = Policy(default=QSGD()).plan(tensors)
    assert {bucket.tensors: bucket.main_spec for bucket in plan.buckets} == {
        ("large",): Identity(),
        ("small", "w"): QSGD(),
    }


@pytest.mark.parametrize(
    ("fields", "carried"),
    [
        ({"scheme": "GRACE"}, False),
        ({"scheme": "comp:gpu allgather:inter decomp:gpu"}, False),
        ({"scheme": "alltoall"}, True),
        ({"schedule": "pipelined"}, True),
        ({}, False),
    ],
)
def test_all_gather_among_many_ranks_carries_no_vectors(fields: dict[str, str], carried: bool) -> None:
    plan = Policy(default=ErrorFeedback(TopK(0.01)), **fields).plan(VECTORS, ranks=16)  # type: ignore[arg-type]
    assert (len(plan.buckets) == 1) == carried


def test_exempt_tensors_of_a_deep_model_take_two_exchanges() -> None:
    """Where payloads cannot carry them."""
    layers = [(f"{i}.{kind}", shape) for i in range(40) for kind, shape in (("weight", (256, 256)), ("bias", (256,)))]
    policy = Policy(default=TopK(0.01), bucket_bytes=2**21)
    plan = policy.plan([TensorInfo(*each, "float32") for each in layers], ranks=8)
    exempt = [b for b in plan.buckets if b.spec == Identity()]
    assert [len(b.tensors) for b in exempt] == [35, 5]
    assert len(plan.launch) == len(plan.buckets)


@pytest.mark.parametrize(
    ("which", "names"),
    [
        ("*.bias|norm*", {"head.bias", "norm.scale"}),
        (Where("*.weight"), {"head.weight", "embed.weight"}),
        (Where(min_numel=1000), {"embed.weight"}),
        (Where(max_numel=10), {"head.bias", "temperature"}),
        (Where(max_dims=1), {"head.bias", "norm.scale", "temperature"}),
        (Where("*weight", min_dims=2, max_numel=1000), {"head.weight"}),
        (Where(dtype="float32", min_dims=1, max_dims=1), {"head.bias", "norm.scale"}),
    ],
)
def test_rules_by_name_size_dimensions_and_dtype(which: str | Where, names: set[str]) -> None:
    policy = Policy(default=QSGD(bits=4), rules=[(which, QSGD(bits=2))], exempt_vectors=False)
    assert Policy.from_json(policy.to_json()) == policy
    plan = policy.plan(VECTORS)
    assert {name for b in plan.buckets for name in b.tensors if b.spec_of(name) == QSGD(bits=2)} == names


def test_chunks_are_for_divisible_exchanges_above_one_chunk() -> None:
    tensors = [tensor("big", 100), tensor("small", 10)]
    policy = Uniform(QSGD(), bucket_bytes=1, chunk_bytes=40)
    assert [bucket.chunk_bytes for bucket in policy.plan(tensors).buckets] == [40, 0]
    for policy in (Uniform(QSGD(), chunk_bytes=0), Uniform(Identity(), chunk_bytes=40)):
        assert {bucket.chunk_bytes for bucket in policy.plan(tensors).buckets} == {0}


REFUSED = [
    (Policy(default=QSGD(), rules=[("*.bais", Identity())]), ["('*.bais', Identity())", "none of the 2", "fc.bias"]),
    (Policy(default=QSGD(), rules=[("*", QSGD()), ("fc.bias", Identity())]), ["'fc.bias'", "earlier rules", "before"]),
    (Uniform(QSGD(), scheme="allreduce"), ["scheme is 'allreduce'", "'fc.bias'", "QSGD", "alltoall"]),
]


@pytest.mark.parametrize(("policy", "words"), REFUSED)
def test_what_cannot_be_planned(policy: Policy, words: list[str]) -> None:
    with pytest.raises(PlanError) as caught:
        policy.plan([tensor("fc.bias", 10), tensor("fc.weight", 10)])
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def test_models_that_cannot_be_planned() -> None:
    with pytest.raises(PlanError, match="0 tensors"):
        Uniform(QSGD()).plan([])
    with pytest.raises(PlanError, match=r"tensors\[1\].name is 'a', and so is tensors\[0\].name"):
        Uniform(QSGD()).plan([tensor("a", 1), tensor("a", 2)])


@pytest.mark.parametrize(
    ("ranks", "words"),
    [((0,), "ranks is 0"), (("2",), "ranks is '2', a str"), ((2, 0), "ranks_per_node is 0"), ((2, 1.0), "ranks_per_node is 1.0")],
)
def test_numbers_of_ranks_that_are_none_are_refused_by_name(ranks: tuple[Any, ...], words: str) -> None:
    with pytest.raises(PlanError, match=f"{words}.*a whole number at least 1"):
        Policy(default=QSGD()).plan([tensor("a", 1)], *ranks)


@pytest.mark.parametrize("which", ["emb[0].w", Where("emb[0].w", min_numel=1), "a|emb[0].w"])
def test_a_name_with_brackets_matches_itself(which: str | Where) -> None:
    tensors = [tensor("a", 1), tensor("emb[0].w", 10)]
    plan = Policy(default=QSGD(), rules=[(which, QSGD(bits=2))]).plan(tensors)
    assert plan.buckets[0].spec_of("emb[0].w") == QSGD(bits=2)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"default": 4}, SpecError, "default is 4"),
        ({"default": QSGD(), "rules": [("a",)]}, FormatError, r"rules\[0\] is \('a',\): it must be a pair"),
        ({"default": QSGD(), "rules": [("a", 4)]}, SpecError, r"rules\[0\]\[1\] is 4"),
        ({"default": QSGD(), "rules": [("", QSGD())]}, FormatError, r"rules\[0\]\[0\] is ''"),
        ({"default": QSGD(), "rules": [({"name": "x"}, QSGD())]}, FormatError, r"rules\[0\]\[0\].*name"),
        ({"default": QSGD(), "rules": [({"min_dims": -1}, QSGD())]}, FormatError, r"rules\[0\]\[0\].min_dims is -1"),
        ({"default": QSGD(), "rules": QSGD()}, FormatError, "rules is QSGD"),
        ({"default": QSGD(), "schedule": "pipelned"}, FormatError, "did you mean 'pipelined'"),
        ({"default": QSGD(), "scheme": "rings"}, FormatError, "scheme is 'rings'.*did you mean 'ring'"),
        (
            {"default": QSGD(), "scheme": "comp:cpu alltoall:intra"},
            FormatError,
            "scheme is 'comp:cpu.*it ends before all ranks",
        ),
        ({"default": QSGD(), "exempt_vectors": "no"}, FormatError, "exempt_vectors is 'no': it must be true or false"),
        ({"default": QSGD(), "exempt_vectors": 1}, FormatError, "exempt_vectors is 1: it must be true or false"),
        ({"default": QSGD(), "bucket_bytes": 0}, FormatError, "bucket_bytes is 0"),
        ({"default": QSGD(), "chunk_bytes": True}, FormatError, "chunk_bytes is True, a bool"),
    ],
)
def test_wrong_policies_are_refused_by_name(arguments: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Policy(**arguments)  # type: ignore[arg-type]


@given(
    st.builds(
        Policy,
        default=specs,
        rules=st.lists(st.tuples(st.text(min_size=1), specs), max_size=3),
        schedule=schedules,
        scheme=st.sampled_from([None, "allreduce", "allgather", "alltoall"]),
        bucket_bytes=st.integers(1, 2**40),
        chunk_bytes=st.integers(0, 2**40),
    )
)
def test_a_policy_round_trips_as_json_and_as_code(policy: Policy) -> None:
    assert Policy.from_json(policy.to_json()) == policy
    again = eval(repr(policy), {**vars(core), "Policy": Policy})
    assert again == policy
    assert hash(again) == hash(policy)


sizes = st.lists(st.tuples(st.integers(0, 99), st.sampled_from(["float32", "float16"])), min_size=1, max_size=20)


@given(sizes, st.integers(1, 400), st.lists(st.sampled_from([QSGD(2), QSGD(8), Identity(), ErrorFeedback(QSGD())])))
def test_every_plan_holds_every_tensor_once_in_order(
    layers: list[tuple[int, str]], bucket_bytes: int, chosen: list[core.Spec]
) -> None:
    tensors = [tensor(f"t{index:02}", numel, dtype) for index, (numel, dtype) in enumerate(layers)]
    rules = [(f"t{index:02}", spec) for index, spec in enumerate(chosen[: len(tensors)])]
    plan = Policy(default=QSGD(4), rules=rules, bucket_bytes=bucket_bytes).plan(tensors)
    plan.check_against(tensors)
    assert sorted(plan.tensors) == [t.name for t in tensors]
    ready = [max(bucket.tensors) for bucket in plan.buckets]
    assert ready == sorted(ready)
    by_name = {t.name: t for t in tensors}
    for bucket in plan.buckets:
        assert list(bucket.tensors) == sorted(bucket.tensors)
        assert len({(by_name[name].dtype, bucket.spec_of(name).family) for name in bucket.tensors}) == 1
        assert sum(by_name[name].nbytes for name in bucket.tensors[:-1]) < bucket_bytes
    assert Plan.from_json(plan.to_json()) == plan


def test_residuals_are_narrow_where_there_are_any() -> None:
    policy = Policy(default=ErrorFeedback(QSGD()), rules=[("b", QSGD())], residual_dtype="int8", bucket_bytes=1)
    plan = policy.plan([tensor("a", 10), tensor("b", 10)])
    assert [bucket.residual_dtype for bucket in plan.buckets] == ["int8", "float32"]
    assert Plan.from_json(plan.to_json()) == plan
    assert Policy.from_json(policy.to_json()) == policy
    assert Uniform(QSGD(), residual_dtype="bfloat16") == Policy(default=QSGD(), exempt_vectors=False, residual_dtype="bfloat16")


def test_a_policy_that_says_nothing_of_residuals_is_written_as_before() -> None:
    assert "residual_dtype" not in Policy(default=QSGD()).to_dict()


@pytest.mark.parametrize("wrong", ["float16", "int4", "", None, 8])
def test_other_residual_dtypes_are_refused_with_those_there_are(wrong: object) -> None:
    with pytest.raises(FormatError, match=r"residual_dtype is .*: it must be one of float32, bfloat16, int8"):
        Policy(default=QSGD(), residual_dtype=wrong)  # type: ignore[arg-type]


def test_states_fit_plans_that_differ_in_the_residual_dtype_alone() -> None:
    tensors = [tensor("a", 10)]
    plain, narrow = (Uniform(ErrorFeedback(QSGD()), residual_dtype=dtype).plan(tensors) for dtype in ("float32", "int8"))
    other = Uniform(ErrorFeedback(QSGD(bits=3)), residual_dtype="int8").plan(tensors)
    assert plain.digest() == plain.state_digest() == narrow.state_digest() != narrow.digest()
    assert other.state_digest() != plain.state_digest()


def test_pipelined_launches_reduces_first_and_gathers_in_forward_order() -> None:
    tensors = [tensor("last.weight", 100), tensor("last.bias", 10), tensor("first.weight", 100)]
    plan = Policy(default=QSGD(), rules=[("last.bias", Identity())], schedule="pipelined", bucket_bytes=1).plan(tensors)
    assert plan.launch == (
        *((0, "alltoall"), (1, "alltoall"), (2, "alltoall")),
        *((2, "allgather"), (1, "allgather"), (0, "allgather")),
    )
    assert plan.gate == 3
    assert replace(plan, schedule=Backward()).gate == 6


def test_an_indivisible_option_runs_whole_before_the_gate() -> None:
    tensors = [tensor("last.weight", 100), tensor("first.weight", 100)]
    plan = Policy(default=QSGD(), schedule="pipelined", scheme="allgather", bucket_bytes=1).plan(tensors)
    assert plan.launch == ((0, "allgather"), (1, "allgather"))
    assert plan.gate == 2


def test_the_gate_of_a_plan_by_hand_is_before_its_last_gathers() -> None:
    tensors = [tensor("last.weight", 100), tensor("first.weight", 100)]
    plan = Policy(default=QSGD(), schedule="pipelined", bucket_bytes=1).plan(tensors)
    by_hand = ((0, "alltoall"), (0, "allgather"), (1, "alltoall"), (1, "allgather"))
    assert replace(plan, launch=by_hand).gate == 3


NESTED = ("reducescatter:intra", *TWO_PHASES, "allgather:intra")


@pytest.mark.parametrize(
    ("scheme", "ranks", "ranks_per_node", "option"),
    [
        (None, 4, 2, NESTED),
        (None, 4, 1, TWO_PHASES),
        (None, 4, 4, TWO_PHASES),
        ("flat", 4, 2, TWO_PHASES),
        ("hierarchical", 4, 1, NESTED),
        ("CGX", 4, 2, TWO_PHASES),
    ],
)
def test_schemes_by_nodes(scheme: str | None, ranks: int, ranks_per_node: int, option: tuple[str, ...]) -> None:
    policy = Uniform(QSGD(bits=4), scheme=scheme)
    assert policy.plan([tensor("a", 1000)], ranks, ranks_per_node).buckets[0].option == option
    assert Policy.from_json(policy.to_json()) == policy


@pytest.mark.parametrize("schedule", ["backward", "pipelined"])
def test_uncompressed_buckets_travel_between_nodes_too(schedule: str) -> None:
    plan = Uniform(Identity(), schedule=schedule).plan([tensor("a", 1000)], 4, 2)
    between = ("allreduce:inter",) if schedule == "backward" else ("reducescatter:inter", "allgather:inter")
    assert plan.buckets[0].option == ("reducescatter:intra", *between, "allgather:intra")
