"""`python -m benchmarks schemes`: schemes beside the model's prediction."""

import io

import pytest
from rich.console import Console
from silent import silent

import gradwire as gw
from benchmarks.campaigns.schemes import BITS, SCHEMES, Exchange, SchemesRecord, SchemesRun, predicted_us, repeats_for
from benchmarks.campaigns.schemes_runner import run_schemes, schemes_tables, verdict
from gradwire.core import Cluster, Link, TensorInfo
from gradwire.core.costs import CodecCosts, Costs
from gradwire.core.provenance import Made
from gradwire.core.specs import Identity
from gradwire.errors import FormatError, TestbedError
from gradwire.testbed import permission_problem

MB = 1 << 20
CLUSTER = Cluster(nodes=2, ranks_per_node=2, intra=Link(100.0, 8.0), inter=Link(300.0, 0.2))
COSTS = Costs(codecs=[CodecCosts(spec=BITS, device="cpu", encode=[(0, 0.0), (MB, 100.0)], decode=[(0, 0.0), (MB, 200.0)])])


def exchange(name: str, hierarchical: bool, nbytes: int, us: float) -> Exchange:
    scheme = next(scheme for scheme in SCHEMES if scheme.name == name)
    policy = gw.Uniform(scheme.spec, scheme=scheme.hierarchical if hierarchical else scheme.flat)
    plan = policy.plan([TensorInfo("weight", (nbytes // 4,), "float32", "cpu")], 4)
    sizes = {"us": (us, us), "inter_bytes": 10, "counted_bytes": 11, "nbytes": nbytes}
    return Exchange(scheme=name, hierarchical=hierarchical, plan=plan, **sizes)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
def test_every_scheme_has_a_plan_and_a_prediction(scheme):
    for hierarchical in (False, True)[: 1 + bool(scheme.hierarchical)]:
        times = [predicted_us(exchange(scheme.name, hierarchical, size, 1.0), CLUSTER, COSTS) for size in (MB, 8 * MB)]
        assert 0 < 4 * times[0] < times[1] < 9 * times[0]


def test_a_prediction_is_the_sum_of_its_parts():
    """All-to-all and all-gather of plain gradients on 2 x 2: each of two phases moves a quarter for each rank abroad."""
    cluster = Cluster(nodes=2, ranks_per_node=2, intra=Link(0.0, 1e6), inter=Link(10.0, 8.0))
    flat = exchange("reduce-scatter, all-gather", False, MB, 1.0)
    assert flat.plan.buckets[0].spec == Identity()
    assert predicted_us(flat, cluster, COSTS) == pytest.approx(2 * (2 * 10.0 + MB / 1000))


def test_the_tables_show_gains_and_errors():
    name = "4 bits: all-to-all, all-gather"
    found = [exchange(name, False, MB, 30_000.0), exchange(name, True, MB, 10_000.0)]
    record = SchemesRecord(cluster=CLUSTER, costs=COSTS, problems=(), exchanges=tuple(found))
    run = SchemesRun(made=Made.now(), link="200mbit", measured=record)
    assert SchemesRun.from_json(run.to_json()) == run
    console = Console(width=170, record=True, file=io.StringIO())
    for table in schemes_tables(run):
        console.print(table)
    shown = console.export_text()
    assert "3.00x" in shown and "10.0 *" in shown and "30.0 *" not in shown
    assert "of 2 cells" in verdict(run)


def test_repeats_shrink_with_size():
    assert repeats_for([64 << 10, MB, 4 * MB, 64 * MB]) == (10, 10, 4, 2)


def test_a_cluster_without_two_links_is_refused():
    with pytest.raises(FormatError, match="2 x 1: hierarchical schemes need"):
        run_schemes("200mbit", 2, 1, None, silent())
    with pytest.raises(TestbedError, match="cannot be measured here: no root"):
        run_schemes("200mbit", 2, 2, "no root", silent())


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.network
@pytest.mark.skipif(permission_problem() is not None, reason="needs network namespaces")
def test_schemes_on_an_emulated_cluster():
    run = run_schemes("1gbit", 2, 2, None, silent(), sizes=[64 << 10], rounds=1)
    assert len(run.measured.exchanges) == sum(1 + bool(scheme.hierarchical) for scheme in SCHEMES)
    assert all(each.counted_bytes >= each.inter_bytes for each in run.measured.exchanges)
    of = {
        each.hierarchical: each.inter_bytes
        for each in run.measured.exchanges
        if each.scheme.endswith("bits: all-to-all, all-gather")
    }
    assert 0.4 < of[True] / of[False] <= 0.55  # headers of small payloads; 0.51 of large ones
