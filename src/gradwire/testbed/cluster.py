"""An emulated cluster: nodes as network namespaces, and runs of ranks on the nodes."""

import contextlib
import itertools
import logging
import os
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Self

from gradwire.errors import TestbedError
from gradwire.testbed import namespaces, network
from gradwire.testbed.namespaces import needs_user_namespace, permission_problem
from gradwire.testbed.network import parse_rate
from gradwire.testbed.supervisor import (
    Grace,
    LineCallback,
    ProcessEnd,
    RankCommand,
    Supervisor,
    exit_on_termination,
    rank_variables,
    recorded,
)
from gradwire.testbed.wide_area import Relay, RelayCounts, parse_wide_area

log = logging.getLogger("gradwire.testbed")

_LAUNCHER = Path(__file__).with_name("launch.py")
MOST_NODES = 1000  # a bridge takes 1023 ports
MOST_SITES = 64

_serials = itertools.count()


class EmulatedCluster:
    """`nodes` network namespaces on a bridge, with `ranks_per_node` ranks in each; a context manager.

    inter is the rate of each node's link in each direction ("500mbit", "1gbit"; see `parse_rate`), intra the rate of the
    loopback inside a node; None means unlimited. With a rate of the loopback ranks share no memory, which has no rate. Every
    node has an equal share of this process's processors. Entering removes the leftovers of dead clusters and makes the
    namespaces. Leaving kills the processes inside and removes the namespaces.

    sites: the number of sites; neighbouring nodes share one. wan: the network between sites, as "50ms 2ms loss 0.1% up 20mbit
    down 100mbit": the round trip, the most jitter of one direction, lost segments, and each site's rates, or `rate` for both;
    `port 51820` is the only port that the sites' firewalls have open.
    Its queues are those of routers: what they cannot hold is lost, and TCP slows down. Ranks know their sites by GRADWIRE_SITE,
    unless the variable is set, also to nothing.

    >>> with EmulatedCluster(2, inter="500mbit") as cluster:  # doctest: +SKIP
    ...     code = cluster.run([sys.executable, "-u", "train.py"])
    ...     cluster.set_inter("100mbit")
    ...     (sent, received), _ = cluster.counters()

    Raises TestbedError for impossible sizes or rates, and on entering if namespaces cannot be made.
    """

    def __init__(
        self,
        nodes: int,
        ranks_per_node: int = 1,
        inter: str | None = None,
        intra: str | None = None,
        sites: int = 1,
        wan: str | None = None,
    ) -> None:
        if not 1 <= nodes <= MOST_NODES:
            raise TestbedError(f"nodes is {nodes}; an emulated cluster has 1 to {MOST_NODES} nodes.")
        if ranks_per_node < 1:
            raise TestbedError(f"ranks_per_node is {ranks_per_node}; every node runs at least 1 rank.")
        if not 1 <= sites <= min(nodes, MOST_SITES):
            raise TestbedError(f"sites is {sites}; a cluster of {nodes} nodes has 1 to {min(nodes, MOST_SITES)} sites.")
        if (sites > 1) != (wan is not None):
            raise TestbedError(
                f"sites is {sites} and wan is {wan!r}. Two sites or more have a network between them, and one has none. Write, "
                'for example, sites=2, wan="50ms rate 100mbit".'
            )
        self.nodes, self.sites, self.ranks_per_node, self.world_size = (nodes, sites, ranks_per_node, nodes * ranks_per_node)
        self.grace = Grace()
        self._inter = None if inter is None else parse_rate(inter)
        self._intra = None if intra is None else parse_rate(intra)
        self._prefix = f"gradwire-{namespaces.this_owner()}-{next(_serials)}-"
        self._hub = f"{self._prefix}hub"
        self._nodes = [f"{self._prefix}node{index}" for index in range(nodes)]
        self._wan = None if wan is None else parse_wide_area(wan)
        self._relay: Relay | None = None
        self._alive = False
        self._busy = threading.Lock()
        self._runs = 0
        self._limited = False  # has or had a limit between nodes: there is a token bucket to change
        self._terminations = contextlib.ExitStack()

    def __enter__(self) -> Self:
        problem = permission_problem()
        if problem is None and needs_user_namespace():
            problem = "this user needs a user namespace to make namespaces, and this process is not in one"
        if problem is not None:
            raise TestbedError(
                f"no emulated cluster can be made here: {problem}. Run as root, use `gradwire emulate`, or call "
                "gradwire.testbed.reexec_in_user_namespace_if_needed first."
            )
        self._terminations.enter_context(exit_on_termination())
        try:
            namespaces.sweep()
            network.build(self._hub, self._nodes, self.sites)
            self._alive = True
            if self._wan is not None:
                self._relay = Relay(self._hub, self.sites)
                for site in range(self.sites):
                    self._relay.set(site, self._wan)
            self._limit_inter(self._inter)
            if self._intra is not None:
                network.limit_intra(self._nodes, self._intra)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Remove the cluster; may be repeated. A signal that arrives meanwhile takes effect afterwards."""
        with recorded() as received:
            self._alive = False
            if self._relay is not None:
                self._relay.close()
                self._relay = None
            namespaces.remove(namespaces.existing(self._prefix))
        try:
            if received.first is not None and error is None:
                signal.raise_signal(received.first)
        finally:
            self._terminations.close()

    def set_inter(self, rate: str | None) -> None:
        """Change the rate of every node's link in both directions; None: unlimited. Ranks may run meanwhile."""
        self._require_alive()
        self._limit_inter(None if rate is None else parse_rate(rate))

    def set_node(self, node: int, rate: str, up: str | None = None) -> None:
        """Change the rate of one node's link. Ranks may run meanwhile. `set_inter` makes all nodes alike again.

        up: the rate of sending, if it differs from the rate of receiving.
        """
        self._check(node)
        down = parse_rate(rate)
        network.limit_node(self._hub, {node: self._nodes[node]}, down, down if up is None else parse_rate(up))
        self._limited = True

    def set_wan(self, wan: str, site: int | None = None) -> None:
        """Change the network between sites; with `site` that of one site alone. Ranks may run meanwhile."""
        relay, changed = self._require_relay(), parse_wide_area(wan)
        if site is not None and not 0 <= site < self.sites:
            raise TestbedError(f"site is {site}; this cluster has sites 0 to {self.sites - 1}.")
        for each in range(self.sites) if site is None else [site]:
            relay.set(each, changed)

    def wan_counts(self) -> RelayCounts:
        """Return what the relay between sites did: what was lost, what full queues dropped, how late frames were."""
        return self._require_relay().counts()

    def _require_relay(self) -> Relay:
        self._require_alive()
        if self._relay is None:
            raise TestbedError("this cluster has one site. Make it with sites=2 and wan=...")
        return self._relay

    def set_link(self, node: int, up: bool) -> None:
        """Cut or restore a node's link. Packets sent over a cut link are lost. Ranks may run meanwhile."""
        self._check(node)
        network.set_link(self._hub, node, up)

    def _check(self, node: int) -> None:
        self._require_alive()
        if not 0 <= node < self.nodes:
            raise TestbedError(f"node is {node}; this cluster has nodes 0 to {self.nodes - 1}.")

    def namespace(self, node: int) -> Path:
        """Return the file of a node's network namespace, which a process enters by setns."""
        self._require_alive()
        return namespaces.NAMESPACE_FOLDER / self._nodes[node]

    def counters(self) -> list[tuple[int, int]]:
        """Return the (sent, received) bytes of each node's interface. A large segment counts one Ethernet header."""
        self._require_alive()
        return network.read_counters(self._hub, self.nodes)

    def run(
        self,
        argv: list[str],
        *,
        env: dict[str, str] | None = None,
        on_line: LineCallback | None = None,
        timeout: float | None = None,
    ) -> int:
        """Execute `argv` once per rank. Returns 0, or the exit code of the first failed rank (128 + its signal).

        The ranks get this process's environment, env, and torchrun's variables. on_line(rank, stream, line) gets each line of
        "stdout" or "stderr" without its newline, in the calling thread; the default prints `[rank] line`. After a failure the
        other ranks are ended in 10 s. After `timeout` seconds all ranks are ended and the result is 124. SIGINT, SIGTERM and
        SIGHUP are passed on to the ranks; when the ranks have ended, they raise here (KeyboardInterrupt, SystemExit).
        """
        outcome = self.supervise(argv, env=env, on_line=on_line, timeout=timeout)
        if outcome.received is not None:
            signal.raise_signal(outcome.received)
        return outcome.code

    def supervise(
        self,
        argv: list[str],
        *,
        env: dict[str, str] | None = None,
        on_line: LineCallback | None = None,
        timeout: float | None = None,
    ) -> ProcessEnd:
        """Run ranks like `run`, but return a received signal in the result instead of raising it."""
        self._require_alive()
        environment = os.environ | (env or {})
        if not argv or shutil.which(argv[0], path=environment.get("PATH")) is None:
            raise TestbedError(f"the command {argv!r} does not begin with a program on PATH. Correct its first word.")
        if not self._busy.acquire(blocking=False):
            raise TestbedError("this cluster already runs ranks. Wait for their end, or make a second EmulatedCluster.")
        try:
            port = 29500 + self._runs % 1000  # not the port of the last run, because its connections may linger
            self._runs += 1
            commands = []
            for rank in range(self.world_size):
                entering = self._entering(rank // self.ranks_per_node)
                variables = {
                    **rank_variables(rank, self.nodes, self.ranks_per_node, network.address_of(0), port, network.INTERFACE),
                    "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", "1"),
                    namespaces.OWNER_VARIABLE: namespaces.this_owner(),
                    **({} if self._intra is None else {"GRADWIRE_SHARED_MEMORY": "off"}),
                }
                if self.sites > 1:
                    site = network.site_of(rank // self.ranks_per_node, self.nodes, self.sites)
                    variables["GRADWIRE_SITE"] = environment.get("GRADWIRE_SITE", f"site{site}")
                commands.append(RankCommand(rank, entering + argv, environment | variables))
            return Supervisor(on_line, self.grace, self._end_leftovers).run(commands, timeout)
        finally:
            self._busy.release()

    def _entering(self, node: int) -> list[str]:
        """Return the words that run a following command on a node."""
        enter = [namespaces.find_tool("ip") or "ip", "netns", "exec", self._nodes[node]]
        launch = [sys.executable, "-I", "-S", str(_LAUNCHER), str(os.getpid()), f"node{node}"]
        usable = sorted(os.sched_getaffinity(0))
        share = max(1, len(usable) // self.nodes)  # with too few processors, nodes share them
        first = node * share % len(usable)
        return [*enter, *launch, network.hosts_file(self.nodes), ",".join(map(str, usable[first : first + share]))]

    def _limit_inter(self, bits_per_second: float | None) -> None:
        if bits_per_second is not None or self._limited:
            self._limited = True
            rate = network.FREE_BITS_PER_SECOND if bits_per_second is None else bits_per_second
            network.limit_node(self._hub, dict(enumerate(self._nodes)), rate, rate)

    def _end_leftovers(self) -> None:
        if survivors := namespaces.kill_inside(self._nodes):
            log.warning("processes %s of this run do not end on SIGKILL", survivors)

    def _require_alive(self) -> None:
        if not self._alive:
            raise TestbedError("this cluster does not exist. Use it inside `with EmulatedCluster(...) as cluster:`.")


def emulate(
    nodes: int,
    ranks_per_node: int,
    inter: str | None,
    intra: str | None,
    command: list[str],
    sites: int = 1,
    wan: str | None = None,
) -> int:
    """Run `command` (`script.py args` or `-m module args`) on every rank of a new cluster. Returns the exit code.

    The code is 0, or that of the first failed rank: 128 + signal for a rank that a signal ended. Users other than root call
    `reexec_in_user_namespace_if_needed` first. Raises TestbedError.
    """
    argv = [sys.executable, "-u", *_checked(command)]
    try:
        with EmulatedCluster(nodes, ranks_per_node, inter, intra, sites, wan) as cluster:
            code = cluster.supervise(argv).code
            if cluster.sites > 1:
                try:
                    problem = cluster.wan_counts().problem()
                except TestbedError as error:  # the ranks' exit code counts all the same
                    problem = str(error)
                if problem is not None:
                    log.warning("%s", problem)
            return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output has ended, as in `gradwire emulate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _checked(command: list[str]) -> list[str]:
    if not command:
        raise TestbedError("no script was given. Add it after `--`: gradwire emulate --nodes 2 -- train.py --epochs 1")
    if command[0] in ("-m", "-c"):
        if len(command) < 2:
            raise TestbedError(f"nothing follows {command[0]}. Write, for example: gradwire emulate -- -m package.train")
        return command
    if not Path(command[0]).exists():
        raise TestbedError(
            f"the script {command[0]!r} does not exist in {Path.cwd()}. Begin the command with the script or with "
            "`-m module`, without `python` or `torchrun`."
        )
    return command
