"""A standalone Spark cluster: a master and two machines, which are processes at loopback addresses of their own.

Where the suite runs as root, master, workers and executors are another user's: they cannot read the launcher's folders.
pgsub comes to them as an archive, as docs/spark.md says.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import patience
import pytest
import pythons
from fix_faults import until

from pgsub.demo.binaries import identity, server_uid
from pgsub.demo.servers import free_port
from pgsub.spark import archive
from pgsub.spark.jvm.java import find_java
from pgsub.spark.jvm.process import spark_home

#: For how long a bounded command waits for executors.
WAITING = "spark.scheduler.maxRegisteredResourcesWaitingTime"
#: Where the machines are; the launcher is at 127.0.0.1.
ADDRESSES = ("127.0.0.2", "127.0.0.3")
CORES = 6


class Cluster:
    """A master and two workers, each of which stands for a machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        home = find_java(folder).home
        self._environment = {
            **{name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ},
            **({"JAVA_HOME": str(home)} if home else {}),
            "HOME": str(folder),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._port = free_port()
        self.url = f"spark://127.0.0.1:{self._port}"
        self._start_master()
        for number in range(len(ADDRESSES)):
            self.join(number, wait=False)
        for number in range(len(ADDRESSES)):
            self._await(f"worker{number}", "Successfully registered")
        self.archive = folder / "pgsub_env.tar.gz"
        archive.write(self.archive, python())

    def _start_master(self) -> None:
        self._start("master", "master.Master", "127.0.0.1", "--port", str(self._port))
        self._await("master", "New state: ALIVE")

    def conf(self, **more: str) -> list[str]:
        """Words of a command that runs on this cluster.

        :param more: settings of Spark, with ``_`` for dots.
        """
        settings = {
            "spark.archives": f"{self.archive}#env",
            "spark.pyspark.python": "./env/bin/python",
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            WAITING: f"{patience.SECONDS:.0f}s",
            **{name.replace("_", "."): value for name, value in more.items()},
        }
        pairs = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
        return ["--master", self.url, *pairs]

    def give(self, file: Path) -> None:
        """Make a file the cluster's user's own."""
        if os.geteuid() == 0:
            os.chown(file, server_uid(), server_uid())

    def renew_master(self) -> None:
        """Kill the master and start it again; it has no recovery mode, so it knows nothing of applications."""
        self._processes["master"].kill()
        self._processes["master"].wait()
        self._start_master()

    def join(self, number: int, *, wait: bool = True) -> None:
        """Start the worker of a machine."""
        name, folder = f"worker{number}", self.folder / f"work{number}"
        words = ["--cores", str(CORES), "--memory", "1g", "-d", str(folder), self.url]
        self._start(name, "worker.Worker", ADDRESSES[number], *words)
        if wait:
            self._await(name, "Successfully registered")

    def _start(self, name: str, kind: str, address: str, *words: str) -> None:
        program = ["bash", str(spark_home() / "bin" / "spark-class"), f"org.apache.spark.deploy.{kind}"]
        with (self.folder / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [*program, "--host", address, "--webui-port", "0", *words],
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={**self._environment, "SPARK_LOCAL_IP": address},
                start_new_session=True,
                **identity(),
            )

    def _await(self, name: str, words: str) -> None:
        log = self.folder / f"{name}.log"
        until(lambda: words in log.read_text(), log.read_text)

    def machine_of(self, pid: int) -> int:
        """Which of the machines a process belongs to."""
        line = _ancestors(pid)
        [number] = [n for n in range(len(ADDRESSES)) if self._processes[f"worker{n}"].pid in line]
        return number

    def processes(self, number: int) -> list[int]:
        """Processes of a machine, its worker first."""
        worker = self._processes[f"worker{number}"].pid
        found = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if worker in _ancestors(pid)]
        return sorted(found, key=lambda pid: len(_ancestors(pid)))

    def executors(self, number: int) -> list[int]:
        """Executors of a machine."""
        return self._named(number, b"CoarseGrainedExecutorBackend")

    def drivers(self) -> list[int]:
        """JVMs of drivers that the master has started."""
        return [pid for number in range(len(ADDRESSES)) for pid in self._named(number, b"deploy.worker.DriverWrapper")]

    def launchers(self) -> list[int]:
        """Launchers in cluster mode, also those whose JVM is gone."""
        place = bytes(self.folder / "opt" / "submit.py")
        words = ((pid, _command(pid).split(b"\0")) for pid in map(int, filter(str.isdigit, os.listdir("/proc"))))
        return [pid for pid, line in words if line[1:2] == [place]]

    def _named(self, number: int, word: bytes) -> list[int]:
        return [pid for pid in self.processes(number) if word in _command(pid)]

    def signal(self, number: int, what: signal.Signals) -> None:
        """Send a signal to all processes of a machine at once."""
        for pid in self.processes(number):
            try:
                os.kill(pid, what)
            except ProcessLookupError:
                pass

    def lose(self, number: int) -> None:
        """All processes of a machine end at once, without a word."""
        self.signal(number, signal.SIGKILL)
        self._processes[f"worker{number}"].wait()

    def kill_worker(self, number: int) -> None:
        """Only the worker of a machine ends, without a word; what it has started is not told."""
        self._processes[f"worker{number}"].kill()
        self._processes[f"worker{number}"].wait()

    def ports(self, number: int) -> set[int]:
        """Local ports of a machine's connections."""
        sockets = set()
        for pid in self.processes(number):
            with contextlib.suppress(OSError):
                for file in Path(f"/proc/{pid}/fd").iterdir():
                    with contextlib.suppress(OSError):
                        sockets.add(os.readlink(file).removeprefix("socket:[").removesuffix("]"))
        rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
        return {int(row[1].rpartition(":")[2], 16) for row in rows[1:] if row[9] in sockets}

    def close(self) -> None:
        """End what is left of it."""
        for number in range(len(ADDRESSES)):
            self.signal(number, signal.SIGKILL)
        for process in self._processes.values():
            process.kill()
            process.wait()


def python() -> str:
    """An interpreter of this minor version that the cluster's user may run; the test is skipped without one."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    candidates = [os.path.realpath(sys._base_executable), shutil.which(name, path="/usr/bin:/usr/local/bin")]
    for candidate in filter(None, candidates):
        try:
            subprocess.run([candidate, "-c", ""], check=True, capture_output=True, cwd="/", **identity())
        except (OSError, subprocess.CalledProcessError):
            continue
        return candidate
    pytest.skip(f"another user has no {name}")


def other_python(folder: Path) -> str:
    """An interpreter of another minor version, copied to where the cluster's user may run it; skipped without one."""
    others = [path for version, path in pythons.found().items() if version[:2] != sys.version_info[:2]]
    if not others:
        pytest.skip("there is no Python of another minor version here (PGSUB_TEST_PYTHONS names some)")
    ask = "import json, sys, sysconfig; print(json.dumps([sys.base_prefix, sysconfig.get_path('stdlib')]))"
    said = subprocess.run([others[0], "-I", "-c", ask], check=True, capture_output=True, text=True).stdout
    base, library = map(Path, json.loads(said))
    place = folder / "other"
    unneeded = shutil.ignore_patterns("test", "tests", "site-packages", "__pycache__", "idlelib", "tkinter", "config-*")
    shutil.copytree(library, place / library.relative_to(base), ignore=unneeded)
    for shared in (base / "lib").glob("libpython*.so*"):
        shutil.copy2(shared, place / "lib")
    shutil.copy2(os.path.realpath(others[0]), place / "python")
    run = place / "python3"  # it looks for both where it was built
    run.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH={place}/lib PYTHONHOME={place} exec {place}/python "$@"\n')
    run.chmod(0o755)
    return str(run)


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _ancestors(pid: int) -> list[int]:
    """A process, its parent, and so on."""
    line = []
    while pid > 1:
        line.append(pid)
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
    return line


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One for all tests of a module, in a folder that everyone may enter."""
    folder = Path(tempfile.mkdtemp(prefix="pgsub-spark-"))
    folder.chmod(0o755)
    if os.geteuid() == 0:
        os.chown(folder, server_uid(), server_uid())
    made = Cluster(folder)
    yield made
    made.close()
    shutil.rmtree(folder, ignore_errors=True)
