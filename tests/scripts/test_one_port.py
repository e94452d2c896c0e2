"""Two sites with one open port each: what blocks a job is explained, and WireGuard through that port lets it train."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradwire.testbed import EmulatedCluster
from gradwire.testbed.network import INTERFACE, address_of

PORT = 51820
HAS_WIREGUARD = None not in map(shutil.which, ("wireguard-go", "wg")) and Path("/dev/net/tun").exists()
GATEWAYS = (0, 2)
"""The nodes that can be reached from outside, one at each site."""


def on(cluster: EmulatedCluster, node: int, *command: str) -> None:
    subprocess.run(["ip", "netns", "exec", cluster.namespace(node).name, *command], check=True, timeout=20.0)


def inner(node: int) -> str:
    """The address of a node in its site's own network."""
    return f"10.219.{node // 2}.{node % 2 + 1}"


def interface(gateway: int) -> str:
    """The name of its WireGuard interface, which has a file outside the namespace."""
    return f"gw{os.getpid()}x{gateway}"


@pytest.fixture
def no_sockets() -> Iterator[None]:
    """Removes the files by which wireguard-go is told what to do."""
    yield
    for gateway in GATEWAYS:
        Path(f"/var/run/wireguard/{interface(gateway)}.sock").unlink(missing_ok=True)


def connect_sites(cluster: EmulatedCluster, folder: Path) -> None:
    """Hide the nodes behind gateways, and connect these by WireGuard."""
    public = {}
    for gateway in GATEWAYS:
        key = subprocess.run(["wg", "genkey"], capture_output=True, check=True).stdout
        (folder / f"key{gateway}").write_bytes(key)
        public[gateway] = subprocess.run(["wg", "pubkey"], input=key, capture_output=True, check=True).stdout.decode().strip()
    for node in range(4):
        on(cluster, node, "ip", "address", "flush", "dev", INTERFACE)
        on(cluster, node, "ip", "address", "add", f"{inner(node)}/24", "dev", INTERFACE)
    for gateway, other in (GATEWAYS, GATEWAYS[::-1]):
        on(cluster, gateway, "ip", "address", "add", f"{address_of(gateway)}/16", "dev", INTERFACE)
        on(cluster, gateway, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        name, theirs = interface(gateway), f"10.219.{other // 2}.0/24"
        on(cluster, gateway, "wireguard-go", name)
        peer = ["peer", public[other], "allowed-ips", theirs, "endpoint", f"{address_of(other)}:{PORT}"]
        key = str(folder / f"key{gateway}")
        on(cluster, gateway, "wg", "set", name, "listen-port", str(PORT), "private-key", key, *peer)
        on(cluster, gateway, "ip", "address", "add", f"{inner(gateway)}/32", "dev", name)  # what it sends is from here
        on(cluster, gateway, "ip", "link", "set", name, "mtu", "1420", "up")
        on(cluster, gateway, "ip", "route", "add", theirs, "dev", name)
        on(cluster, gateway + 1, "ip", "route", "add", theirs, "via", inner(gateway))


TRAIN = """
import torch, torch.distributed as dist
import gradwire as gw
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.Linear(300, 300)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
handle = gw.parallelize(model, optimizer, plan=gw.QSGD(bits=4))
for _ in range(5):
    model(torch.randn(8, 300)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
total = sum(p.detach().double().sum() for p in model.parameters())
print("weights", repr(float(total)), handle.stats().steps)
"""


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.network
@pytest.mark.skipif(not HAS_WIREGUARD, reason="wireguard-go, wg or /dev/net/tun is not there")
def test_four_nodes_train_through_one_port_of_each_site(clean: None, no_sockets: None, tmp_path: Path) -> None:
    said: list[str] = []
    words = f'export MASTER_ADDR={inner(0)}; exec "$0" "$@"'
    with EmulatedCluster(4, sites=2, wan=f"20ms rate 100mbit port {PORT}") as cluster:
        connect_sites(cluster, tmp_path)
        command = ["sh", "-c", words, sys.executable, "-c", TRAIN]
        code = cluster.run(command, on_line=lambda *line: said.append(line[2]), timeout=90.0)
        assert code == 0, "\n".join(said[-20:])
        assert cluster.wan_counts().blocked_frames < 100
    weights = [line.split() for line in said if line.startswith("weights")]
    assert len(weights) == 4 and len({total for _, total, _ in weights}) == 1 and {steps for *_, steps in weights} == {"5"}


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.network
def test_the_doctor_says_what_lets_a_job_through_one_port(clean: None) -> None:
    """Only the port of the meeting point is open."""
    said: list[str] = []
    with EmulatedCluster(2, sites=2, wan="10ms port 29500") as cluster:
        command = [sys.executable, "-m", "gradwire", "doctor", "--timeout", "8"]
        began = time.monotonic()
        assert cluster.run(command, on_line=lambda *line: said.append(line[2]), timeout=120.0) == 1
        assert time.monotonic() - began < 90
        assert cluster.wan_counts().blocked_frames > 0
    text = re.sub(r"[\s│]+", " ", " ".join(said))
    assert "could not join a gloo group" in text and "the ranks did reach MASTER_ADDR" in text
    assert "a private network through one port, such as WireGuard" in text
