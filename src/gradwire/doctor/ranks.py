"""Judges a job by its survey: missing ranks, differences, the speed of links. Pure: no communication."""

import statistics
from collections.abc import Iterator, Mapping

from gradwire.core import FAR_US, qsgd_bytes
from gradwire.doctor.differences import differences, rank_list
from gradwire.doctor.facts import SITE, Facts, is_loopback
from gradwire.doctor.links import Direction, rate_text
from gradwire.doctor.machine import machine_findings
from gradwire.doctor.meeting import Survey
from gradwire.doctor.report import Finding, note, ok, problem

MUCH_SLOWER = 2.0
"""Factor between the speeds of other links and a link that is reported as slow."""
MILLION_PARAMETERS = 100


def survey_findings(survey: Survey, world_size: int, timeout_s: float) -> list[Finding]:
    """Return the findings about the job as a whole, and the problems of single ranks other than 0."""
    return [
        *_attendance(survey, world_size, timeout_s),
        *differences(survey.present),
        *_problems_elsewhere(survey.present),
        *_connections(survey),
        *_rates(survey, world_size),
        *_far_links(survey),
    ]


def _seconds(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:.0f} s"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def _attendance(survey: Survey, world_size: int, timeout_s: float) -> Iterator[Finding]:
    if survey.stopped is not None:
        yield problem(
            "ranks",
            survey.stopped,
            "The ranks could not be examined together.",
            "Start every rank with the same command, MASTER_ADDR and MASTER_PORT. All ranks must reach the address.",
        )
    elif survey.missing:
        yield problem(
            "ranks",
            f"{rank_list(survey.missing)} of {world_size} did not come within {timeout_s:g} s",
            "The job would wait for them in init_process_group, and then fail.",
            "Look at their logs: did they start, with the same MASTER_ADDR and MASTER_PORT? Does a firewall block the port? "
            "Can they look up the name in MASTER_ADDR? If not, give torchrun --local-addr with each machine's own address. "
            "Slow starts need a longer --timeout. No link was measured.",
        )
    else:
        nodes = len({facts.node for facts in survey.present.values()})
        where = f"on {nodes} nodes" if nodes > 1 else "on one node"
        yield ok("ranks", f"all {world_size} ranks came, {where}")
    if survey.twice:
        yield problem(
            "ranks",
            f"several processes say that they are {rank_list(survey.twice)}",
            "The job would hang or add the wrong gradients.",
            "Give every process another RANK; with torchrun, give every node another --node-rank.",
        )


def _problems_elsewhere(present: Mapping[int, Facts]) -> Iterator[Finding]:
    """Yield the problems of ranks other than 0, except those that rank 0 has too."""
    own = {finding.found for finding in machine_findings(present[0])} if 0 in present else set()
    seen: dict[str, tuple[Finding, list[int]]] = {}
    for rank, facts in sorted(present.items()):
        for finding in machine_findings(facts):
            if finding.severity == "problem" and finding.found not in own:
                seen.setdefault(finding.found, (finding, []))[1].append(rank)
    for finding, ranks in seen.values():
        yield problem(finding.topic, f"{rank_list(ranks)}: {finding.found}", finding.why, finding.cure)


def _connections(survey: Survey) -> Iterator[Finding]:
    """Yield the problems of gloo and of the links."""
    nodes = {facts.node for facts in survey.present.values()}
    on_loopback = [r for r, facts in survey.present.items() if facts.gloo and is_loopback(facts.gloo.address)]
    if survey.unreachable:
        said = min(survey.unreachable.items())
        hint = ""
        if len(nodes) > 1 and on_loopback:
            hint = f"; {rank_list(on_loopback)} would listen at loopback, which other nodes cannot reach"
        yield problem(
            "gloo",
            f"{rank_list(survey.unreachable)} could not join a gloo group{hint} (rank {said[0]}: {_short(said[1])})",
            "init_process_group('gloo') would fail the same way; the ranks did reach MASTER_ADDR.",
            "On every node, export GLOO_SOCKET_IFNAME=the interface that reaches the other nodes, and open all ports between "
            "the nodes in the firewall. If one port is all that can be open, make a private network through one port, such as "
            "WireGuard, and name the interface that reaches it.",
        )
    failed = [direction for direction in survey.directions if direction.problem is not None]
    if failed:
        first, others = failed[0], failed[1:]
        also = f"; so did {', '.join(_arrow(d) for d in others[:6])}{', ...' * (len(others) > 6)}" if others else ""
        yield problem(
            "links",
            f"{_arrow(first)} failed ({_short(first.problem or '')}){also}",
            "A training step would fail or hang there. Later failures may follow from the first one.",
            "Look at the logs of both ranks: did a process die? Then check the network between their nodes.",
        )
    if survey.silent:
        yield problem(
            "ranks",
            f"{rank_list(survey.silent)} came, but fell silent while gloo connected or links were measured",
            "A process died or hangs, or its network is cut.",
            "Look at the log of each of these ranks.",
        )


def _rates(survey: Survey, world_size: int) -> Iterator[Finding]:
    measured = [(d.gbps, d) for d in survey.directions if d.gbps is not None]
    if not measured:
        return
    rate, slowest = min(measured, key=lambda pair: pair[0])
    numel = MILLION_PARAMETERS * 10**6
    # every rank sends 2 (n-1)/n of its gradient, in an all-reduce and in the two phases of a compressed exchange alike
    share = 2 * (world_size - 1) / world_size
    plain_s = share * 4 * numel * 8 / (rate * 1e9)
    compressed_s = share * sum(qsgd_bytes([(numel, 4)], 128, "max")) * 8 / (rate * 1e9)
    yield ok(
        "links",
        f"{len(measured)} direction{'s' * (len(measured) != 1)} measured; the slowest is {_arrow(slowest)}: "
        f"{rate_text(rate)}, round trip {slowest.round_trip_us or 0:.0f} us. At that rate the gradients of "
        f"{MILLION_PARAMETERS}M parameters take {_seconds(plain_s)} a step in float32, {_seconds(compressed_s)} in 4 bits",
    )
    for kind in ("between sites", "between nodes", "inside a node"):
        alike = [(g, d) for g, d in measured if _kind_of(d, survey.present) == kind]
        usual = statistics.median_high(g for g, _ in alike) if alike else 0.0  # of two, the faster
        slow = [(g, d) for g, d in alike if g * MUCH_SLOWER < usual]
        if slow:
            yield note(
                "links",
                f"slower than the other links {kind} ({rate_text(usual)}): "
                + "; ".join(f"{_arrow(d)} {rate_text(g)}" for g, d in slow),
                "The slowest link limits every exchange.",
                "Check that node's adapter, cable, switch port and other traffic, and measure again.",
            )


def _kind_of(direction: Direction, present: Mapping[int, Facts]) -> str:
    ends = [present.get(rank, Facts()) for rank in (direction.source, direction.destination)]
    sites, nodes = ({each.variables.get(SITE, "") for each in ends}, {each.node for each in ends})
    return "between sites" if len(sites) > 1 else "between nodes" if len(nodes) > 1 else "inside a node"


def _far_links(survey: Survey) -> Iterator[Finding]:
    """Yield a note on ranks that send over far links without BBR."""
    far = [each for each in survey.directions if (each.round_trip_us or 0.0) >= 2 * FAR_US and each.source in survey.present]
    controls = {each.source: survey.present[each.source].long_control for each in far}
    without = sorted(rank for rank, control in controls.items() if control not in ("", "bbr"))
    if without:
        yield note(
            "links",
            f"round trips of {max(each.round_trip_us or 0.0 for each in far) / 1e3:.0f} ms, on which "
            f"{rank_list(without)} would send with TCP's {', '.join(sorted({controls[rank] for rank in without}))}",
            "After a lost packet, and after the pause of a step, it takes several round trips to come to its full rate again. "
            "BBR does not.",
            "On each of these machines: sudo modprobe tcp_bbr, and sudo sysctl -w "
            "net.ipv4.tcp_allowed_congestion_control='reno cubic bbr'. gradwire then takes BBR for far links by itself.",
        )


def _arrow(direction: Direction) -> str:
    return f"rank {direction.source} to {direction.destination}"


def _short(text: str) -> str:
    """Return the first sentence of a backend's message."""
    line = " ".join(text.split()).partition(". ")[0]
    return line if len(line) <= 200 else line[:197] + "..."
