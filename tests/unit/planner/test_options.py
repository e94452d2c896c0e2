"""ByteComp's tree: its size, every option judged by a cluster in miniature, parsing, constraints, names, the command."""

import doctest
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from cluster_of_sums import Cluster, everything_right
from typer.testing import CliRunner

from gradwire.cli import app
from gradwire.core import QSGD, Identity, PowerSGD, RandomK, TensorInfo
from gradwire.core.collectives import CODEC_TASKS, LINK_TASKS
from gradwire.core.schedules import Delayed
from gradwire.errors import PlanError
from gradwire.plan import Uniform
from gradwire.plan.grammar import (
    CONNECTIONS,
    DEVICES,
    PATTERNS,
    SCHEMES,
    WORDS,
    Action,
    Place,
    endings,
    roots,
)
from gradwire.plan.options import option_of, select, tree
from gradwire.plan.schemes import RESTRICTED, SYSTEMS, beside_tree, check_known, correction_plan, names_of

TREE = tree()
PAGE = Path(__file__).parents[3] / "docs" / "options.md"
BETWEEN_WHOLE, BETWEEN_DIVIDED = PATTERNS[2][1:], PATTERNS[3][1:]


def recursion(c, d):
    """Sizes of ByteComp's sub-trees with c devices for Comp and d for Decomp, by the recursion of docs/options.md."""
    t1 = 1 + c * d
    t2 = d + d * t1
    t5 = t1 + c * t2
    t3 = t1 + 2 * t5
    t4 = t2 + 2 * (t2 + d * t5)
    flat = 1 + 2 * t1 + c * (d + 2 * t2)
    hierarchical = 2 * (t3 + c * t4) + 2 * c * (t4 + d * (t3 + c * t4))
    return {"T1": t1, "T2": t2, "T3": t3, "T4": t4, "T5": t5, "flat": flat, "hierarchical": hierarchical}


def sizes(devices):
    """The same sizes, counted in what the grammar generates."""

    def size(last, steps, opened):
        return len(endings(Place(last, steps, opened), devices))

    def uncompressed_there(steps):
        """Endings whose first task is an exchange: T3 begins after the question whether to encode between nodes."""
        paths = endings(Place(Action.COMM1, steps, ("reduce",)), devices)
        return sum(path[0].action is not Action.COMP for path in paths)

    inside, second, pair = BETWEEN_WHOLE[1:], BETWEEN_DIVIDED[1:], ("reducescatter", "reduce")
    by_root = [len(endings(root, devices)) for root in roots()]
    return {
        "T1": size(Action.COMM, inside, ("reduce",)),
        "T2": size(Action.COMM_COMP, inside, ("reduce",)),
        "T3": uncompressed_there(BETWEEN_WHOLE) + uncompressed_there(BETWEEN_DIVIDED),
        "T4": sum(size(Action.COMP, steps, ("reduce",)) for steps in (BETWEEN_WHOLE, BETWEEN_DIVIDED)),
        "T5": size(Action.COMM1, second, pair),
        "flat": sum(by_root[:2]),
        "hierarchical": sum(by_root[2:]),
    }


@pytest.mark.parametrize("devices", [(), ("gpu",), ("cpu",), ("gpu", "cpu")])
def test_sub_trees_have_the_size_of_the_recursion(devices):
    assert sizes(devices) == recursion(len(devices), len(devices))


def test_the_tree_has_the_published_size():
    assert len(TREE) == 4341
    assert sum(option.flat for option in TREE) == 63
    assert len(tree(("gpu",))) == len(tree(("cpu",))) == 174
    assert sum(not option.compresses for option in tree(("gpu",))) == len(tree(())) == 9


def test_no_two_options_have_the_same_tasks():
    assert len({option.tasks for option in TREE}) == len(TREE)


def test_the_tree_is_all_that_works():
    """Tried out without the grammar: every sequence over the same links that gives all ranks the sum is an option, and every
    option gives them the sum."""
    assert {option.tasks for option in TREE} == everything_right(DEVICES)


def test_every_rule_is_needed_by_some_option():
    used = {pair for option in TREE for pair in pairwise((Action.START, *option.actions, Action.END))}
    assert used == {(before, after) for before, following in CONNECTIONS.items() for after in following}
    assert {task.partition(":")[0] for option in TREE for task in option.tasks} == {*CODEC_TASKS, *LINK_TASKS}
    assert {word for words in WORDS.values() for word in words} == set(LINK_TASKS)
    assert {scheme for option in TREE for scheme in option.schemes} == set(SCHEMES)


def in_steps(option):
    """The cluster before each task and after the last."""
    clusters = [Cluster(flat=option.flat)]
    for task in option.tasks:
        clusters.append(clusters[-1].after(task))
    return clusters


def test_options_know_what_a_rank_does():
    """Encodes, decodes, payloads on the wire, forwards and skips, each against what the ranks of the cluster hold."""
    for option in tree(("gpu",)):
        clusters = in_steps(option)
        coded = [cluster.coded for cluster in clusters]
        sends = [index for index, task in enumerate(option.tasks) if task.partition(":")[0] in LINK_TASKS]
        assert option.encodes == sum(not before and after for before, after in pairwise(coded))
        assert option.decodes == sum(before and not after for before, after in pairwise(coded))
        assert [exchange.compressed for exchange in option.exchanges] == [coded[index] for index in sends]
        forwards = [index for index in sends if index - 1 in sends and coded[index]]
        assert option.forwards == len(forwards)
        assert option.skips == sum(clusters[index].most_parts > 1 for index in forwards)


def test_every_payload_list_is_forwarded_by_a_skip():
    """Lists of payloads to add later travel only where `skips` says so."""
    for option in tree(("gpu",)):
        lists = [cluster.most_parts > 1 for cluster, task in zip(in_steps(option), option.tasks, strict=False)
                 if task.partition(":")[0] in LINK_TASKS]  # fmt: skip
        assert sum(lists) == option.skips


def test_what_an_option_says_of_itself():
    option = option_of(["comp:gpu", "alltoall:intra", "alltoall:inter", "decomp:cpu", "allgather:inter", "allgather:intra"])
    assert (option.intra, option.inter, option.schemes) == ("alltoall+allgather",) * 2 + (("alltoall+allgather",) * 2,)
    assert (option.flat, option.compresses, option.encodes, option.decodes) == (False, True, 1, 1)
    assert option.devices == ("gpu", "cpu")
    assert (option.forwards, option.skips) == (1, 1)
    assert [exchange.compressed for exchange in option.exchanges] == [True, True, False, False]
    plain = option_of(["allreduce:inter"])
    assert (plain.intra, plain.inter, plain.devices, plain.flat, plain.compresses) == ("", "allreduce", (), True, False)


def test_a_summed_shard_is_forwarded_without_a_skip():
    """Second step to second step: what is forwarded is one payload of a sum, not a list."""
    between = ["alltoall:inter", "decomp:gpu", "comp:gpu", "allgather:inter"]
    option = option_of(["reducescatter:intra", "comp:gpu", *between, "allgather:intra", "decomp:gpu"])
    assert (option.forwards, option.skips) == (1, 0)


def test_parsing_gives_every_option_back():
    assert all(option_of(list(option.tasks)) is option for option in TREE)


PREFIXES = {option.tasks[:length] for option in TREE for length in range(len(option.tasks) + 1)}


def mutants(tasks):
    every = [f"{word}:{where}" for word in CODEC_TASKS for where in DEVICES]
    every += [f"{word}:{link}" for word in LINK_TASKS for link in ("intra", "inter")]
    for index in range(len(tasks)):
        yield tasks[:index] + tasks[index + 1 :]
        yield tasks[:index]
        yield tasks[:index] + (tasks[index],) * 2 + tasks[index + 1 :]
        yield tasks[:index] + tasks[index : index + 2][::-1] + tasks[index + 2 :]
        for other in (*every, "allgather", "comp:tpu", "alltoall:gpu", "scatter:inter"):
            yield (*tasks[:index], other, *tasks[index + 1 :])


def test_mutants_are_refused_at_the_first_task_that_leads_nowhere():
    options = {option.tasks for option in TREE}
    refused = 0
    for option in TREE[::241]:
        for mutant in set(mutants(option.tasks)) - options:
            with pytest.raises(PlanError) as raised:
                option_of(mutant)
            message, refused = str(raised.value), refused + 1
            found = re.match(r"option\[(\d+)\] is '(.*?)' ", message)
            if found is None:
                assert message.startswith("option is [") and mutant in PREFIXES
            else:
                index = int(found[1])
                assert mutant[index] == found[2]
                assert mutant[:index] in PREFIXES and mutant[: index + 1] not in PREFIXES
            for possible in re.search(r"Possible.*?: (.*)\.$", message)[1].split(", "):
                before = mutant if found is None else mutant[: int(found[1])]
                assert possible == "nothing more" or (*before, possible) in PREFIXES
    assert refused > 1000


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ("comp:gpu allreduce:inter decomp:gpu", "is 'allreduce:inter' after comp:gpu: allreduce does not take payloads"),
        ("alltoall:inter allgather:inter", "option[0] is 'alltoall:inter' at the start: alltoall takes payloads, and nothing"),
        ("comp:gpu gather:inter allgather:inter", "'allgather:inter' after gather:inter: gather pairs with broadcast"),
        ("reduce:intra allreduce:inter allgather:intra", "'allgather:intra' after allreduce:inter: reduce pairs with broadcast"),
        ("reducescatter:intra allgather:intra", "due is the first step on inter or the whole step on inter"),
        ("comp:gpu decomp:gpu", "what was just encoded would be decoded unsent"),
        ("allreduce:inter allreduce:inter", "the exchange is complete before it. Possible there: nothing more"),
        ("comp:gpu alltol:inter", "no such task (did you mean 'alltoall'?)"),
        ("comp:tpu", "comp runs on gpu or cpu"),
        ("comp:gpu allgather:inter", "it ends before all ranks have the whole sum, uncompressed. Possible after that: decomp"),
        ("", "option is []: it ends before"),
    ],
)  # fmt: skip
def test_refusals_name_the_connection(tasks, said):
    with pytest.raises(PlanError, match=re.escape(said)):
        option_of(tasks.split())


def test_what_is_no_list_of_words_is_refused():
    with pytest.raises(PlanError, match=r"option\[1\] is 3"):
        option_of(["comp:gpu", 3])


def encodes(option):
    return sum(task.startswith("comp:") for task in option.tasks)


@pytest.mark.parametrize(
    ("constraints", "keeps"),
    [
        ({"devices": ("gpu",)}, lambda option: not any(task.endswith("cpu") for task in option.tasks)),
        ({"devices": ("cpu", "gpu")}, lambda option: True),
        ({"devices": ()}, lambda option: encodes(option) == 0),
        ({"max_encodes": 1}, lambda option: encodes(option) <= 1),
        ({"flat": True}, lambda option: not any(task.endswith("intra") for task in option.tasks)),
        ({"flat": False}, lambda option: any(task.endswith("intra") for task in option.tasks)),
        ({"compressed": True}, lambda option: encodes(option) > 0),
        ({"compressed": False}, lambda option: encodes(option) == 0),
        ({"nodes": 1}, lambda option: option.flat),
        ({"nodes": 4, "ranks_per_node": 1}, lambda option: option.flat),
        ({"nodes": 4, "ranks_per_node": 2}, lambda option: True),
        ({"nodes": 1, "ranks_per_node": 1}, lambda option: False),
        ({"where": lambda option: option.skips == 0}, lambda option: option.skips == 0),
        (
            {"schemes": ["allreduce", "reduce+broadcast"]},
            lambda option: not re.search("gather|alltoall|scatter", " ".join(option.tasks)),
        ),
        (
            {"flat": False, "max_encodes": 2, "devices": ["gpu"], "compressed": True},
            lambda option: not option.flat and 0 < encodes(option) < 3 and option.devices == ("gpu",),
        ),
    ],
)
def test_constraints(constraints, keeps):
    assert select(**constraints) == tuple(option for option in TREE if keeps(option))


@pytest.mark.parametrize(
    ("constraints", "said"),
    [
        ({"devices": ["tpu"]}, "devices[0] is 'tpu'"),
        ({"schemes": ["allgather", "ring"]}, "schemes[1] is 'ring'"),
        ({"nodes": 0}, "nodes is 0"),
        ({"ranks_per_node": True}, "ranks_per_node is True"),
        ({"max_encodes": -1}, "max_encodes is -1"),
    ],
)
def test_constraints_that_are_none_are_refused(constraints, said):
    with pytest.raises(PlanError, match=re.escape(said)):
        select(**constraints)


def test_named_options_are_in_the_tree():
    for name, options in SYSTEMS.items():
        for tasks in options:
            assert name in names_of(option_of(tasks))
    assert sum(bool(names_of(option)) for option in TREE) == len({tasks for each in SYSTEMS.values() for tasks in each})


def test_restricted_searches_have_the_size_that_the_paper_describes():
    """9 uncompressed options, and the compressed ones by the devices of each codec task and the pairs inside a node."""
    two_pairs_inside, codec = 2, 2 * 2
    inter_alltoall = two_pairs_inside * (codec + codec * codec)  # forwarded, or decoded and encoded again
    after_both = 2 + 2 * (1 + codec)  # T2: decode behind the last exchange, or before it and then perhaps encode again
    alltoall_twice = codec * 2 * (1 + codec) * after_both
    expected = {
        "all-compressed": 4341 - 9,
        "gpu": 174,
        "cpu": 174,
        "inter-allgather": 9 + two_pairs_inside * codec,
        "inter-alltoall": 9 + inter_alltoall,
        "alltoall+alltoall": 9 + alltoall_twice,
    }
    assert {name: len(select(where=keeps)) for name, keeps in RESTRICTED.items()} == expected


def test_restricted_searches_hold_the_systems_they_describe():
    def systems(restriction):
        return {name for option in select(where=RESTRICTED[restriction], compressed=True) for name in names_of(option)}

    assert systems("inter-allgather") == {"HiTopKComm"}
    assert systems("inter-alltoall") == {"CGX between nodes", "BytePS-Compress"}
    assert systems("alltoall+alltoall") == set()
    assert "BytePS-Compress" in systems("cpu") and "HiTopKComm" not in systems("cpu")


def test_every_option_has_uncompressed_corrections_that_the_tree_has_too():
    tensor = TensorInfo("weight", (64, 64), "float32")
    for option in TREE:
        if option.compresses:
            plan = Uniform(QSGD(), "delayed", " ".join(option.tasks)).plan([tensor])
            (bucket,) = correction_plan(plan, Delayed(), [tensor]).buckets
            assert not any(task.startswith(("comp", "decomp")) for task in bucket.option)
            check_known(bucket.option)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheme", [None, "allreduce", "allgather", "alltoall"])
def test_what_policies_plan_is_in_the_tree_or_known_beside_it(scheme, device):
    tensors = [TensorInfo("weight", (64, 64), "float32", device)]
    for spec in (Identity(), QSGD(bits=4), PowerSGD(rank=2), RandomK(0.1)):
        if scheme is not None and scheme not in spec.schemes:
            continue
        tasks = Uniform(spec, scheme=scheme).plan(tensors).buckets[0].option
        if beside_tree(tasks):
            assert isinstance(spec, (Identity, PowerSGD, RandomK))
            with pytest.raises(PlanError):
                option_of(tasks)
        else:
            assert any(name.startswith("gradwire") for name in names_of(option_of(tasks)))


def test_nothing_of_the_tree_is_beside_it():
    assert not any(beside_tree(option.tasks) for option in TREE)


def run(*arguments):
    result = CliRunner().invoke(app, ["options", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result


def test_the_command_counts():
    assert run("--count").stdout == "4341\n"
    assert run("--devices", "gpu", "--count").stdout == "174\n"
    assert run("--devices", "gpu", "--uncompressed", "--count").stdout == "9\n"
    assert run("--nodes", "2", "--ranks-per-node", "1", "--count").stdout == "63\n"


def test_the_command_lists_tasks_that_parse():
    result = run("--ranks-per-node", "1", "--nodes", "3", "--schemes", "allgather,alltoall+allgather")
    header, *lines = result.stdout.splitlines()
    assert header.split() == ["index", "encodes", "intra", "inter", "tasks"]
    assert len(lines) == len(select(flat=True, schemes=["allgather", "alltoall+allgather"]))
    for line in lines:
        index, count, intra, inter, *rest = line.partition("  [")[0].split()
        option = option_of(rest)
        assert TREE[int(index)] is option
        assert (int(count), intra, inter.replace("*", "")) == (option.encodes, "-", option.inter)
        assert inter.count("*") == sum(exchange.compressed for exchange in option.exchanges)
    assert result.stderr.startswith("63 of 4341 options apply to 3 nodes with 1 rank each")


def test_the_command_gives_json():
    listed = json.loads(run("--json", "--restrict", "inter-allgather", "--hierarchical").stdout)
    assert [tuple(each["tasks"]) for each in listed] == [
        option.tasks for option in select(flat=False, where=RESTRICTED["inter-allgather"])
    ]
    first = next(each for each in listed if "HiTopKComm" in each["names"])
    assert (first["encodes"], first["intra"], first["inter"]) == (1, "reducescatter+allgather", "allgather")
    assert run("--json", "--nodes", "1", "--ranks-per-node", "1").stdout == "[]\n"


COMMANDS = re.findall(r"^gradwire options (.*--count)\s+# (\d+)$", PAGE.read_text(), re.MULTILINE)


@pytest.mark.parametrize(("arguments", "count"), COMMANDS)
def test_counts_on_the_page_are_true(arguments, count):
    assert run(*arguments.split()).stdout == f"{count}\n"


def test_examples_on_the_page_run():
    assert len(COMMANDS) > 3
    assert doctest.testfile(str(PAGE), module_relative=False, optionflags=doctest.ELLIPSIS).failed == 0
