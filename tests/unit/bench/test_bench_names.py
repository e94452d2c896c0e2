"""What a user writes is read as meant, or refused with the words that are wrong."""

import subprocess
import sys

import pytest

from benchmarks.campaigns.ceiling import ceiling_methods, ceiling_tables
from benchmarks.campaigns.predict import predictable
from gradwire.bench.names import DECIDING, arguments_of, check_method, parse_policy, split_names
from gradwire.bench.results import BenchRun, Cell, StepTimes
from gradwire.bench.runner import BenchRequest
from gradwire.core import QSGD, Backward, Cast, Delayed, ErrorFeedback, Identity, Pipelined
from gradwire.core.provenance import Made
from gradwire.errors import FormatError, GradwireError, SpecError, TestbedError
from gradwire.plan.adaptive import AdaptiveBits
from gradwire.plan.policy import Policy, Uniform
from gradwire.record.run import Interval


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("identity", Identity()),
        ("fp16", Cast("float16")),
        ("qsgd4", QSGD(bits=4)),
        ("qsgd8", QSGD(bits=8)),
        ("qsgd2-ef", ErrorFeedback(QSGD(bits=2))),
        ('{"id": "qsgd", "bits": 3, "block": 1024}', QSGD(bits=3, block=1024)),
    ],
)
def test_policy_text(text, spec):
    policy = parse_policy(text)
    assert policy.default == spec
    assert not policy.rules


def test_names_of_what_decides():
    for name in DECIDING:
        assert check_method(f"gradwire:{name}") == f"gradwire:{name}"
    assert arguments_of("auto") == {"plan": "auto", "accuracy": "safe"}
    assert arguments_of("adaptive") == {"plan": AdaptiveBits()}
    assert arguments_of("qsgd4") == {"plan": Uniform(QSGD(bits=4))}
    assert predictable(["ddp", "gradwire:auto", "gradwire:qsgd4"]) == ["ddp", "gradwire:qsgd4"]


@pytest.mark.parametrize(
    ("text", "schedule"),
    [
        ("qsgd4", Backward()),
        ("qsgd4@pipelined", Pipelined()),
        ("qsgd4@delayed", Delayed()),
        ("qsgd4@delayed2", Delayed(k=2)),
        ("qsgd4@delayed2-unstaggered", Delayed(k=2, stagger=False)),
        ("qsgd4@delayed5-unstaggered+qsgd8", Delayed(k=5, correction=QSGD(bits=8), stagger=False)),
        ('{"id":"qsgd","bits":4}@delayednone', Delayed(k=None)),
    ],
)
def test_policy_with_a_schedule(text, schedule):
    assert parse_policy(text) == Uniform(QSGD(bits=4), schedule=schedule)


def test_policy_with_rules_as_text_and_as_a_file(tmp_path):
    policy = Policy(default=QSGD(bits=4), rules=[("*.bias", Identity())], scheme="allgather", chunk_bytes=2**20)
    assert parse_policy(policy.to_json(None).strip()) == policy
    path = tmp_path / "policy.json"
    policy.save(path)
    assert parse_policy(str(path)) == policy


def test_policy_may_be_a_plan_file(tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_text("{}")
    assert parse_policy(str(plan)) == str(plan)


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("allreduce", FormatError, "'allreduce'"),
        ("gradwire:qsqd4", FormatError, "'qsqd4'"),
        ("gradwire:qsgd9", SpecError, "bits is 9"),
        ("gradwire:", FormatError, "''"),
        ('gradwire:{"id": "qsgd", "bit": 4}', SpecError, "bit is not a field"),
        ('gradwire:{"id": ', FormatError, "not JSON"),
        ("gradwire:" + '{"id":' * 10_000, FormatError, "nested deeper"),
        ('gradwire:{"id": "qsgd", "bits": 1' + "0" * 5000 + "}", FormatError, "not JSON"),
        ('gradwire:{"id": "qsgd", "id": "cast"}', FormatError, "id stands twice"),
        ("gradwire:qsgd" + "9" * 5000, FormatError, "is no policy"),
        ("gradwire:" + "x" * 100_000, FormatError, "is no policy"),
        ("gradwire:qsgd4@pipelned", FormatError, "'qsgd4@pipelned'"),
        ("gradwire:no/such/plan.json", FormatError, "no/such/plan.json"),
        ("gradwire:auto@pipelined", FormatError, "sets a schedule for auto, which takes none. Write auto@all"),
        ("gradwire:adaptive@delayed2", FormatError, "sets a schedule for adaptive, which takes none"),
        ("gradwire:qsgd4@delayed2+auto", FormatError, "'auto' is no spec: it chooses specs while a job runs"),
    ],
)
def test_wrong_method_is_named(name, error, said):
    with pytest.raises(error) as caught:
        check_method(name)
    assert said in str(caught.value)


def test_commas_in_json_do_not_separate():
    spec = 'gradwire:{"id":"qsgd","bits":4}'
    assert split_names(f" ddp ,{spec},, ddp,floor") == ["ddp", spec, "floor"]


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"jobs": ["vgg"]}, FormatError, "'vgg'"),
        ({"links": ["500"]}, TestbedError, "'500'"),
        ({"methods": []}, FormatError, "no method"),
        ({"nodes": 0}, FormatError, "nodes is 0"),
        ({"steps": 0}, FormatError, "steps is 0"),
        ({"warmup_steps": 2}, FormatError, "warmup_steps is 2"),
        ({"nodes": 100_000}, FormatError, "1 to 1000 nodes"),
    ],
)
def test_wrong_request_is_named(change, error, said):
    right = {"jobs": ["mlp"], "links": ["unlimited"], "methods": ["ddp"]}
    with pytest.raises(error) as caught:
        BenchRequest(**(right | change))
    assert isinstance(caught.value, GradwireError)
    assert said in str(caught.value)


def test_reading_names_needs_no_torch():
    code = "import sys, gradwire.bench.runner, gradwire.bench.table; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_ceilings_methods_are_methods() -> None:
    methods = ceiling_methods()
    assert len(set(methods)) == len(methods) > 10
    for method in methods:
        check_method(method)


def test_the_ceiling_says_where_more_stops_paying() -> None:
    *_, computed, same_bytes = ceiling_methods()
    times = {"floor": 100.0, "ddp": 1000.0, computed: 117.5, same_bytes: 116.0}
    cells = []
    for method in ceiling_methods():
        ratio = float(method.split("(")[1].split(",")[0]) if "Truncate" in method else 1.0
        median = 1e3 * times.get(method, max(110.0, 900.0 / ratio))
        step = StepTimes(median_us=median, minimum_us=median, p10_us=median, p90_us=median, mean_us=median, stdev_us=0.0, steps=1)
        speedup = Interval(ratio=1e6 / median, low=1.0, high=1.0)
        cells.append(Cell(job="mlp", link="1gbit", gbps=1.0, method=method, step=step, speedup=speedup))
    run = BenchRun(
        made=Made(host="h", date="2026-11-21", command="c"), torch="2", cores=2, network="loopback", nodes=2,
        ranks_per_node=1, steps=1, warmup_steps=3, turn_steps=1, seed=0, cells=tuple(cells),
    )  # fmt: skip
    ((table, words),) = ceiling_tables(run)
    assert table.row_count == 12
    assert "more than 9.09 times as fast as plain DDP's here, and more than 1/8 brings nothing" in words
    assert "costs 1.5 ms of a step" in words
