"""What else befalls a cluster: partitions, machines that stand still, executors that come and go by themselves."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest
from fix_faults import Site, until
from fix_proxy import Link, Proxy
from fix_spark import ADDRESSES, CORES, Cluster
from psycopg.conninfo import make_conninfo
from spark.seen import begins, shown, stored
from thorough import only_thorough

from pgsub.demo.servers import free_port

pytestmark = [only_thorough, pytest.mark.timeout(900)]

#: Where executors find the driver; something forwards what arrives there.
OUTSIDE = "127.0.0.4"
#: Seconds until Spark counts an executor as lost.
_LOST = {
    "spark_network_timeout": "16s",
    "spark_network_timeoutInterval": "4s",
    "spark_executor_heartbeatInterval": "4s",
}


class Outside:
    """An address at which executors reach the driver's two ports, as behind NAT.

    :ivar beats: datagrams that arrived at the port of heartbeats, where one was given; all others go nowhere.
    """

    def __init__(self) -> None:
        self._ports = [free_port() for _ in range(2)]
        places = [make_conninfo("", host="127.0.0.1", port=port) for port in self._ports]
        self._proxies = [Proxy(place, (OUTSIDE, port)) for place, port in zip(places, self._ports)]
        self._datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._datagrams.bind((OUTSIDE, 0))
        self.beats = 0

    def conf(self, cluster: Cluster, **more: str) -> list[str]:
        """Words of a command whose driver is behind it."""
        driver, blocks = self._ports
        words = cluster.conf(spark_driver_host=OUTSIDE, spark_driver_bindAddress="127.0.0.1", **more)
        return [*words, "--conf", f"spark.driver.port={driver}", "--conf", f"spark.driver.blockManager.port={blocks}"]

    def pass_heartbeats(self) -> list[str]:
        """Let datagrams through, at one port.

        :return: words of a command.
        """
        port = self._datagrams.getsockname()[1]
        threading.Thread(target=self._pass, args=[("127.0.0.1", port)], daemon=True).start()
        return ["--conf", f"spark.pgsub.heartbeat.port={port}"]

    def _pass(self, launcher: tuple[str, int]) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._datagrams.sendto(self._datagrams.recv(65536), launcher)
                self.beats += 1

    def cut_off(self, cluster: Cluster, number: int) -> None:
        """Let no byte pass to and from one machine."""
        ports: set[int] = set()
        others: set[int] = set()

        def held(link: Link) -> bool:
            if link.client_port not in ports | others:
                (ports if link.client_port in cluster.ports(number) else others).add(link.client_port)
            return link.client_port in ports

        for proxy in self._proxies:
            proxy.held = held

    def stall(self) -> None:
        """No byte passes, and nobody is told."""
        for proxy in self._proxies:
            proxy.stall()

    def resume(self) -> None:
        """All is as before."""
        for proxy in self._proxies:
            proxy.held = lambda link: False
            proxy.resume()

    def close(self) -> None:
        """End all connections."""
        for proxy in self._proxies:
            proxy.close()
        self._datagrams.close()


@pytest.fixture
def outside() -> Iterator[Outside]:
    """The driver's address outside."""
    with closing(Outside()) as made:
        yield made


def test_behind_nat_and_without_a_heartbeat_all_ends_well_and_a_partition_loses_and_repeats_nothing(
    site: Callable[[], Site], cluster: Cluster, outside: Outside
) -> None:
    case = site()
    writer = case.make("audit1", "keyed1", "counter1")
    case.end(case.create("--timeout", "5m", *outside.conf(cluster)), timeout=300)
    assert case.all_ready()
    assert f'arrives at "{OUTSIDE}", UDP port ' in case.output.read_text()

    process = case.run(*outside.conf(cluster, **_LOST), "--timeout", "15m")
    until(lambda: stored(case, "stage") == "alive", case.said)
    writer.some(20)
    epoch, applied = case.epoch(), case.ledger("remote_lsn")

    outside.stall()
    until(lambda: case.ledger("remote_lsn") > applied, case.said)  # the executor reaches both servers
    until(lambda: stored(case, "waits_for") == "a free task slot: Spark has none yet", case.said)
    assert shown(case)["state"] != "running"
    until(lambda: case.epoch() > epoch, case.said)
    applied = case.ledger("remote_lsn")
    writer.some(20)
    assert case.ledger("remote_lsn") == applied  # whoever is still there is fenced off

    outside.resume()
    begins(case, "the partition ended", epoch)
    writer.some(20)
    writer.rest()
    case.end(case.start("wait", case.name, "--for", "caught-up", "--timeout", "2m"))
    assert case.digest(case.subdb) == case.digest(case.pubdb)
    case.terminate(process)

    writer.resume()
    writer.some(20)
    writer.rest()
    case.end(case.run("--until-caught-up", "--timeout", "5m", *outside.conf(cluster)), timeout=300)
    case.check()


def test_a_machine_that_is_cut_off_from_the_driver_loses_apply_to_the_other_one_and_repeats_nothing(
    site: Callable[[], Site], cluster: Cluster, outside: Outside
) -> None:
    case = site()
    writer = case.make("audit1", "keyed1", "counter1")
    case.end(case.create("--no-wait"))
    words = [*outside.conf(cluster, **_LOST, spark_cores_max=str(len(ADDRESSES) * CORES)), *outside.pass_heartbeats()]
    process = case.run(*words, "--timeout", "15m")
    case.wait_ready()
    until(lambda: stored(case, "stage") == "alive", case.said)
    until(lambda: outside.beats > 0, case.said)
    seen = "SELECT last_msg_receipt_time FROM pg_stat_subscription WHERE worker_type = 'apply'"
    until(lambda: case.sqlite(seen)[0][0] is not None, case.said)  # what only heartbeats say
    assert "no heartbeat of the executor" not in case.output.read_text()
    until(lambda: all(cluster.executors(number) for number in range(len(ADDRESSES))), case.said)
    machine, epoch = cluster.machine_of(case.worker_pid()), case.epoch()

    outside.cut_off(cluster, machine)
    begins(case, "a machine was cut off", epoch)
    until(lambda: cluster.machine_of(case.worker_pid()) != machine, case.said)
    applied = case.ledger("remote_lsn")
    until(lambda: case.ledger("remote_lsn") > applied, case.said)
    outside.resume()
    writer.some(20)
    case.wait_equal()
    case.terminate(process)
    case.check()


def test_a_master_that_was_started_again_without_its_state_keeps_nothing_waiting(
    site: Callable[[], Site], cluster: Cluster
) -> None:
    case = site()
    writer = case.make("audit1", "keyed1", "counter1")
    case.end(case.create("--no-wait"))
    process = case.run(*cluster.conf(), "--timeout", "15m")
    case.wait_ready()
    until(lambda: stored(case, "stage") == "alive", case.said)
    epoch = case.epoch()
    cluster.renew_master()
    begins(case, "the master was started again", epoch)
    assert f'Spark master "{cluster.url}" no longer knows this application' in case.output.read_text()
    writer.some(20)
    case.wait_equal()
    case.terminate(process)
    case.check()


def test_a_spark_that_is_started_again_with_too_few_machines_serves_what_it_can(
    site: Callable[[], Site], cluster: Cluster
) -> None:
    case = site()
    writer = case.make("audit1", "counter1")
    for database in (case.pubdb, case.subdb):
        database.execute("CREATE TABLE later (id int)")
    case.pubdb.execute("CREATE PUBLICATION q FOR TABLE later")
    case.end(case.create("--no-wait"))
    ends = ("--connection", case.pubdb.conninfo, "--target", case.target, "--publication", "q")
    case.end(case.start("create", f"{case.name}_other", *ends, "--no-wait"))
    waits = "spark.scheduler.maxRegisteredResourcesWaitingTime=5s"
    # each machine has memory for two executors: both together have four slots, three of which are needed
    process = case.start("run", *cluster.conf(spark_executor_cores="1"), "--conf", waits, "--timeout", "15m")
    case.wait_ready()
    alive = "SELECT count(*) FROM pgsub_task WHERE stage = 'alive' AND waits_for IS NULL"
    until(lambda: case.sqlite(alive) == [(2,)], case.said)
    cluster.lose(0)
    epoch = case.epoch()
    os.kill(int(case.jvm_pid.read_text()), signal.SIGKILL)
    fewer = re.compile("Spark has only [12] of the 3 task slots that are needed")  # as many as have come by then
    until(lambda: fewer.search(case.output.read_text()) is not None, case.said)
    until(lambda: case.epoch() > epoch and case.sqlite(alive) == [(2,)], case.said)
    cluster.join(0)
    writer.some(20)
    case.wait_equal()
    case.terminate(process)
    case.end(case.start("drop", f"{case.name}_other", "--yes"))
    case.check()


def test_a_machine_that_stands_still_is_taken_over_and_may_wake_up_at_any_time(
    site: Callable[[], Site], cluster: Cluster
) -> None:
    case = site()
    writer = case.make("audit1", "keyed1", "counter1")
    case.end(case.create("--no-wait"))
    settings = cluster.conf(**_LOST, spark_cores_max=str(len(ADDRESSES) * CORES))
    process = case.run(*settings, "--timeout", "15m", PGSUB_WORKER_TIMEOUT="8")
    case.wait_ready()
    until(lambda: stored(case, "stage") == "alive", case.said)
    machine, epoch = cluster.machine_of(case.worker_pid()), case.epoch()
    with ExitStack() as stack:
        cluster.signal(machine, signal.SIGSTOP)
        stack.callback(cluster.signal, machine, signal.SIGCONT)
        until(lambda: str(stored(case, "waits_for")).startswith("a sign of life of PID"), case.said)
        begins(case, "a machine stood still", epoch)
        until(lambda: cluster.machine_of(case.worker_pid()) != machine, case.said)
        writer.some(20)
        applied = case.ledger("remote_lsn")
        until(lambda: case.ledger("remote_lsn") > applied, case.said)
    writer.some(20)
    case.wait_equal()
    assert "gave no sign of life for" in case.output.read_text()
    case.terminate(process)
    case.check()


def test_executors_that_spark_allocates_come_when_tasks_want_them_and_go_when_none_does(
    site: Callable[[], Site], cluster: Cluster
) -> None:
    case = site()
    writer = case.make("audit1", "keyed1", "counter1", "auditbig")
    case.end(case.create("--no-wait", "--max-sync-workers", "4", "--copy-workers", "4"))
    dynamic = {
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.executorIdleTimeout": "4s",
        "spark.executor.cores": "1",
    }
    words = [word for name, value in dynamic.items() for word in ("--conf", f"{name}={value}")]
    process = case.run(*cluster.conf(), *words, "--timeout", "15m")
    case.wait_ready()
    until(lambda: stored(case, "stage") == "alive", case.said)

    def running() -> list[int]:
        return [pid for number in range(len(ADDRESSES)) for pid in cluster.executors(number)]

    until(lambda: len(running()) == 1, lambda: f"executors: {running()}")
    epoch, [executor] = case.epoch(), running()
    os.kill(executor, signal.SIGKILL)
    begins(case, "the only executor was killed", epoch)
    writer.some(20)
    case.wait_equal()
    case.terminate(process)
    case.check()
