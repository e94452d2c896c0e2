"""gradwire doctor: what is judged of given facts, and whole runs: alone, with two ranks, with a rank that does not come."""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from unittest import mock

import msgspec
import pytest
from rich.console import Console

from gradwire.core.provenance import Made
from gradwire.doctor import Finding, Report, examine, summary, tables
from gradwire.doctor.differences import differences, rank_list
from gradwire.doctor.facts import (
    Facts,
    GlooChoice,
    Interface,
    gather_facts,
    gloo_choice,
    interfaces,
    is_loopback,
    nccl_choice,
)
from gradwire.doctor.links import Direction, follow, lead, rate_text, ring_links, seconds_each
from gradwire.doctor.machine import TRAPS, emulation_finding, machine_findings, traps_of
from gradwire.doctor.meeting import Job, Meeting, Survey, bounded
from gradwire.doctor.ranks import survey_findings
from gradwire.testbed.supervisor import free_port

LO, ETH = Interface("lo", "127.0.0.1"), Interface("eth0", "10.0.0.5")
HEALTHY = Facts(
    host="node0",
    gradwire="0.1.0",
    python="3.11.7",
    torch="2.13.0+cpu",
    torch_needed="2.13",
    backends={"gloo": True, "nccl": False, "mpi": False, "ucc": False},
    kernel_level="avx2",
    encode_gbytes_s=20.0,
    cores=4,
    threads=4,
    gloo_timeout_s=1800.0,
    interfaces=(LO, ETH),
    gloo=GlooChoice("10.0.0.5", "eth0", "the host name resolves to it"),
)


def facts(**changed):
    return msgspec.structs.replace(HEALTHY, **changed)


def on_topic(findings, topic):
    return [finding for finding in findings if finding.topic == topic]


def judged(topic, **changed):
    (finding,) = on_topic(machine_findings(facts(**changed)), topic)
    return finding


# ---- one machine


def test_a_healthy_machine_has_no_problems():
    severities = {finding.topic: finding.severity for finding in machine_findings(HEALTHY)}
    assert severities.pop("timeout") == "note"
    assert set(severities.values()) == {"ok"}


@pytest.mark.parametrize(
    ("topic", "changed", "severity", "words"),
    [
        ("versions", {"torch": "2.12.1"}, "problem", "needs torch 2.13"),
        ("versions", {"torch": "2.13.1+cu130"}, "ok", "2.13.1"),
        ("versions", {"torch": "3.0.0a0+git123"}, "ok", "3.0.0a0"),
        ("versions", {"torch": None, "torch_problem": "ImportError: libc10.so"}, "problem", "libc10.so"),
        ("backends", {"backends": {"gloo": False, "nccl": True}}, "problem", "not gloo"),
        ("backends", {"cuda_devices": ("A100",)}, "problem", "1 GPUs"),
        ("devices", {"cuda_devices": ("A100", "A100"), "cuda": "13.0", "nccl": "2.28"}, "note", "2 x A100"),
        ("devices", {"cuda_devices": ("A100",), "gpu_kernels": True, "triton": "3.4"}, "ok", "Triton 3.4"),
        ("kernels", {"kernel_level": None, "kernel_problem": "it was not built"}, "problem", "it was not built"),
        ("kernels", {}, "ok", "avx2"),
        ("threads", {"threads": 4, "local_world_size": 2}, "note", "OMP_NUM_THREADS is not set"),
        ("threads", {"threads": 4, "core_quota": 2.0}, "note", "limited to 2"),
        ("threads", {"threads": 1, "variables": {"OMP_NUM_THREADS": "1"}}, "note", "OMP_NUM_THREADS=1"),
        ("threads", {"threads": 2, "local_world_size": 2}, "ok", "2 ranks"),
        ("timeout", {"nccl_timeout_s": 600.0}, "note", "30 minutes on gloo, 10 minutes on NCCL"),
        ("interface", {"gloo": GlooChoice("127.0.1.1", "lo", "the host name")}, "note", "127.0.1.1"),
        ("interface", {"gloo": GlooChoice(None, None, "GLOO_SOCKET_IFNAME=^lo", "none")}, "problem", "^lo"),
    ],
)
def test_what_is_judged_of_a_machine(topic, changed, severity, words):
    finding = judged(topic, **changed)
    assert finding.severity == severity
    assert words in finding.found
    assert severity == "ok" or (finding.why and finding.cure)


def test_the_cure_for_threads_is_each_ranks_share():
    assert "OMP_NUM_THREADS=2 " in judged("threads", threads=4, local_world_size=2).cure


def test_the_cure_for_loopback_names_an_interface_that_others_reach():
    finding = judged("interface", gloo=GlooChoice("127.0.0.1", "lo", "the host name"))
    assert "GLOO_SOCKET_IFNAME=eth0" in finding.cure


def test_nccl_is_judged_only_with_gpus():
    wrong = {"NCCL_SOCKET_IFNAME": "ib"}
    assert not on_topic(machine_findings(facts(variables=wrong)), "NCCL interface")
    with_gpu = {"cuda_devices": ("A100",), "variables": wrong}
    assert judged("NCCL interface", **with_gpu).severity == "problem"
    assert judged("NCCL interface", cuda_devices=("A100",), variables={"NCCL_SOCKET_IFNAME": "eth"}).severity == "ok"


def test_a_machine_without_permission_for_the_testbed_has_no_problem():
    assert emulation_finding(None).severity == "ok"
    finding = emulation_finding("the program ip cannot be found")
    assert finding.severity == "note" and "the program ip" in finding.found


# ---- interfaces


@pytest.mark.parametrize(
    ("variable", "resolved", "address", "interface"),
    [
        ("eth0", None, "10.0.0.5", "eth0"),
        ("eth0,lo", None, "10.0.0.5", "eth0"),
        ("eth", "10.0.0.5", None, None),
        ("eth0,ib0", "10.0.0.5", None, None),
        (None, "10.0.0.5", "10.0.0.5", "eth0"),
        (None, "127.0.1.1", "127.0.1.1", "lo"),
        (None, None, "127.0.0.1", "lo"),
        ("", "10.0.0.5", "10.0.0.5", "eth0"),
    ],
)
def test_what_gloo_takes(variable, resolved, address, interface):
    choice = gloo_choice(variable, "node0", (LO, ETH), lambda host: resolved)
    assert (choice.address, choice.interface) == (address, interface)
    assert (choice.problem is None) == (address is not None)


@pytest.mark.parametrize(
    ("variable", "admitted"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth0", ["eth0"]),
        ("^docker,lo", ["eth0", "eth1"]),
        ("^=eth0", ["lo", "eth1", "docker0"]),
        ("ib", []),
    ],
)
def test_what_nccl_takes(variable, admitted):
    assert nccl_choice(variable, ["lo", "eth0", "eth1", "docker0"]) == admitted


def test_loopback_addresses():
    loopback = [a for a in ("127.0.1.1", "::1", "::ffff:127.0.0.1", "10.0.0.1", "fe80::1%eth0", None) if is_loopback(a)]
    assert loopback == ["127.0.1.1", "::1", "::ffff:127.0.0.1"]


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for addresses")
def test_interfaces_of_this_machine():
    (loopback,) = [each for each in interfaces() if each.name == "lo"]
    assert loopback.address == "127.0.0.1" and loopback.up and not loopback.usable_across_nodes


# ---- a job

VARIABLES = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


def test_the_job_is_in_the_environment():
    assert Job.of({}) is None
    assert Job.of({"MASTER_ADDR": "node0"}) is None
    job = Job.of(VARIABLES | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert (job.rank, job.world_size, job.address, job.port, job.store_is_launchers) == (1, 2, "node0", 29500, True)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"RANK": "2"}, "WORLD_SIZE is 2"),
        ({"MASTER_ADDR": ""}, "not MASTER_ADDR"),
        ({"WORLD_SIZE": "two"}, "'two'"),
        ({"MASTER_PORT": "70000"}, "70000"),
    ],
)
def test_impossible_jobs_are_problems_in_words(changed, words):
    with pytest.raises(ValueError, match=words):
        Job.of(VARIABLES | changed)


def test_ranks_in_words():
    assert [rank_list(ranks) for ranks in ([3], [0, 1], [5, 0, 1, 2])] == ["rank 3", "ranks 0, 1", "ranks 0 to 2, 5"]


def test_differences_are_told_by_rank():
    assert list(differences({0: HEALTHY, 1: HEALTHY})) == []
    present = {0: HEALTHY, 1: facts(torch="2.14.0"), 2: HEALTHY, 3: facts(variables={"NCCL_DEBUG": "INFO"})}
    of_torch, of_nccl = differences(present)
    assert of_torch.severity == "problem"
    assert of_torch.found == "torch: 2.13.0+cpu on ranks 0, 2, 3; 2.14.0 on rank 1"
    assert of_nccl.severity == "note" and "INFO on rank 3" in of_nccl.found


def test_sites_and_encryption_on_some_machines_are_problems():
    paris, lyon = ({"GRADWIRE_SITE": name, "GRADWIRE_TLS": f"{name}.pem:{name}.key:ca.pem"} for name in ("paris", "lyon"))
    assert list(differences({0: facts(variables=paris), 1: facts(variables=lyon)})) == []
    assert list(differences({0: HEALTHY, 1: facts(variables={"GRADWIRE_TLS": "0"})})) == []
    found = list(differences({0: facts(variables=paris), 1: HEALTHY, 2: facts(variables={"GRADWIRE_TLS": "on"})}))
    assert [(each.severity, each.found) for each in found] == [
        ("problem", "GRADWIRE_SITE: set on rank 0; (not set) on ranks 1, 2"),
        ("problem", "GRADWIRE_TLS: by certificates on rank 0; no encryption on rank 1; by the job's key on rank 2"),
    ]


def survey(size, **changed):
    nodes = {rank: facts(rank=rank, host=f"node{rank}") for rank in range(size)}
    return Survey(**{"present": nodes, **changed})


def problems_of(findings):
    return [finding.found for finding in findings if finding.severity == "problem"]


def test_missing_ranks_are_named():
    found = survey_findings(survey(2, missing=[2, 3]), 4, 60.0)
    assert problems_of(found) == ["ranks 2, 3 of 4 did not come within 60 s"]
    assert "--local-addr" in found[0].cure


def test_problems_of_other_ranks_are_told_with_their_ranks():
    given = survey(3)
    for rank in (1, 2):
        given.present[rank] = facts(rank=rank, kernel_level=None, kernel_problem="not built")
    (found,) = problems_of(survey_findings(given, 3, 60.0))
    assert found.startswith("ranks 1, 2: no C++ kernels: not built")


def test_gloo_that_cannot_connect_names_the_ranks_on_loopback():
    given = survey(2, unreachable={0: "Connection refused. More."})
    given.present[1] = facts(rank=1, host="node1", gloo=GlooChoice("127.0.1.1", "lo", "the host name"))
    (found,) = problems_of(survey_findings(given, 2, 60.0))
    assert "rank 1 would listen at loopback" in found and "Connection refused" in found and "More" not in found


def ring(rates):
    pairs = [pair for link in ring_links(len(rates)) for pair in (link, link[::-1])]
    return [Direction(source=a, destination=b, round_trip_us=100.0, gbps=rates[min(a, b)] if b else rates[a]) for a, b in pairs]


def test_links_are_judged_by_the_slowest():
    (found,) = on_topic(survey_findings(survey(3, directions=ring([0.5, 0.5, 0.5])), 3, 60.0), "links")
    assert found.severity == "ok" and "6 directions" in found.found and "500 Mb/s" in found.found
    # 2 (n-1)/n of 400 MB at 0.5 Gb/s
    assert "8.5 s a step in float32" in found.found


def test_a_slow_link_is_told_apart_from_the_others():
    directions = [
        Direction(source=a, destination=b, round_trip_us=100.0, gbps=0.1 if (a, b) == (2, 1) else 1.0)
        for link in ring_links(4)
        for a, b in (link, link[::-1])
    ]
    _, slow = on_topic(survey_findings(survey(4, directions=directions), 4, 60.0), "links")
    assert slow.severity == "note" and "rank 2 to 1 100 Mb/s" in slow.found and "rank 1 to 2" not in slow.found


def test_links_between_sites_are_compared_with_each_other_alone():
    given = survey(4)
    for rank, site in enumerate(["one", "one", "two", "two"]):
        given.present[rank] = facts(rank=rank, host=f"node{rank}", variables={"GRADWIRE_SITE": site})
    given.directions = [
        Direction(source=a, destination=b, round_trip_us=100.0, gbps=0.1 if {a, b} in ({1, 2}, {3, 0}) else 10.0)
        for link in ring_links(4)
        for a, b in (link, link[::-1])
    ]
    assert len(on_topic(survey_findings(given, 4, 60.0), "links")) == 1


def test_one_direction_of_a_single_link_may_be_slow():
    directions = [
        Direction(source=0, destination=1, round_trip_us=100.0, gbps=1.0),
        Direction(source=1, destination=0, round_trip_us=100.0, gbps=0.2),
    ]
    _, slow = on_topic(survey_findings(survey(2, directions=directions), 2, 60.0), "links")
    assert "rank 1 to 0 200 Mb/s" in slow.found


def test_a_link_that_fails_is_a_problem():
    directions = [Direction(source=0, destination=1, problem="Timed out waiting 6000ms. More")]
    (found,) = problems_of(survey_findings(survey(2, directions=directions), 2, 60.0))
    assert found == "rank 0 to 1 failed (Timed out waiting 6000ms)"


def test_ranks_that_send_far_without_bbr_are_named():
    directions = [Direction(source=a, destination=1 - a, round_trip_us=50_000.0, gbps=0.1) for a in (0, 1)]
    given = survey(2, directions=directions)
    given.present[0] = facts(rank=0, long_control="bbr")
    given.present[1] = facts(rank=1, long_control="cubic")
    _, far = on_topic(survey_findings(given, 2, 60.0), "links")
    assert far.severity == "note" and "50 ms" in far.found and "rank 1 would send with TCP's cubic" in far.found
    assert "tcp_bbr" in far.cure
    near = [msgspec.structs.replace(each, round_trip_us=100.0) for each in directions]
    given.directions = near
    assert len(on_topic(survey_findings(given, 2, 60.0), "links")) == 1


def test_rates_in_words():
    assert [rate_text(gbps) for gbps in (0.0095, 0.4781, 12.34)] == ["9.5 Mb/s", "478 Mb/s", "12.3 Gb/s"]


# ---- links


def test_the_ring_of_links():
    assert [ring_links(size) for size in (1, 2, 3)] == [[], [(0, 1)], [(0, 1), (1, 2), (2, 0)]]
    assert all(2 * size * seconds_each(size) < 30 for size in (2, 8, 64, 1000))


class SlowWire:
    """In place of a wire: messages between two threads that take as long as their bytes on a link of `gbps`."""

    def __init__(self, incoming, outgoing, gbps):
        self.incoming, self.outgoing, self.gbps, self.sizes = incoming, outgoing, gbps, []

    def put(self, number):
        self.outgoing.put(number)

    def take(self):
        return self.incoming.get(timeout=30)

    def send(self, size):
        self.sizes.append(size)
        time.sleep(size * 8 / self.gbps / 1e9)
        self.outgoing.put(b"")

    def receive(self, size):
        self.incoming.get(timeout=30)


@pytest.mark.parametrize("gbps", [0.01, 10.0])
def test_messages_grow_until_they_take_long_enough(gbps):
    there, back = queue.Queue(), queue.Queue()
    wire = SlowWire(back, there, gbps)
    follower = threading.Thread(target=follow, args=(SlowWire(there, back, gbps),))
    follower.start()
    _, measured = lead(wire, 0.1)
    follower.join(10)
    assert not follower.is_alive()
    # a message takes at most eight times as long as wanted, but sleeping is not exact
    assert max(wire.sizes) * 8 / gbps / 1e9 < 0.8
    assert 0 < measured < 2 * gbps


class FarWire(SlowWire):
    """The same with round trips of 20 ms, over TCP that doubles what is on its way in each of them."""

    window = 2**14

    def send(self, size):
        self.sizes.append(size)
        while size > 0:
            time.sleep(max(0.02, min(size, self.window) * 8 / self.gbps / 1e9))
            size -= self.window
            self.window = min(2 * self.window, int(0.02 * self.gbps * 1e9 / 8))
        self.outgoing.put(b"")


@pytest.mark.timing
def test_a_far_link_is_measured_when_tcp_knows_its_rate():
    there, back = queue.Queue(), queue.Queue()
    wire = FarWire(back, there, 0.1)
    follower = threading.Thread(target=follow, args=(FarWire(there, back, 0.1),))
    follower.start()
    with mock.patch.object(wire, "take", lambda: (time.sleep(0.02), SlowWire.take(wire))[1]):
        _, measured = lead(wire, 0.1)
    follower.join(10)
    assert not follower.is_alive()
    assert 0.05 < measured < 0.13


# ---- never hanging


def test_a_call_that_hangs_has_an_end():
    assert bounded(lambda: 5, 10.0) == 5
    with pytest.raises(KeyError):
        bounded(lambda: {}["no"], 10.0)
    with pytest.raises(TimeoutError):
        bounded(threading.Event().wait, 0.05)


def test_a_meeting_point_that_nobody_opens():
    job = Job(1, 2, "127.0.0.1", free_port(), False, "0")
    with pytest.raises(ConnectionError, match="rank 0 did not come"):
        Meeting(job, 0.3)


def test_a_meeting_point_whose_name_cannot_be_looked_up():
    job = Job(1, 2, "no-such-machine.invalid", free_port(), True, "0")
    with pytest.raises(ConnectionError, match=r"cannot look up the name no-such-machine\.invalid.*--local-addr"):
        Meeting(job, 0.3)


# ---- traps


def test_traps_are_those_of_the_version():
    assert {trap.found for trap in traps_of("2.13.0+cpu")} == {trap.found for trap in TRAPS}
    assert all(trap.severity == "note" and trap.cure for trap in traps_of("2.13.0"))
    (unknown,) = traps_of("2.14.0")
    assert "2.13" in unknown.found
    assert traps_of(None) == []


# ---- the report


def report(*findings):
    return Report(
        made=Made(host="node0", date="2026-01-01", command="gradwire doctor"),
        world_size=2,
        findings=findings,
        traps=tuple(traps_of("2.13.0")),
        links=(Direction(source=0, destination=1, gbps=0.5, round_trip_us=90.0),),
        ranks=(HEALTHY,),
    )


PROBLEM = Finding(topic="ranks", severity="problem", found="rank 1 of [2] did not come", why="w", cure="c")


@pytest.mark.parametrize("width", [24, 80, 200])
def test_the_table_fits_any_width(width):
    console = Console(width=width, force_terminal=False)
    with console.capture() as captured:
        for table in tables(report(PROBLEM)):
            console.print(table)
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= width
    if width == 200:
        assert any("rank 1 of [2] did not come" in line for line in lines)
        assert any("500 Mb/s" in line for line in lines)


def test_the_last_lines_repeat_the_problems():
    assert summary(report()) == "No problems, 0 notes."
    assert summary(report(PROBLEM)) == "1 problem, 0 notes:\n  ranks: rank 1 of [2] did not come"


def test_examine_outside_of_a_job():
    shown = []
    code = examine(1.0, shown.append, environ={})
    (only,) = shown
    assert code == (1 if only.problems else 0)
    assert "gradwire emulate --nodes 2 -- -m gradwire doctor" in on_topic(only.findings, "links")[0].found


def test_examine_says_when_the_job_is_impossible():
    shown = []
    assert examine(1.0, shown.append, environ=VARIABLES | {"RANK": "7"}) == 1
    assert "RANK is 7" in on_topic(shown[0].findings, "job")[0].found


def test_facts_travel_as_json():
    ours = gather_facts({"RANK": "3", "NCCL_DEBUG": "INFO", "SECRET": "x"})
    assert msgspec.json.decode(msgspec.json.encode(ours), type=Facts) == ours
    assert ours.rank == 3 and ours.variables == {"NCCL_DEBUG": "INFO", "RANK": "3"}
    assert ours.torch and ours.backends["gloo"] and ours.encode_gbytes_s > 0
    newer = json.loads(msgspec.json.encode(ours)) | {"a_field_of_a_later_version": 1}
    assert msgspec.json.decode(json.dumps(newer), type=Facts) == ours


# ---- whole runs


def start(popen, *arguments, **variables):
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return popen(
        [sys.executable, "-m", "gradwire", "doctor", *arguments],
        env=environment | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_rank(popen, rank, size, port, *arguments):
    return start(popen, *arguments, RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def finish(process):
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert "Traceback" not in err
    # torch's store warns where a busy machine keeps it waiting
    return process.returncode, out, "".join(line for line in err.splitlines(True) if "waitForInput" not in line)


def test_a_run_alone(interpreters):
    as_json, as_table = start(interpreters.start, "--json"), start(interpreters.start, COLUMNS="60")
    code, out, _ = finish(as_json)
    told = json.loads(out)
    assert code == (1 if told["problems"] else 0)
    assert told["world_size"] == 1 and told["links"] == [] and len(told["ranks"]) == 1
    assert {"versions", "backends", "kernels", "threads", "timeout", "interface", "testbed", "links"} <= {
        finding["topic"] for finding in told["findings"]
    }
    code_of_table, out, _ = finish(as_table)
    assert code_of_table == code
    assert "gradwire doctor" in out and max(map(len, out.splitlines()[:-1])) <= 60


def test_two_ranks_measure_their_link_and_leave_with_one_code(interpreters):
    port = free_port()
    ranks = [start_rank(interpreters.start, rank, 2, port, "--json") for rank in range(2)]
    (code, out, _), (other_code, other_out, other_err) = [finish(rank) for rank in ranks]
    told = json.loads(out)
    assert code == other_code == (1 if told["problems"] else 0)
    assert (other_out, other_err) == ("", "")
    assert [(link["source"], link["destination"]) for link in told["links"]] in ([(0, 1), (1, 0)], [(1, 0), (0, 1)])
    assert all(link["gbps"] > 0 and link["round_trip_us"] > 0 for link in told["links"])
    assert [rank["rank"] for rank in told["ranks"]] == [0, 1]


def test_a_rank_that_does_not_come_is_named_in_time(interpreters):
    finish(start(interpreters.start))  # the server runs now, and the ranks start at the same time
    port, start_of_all = free_port(), time.monotonic()
    ranks = [start_rank(interpreters.start, rank, 3, port, "--json", "--timeout", "4") for rank in (0, 2)]
    (code, out, _), (other_code, _, other_err) = [finish(rank) for rank in ranks]
    assert time.monotonic() - start_of_all < 100
    assert (code, other_code) == (1, 1)
    assert "rank 1 of 3 did not come within 4 s" in [f["found"] for f in json.loads(out)["findings"]]
    assert "gradwire doctor: rank 2 leaves" in other_err and "waited for rank 1" in other_err


def test_without_rank_0_the_others_end_in_words():
    code, out, err = finish(start_rank(subprocess.Popen, 1, 2, free_port(), "--timeout", "2"))
    assert (code, out) == (1, "")
    assert err.startswith("gradwire doctor: rank 1 did not reach the meeting point") and "within 2 s" in err
