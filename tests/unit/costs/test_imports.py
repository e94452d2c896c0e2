"""Links from nccl-tests and codec times from CSV: what they say, and what is refused with line, value and cure."""

import pytest
from typer.testing import CliRunner

from gradwire.cli import app
from gradwire.core import QSGD, Cluster, Costs, ErrorFeedback, TopK
from gradwire.costs.collectives import flat_traffic
from gradwire.costs.imported import import_file
from gradwire.costs.nccl_tests import cluster_from, read_nccl_tests
from gradwire.errors import FormatError, GradwireError

WORDS = {"all_reduce": "allreduce", "all_gather": "allgather", "alltoall": "alltoall", "broadcast": "broadcast"}
SIZES = [8 * 4**power for power in range(13)]
HEADING = (
    "#                                                              out-of-place                       in-place\n"
    "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong\n"
    "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)\n"
)


def output(hosts, per_host, alpha_us, gbps, collective="all_reduce", named=True) -> str:
    """What nccl-tests would print of a link like this, by the model of costs."""
    ranks = hosts * per_host
    traffic = flat_traffic(WORDS[collective], hosts, per_host)
    load = traffic.inter if hosts > 1 else traffic.intra
    lines = ["# nThread 1 nGpus 1 minBytes 8 maxBytes 134217728 step: 4(factor) warmup iters: 5 iters: 20 agg iters: 1"]
    lines += [f"# Collective test starting: {collective}_perf"] * named
    lines += [
        f"#  Rank {rank:2d} Group  0 Pid  105{rank} on  node{rank // per_host} device {rank % per_host:2d} [0x07] NVIDIA A100"
        for rank in range(ranks)
    ]
    lines += ["node0:105:105 [0] NCCL INFO Bootstrap : Using eth0", HEADING.rstrip("\n")]
    bus = {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}.get(collective, (ranks - 1) / ranks)
    for size in [0, *SIZES]:
        held = size / ranks if collective == "all_gather" else size
        us = load.messages * alpha_us + load.factor * held * 8 / (gbps * 1000)
        algbw = size / us / 1000
        numbers = f"{us:9.2f} {algbw:7.2f} {algbw * bus:7.2f}"
        lines.append(f"{size:12d} {size // 4:12d} float sum -1 {numbers} 0 {9.99:9.2f} 1.00 1.00 N/A")
    return "\n".join([*lines, "# Out of bounds values : 0 OK", f"# Avg bus bandwidth    : {1.0}", ""])


@pytest.mark.parametrize("collective", WORDS)
@pytest.mark.parametrize(("hosts", "per_host"), [(1, 8), (4, 1), (2, 4)])
def test_links_come_back_from_times_of_any_collective(hosts, per_host, collective):
    run = read_nccl_tests(output(hosts, per_host, 12.0, 25.0, collective))
    assert (len(run.hosts), run.ranks, run.ranks_per_node) == (hosts, hosts * per_host, per_host)
    link, problem = run.link()
    assert link.alpha_us == pytest.approx(12.0, rel=0.01)
    assert link.gbps == pytest.approx(25.0, rel=0.01)
    assert problem == ""


def write(folder, **outputs):
    paths = []
    for name, text in outputs.items():
        paths.append(folder / f"{name}.txt")
        paths[-1].write_text(text)
    return paths


def test_a_cluster_of_both_links_and_of_all_reduce(tmp_path):
    paths = write(
        tmp_path,
        inside=output(1, 8, 3.0, 1600.0),
        between=output(4, 8, 20.0, 100.0, "alltoall"),
        summed=output(4, 8, 15.0, 90.0),
    )
    out = tmp_path / "cluster.json"
    done = CliRunner().invoke(app, ["import-cluster", *map(str, paths), "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert f"cluster of 4 x 8 ranks (intra 1.6e+03 Gb/s, inter 100 Gb/s) written to {out}." in done.output
    cluster = Cluster.load(out)
    assert (cluster.nodes, cluster.ranks_per_node) == (4, 8)
    rates = [link.gbps for link in (cluster.intra, cluster.inter, cluster.allreduce) if link is not None]
    assert rates == pytest.approx([1600.0, 100.0, 90.0], rel=0.01)
    assert cluster.made is not None and "inside.txt" in cluster.made.command and "node3" in cluster.made.host


def test_one_file_is_enough_where_there_is_one_link(tmp_path):
    single, flat = write(tmp_path, single=output(1, 4, 3.0, 400.0), flat=output(4, 1, 20.0, 25.0))
    inside, between = cluster_from([single])[0], cluster_from([flat])[0]
    assert (inside.nodes, inside.ranks_per_node, inside.allreduce) == (1, 4, None)
    assert inside.inter == inside.intra and between.intra == between.inter
    assert (between.nodes, between.ranks_per_node) == (4, 1)


def test_times_that_bend_are_said(tmp_path):
    text = output(4, 1, 20.0, 25.0)
    for line in [line for line in text.splitlines() if " float " in line][-6:]:
        slow = line.split()
        slow[5] = f"{float(slow[5]) * 20:.2f}"
        slow[6] = slow[7] = "0.10"
        text = text.replace(line, " ".join(slow))
    _, problems = cluster_from(write(tmp_path, bent=text))
    assert len(problems) == 1 and "bent.txt" in problems[0] and "line" in problems[0]


def line_of(text, part):
    return next(number for number, line in enumerate(text.splitlines(), 1) if part in line)


GOOD = output(2, 2, 12.0, 25.0)
LAST = GOOD.splitlines()[-3]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD.replace(LAST, LAST[:40]), f"line {line_of(GOOD, LAST)}: .* values, but the table has 13 columns"),
        (GOOD.replace(LAST, LAST.replace(LAST.split()[5], "nan", 1)), f"line {line_of(GOOD, LAST)}: time is 'nan'"),
        (
            GOOD.replace(LAST, LAST.replace(LAST.split()[7], "7.00", 1)),
            "busbw over algbw is .* among 4 ranks it is 1.5",
        ),
        (GOOD.replace("all_reduce_perf", "all_gather_perf"), "for all_gather among 4 ranks it is 0.75"),
        (GOOD.replace(HEADING, ""), "no line names the columns size, time, algbw, busbw"),
        (GOOD.replace("#  Rank  3", "#  Rnk  3"), "different numbers of ranks .node0 2, node1 1."),
        (GOOD.replace("#  Rank  1", "#  Rank  0"), "line 4: rank 0 is on node0, and an earlier line has a rank 0"),
        (GOOD.replace("#  Rank  1", "#  Rank  9"), "rank 1 has no line, though rank 9 has one"),
        (GOOD.replace("on  node", "at  node"), "0 lines say on which host a rank was"),
        (output(2, 2, 12.0, 25.0, named=False), "does not name its collective. Say by --collective"),
        (GOOD.partition(f"{SIZES[1]:12d} ")[0], "there are 1 points of 1 sizes. A line needs at least 3 points"),
        ("", "no line names the columns"),
    ],
)
def test_outputs_that_cannot_be_meant_are_refused(text, said, tmp_path):
    (path,) = write(tmp_path, wrong=text)
    with pytest.raises(FormatError, match=said) as refused:
        cluster_from([path])
    assert str(refused.value).startswith(f"{path}: ")


def test_files_that_do_not_make_a_cluster_are_refused(tmp_path):
    shared, again, inside = write(
        tmp_path, shared=output(2, 4, 20.0, 25.0), again=output(2, 4, 20.0, 25.0), inside=output(1, 4, 2.0, 400.0)
    )
    with pytest.raises(FormatError, match=r"no file measures the link inside a node\. Add the output of a run on one host"):
        cluster_from([shared])
    with pytest.raises(FormatError, match=r"again.txt: it measures all_reduce between nodes, and .*shared.txt measures"):
        cluster_from([shared, again, inside])
    with pytest.raises(FormatError, match="there is no file"):
        cluster_from([])
    with pytest.raises(FormatError, match="the collective is 'allreduce'"):
        cluster_from([inside], "allreduce")
    with pytest.raises(FormatError, match="it says that it is of all_reduce, but alltoall was asked for"):
        cluster_from([inside], "alltoall")


CSV = """\ufeff# measured on a quiet machine
device, spec, bytes, encode_us, decode_us

gpu, "QSGD(bits=4, block=128)", 4194304, 40.5, 25
gpu, "QSGD(bits=4, block=128)", 4096, 12, 9
cpu, QSGD(bits=4), 4096.0, 120, 90
gpu, ErrorFeedback(TopK(0.01)), 4096, 50, 5
gpu, "{""id"": ""topk"", ""ratio"": 0.01}", 4096, 45, 5
"""


def test_codec_times_in_csv(tmp_path):
    path, out = tmp_path / "times.csv", tmp_path / "costs.json"
    path.write_text(CSV)
    done = CliRunner().invoke(app, ["import-profile", str(path), "-o", str(out)])
    assert done.output == f"costs written to {out}.\n"
    costs = Costs.load(out)
    assert [(codec.spec, codec.device) for codec in costs.codecs] == [
        (QSGD(), "gpu"),
        (QSGD(), "cpu"),
        (ErrorFeedback(TopK(0.01)), "gpu"),
        (TopK(0.01), "gpu"),
    ]
    assert costs.codecs[0].encode == ((4096, 12.0), (4194304, 40.5))
    assert costs.codecs[0].decode == ((4096, 9.0), (4194304, 25.0))


FIRST = "spec,device,bytes,encode_us,decode_us\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there are no times in it. The first line must be spec,device,bytes,encode_us,decode_us"),
        (FIRST, "there are no times in it"),
        ("spec,device,byte,encode_us,decode_us\n", r"line 1: the columns are .*did you mean 'bytes'"),
        ("spec,device,bytes,encode_us\n", "line 1: the columns are"),
        (FIRST + "QSGD(bits=4, block=128),gpu,1,2,3\n", "line 2: .* has 6 values, but there are 5 columns. Put a spec"),
        (FIRST + "\nQSGD(bits=9),gpu,1,2,3\n", "line 3: bits is 9"),
        (FIRST + "QSDG(bits=4),gpu,1,2,3\n", "line 2: .*QSDG"),
        (FIRST + "Identity,gpu,1,2,3\n", "line 2: spec is 'Identity', which encodes nothing"),
        (FIRST + '"{id}",gpu,1,2,3\n', "line 2: spec is '{id}', which is not JSON"),
        (FIRST + "QSGD,tpu,1,2,3\n", "line 2: device is 'tpu': it must be one of gpu, cpu"),
        (FIRST + "QSGD,gpu,4 KB,2,3\n", "line 2: bytes is '4 KB': it must be a number"),
        (FIRST + "QSGD,gpu,4.5,2,3\n", "line 2: bytes is 4.5"),
        (FIRST + "QSGD,gpu,-4,2,3\n", "line 2: bytes is -4"),
        (FIRST + "QSGD,gpu,4,2 ms,3\n", "line 2: encode_us is '2 ms'"),
        (FIRST + "QSGD,gpu,4,2,nan\n", "line 2: decode_us is nan"),
        (FIRST + "QSGD,gpu,4,2,3\nQSGD(bits=4),gpu,4,2,3\n", "line 3: QSGD.* has times of 4 bytes here and in line 2"),
    ],
)
def test_csv_that_cannot_be_meant_is_refused_by_line(text, said, tmp_path):
    path = tmp_path / "times.csv"
    path.write_text(text)
    with pytest.raises(GradwireError, match=said) as refused:
        import_file(path)
    assert str(refused.value).startswith(f"{path}: ")
