"""Profile, cluster, costs and plan: strict, frozen, JSON in and out."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_core_specs import qsgd, specs

from gradwire.core import (
    QSGD,
    Backward,
    Bucket,
    Cluster,
    CodecCosts,
    Costs,
    Delayed,
    Identity,
    Link,
    LocalSteps,
    Made,
    Nesterov,
    Pipelined,
    Plan,
    Prediction,
    Profile,
    TensorProfile,
)
from gradwire.core.strict import Document
from gradwire.errors import FormatError, GradwireError

PROFILE = """
{"version": 1, "model": "resnet50", "batch": 32, "device": "V100",
 "made": {"host": "...", "date": "...", "command": "..."},
 "tensors": [{"name": "fc.bias", "shape": [1000], "dtype": "float32", "backward_us": 0.0, "forward_us": 0.0}]}
"""
CLUSTER = """
{"version": 1, "nodes": 8, "ranks_per_node": 8,
 "intra": {"alpha_us": 5.0, "gbps": 400.0}, "inter": {"alpha_us": 30.0, "gbps": 25.0}}
"""
COSTS = """
{"version": 1, "codecs": [{"spec": {"id": "qsgd", "bits": 4, "block": 128}, "device": "gpu",
   "encode": [[4096, 12.0], [4194304, 40.0]], "decode": [[4096, 9.0], [4194304, 25.0]]}]}
"""
# Two buckets, so that the launch order has something to say.
PLAN = """
{"version": 1, "fingerprint": "sha256 of (name, shape, dtype) in order", "schedule": {"kind": "backward"},
 "buckets": [{"tensors": ["fc.bias", "fc.weight"], "spec": {"id": "qsgd", "bits": 4, "block": 128},
              "reduce_dtype": "float32", "residual_dtype": "float32",
              "option": ["comp:gpu", "alltoall:inter", "decomp:gpu", "comp:gpu", "allgather:inter", "decomp:gpu"]},
             {"tensors": ["conv.weight"], "spec": {"id": "qsgd", "bits": 4, "block": 128},
              "reduce_dtype": "float32", "residual_dtype": "float32",
              "option": ["comp:gpu", "alltoall:inter", "decomp:gpu", "comp:gpu", "allgather:inter", "decomp:gpu"]}],
 "launch": [[0, "alltoall"], [1, "alltoall"], [0, "allgather"], [1, "allgather"]],
 "prediction": {"step_us": 0.0, "baseline_step_us": 0.0, "lower_bound_us": 0.0, "bytes_per_rank": 0,
                "extra_bytes_device": 0, "extra_bytes_host": 0}}
"""
EXAMPLES: dict[type[Document], str] = {Profile: PROFILE, Cluster: CLUSTER, Costs: COSTS, Plan: PLAN}


@pytest.mark.parametrize(("cls", "text"), EXAMPLES.items())
def test_the_designs_examples_load_and_round_trip(cls: type[Document], text: str, tmp_path: Path) -> None:
    document = cls.from_json(text)
    one_line = " ".join(text.split())
    assert document.to_json(indent=None) == one_line.replace("[ ", "[").replace("] }", "]}") + "\n"
    assert cls.from_json(document.to_json()) == document
    document.save(tmp_path / "file.json")
    assert cls.load(tmp_path / "file.json") == document
    assert [path.name for path in tmp_path.iterdir()] == ["file.json"]
    hash(document)


times = st.floats(0, 1e9)
names = st.text(min_size=1, max_size=8)
dtypes = st.sampled_from(["float32", "float64", "float16", "bfloat16"])
made = st.none() | st.builds(Made, host=names, date=names, command=names)
rates = st.floats(1e-3, 1e4)
links = st.builds(Link, alpha_us=times, gbps=rates)
uneven = st.builds(Link, alpha_us=times, gbps=rates, up_gbps=st.none() | rates, flow_gbps=st.none() | rates)
points = st.dictionaries(st.integers(0, 2**40), times, min_size=1, max_size=4).map(lambda d: tuple(sorted(d.items())))
profiles = st.builds(
    Profile,
    model=names,
    batch=st.integers(1, 4096),
    device=names,
    steps=st.none() | st.integers(1, 1000),
    optimizer_us=st.none() | times,
    loaded_backward_us=st.none() | times,
    made=made,
    tensors=st.lists(
        st.builds(
            TensorProfile,
            name=names,
            shape=st.lists(st.integers(0, 999), max_size=4),
            dtype=dtypes,
            backward_us=times,
            forward_us=st.none() | times,
            backward_iqr_us=st.none() | times,
            forward_iqr_us=st.none() | times,
        ),
        min_size=1,
        max_size=4,
        unique_by=lambda tensor: tensor.name,
    ),
)
clusters = st.builds(
    Cluster,
    nodes=st.integers(1, 99),
    ranks_per_node=st.integers(1, 9),
    intra=links,
    inter=uneven,
    allreduce=st.none() | links,
    launch_us=st.none() | times,
    slow_nodes=st.lists(uneven, max_size=1),
    made=made,
)
codecs = st.builds(CodecCosts, spec=specs, device=st.sampled_from(["gpu", "cpu"]), encode=points, decode=points)
costs = st.builds(Costs, codecs=st.lists(codecs, max_size=3, unique_by=lambda c: (c.spec, c.device)), made=made)
schedules = st.one_of(
    st.just(Backward()),
    st.just(Pipelined()),
    st.builds(
        Delayed,
        k=st.none() | st.integers(1, 50),
        correction=st.none() | specs,
        warmup_steps=st.integers(0, 9),
        local_lr=st.none() | st.floats(0, 9),
        local_step=st.sampled_from(["optimizer", "sgd"]),
        warmup_lands=st.booleans(),
    ),
    st.builds(Delayed, k=st.integers(1, 50), flush=st.booleans(), local_update=st.booleans(), stagger=st.booleans()),
    st.builds(
        LocalSteps,
        every=st.integers(9, 500),
        outer=st.builds(Nesterov, lr=st.floats(0.1, 2), momentum=st.floats(0, 0.99), radius=st.none() | st.floats(0.01, 9)),
        fragments=st.integers(1, 3),
        delay=st.integers(0, 3),
        mixing=st.floats(0.1, 1),
    ),
    st.builds(lambda fewer: LocalSteps(every=9, steps_of_ranks=(9, *fewer)), st.lists(st.integers(1, 9))),
)
OPTIONS = [
    ["allreduce:inter"],
    ["comp:gpu", "allgather:inter", "decomp:cpu"],
    [
        "reducescatter:intra",
        "comp:cpu",
        "alltoall:inter",
        "decomp:cpu",
        "comp:cpu",
        "allgather:inter",
        "allgather:intra",
    ],
]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    pool = draw(st.lists(names, min_size=1, max_size=8, unique=True))
    buckets = []
    while pool:
        size = draw(st.integers(1, len(pool)))
        tensors, pool = pool[:size], pool[size:]
        family = draw(qsgd)
        mixed = {t: QSGD(draw(st.integers(2, 8)), family.block, family.scale, family.rounding, family.seed) for t in tensors}
        buckets.append(
            Bucket(
                tensors=tuple(tensors),
                spec=draw(st.one_of(specs, st.just(mixed))),
                reduce_dtype=draw(dtypes),
                option=tuple(draw(st.sampled_from(OPTIONS))),
                chunk_bytes=draw(st.sampled_from([0, 4096])),
                numel=draw(st.integers(0, 99)),
            )
        )
    bag = draw(st.permutations([index for index, bucket in enumerate(buckets) for _ in bucket.link_tasks]))
    queues = [list(bucket.link_tasks) for bucket in buckets]
    launch = tuple((index, queues[index].pop(0)) for index in bag)
    sizes = st.integers(0, 2**40)
    prediction = st.builds(
        Prediction,
        step_us=times,
        baseline_step_us=times,
        lower_bound_us=times,
        bytes_per_rank=sizes,
        extra_bytes_device=sizes,
        extra_bytes_host=sizes,
    )
    return Plan(
        fingerprint=draw(names),
        schedule=draw(schedules),
        buckets=tuple(buckets),
        launch=launch,
        prediction=draw(st.none() | prediction),
    )


@given(st.one_of(profiles, clusters, costs, plans()))
def test_every_document_round_trips(document: Document) -> None:
    text = document.to_json()
    again = type(document).from_json(text)
    assert again == document
    assert again.to_json() == text


DELETE = object()
TENSOR = ("tensors", 0)
BUCKET = ("buckets", 0)
WRONG: list[tuple[type[Document], tuple[str | int, ...], object, list[str]]] = [
    (Profile, ("version",), 2, ["profile: version is 2", "reads version 1", "gradwire profile"]),
    (Profile, ("version",), True, ["version is True"]),
    (Profile, ("version",), DELETE, ["version is missing", '"version": 1']),
    (Profile, ("colour",), 1, ["colour is not a field", "value is 1", "fields are version, model"]),
    (Profile, ("modle",), "m", ["modle is not a field", "'m'", "did you mean 'model'"]),
    (Profile, ("model",), "", ["model is ''", "not empty"]),
    (Profile, ("batch",), 4.5, ["batch is 4.5", "whole number"]),
    (Profile, ("batch",), True, ["batch is True", "whole number"]),
    (Profile, ("batch",), 0, ["batch is 0", "at least 1"]),
    (Profile, ("batch_kb",), 0, ["batch_kb is not a field"]),
    (Profile, ("made",), {"host": "h", "date": "d"}, ["made.command is missing"]),
    (Profile, ("made", "hots"), "x", ["made.hots is not a field", "did you mean 'host'"]),
    (Profile, ("tensors",), [], ["tensors is []", "at least one"]),
    (Profile, ("tensors",), {}, ["tensors is {}", "a list"]),
    (
        Profile,
        (*TENSOR, "backward_ms"),
        3,
        ["tensors[0].backward_ms", "value is 3", "Times are microseconds: backward_us"],
    ),
    (Profile, (*TENSOR, "forward_s"), 3, ["tensors[0].forward_s", "Times are microseconds: forward_us"]),
    (Profile, (*TENSOR, "backward"), 3, ["tensors[0].backward is", "Times are microseconds: backward_us"]),
    (Profile, (*TENSOR, "backward_us"), "3ms", ["tensors[0].backward_us is '3ms'", "a number", "microseconds"]),
    (Profile, (*TENSOR, "backward_us"), True, ["tensors[0].backward_us is True", "a number"]),
    (Profile, (*TENSOR, "backward_us"), math.nan, ["tensors[0].backward_us is nan", "finite"]),
    (Profile, (*TENSOR, "backward_us"), math.inf, ["tensors[0].backward_us is inf", "finite"]),
    (Profile, (*TENSOR, "backward_us"), -1, ["tensors[0].backward_us is -1", "at least 0"]),
    (Profile, (*TENSOR, "backward_us"), DELETE, ["tensors[0].backward_us is missing"]),
    (Profile, (*TENSOR, "forward_us"), -0.5, ["tensors[0].forward_us is -0.5"]),
    (Profile, (*TENSOR, "shape"), [3, -1], ["tensors[0].shape[1] is -1"]),
    (Profile, (*TENSOR, "shape"), [True], ["tensors[0].shape[0] is True"]),
    (Profile, (*TENSOR, "dtype"), "fp32", ["tensors[0].dtype is 'fp32'", "float32"]),
    (Profile, (*TENSOR, "name"), 5, ["tensors[0].name is 5", "a string"]),
    (Cluster, ("inter", "mbps"), 500, ["inter.mbps is not a field", "500", "Rates are gigabits per second: gbps"]),
    (Cluster, ("intra", "bandwidth"), 1, ["intra.bandwidth", "Rates are gigabits per second: gbps"]),
    (Cluster, ("inter", "alpha_ms"), 1, ["inter.alpha_ms", "Times are microseconds: alpha_us"]),
    (Cluster, ("inter", "gbps"), 0, ["inter.gbps is 0", "above 0"]),
    (Cluster, ("inter", "gbps"), 10**400, ["inter.gbps is 1000", "out of range"]),
    (Cluster, ("inter", "gbps"), None, ["inter.gbps is None", "a number"]),
    (Cluster, ("inter",), 25.0, ["inter is 25.0", "an object"]),
    (Cluster, ("nodes",), 0, ["nodes is 0", "at least 1"]),
    (Cluster, ("nodes",), "8", ["nodes is '8'", "whole number"]),
    (
        Costs,
        ("codecs", 0, "encode"),
        [[8, 1.0], [8, 2.0]],
        ["codecs[0].encode[1][0] is 8 after 8", "strictly increasing"],
    ),
    (Costs, ("codecs", 0, "decode"), [], ["codecs[0].decode is []", "at least one point"]),
    (Costs, ("codecs", 0, "encode", 0), [8, 1.0, 2], ["codecs[0].encode[0]", "length 2"]),
    (Costs, ("codecs", 0, "encode", 0), [8.5, 1.0], ["codecs[0].encode[0][0] is 8.5", "whole number"]),
    (Costs, ("codecs", 0, "encode", 1, 1), -2, ["codecs[0].encode[1][1] is -2"]),
    (Costs, ("codecs", 0, "device"), "tpu", ["codecs[0].device is 'tpu'", "gpu, cpu"]),
    (Costs, ("codecs", 0, "spec", "bits"), 1, ["codecs[0].spec.bits is 1", "from 2 to 8"]),
    (Costs, ("codecs", 0, "encode_ms"), [], ["codecs[0].encode_ms is not a field"]),
    (Plan, ("fingerprint",), 5, ["fingerprint is 5", "a string"]),
    (Plan, ("schedule",), {"kind": "bakward"}, ["schedule", "'bakward'", "did you mean 'backward'"]),
    (Plan, ("schedule",), {"kind": "delayed", "kk": 2}, ["schedule.kk is not a field"]),
    (Plan, ("schedule",), {"kind": "delayed", "k": 0}, ["schedule.k is 0", "at least 1"]),
    (Plan, ("schedule",), {"kind": "delayed", "warmup_steps": -1}, ["schedule.warmup_steps is -1", "at least 0"]),
    (Plan, ("schedule",), {"kind": "delayed", "local_lr": -0.1}, ["schedule.local_lr is -0.1", "at least 0"]),
    (Plan, ("schedule",), {"kind": "delayed", "k": None, "flush": True}, ["flush is true and k is null", "Give k"]),
    (Plan, ("schedule",), {"kind": "delayed", "local_ratio": 0}, ["schedule.local_ratio is 0", "above 0"]),
    (Plan, ("schedule",), {"kind": "delayed", "local_step": "sdg"}, ["local_step is 'sdg'", "did you mean 'sgd'"]),
    (
        Plan,
        ("schedule",),
        {"kind": "delayed", "local_lr": 0.1, "local_ratio": 0.5},
        ["local_lr is 0.1 and local_ratio is 0.5", "Give one of the two"],
    ),
    (Plan, ("schedule",), {"kind": "delayed", "stagger": 1}, ["schedule.stagger is 1", "must be bool"]),
    (
        Plan,
        ("schedule",),
        {"kind": "delayed", "local_lr": 0.1, "local_update": False},
        ["local_lr is 0.1 and local_update is false", "Leave local_lr out"],
    ),
    (
        Plan,
        ("schedule",),
        {"kind": "delayed", "correction": {"id": "qsgd", "bits": 0}},
        ["schedule.correction.bits is 0"],
    ),
    (Plan, ("schedule",), {"kind": "local", "every": 0}, ["schedule.every is 0", "at least 1"]),
    (Plan, ("schedule",), {"kind": "local", "every": 4, "delay": 5}, ["schedule.delay is 5", "from 0 to 4"]),
    (
        Plan,
        ("schedule",),
        {"kind": "local", "every": 9, "fragments": 4, "delay": 3},
        ["schedule.delay is 3", "from 0 to 2"],
    ),
    (Plan, ("schedule",), {"kind": "local", "every": 4, "fragments": 5}, ["schedule.fragments is 5", "from 1 to 4"]),
    (Plan, ("schedule",), {"kind": "local", "mixing": 1.5}, ["schedule.mixing is 1.5", "at most 1"]),
    (Plan, ("schedule",), {"kind": "local", "outer": {"lr": 0}}, ["schedule.outer.lr is 0", "above 0"]),
    (Plan, ("schedule",), {"kind": "local", "outer": {"radius": -1}}, ["schedule.outer.radius is -1", "above 0"]),
    (Plan, ("schedule",), {"kind": "local", "outer": {"rate": 1}}, ["schedule.outer.rate is not a field"]),
    (Plan, ("buckets",), [], ["buckets is []"]),
    (Plan, (*BUCKET, "tensors"), [], ["buckets[0].tensors is []"]),
    (Plan, (*BUCKET, "tensors"), ["a", "b", "a"], ["buckets[0].tensors[2] is 'a'", "buckets[0].tensors[0]"]),
    (Plan, (*BUCKET, "tensors"), ["conv.weight"], ["buckets[1].tensors has 'conv.weight'", "buckets[0]"]),
    (Plan, (*BUCKET, "spec"), None, ["buckets[0].spec is None", "must be a spec"]),
    (Plan, (*BUCKET, "spec", "block"), 100, ["buckets[0].spec.block is 100", "64 or 128"]),
    (Plan, (*BUCKET, "spec"), {"fc.bias": {"id": "qsgd"}}, ["buckets[0].spec", "no entry for tensor 'fc.weight'"]),
    (
        Plan,
        (*BUCKET, "spec"),
        {"fc.bias": {"id": "qsgd"}, "fc.weight": {"id": "qsgd"}, "fc.bais": {"id": "qsgd"}},
        ["buckets[0].spec['fc.bais']", "did you mean 'fc.bias'"],
    ),
    (
        Plan,
        (*BUCKET, "spec"),
        {"fc.bias": {"id": "qsgd"}, "fc.weight": {"id": "cast"}},
        ["buckets[0].spec['fc.weight'] is Cast", "QSGD(bits=4, block=128)", "families"],
    ),
    (
        Plan,
        (*BUCKET, "spec"),
        {"fc.bias": {"id": "qsgd"}, "fc.weight": {"id": "qsgd", "bits": 99}},
        ["buckets[0].spec['fc.weight'].bits is 99"],
    ),
    (Plan, (*BUCKET, "reduce_dtype"), "float8", ["buckets[0].reduce_dtype is 'float8'"]),
    (Plan, (*BUCKET, "option"), ["comp:gpu"], ["buckets[0].option is ['comp:gpu']", "link task"]),
    (Plan, (*BUCKET, "option", 0), "comp:inter", ["buckets[0].option[0] is 'comp:inter'", "gpu or cpu"]),
    (Plan, (*BUCKET, "option", 1), "alltoall:gpu", ["buckets[0].option[1] is 'alltoall:gpu'", "intra or inter"]),
    (Plan, (*BUCKET, "option", 1), "all_to_all:inter", ["option[1] is 'all_to_all:inter'", "did you mean 'alltoall'"]),
    (Plan, (*BUCKET, "option", 1), "alltoall", ["buckets[0].option[1] is 'alltoall'", "task:where"]),
    (Plan, (*BUCKET, "chunk_kb"), 4, ["buckets[0].chunk_kb", "Sizes are bytes: chunk_bytes"]),
    (Plan, (*BUCKET, "chunk_bytes"), -4, ["buckets[0].chunk_bytes is -4"]),
    (Plan, ("launch", 0), [2, "alltoall"], ["launch[0][0] is 2", "from 0 to 1"]),
    (Plan, ("launch", 0), [-1, "alltoall"], ["launch[0][0] is -1"]),
    (Plan, ("launch", 0), [0, "allgather"], ["launch[0] is [0, 'allgather']", "alltoall of bucket 0 is due"]),
    (Plan, ("launch", 1), [0, "alltoall"], ["launch[1] is [0, 'alltoall']", "allgather of bucket 0 is due"]),
    (Plan, ("launch", 0), [0], ["launch[0] is [0]", "length 2"]),
    (Plan, ("launch", 3), DELETE, ["launch has no [1, 'allgather']"]),
    (Plan, ("prediction", "kb_per_rank"), 1, ["prediction.kb_per_rank", "Sizes are bytes: bytes_per_rank"]),
    (Plan, ("prediction", "step_ms"), 1, ["prediction.step_ms", "Times are microseconds: step_us"]),
    (Plan, ("prediction", "step_us"), -1, ["prediction.step_us is -1"]),
    (Plan, ("prediction", "bytes_per_rank"), 1.5, ["prediction.bytes_per_rank is 1.5"]),
    (Plan, ("prediction", "extra_bytes_host"), DELETE, ["prediction.extra_bytes_host is missing"]),
]


@pytest.mark.parametrize(("cls", "path", "value", "words"), WRONG)
def test_wrong_input_is_refused_by_name(
    cls: type[Document], path: tuple[str | int, ...], value: object, words: list[str]
) -> None:
    data: Any = json.loads(EXAMPLES[cls])
    place = data
    for part in path[:-1]:
        place = place[part]
    if value is DELETE:
        del place[path[-1]]
    else:
        place[path[-1]] = copy.deepcopy(value)
    with pytest.raises(GradwireError) as caught:
        cls.from_json(json.dumps(data))
    assert [word for word in [f"{cls.what}: ", *words] if word not in str(caught.value)] == [], str(caught.value)


def test_twins_are_refused() -> None:
    tensor = TensorProfile(name="a", shape=(1,), dtype="float32", backward_us=0.0)
    with pytest.raises(FormatError, match=r"tensors\[1\]\.name is 'a', and so is tensors\[0\]\.name"):
        Profile(model="m", batch=1, device="d", tensors=(tensor, tensor))
    codec = CodecCosts(spec=Identity(), device="cpu", encode=((0, 0.0),), decode=((0, 0.0),))
    with pytest.raises(FormatError, match=r"codecs\[1\] is Identity\(\) on cpu, and so is codecs\[0\]"):
        Costs(codecs=(codec, codec))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["is not JSON", "line 1"]),
        ("[" * 100_000, ["nested deeper"]),
        (b"\xff\xfe\x00", ["is not UTF-8", "byte 0 is 0xff"]),
        ("[1]", ["the document is [1]", "an object"]),
        ('{"version": 1, "version": 1}', ["version stands twice"]),
        ("// a comment\n{}", ["is not JSON", "Comments"]),
    ],
)
def test_text_that_is_no_document(text: str | bytes, words: list[str]) -> None:
    with pytest.raises(FormatError) as caught:
        Plan.from_json(text)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize("document", [Profile, Cluster, Costs])
def test_where_a_measured_file_cannot_be_read_the_error_says_what_makes_one(document: type[Document], tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nofile.json"):
        with pytest.raises(FormatError, match=r"Check the path.* made by `gradwire profile`.*docs/how-to/plan-a-cluster\.md"):
            document.load(path)


def test_a_file_is_named_in_its_errors(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    with pytest.raises(FormatError, match=r"cluster\.json: cannot be read: No such file"):
        Cluster.load(path)
    path.write_text(CLUSTER.replace("25.0", '"25.0"'))
    with pytest.raises(FormatError, match=r"cluster\.json: inter\.gbps is '25.0'"):
        Cluster.load(path)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster.from_json(CLUSTER)
    path = tmp_path / "cluster.json"
    path.write_text("old")

    def full_disk(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="no space left"):
        cluster.save(path)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["cluster.json"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Link(True, 1.0), "alpha_us is True, a bool"),
        (lambda: Link(1.0, math.nan), "gbps is nan"),
        (lambda: Link(1.0, 1.0, up_gbps=0), "up_gbps is 0"),
        (lambda: Link(1.0, 1.0, flow_gbps="fast"), "flow_gbps is 'fast'"),
        (lambda: Cluster(nodes=2, ranks_per_node=1, intra=Link(1, 1), inter=25), "inter is 25"),
        (lambda: Cluster(version=2, nodes=2, ranks_per_node=1, intra=Link(1, 1), inter=Link(1, 1)), "version is 2"),
        (lambda: Plan(fingerprint="f", buckets=({},), launch=()), r"buckets\[0\] is \{\}, a dict"),
        (lambda: Plan(fingerprint="f", buckets=3, launch=()), "buckets is 3, a int"),
        (lambda: Plan(fingerprint="f", schedule="bakward", buckets=(), launch=()), "schedule is 'bakward'"),
        (lambda: Bucket(tensors="abc", spec=Identity(), option=("allreduce:inter",)), "tensors is 'abc', a str"),
    ],
)
def test_constructors_are_as_strict_as_files(make, words) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(FormatError, match=words):
        make()


def test_a_plan_takes_a_schedule_by_its_word() -> None:
    bucket = Bucket(tensors=("a",), spec=Identity(), option=("allreduce:inter",))
    plan = Plan(fingerprint="f", schedule="backward", buckets=[bucket], launch=[[0, "allreduce"]])  # type: ignore[arg-type]
    assert plan.schedule == Backward()
    assert plan.launch == ((0, "allreduce"),)
