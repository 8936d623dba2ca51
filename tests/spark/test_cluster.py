"""A standalone Spark cluster of two machines, which are processes on this one: master, workers, executors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fix_faults import Site, until
from thorough import only_thorough

from pgsub.demo.servers import free_port
from pgsub.spark.gateway import spark_home
from pgsub.spark.java import find_java

pytestmark = only_thorough
_CORES = 8


class Cluster:
    """A master and two workers, each of which stands for a machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        java = find_java(folder).home
        self._environment = {
            **os.environ,
            **({"JAVA_HOME": str(java)} if java else {}),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
        }
        self._processes: list[subprocess.Popen[bytes]] = []
        port = free_port()
        self.url = f"spark://127.0.0.1:{port}"
        self._start("master", "master.Master", "--port", str(port))
        until(lambda: "New state: ALIVE" in self.said("master"), lambda: self.said("master"))
        for name in ("worker0", "worker1"):
            places = ["-d", str(folder / name), self.url]
            self._start(name, "worker.Worker", "--cores", str(_CORES), "--memory", "1g", *places)
        for name in ("worker0", "worker1"):
            until(lambda n=name: "Successfully registered" in self.said(n), lambda n=name: self.said(n))

    def _start(self, name: str, kind: str, *words: str) -> None:
        program = [str(spark_home() / "bin" / "spark-class"), f"org.apache.spark.deploy.{kind}"]
        with (self._folder / f"{name}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    ["bash", *program, "--host", "127.0.0.1", "--webui-port", "0", *words],
                    stdout=log,
                    stderr=log,
                    env=self._environment,
                    start_new_session=True,
                )
            )

    def said(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    def machine_of(self, pid: int) -> int:
        """Which of the two workers a task's process belongs to."""
        line = _ancestors(pid)
        [number] = [n for n, process in enumerate(self._processes[1:]) if process.pid in line]
        return number

    def lose(self, number: int) -> None:
        """All processes of a machine end at once, without a word."""
        worker = self._processes[1 + number].pid
        for pid in [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if worker in _ancestors(pid)]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def close(self) -> None:
        """End what is left of it."""
        for number, process in enumerate(self._processes):
            if number:
                self.lose(number - 1)
            process.kill()
            process.wait()


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


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


def test_a_worker_of_a_standalone_cluster_that_dies_loses_and_repeats_nothing(
    site: Callable[[], Site], cluster: Cluster
) -> None:
    case = site()
    writer = case.make("audit1", "keyed1", "counter1", "auditbig")
    case.end(case.create("--no-wait", "--max-sync-workers", "2", "--copy-workers", "2"))
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.pyspark.python": sys.executable,
        "spark.executor.memory": "512m",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
    }
    words = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    process = case.run("--master", cluster.url, *words, "--timeout", "200s")
    case.wait_ready()
    writer.some(20)
    machine, epoch = cluster.machine_of(case.worker_pid()), case.epoch()
    cluster.lose(machine)
    writer.some(20)
    until(lambda: case.epoch() > epoch, "apply was not started again")
    case.wait_equal()
    assert cluster.machine_of(case.worker_pid()) == 1 - machine
    # what is left of the cluster copies tables, too
    for database in (case.pubdb, case.subdb):
        database.execute("CREATE TABLE later (id int)")
    case.pubdb.execute("INSERT INTO later SELECT generate_series(1, 1000); ALTER PUBLICATION p ADD TABLE later")
    case.end(case.start("refresh", case.name, "--timeout", "100s"))
    assert case.subdb.value("SELECT count(*) FROM later") == 1000
    case.terminate(process)
    case.tables.append("later")
    case.check()
