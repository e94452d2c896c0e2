"""Interpreters that have torch loaded when they start, for tests of whole programs.

    process = interpreters.start([sys.executable, "-m", "gradwire", "doctor"], stdout=PIPE, text=True)

takes what `subprocess.Popen` takes and returns one. The process is forked from a server that has loaded torch, with the half of
it that optimizers load when they are first used, and gradwire's engine and command line. So a start costs milliseconds of a
processor, not seconds. The program is a child of the tests' process, has the arguments, environment, folder and files that were
asked for, and ends as any interpreter does. It gets SIGTERM when the tests' process dies. Variables that torch reads when it is
loaded have no effect, and torch finds no Triton.

A test about the start of an interpreter calls `subprocess.Popen`.
"""

import ctypes
import faulthandler
import gc
import inspect
import os
import pickle
import runpy
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Sequence
from pathlib import Path
from subprocess import PIPE, CompletedProcess, Popen
from typing import Any

__all__ = ["Interpreters"]

_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER: whether this process becomes the parent of processes below it whose parents end."""
_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG: the signal that this process gets when its parent dies."""
_MOST_BYTES = 200_000
"""Of a request."""


class Interpreters:
    """Starts Python programs. The server starts with the first of them."""

    def __init__(self) -> None:
        self._server: Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._lock = threading.Lock()

    def start(self, command: Sequence[str | Path], **options: Any) -> "Popen[Any]":
        """Start `[sys.executable, ...]` as `subprocess.Popen` does. Options: files, text, env, cwd and start_new_session. Other
        programs are started as ever."""
        if str(command[0]) != sys.executable:
            return Popen(command, **options)
        return _Forked(self, [str(word) for word in command], options)

    def run(self, command: Sequence[str | Path], timeout: float, **options: Any) -> "CompletedProcess[str]":
        """Run `[sys.executable, ...]` to its end, and capture its text. After `timeout` seconds it is killed."""
        pipes = dict.fromkeys(("stdout", "stderr"), PIPE)
        with self.start(command, **pipes, text=True, **options) as process:
            try:
                out, err = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        return CompletedProcess(process.args, process.returncode, out, err)

    def close(self) -> None:
        """End the server. Programs that still run are not ended."""
        if self._server is not None and self._connection is not None:
            self._connection.close()
            self._server.wait(10)

    def _fork(self, request: dict[str, Any], files: list[int]) -> int:
        """The process id of a new child of this process."""
        with self._lock:
            if self._connection is None:
                self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with theirs:
                    command = [sys.executable, __file__, str(theirs.fileno())]
                    self._server = Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
            prctl = ctypes.CDLL(None).prctl
            prctl(_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._connection, [pickle.dumps(request)], files)
                answer = self._connection.recv(100)
            finally:
                prctl(_SUBREAPER, 0, 0, 0, 0)
        if not answer:
            raise ChildProcessError("the server of interpreters has ended; its error is above")
        return int(answer)


class _Forked(Popen[Any]):
    """A Popen whose child is forked by the server."""

    _FILES = ("p2cread", "c2pwrite", "errwrite")

    def __init__(self, interpreters: Interpreters, command: list[str], options: dict[str, Any]) -> None:
        self._interpreters = interpreters
        super().__init__(command, **options)

    def _execute_child(self, *given: Any) -> None:
        names = list(inspect.signature(Popen._execute_child).parameters)[1:]  # type: ignore[attr-defined]
        of = dict(zip(names, given, strict=True))
        request = {name: of[name] for name in ("args", "start_new_session")}
        request["env"] = dict(os.environ if of["env"] is None else of["env"])
        request["cwd"] = os.getcwd() if of["cwd"] is None else os.fspath(of["cwd"])
        files = [of[name] if of[name] >= 0 else usual for usual, name in enumerate(self._FILES)]
        try:
            self.pid = self._interpreters._fork(request, files)
            self._child_created = True
        finally:
            self._close_pipe_fds(*(of[name] for name in names if name[:3] in ("p2c", "c2p", "err")))  # type: ignore[attr-defined]


# ---- the server


def serve(connection: socket.socket) -> dict[str, Any]:
    """Fork for every request. Returns in the forked processes, with the request. The server ends with its client."""
    while True:
        data, files, _, _ = socket.recv_fds(connection, _MOST_BYTES, 3)
        if not data:
            os._exit(0)
        reading, writing = os.pipe()
        if (between := os.fork()) == 0:
            between = os.getpid()
            if pid := os.fork():
                os.write(writing, str(pid).encode())
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.001)  # the client becomes the parent
            ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
            connection.detach()
            for number, file in enumerate(files):
                os.dup2(file, number)
            os.closerange(3, 1000)
            return dict(pickle.loads(data))
        os.waitpid(between, 0)
        connection.send(os.read(reading, 100))
        for file in (reading, writing, *files):
            os.close(file)


def become(request: dict[str, Any], usual_path: list[str]) -> None:
    """Make this process the one that the request asks for, and run its program."""
    if request["start_new_session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    words = list(request["args"][1:])
    if words[0] == "-u":
        words.pop(0)
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [os.getcwd() if words[0] == "-m" else "", *paths, *usual_path]
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv[:] = ["-c", *words[2:]]
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), module.__dict__)
    else:
        sys.argv[:] = words
        sys.path[0] = str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    sys.modules["triton"] = None  # type: ignore[assignment]  # when frozen it would complain at the end of every program
    import torch._dynamo

    import gradwire.cli  # noqa: F401
    import gradwire.engine  # noqa: F401

    del sys.modules["triton"]

    torch.set_num_threads(1)
    of_tests = set(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    usual_path = [path for path in sys.path[1:] if path not in of_tests]
    gc.freeze()  # otherwise every program, when it ends, looks at the 300,000 objects of torch, and copies their memory
    become(serve(connection), usual_path)


if __name__ == "__main__":
    main()
