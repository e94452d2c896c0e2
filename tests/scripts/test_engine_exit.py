"""How a training script ends: by itself, by Ctrl-C, with and without tidying up. Real interpreters, since only these
run what happens at exit."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from interpreters import Interpreters
from script_ends import rank_environments

SCRIPT = """
import os, sys, threading, time
import torch, torch.distributed as dist
import gradwire as gw

torch.set_num_threads(1)
dist.init_process_group("gloo")
model = torch.nn.Linear(300, 20)
handle = gw.parallelize(model, plan=gw.QSGD(bits=4))
ending, rank = sys.argv[1], dist.get_rank()
for step in range(3):
    model(torch.randn(4, 300)).sum().backward()
if ending == "interrupt":
    if rank == 1:
        time.sleep(60)
    print("waiting", flush=True)
    model(torch.randn(4, 300)).sum().backward()
if ending == "destroy":
    dist.destroy_process_group()
if ending == "detach":
    handle.detach()
    dist.destroy_process_group()
if ending == "raise":
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()
        @staticmethod
        def backward(ctx, g):
            raise ValueError("as ordered")
    head = torch.nn.Linear(20, 1)
    both = torch.nn.Sequential(model, head)
    handle.detach()
    handle = gw.parallelize(both, plan=gw.QSGD(bits=4))
    head(Raises.apply(model(torch.randn(4, 300)))).sum().backward()
print("done", flush=True)
"""


STOPPED_STORE = """
import os, signal, sys, time
from types import ModuleType, SimpleNamespace
from torch.distributed import PrefixStore, TCPStore
from gradwire.transport.keys import JobKey
from gradwire.transport.lanes import RollCall

read, write = os.pipe()
host = os.fork()
if host == 0:
    hosted = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(write, str(hosted.port).encode())
    time.sleep(60)
    os._exit(0)
store = TCPStore("127.0.0.1", int(os.read(read, 20)), is_master=False, wait_for_workers=False)

class WhileTheInterpreterEnds:
    def __del__(self, kill=os.kill, host=host, number=signal.SIGKILL, sleep=time.sleep):
        kill(host, number)  # the wait for the store ends now
        sleep(3.0)

# modules go when the interpreter ends
sys.modules["last"] = ModuleType("last")
sys.modules["last"].kept = WhileTheInterpreterEnds()
met = SimpleNamespace(key=JobKey(bytes(32)))
named = dict(process_group=store, met=met, store=lambda name: PrefixStore(name, store))
call = RollCall(SimpleNamespace(rank=0, world_size=2, global_ranks=(0, 1), **named), "job")
os.kill(host, signal.SIGSTOP)
print(call.missing(0.2).is_known, flush=True)
"""


def ended(folder: Path, text: str) -> "subprocess.CompletedProcess[str]":
    """A script with this text, at its end."""
    script = folder / "script.py"
    script.write_text(text)
    return subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)


def test_an_answer_of_the_store_while_the_interpreter_ends_ends_nothing_else(tmp_path: Path) -> None:
    """The rank that hosts the store is stopped when a survivor asks who failed, and is killed while the survivor exits."""
    found = ended(tmp_path, STOPPED_STORE)
    assert (found.stdout, found.returncode) == ("False\n", 0), found.stderr


BUSY_THREAD = """
import hashlib, threading, time
from gradwire.transport import waits_for_store

def ask():
    with waits_for_store():
        data, until = bytes(20_000_000), time.monotonic() + 2.0
        while time.monotonic() < until:
            hashlib.sha256(data)  # runs without the interpreter's lock
        print("answered", flush=True)

threading.Thread(target=ask, daemon=True).start()
time.sleep(0.2)
"""


@pytest.mark.skipif(not Path("/proc/self/syscall").exists(), reason="nobody knows here what a thread does")
def test_a_thread_that_computes_for_the_store_is_awaited(tmp_path: Path) -> None:
    """A busy machine makes connecting to the store slow. A thread that is still at it may not be ended in C++."""
    found = ended(tmp_path, BUSY_THREAD)
    assert (found.stdout, found.returncode) == ("answered\n", 0), found.stderr


FREED_IN_A_THREAD = """
import threading, time
from functools import partial
from gradwire.transport.exits import start_store_thread

class Held:
    def __del__(self):
        time.sleep(0.5)
        print("freed", flush=True)

begun = threading.Event()
start_store_thread(partial(lambda held: begun.set(), Held()), "asks")
begun.wait()
"""


def test_what_only_a_thread_for_the_store_holds_is_freed_before_the_interpreter_ends(tmp_path: Path) -> None:
    """A process group that such a thread freed while the interpreter ended ended the process with SIGABRT."""
    found = ended(tmp_path, FREED_IN_A_THREAD)
    assert (found.stdout, found.returncode) == ("freed\n", 0), found.stderr


@contextmanager
def two_ranks(interpreters: Interpreters, folder: Path, ending: str) -> Iterator[list[subprocess.Popen[str]]]:
    """The script as torchrun would start it; whatever is left at the end is killed."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    ranks = [
        interpreters.start([sys.executable, script, ending], env=environment, text=True, **pipes)
        for environment in rank_environments()
    ]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize("ending", ["plain", "destroy", "detach"])
def test_a_script_ends_by_itself(interpreters: Interpreters, tmp_path: Path, ending: str) -> None:
    with two_ranks(interpreters, tmp_path, ending) as ranks:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "done\n" or pytest.fail(rank.communicate(timeout=30)[1])
        started = time.monotonic()
        for rank in ranks:
            _, stderr = rank.communicate(timeout=60)
            assert rank.returncode == 0, stderr
            assert "Error" not in stderr
        assert time.monotonic() - started < 40  # also on a busy machine; nobody waits for a timeout


def test_an_exception_in_backward_ends_the_script(interpreters: Interpreters, tmp_path: Path) -> None:
    with two_ranks(interpreters, tmp_path, "raise") as ranks:
        for rank in ranks:
            _, stderr = rank.communicate(timeout=40)
            assert rank.returncode == 1
            assert "ValueError: as ordered" in stderr


def test_ctrl_c_ends_a_rank_that_waits_in_backward(interpreters: Interpreters, tmp_path: Path) -> None:
    with two_ranks(interpreters, tmp_path, "interrupt") as (waiting, _):
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "waiting\n"
        time.sleep(1)
        waiting.send_signal(signal.SIGINT)
        started = time.monotonic()
        _, stderr = waiting.communicate(timeout=60)
        assert time.monotonic() - started < 30
        assert "KeyboardInterrupt" in stderr
        assert waiting.returncode in (1, -signal.SIGINT, 130)
