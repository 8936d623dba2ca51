"""Command lines of the program in processes that are forked off one that has imported it.

Most of the time of a command, half a second to one, goes into imports, and the suite runs more than a thousand. What
is forked off is a process of its own all the same: pid, environment, folder, streams, signals and exit code are its
own, and of the program nothing had run, only its modules were there. The environment is that of the process it comes
from but for :data:`RUN_TIME`, so what modules read while they are imported is right too. With
``PGSUB_TEST_THOROUGH=1`` every command is a ``python -m pgsub``; tests of starting, terminals and streams always take
one.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pkgutil
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence

#: Variables that nothing reads while the program is imported.
RUN_TIME = {
    "HOME",
    "PGSUB_STATE_DIR",
    "PGSUB_FAILPOINTS",
    "PGSUB_FAILPOINTS_DIR",
    "PGSUB_RETRY_SECONDS",
    "PGSUB_SEQUENCE_SECONDS",
    "PGSUB_WORKER_TIMEOUT",
    "PGSUB_SPOOL_LIMIT",
    "PGSUB_DEBUG",
    "PGSUB_CONNECTION",
    "PGSUB_TARGET",
    *("PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET", "PYSPARK_SUBMIT_ARGS"),
    *("PGHOST", "PGPORT", "PGUSER", "PGDATABASE", "PGPASSWORD", "PGPASSFILE", "PGSERVICEFILE", "PGCONNECT_TIMEOUT"),
}
_REQUEST_BYTES = 1 << 17
_ORIGIN_PAYS = 3  #: from so many commands on it takes less time to import the program once
_NOT_IMPORTED = ("pgsub.__main__", "pgsub.cli.docs", "pgsub.demo", "pgsub.spark")

Environment = frozenset[tuple[str, str]]
_lock = threading.Lock()
_uses: Counter[Environment] = Counter()
_origins: dict[Environment, socket.socket] = {}


class Forked:
    """A process that has been forked off; the part of :class:`subprocess.Popen` that tests use.

    :param origin: connection with the process to fork from.
    :param args: words of the command line behind the program's name.
    :param streams: file descriptors of stdin, stdout and stderr; they stay the caller's.
    """

    def __init__(
        self, origin: socket.socket, args: Sequence[str], env: Mapping[str, str], streams: Sequence[int]
    ) -> None:
        self.args = list(args)
        self.returncode: int | None = None
        self._channel, theirs = socket.socketpair()
        with theirs:
            request = json.dumps([list(args), os.getcwd(), dict(env)]).encode()
            assert len(request) < _REQUEST_BYTES
            socket.send_fds(origin, [request], [*streams, theirs.fileno()])
        self._answers = self._channel.makefile("r")
        self.pid = int(self._answers.readline())

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended.

        :param timeout: seconds.
        :raises subprocess.TimeoutExpired: it still runs.
        """
        if self.returncode is None:
            if not select.select([self._channel], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(self._answers.readline())
            self._answers.close()
            self._channel.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


Started = Forked | subprocess.Popen[bytes]


def origin(env: Mapping[str, str]) -> socket.socket | None:
    """A process from which commands with this environment can be forked.

    :return: None where a process of its own is as cheap, or wanted.
    """
    key = frozenset((name, value) for name, value in env.items() if name not in RUN_TIME)
    with _lock:
        _uses[key] += 1
        if key not in _origins and _uses[key] >= _ORIGIN_PAYS and not os.environ.get("PGSUB_TEST_THOROUGH"):
            _origins[key] = _start(dict(key))
        return _origins.get(key)


def _start(env: dict[str, str]) -> socket.socket:
    """It ends when this process does, which closes the connection."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        null = subprocess.DEVNULL
        number = theirs.fileno()
        words = [sys.executable, __file__, str(number)]
        process = subprocess.Popen(words, env=env, stdin=null, stdout=null, pass_fds=[number])
    process.returncode = 0  # it is never waited for
    return ours


def run(args: Sequence[str], env: Mapping[str, str], stdin: str, timeout: float) -> subprocess.CompletedProcess[str]:
    """Run a command line to its end, as :func:`subprocess.run` does.

    :param timeout: seconds.
    """
    source = origin(env)
    if source is None:
        return subprocess.run(command(args), env=env, input=stdin, capture_output=True, text=True, timeout=timeout)
    (stdin_read, stdin_write), (out, out_write), (err, err_write) = os.pipe(), os.pipe(), os.pipe()
    os.write(stdin_write, stdin.encode())
    theirs = (stdin_read, out_write, err_write)
    process = Forked(source, args, env, theirs)
    for number in (stdin_write, *theirs):
        os.close(number)
    try:
        said = _read((out, err), args, time.monotonic() + timeout)
        return subprocess.CompletedProcess(list(args), process.wait(timeout), *said)
    finally:
        process.kill()


def start(args: Sequence[str], env: Mapping[str, str], stdout: int, stderr: int) -> Started:
    """Start a command line without input.

    :param stdout: file descriptor; it stays the caller's, as ``stderr`` does.
    """
    source = origin(env)
    with open(os.devnull) as null:
        if source is not None:
            return Forked(source, args, env, (null.fileno(), stdout, stderr))
        return subprocess.Popen(command(args), env=env, stdin=null, stdout=stdout, stderr=stderr)


def command(args: Sequence[str]) -> list[str]:
    """The words of a process that nothing was imported for."""
    return [sys.executable, "-m", "pgsub", *args]


def _read(streams: Sequence[int], args: Sequence[str], deadline: float) -> list[str]:
    """What comes from these streams until all have ended; they are closed."""
    said = dict.fromkeys(streams, b"")
    with selectors.DefaultSelector() as waiting:
        for number in streams:
            waiting.register(number, selectors.EVENT_READ)
        try:
            while waiting.get_map():
                if not (ready := waiting.select(max(deadline - time.monotonic(), 0))):
                    raise subprocess.TimeoutExpired(list(args), 0, *said.values())
                for key, _events in ready:
                    said[key.fd] += (piece := os.read(key.fd, 1 << 16))
                    if not piece:
                        waiting.unregister(key.fd)
        finally:
            for number in streams:
                os.close(number)
    return [text.decode() for text in said.values()]


# the process to fork from


def _import_program() -> None:
    import pgsub

    for module in pkgutil.walk_packages(pgsub.__path__, "pgsub."):
        if not module.name.startswith(_NOT_IMPORTED):
            __import__(module.name)
    with contextlib.suppress(ImportError):
        __import__("typer._adapters")  # typer itself does at the first option that it reads


def _serve(requests: socket.socket) -> None:
    """Fork at every request, and tell how each ended; the command itself returns from here."""
    signal.signal(signal.SIGCHLD, lambda *_: None)
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    channels: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([requests, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            _reap(channels)
        if requests not in ready:
            continue
        request, numbers, _, _ = socket.recv_fds(requests, _REQUEST_BYTES, 4)
        if not request:
            os._exit(0)
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number in (woken, waker, requests.detach(), *(channel.detach() for channel in channels.values())):
                os.close(number)
            return _become(request, numbers)
        for number in numbers[:3]:
            os.close(number)
        channels[pid] = socket.socket(fileno=numbers[3])
        channels[pid].sendall(f"{pid}\n".encode())


def _reap(channels: dict[int, socket.socket]) -> None:
    while channels:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with channels.pop(pid) as channel, contextlib.suppress(OSError):  # nobody waits for it
            channel.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _become(request: bytes, numbers: Sequence[int]) -> None:
    """Be ``python -m pgsub`` with these words."""
    args, folder, env = json.loads(request)
    for stream, number in enumerate(numbers[:3]):
        os.dup2(number, stream)
    for number in numbers:
        os.close(number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    sys.path[0] = folder
    sys.argv = ["pgsub", *args]


if __name__ == "__main__":
    sys.path[0] = os.getcwd()
    _import_program()
    gc.freeze()  # or every process would copy all there is when it ends
    _serve(socket.socket(fileno=int(sys.argv[1])))
    runpy.run_module("pgsub", run_name="__main__", alter_sys=True)
