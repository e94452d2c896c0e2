"""Emulated clusters: what ranks are given and return, that links keep their rate, and that nothing is left behind."""

import doctest
import logging
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from gradwire.errors import TestbedError
from gradwire.testbed import EmulatedCluster, emulate, namespaces, network, parse_rate, permission_problem
from gradwire.testbed.supervisor import Grace, RankCommand, Supervisor

SOURCE = Path(__file__).resolve().parents[2] / "src"
PATHS = f"{SOURCE}:{Path(msgspec.__file__).parents[1]}"
"""Where another interpreter of this version finds gradwire's testbed, which needs msgspec."""
Script = Callable[[str], list[str]]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Write a program under a name with spaces; the command that runs it."""

    def write(text: str) -> list[str]:
        path = tmp_path / "a script.py"
        path.write_text(textwrap.dedent(text))
        return [sys.executable, "-u", str(path)]

    return write


def gather(cluster: EmulatedCluster, argv: list[str], **options: object) -> tuple[int, list[tuple[int, str, str]]]:
    lines: list[tuple[int, str, str]] = []
    code = cluster.run(argv, on_line=lambda *line: lines.append(line), **options)  # type: ignore[arg-type]
    return code, lines


def wait_until(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what the test waits for did not come"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    return namespaces.start_time(pid) is not None


@pytest.mark.parametrize(
    ("text", "bits_per_second"),
    [("500mbit", 5e8), ("1gbit", 1e9), ("100kbit", 1e5), ("2.5Gbit", 2.5e9), ("64000bit", 64e3), (" .5 gbit ", 5e8)],
)
def test_rates(text: str, bits_per_second: float) -> None:
    assert parse_rate(text) == bits_per_second


@pytest.mark.parametrize("text", ["", "fast", "500", "500mbps", "-1gbit", "0mbit", "1e3mbit", "nanmbit", "9999gbit"])
def test_a_wrong_rate_is_named_with_examples(text: str) -> None:
    with pytest.raises(TestbedError) as error:
        parse_rate(text)
    assert repr(text) in str(error.value)
    assert "100mbit" in str(error.value) or "Leave out the rate" in str(error.value)


@pytest.mark.parametrize("size", [1, 3, 7, 4097])
def test_lines_do_not_depend_on_how_bytes_arrive(size: int) -> None:
    data = "one\r\ntwo\rüber\n\n".encode() + b"\xff\xfe\n" + b"x" * 3_000 + b"\nend\r"
    pieces = f"import os; [os.write(1, {data!r}[at : at + {size}]) for at in range(0, {len(data)}, {size})]"
    lines: list[tuple[int, str, str]] = []
    supervisor = Supervisor(lambda *line: lines.append(line), Grace())
    assert supervisor.run([RankCommand(0, [sys.executable, "-c", pieces], dict(os.environ))], 60.0).code == 0
    wanted = ["one", "two", "über", "", r"\xff\xfe", "x" * 3_000, "end"]
    assert lines == [(0, "stdout", line) for line in wanted]


def test_a_run_waits_for_no_output_that_has_ended() -> None:
    supervisor = Supervisor(lambda *line: None, Grace())
    supervisor._watchers = 1
    supervisor._said.put((0, "stdout", None))
    closing = threading.Thread(target=supervisor._hand_on, args=(3600.0,), daemon=True)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(network).failed == 0


def test_the_room_needs_no_torch() -> None:
    code = "import sys, gradwire.testbed; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(SOURCE)})


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(0, 1), (1001, 1), (2, 0)])
def test_impossible_sizes(nodes: int, ranks_per_node: int) -> None:
    with pytest.raises(TestbedError, match=r"is (0|1001)"):
        EmulatedCluster(nodes, ranks_per_node)


def test_emulate_explains_a_wrong_command(tmp_path: Path) -> None:
    for command in ([], ["-m"], ["python", "train.py"], [str(tmp_path / "gone.py")]):
        with pytest.raises(TestbedError, match=r"gradwire emulate|the script"):
            emulate(1, 1, None, None, command)


@pytest.mark.network
def test_ranks_get_torchruns_variables(clean: None, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    argv = script("""
        import os, socket, sys
        names = "LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK NODE_RANK MASTER_ADDR OMP_NUM_THREADS EXTRA"
        print(os.environ["RANK"], *(os.environ[name] for name in names.split()), *sys.argv[1:])
        socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"]) + int(os.environ["LOCAL_RANK"])))
        interfaces = {name for _, name in socket.if_nameindex()}
        assert interfaces == {"lo", os.environ["GLOO_SOCKET_IFNAME"]}, interfaces
        assert os.environ["TP_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == os.environ["GLOO_SOCKET_IFNAME"]
        assert socket.gethostname() == "node" + os.environ["NODE_RANK"]
        assert socket.gethostbyname("node0") == os.environ["MASTER_ADDR"]
    """)
    with EmulatedCluster(2, 2) as cluster:
        assert cluster.world_size == 4
        assert cluster.counters() == [(0, 0), (0, 0)]  # silence: no IPv6, no spanning tree
        code, lines = gather(cluster, [*argv, "two words"], env={"EXTRA": "extra"})
        assert code == 0, lines
        assert cluster.run(argv, env={"EXTRA": "", "OMP_NUM_THREADS": "2"}, on_line=lambda *_: None) == 0
    said = sorted(line for _, _, line in lines)
    assert said == [f"{rank} {rank % 2} 4 2 {rank // 2} {rank // 2} 10.218.0.1 1 extra two words" for rank in range(4)]


@pytest.mark.network
@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_nodes_have_processors_of_their_own(clean: None, script: Script, nodes: int) -> None:
    usable = os.sched_getaffinity(0)
    with EmulatedCluster(nodes, 2) as cluster:
        code, lines = gather(cluster, script("import os; print(*sorted(os.sched_getaffinity(0)))"))
    assert code == 0
    given = {rank: [int(word) for word in line.split()] for rank, _, line in lines}
    share = max(1, len(usable) // nodes)
    assert all(len(processors) == share and usable >= set(processors) for processors in given.values())
    assert given[0] == given[1]  # of one node
    if len(usable) >= nodes:
        assert len({processor for processors in given.values() for processor in processors}) == share * nodes


@pytest.mark.network
def test_output_is_whole_and_prefixed(clean: None, script: Script, capfd: pytest.CaptureFixture[str]) -> None:
    argv = script(r"""
        import os, sys
        os.write(1, b"\xff bytes\n" + b"y" * 300_000 + b"\n")
        print("wrong", file=sys.stderr)
        os.write(1, b"no newline")
    """)
    assert emulate(1, 2, None, None, [argv[-1]]) == 0
    out, err = capfd.readouterr()
    for rank in range(2):
        mine = [line for line in out.splitlines() if line.startswith(f"[{rank}]")]
        assert mine == [rf"[{rank}] \xff bytes", f"[{rank}] " + "y" * 300_000, f"[{rank}] no newline"]
    assert sorted(err.splitlines()) == ["[0] wrong", "[1] wrong"]


@pytest.mark.network
def test_the_first_failure_ends_the_run(clean: None, script: Script, caplog: pytest.LogCaptureFixture) -> None:
    argv = script("""
        import os, sys, time
        runs = f"{sys.argv[0]}.runs"
        if os.environ["RANK"] == "1":
            while not os.path.exists(runs):
                time.sleep(0.01)
            sys.exit(7)
        open(runs, "w").close()
        time.sleep(0.3)
        print("I saw it too")
        time.sleep(60)
    """)
    with caplog.at_level(logging.WARNING, "gradwire.testbed"), EmulatedCluster(2) as cluster:
        cluster.grace = Grace(after_failure=3.0, after_signal=2.0)
        code, lines = gather(cluster, argv)
    assert code == 7
    assert lines == [(0, "stdout", "I saw it too")]
    assert "rank 1 ended with exit code 7" in caplog.text


@pytest.mark.network
def test_codes_of_signals_timeouts_and_missing_programs(clean: None, script: Script) -> None:
    argv = script("import os, sys, time; sys.argv[1:] or time.sleep(60); os.kill(os.getpid(), 9)")
    with EmulatedCluster(1) as cluster:
        cluster.grace = Grace(after_failure=0.1, after_signal=0.5)
        assert cluster.run([*argv, "now"]) == 128 + signal.SIGKILL
        assert cluster.run(argv, timeout=0.3) == 124
        with pytest.raises(TestbedError, match="does not begin with a program"):
            cluster.run(["/does/not/exist"])
    with pytest.raises(TestbedError, match="with EmulatedCluster"):
        cluster.run(argv)


@pytest.mark.network
def test_nothing_that_a_rank_starts_outlives_the_run(clean: None, script: Script) -> None:
    argv = script("""
        import subprocess
        print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
    """)
    with EmulatedCluster(2) as cluster:
        code, lines = gather(cluster, argv)
        assert code == 0
        until = time.monotonic() + 5.0  # on a busy machine the kernel takes a while to end them
        while (alive := [line for _, _, line in lines if is_alive(int(line))]) and time.monotonic() < until:
            time.sleep(0.01)
        assert not alive


SEND = """
    import os, socket, sys, time
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    size = 2_500_000
    if os.environ["RANK"] == "0":
        connection = socket.create_server(address).accept()[0]
        begin, left = time.monotonic(), size
        while left:
            left -= len(connection.recv(left))
        print(time.monotonic() - begin)
    else:
        while True:
            try:
                connection = socket.create_connection(address)
                break
            except ConnectionRefusedError:
                time.sleep(0.02)
        connection.sendall(bytes(size))
"""


@pytest.mark.network
def test_a_link_is_no_faster_than_its_rate(clean: None, script: Script) -> None:
    argv, megabits = script(SEND), 2.5 * 8
    with EmulatedCluster(2, inter="100mbit") as cluster:
        code, lines = gather(cluster, argv)
        assert code == 0, lines
        assert float(lines[0][2]) > megabits / 100 * 0.97
        (_, received), (sent, _) = cluster.counters()
        assert 2_500_000 < received < 2_700_000
        assert 2_500_000 < sent < 2_700_000
        cluster.set_inter("40mbit")
        _, lines = gather(cluster, argv)
        assert float(lines[0][2]) > megabits / 40 * 0.97
        cluster.set_inter(None)
        assert gather(cluster, argv)[0] == 0
        with pytest.raises(TestbedError, match="fastish"):
            cluster.set_inter("fastish")


@pytest.mark.network
def test_one_node_can_have_another_rate_in_each_direction(clean: None, script: Script) -> None:
    """Rank 1 sends to rank 0."""
    argv, megabits = script(SEND), 2.5 * 8
    with EmulatedCluster(2, inter="400mbit") as cluster:
        for node, rate, up in ((1, "400mbit", "50mbit"), (0, "50mbit", "400mbit"), (1, "50mbit", None)):
            cluster.set_inter("400mbit")
            cluster.set_node(node, rate, up)
            code, lines = gather(cluster, argv)
            assert code == 0, lines
            assert float(lines[0][2]) > megabits / 50 * 0.97
        with pytest.raises(TestbedError, match="node is 2"):
            cluster.set_node(2, "50mbit")
        with pytest.raises(TestbedError, match="fastish"):
            cluster.set_node(1, "50mbit", "fastish")


@pytest.mark.network
def test_the_rate_can_change_while_ranks_run(clean: None, script: Script) -> None:
    argv = script(SEND)
    with EmulatedCluster(2, inter="100kbit") as cluster:  # 200 s, but for the change
        lines: list[str] = []

        def speed_up(rank: int, stream: str, line: str) -> None:
            cluster.set_inter("100mbit") if line == "go" else lines.append(line)

        Path(argv[-1]).write_text(Path(argv[-1]).read_text() + '\nprint("done")\n')
        argv[-1:] = ["-c", f"import os; print('go'); exec(open({argv[-1]!r}).read())"]
        assert cluster.run(argv, on_line=speed_up, timeout=30) == 0
        assert lines.count("done") == 2


@pytest.mark.network
def test_loopback_has_a_rate_too(clean: None, script: Script) -> None:
    with EmulatedCluster(1, 2, intra="100mbit") as cluster:
        code, lines = gather(cluster, script(SEND))
        assert code == 0
        assert float(lines[0][2]) > (2.5 * 8 - 2) / 100 * 0.97  # less what the bucket holds
        assert cluster.counters() == [(0, 0)]


@pytest.mark.network
def test_an_exception_inside_still_cleans_up(clean: None, script: Script) -> None:
    def fail(rank: int, stream: str, line: str) -> None:
        pids.append(int(line))
        raise RuntimeError("from the callback")

    pids: list[int] = []
    argv = script("import os, time; print(os.getpid()); time.sleep(60)")
    with pytest.raises(RuntimeError, match="from the callback"), EmulatedCluster(1) as cluster:
        cluster.run(argv, on_line=fail)
    assert len(pids) == 1
    assert not is_alive(pids[0])


@pytest.mark.network
def test_a_cleanup_may_be_repeated_and_two_clusters_coexist(clean: None) -> None:
    with EmulatedCluster(1) as one, EmulatedCluster(2) as two:
        one.__exit__(None, None, None)
        assert two.counters() == [(0, 0), (0, 0)]


DRIVER = """
    import sys
    from gradwire.testbed import emulate, reexec_in_user_namespace_if_needed
    reexec_in_user_namespace_if_needed([sys.executable, *sys.orig_argv[1:]])
    sys.exit(emulate(2, 1, "500mbit", None, sys.argv[1:]))
"""

WAIT = """
    import os, signal, subprocess, sys, time
    received = []
    def note(number, frame):
        received.append(number)
        time.sleep(0.3)  # a second signal would come now
        print("received", received, flush=True)
        sys.exit(5)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    print("ready", os.getpid(), child.pid, flush=True)
    while True:  # a signal just before one long sleep would be seen only after it
        time.sleep(0.05)
"""


def start_driver(command: list[str], script: list[str]) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a supervisor of two waiting ranks in another process; it, and the ids of each rank and its child."""
    driver = subprocess.Popen(
        [*command, "-c", textwrap.dedent(DRIVER), *script],
        env=os.environ | {"PYTHONPATH": PATHS},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert driver.stdout is not None
    pids: list[int] = []
    while len(pids) < 4:
        line = driver.stdout.readline()
        assert line, "the supervisor ended early"
        if "ready" in line:
            pids += [int(word) for word in line.split()[-2:]]
    return driver, pids


def names_of(driver: subprocess.Popen[str]) -> list[str]:
    return namespaces.existing(f"gradwire-{driver.pid}-")


@pytest.mark.network
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_every_rank_once_and_leave_nothing(clean: None, script: Script, number: signal.Signals) -> None:
    driver, pids = start_driver([sys.executable], script(WAIT)[-1:])
    assert len(names_of(driver)) == 3
    os.killpg(driver.pid, number)  # as a terminal does: all in the foreground get it
    said, _ = driver.communicate(timeout=20)
    assert said.count(f"received [{int(number)}]") == 2, said
    assert driver.returncode == 5
    assert names_of(driver) == []
    assert not any(map(is_alive, pids))


@pytest.mark.network
def test_the_next_run_sweeps_what_a_killed_one_left_and_spares_the_living(clean: None, script: Script) -> None:
    living, living_pids = start_driver([sys.executable], script(WAIT)[-1:])
    killed, killed_pids = start_driver([sys.executable], script(WAIT)[-1:])
    stranger = f"gradwire-stranger-{os.getpid()}"
    namespaces.run_tool(["ip", "netns", "add", stranger])
    try:
        killed.kill()
        killed.wait()
        wait_until(lambda: not is_alive(killed_pids[0]) and not is_alive(killed_pids[2]))  # PDEATHSIG
        assert is_alive(killed_pids[1])  # a child with a session of its own
        assert len(names_of(killed)) == 3
        with EmulatedCluster(1):
            assert names_of(killed) == []
            assert not any(map(is_alive, killed_pids))
        assert len(names_of(living)) == 3
        assert all(map(is_alive, living_pids))
        assert (namespaces.NAMESPACE_FOLDER / stranger).exists()
    finally:
        namespaces.run_tool(["ip", "netns", "delete", stranger])
        living.terminate()
        living.communicate(timeout=20)
    assert names_of(living) == []
    assert not any(map(is_alive, living_pids))


@pytest.mark.network
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_outside_a_run_cleans_up_too(clean: None, number: signal.Signals) -> None:
    code = """
        import time
        from gradwire.testbed import EmulatedCluster
        with EmulatedCluster(2):
            print("ready", flush=True)
            while True:
                time.sleep(0.05)
    """
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert driver.stdout is not None
    assert driver.stdout.readline() == "ready\n"
    assert len(names_of(driver)) == 3
    driver.send_signal(number)
    driver.communicate(timeout=20)
    assert driver.returncode in (-number, 128 + number)
    assert names_of(driver) == []


@pytest.fixture
def nobody(clean: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command prefix of an unprivileged user's Python, where that user can read the tree and make namespaces."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root and setpriv, to become an unprivileged user")
    monkeypatch.chdir("/")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    prefix = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "/usr/bin/python3"]
    probe = "import sys; assert sys.version_info >= (3, 11); import gradwire.testbed as t; sys.exit(t.permission_problem())"
    environment = os.environ | {"PYTHONPATH": PATHS}
    able = subprocess.run([*prefix, "-c", probe], env=environment, capture_output=True, text=True, check=False)
    if able.returncode != 0:
        pytest.skip(f"user 65534 cannot: {able.stderr.strip()[-300:]}")
    return prefix


@pytest.mark.network
def test_an_unprivileged_user_gets_a_user_namespace(nobody: list[str]) -> None:
    argv = [
        *nobody,
        "-c",
        textwrap.dedent(DRIVER),
        "-c",
        "import os; print('on', os.environ['NODE_RANK']); os._exit(9)",
    ]
    environment = os.environ | {"PYTHONPATH": PATHS}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 9, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "[0] on 0", "[1] on 1"]


FLOOD = """
    import os, socket, sys, time
    packets = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    rank, host, folder = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], 5555), sys.argv[1]
    def ask(word):
        for _ in range(500):
            packets.sendto(word, host)
            try:
                if packets.recv(64) == word:
                    return
            except OSError:  # rank 0 is not there yet, or no more
                time.sleep(0.02)
        sys.exit(7)
    if rank == 0:
        packets.bind(host)
        packet = b""
        while packet != b"end":
            packet, sender = packets.recvfrom(2000)
            if len(packet) < 9:
                packets.sendto(packet, sender)
    else:
        packets.settimeout(0.1)
        for count in (1000, 100_000):
            ask(b"begin")  # both hosts know each other's Ethernet address from now on
            for word in ("stop", "go on"):
                print(word, count, flush=True)
                while not os.path.exists(f"{folder}/{word} {count}"):
                    time.sleep(0.01)
                for _ in range(count * (word == "stop")):
                    packets.sendto(bytes(1400), host)
        ask(b"end")
"""

FLOODED = """
    import os, signal, sys, tempfile
    from gradwire.testbed import EmulatedCluster, reexec_in_user_namespace_if_needed
    reexec_in_user_namespace_if_needed([sys.executable, *sys.orig_argv[1:]])
    with EmulatedCluster(2, sites=2, wan="1ms") as cluster, tempfile.TemporaryDirectory() as folder:
        def heard(rank, stream, line):
            if stream == "stdout":
                os.kill(cluster._relay._process.pid, signal.SIGSTOP if line.startswith("stop") else signal.SIGCONT)
                if line.startswith("go on"):
                    print(cluster.wan_counts().dropped_frames, flush=True)
                open(f"{folder}/{line}", "w").close()
        sys.exit(cluster.run([sys.executable, "-c", sys.argv[1], folder], on_line=heard, timeout=50.0))
"""


@pytest.mark.network
@pytest.mark.parametrize("user", ["this user", "nobody"])
def test_what_the_kernel_drops_before_the_relay_reads_it_is_counted(
    clean: None, request: pytest.FixtureRequest, user: str
) -> None:
    """The relay stands still while a rank sends 1.4 MB, which the relay's socket holds, and 140 MB, which it does not."""
    if int(Path("/proc/sys/net/core/rmem_max").read_text()) < 2**22:
        pytest.skip("sockets of 4 MB are not allowed here")
    python = request.getfixturevalue("nobody") if user == "nobody" else [sys.executable]
    argv = [*python, "-c", textwrap.dedent(FLOODED), textwrap.dedent(FLOOD)]
    environment = os.environ | {"PYTHONPATH": PATHS}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    held, flooded = map(int, done.stdout.split())
    assert held == 0 and 0 < flooded <= 100_000


@pytest.mark.network
def test_an_unprivileged_users_orphans_are_swept(nobody: list[str]) -> None:
    killed, pids = start_driver(nobody, ["-c", textwrap.dedent(WAIT)])
    killed.kill()
    killed.wait()
    wait_until(lambda: not is_alive(pids[0]) and not is_alive(pids[2]))
    assert is_alive(pids[1])
    environment = os.environ | {"PYTHONPATH": PATHS}
    subprocess.run([*nobody, "-c", textwrap.dedent(DRIVER), "-c", "0"], env=environment, timeout=30, check=True)
    assert not any(map(is_alive, pids))


@pytest.mark.network
def test_the_sweep_ends_what_is_in_a_runs_network_and_nothing_else(clean: None) -> None:
    """A server that a rank started and that left the run's network, such as tmux, keeps the mark in its environment."""
    marked = os.environ | {namespaces.OWNER_VARIABLE: "999999999-1"}
    server = subprocess.Popen(["sleep", "600"], env=marked, start_new_session=True)
    inside = subprocess.Popen(["unshare", "-n", "sleep", "600"], env=marked, start_new_session=True)
    try:
        wait_until(
            lambda: (
                os.stat(f"/proc/{inside.pid}/ns/net").st_ino != os.stat("/proc/self/ns/net").st_ino
                and Path(f"/proc/{inside.pid}/comm").read_text() == "sleep\n"
            )
        )
        assert namespaces.kill_marked_orphans() == []
        assert inside.wait(10) == -signal.SIGKILL
        assert server.poll() is None
    finally:
        for process in (server, inside):
            process.kill()
            process.wait()


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda program, path=None: None if program == "tc" else f"/bin/{program}")
    assert "tc" in (permission_problem() or "")
    assert "iproute2" in (permission_problem() or "")
