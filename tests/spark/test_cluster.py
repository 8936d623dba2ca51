"""The whole program on a standalone cluster of two machines, whose executors are another user's."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import patience
import pytest
from fix_faults import Site, until
from fix_spark import ADDRESSES, CORES, Cluster
from spark.seen import begins, running_on, shown, spark_pages, status, stored

#: What a chunk of the large table waits for.
_HELD_UP = """
CREATE FUNCTION held_up() RETURNS bool LANGUAGE plpgsql AS
'BEGIN PERFORM pg_advisory_xact_lock_shared(7); RETURN true; END';
ALTER TABLE auditbig ADD CHECK (held_up())
"""


def both_machines() -> list[str]:
    """Words of a command that begins when both machines are there: the first alone has room for all tasks."""
    settings = {
        "cores.max": len(ADDRESSES) * CORES,
        "scheduler.minRegisteredResourcesRatio": "1.0",
        "scheduler.maxRegisteredResourcesWaitingTime": "100s",
    }
    return [word for name, value in settings.items() for word in ("--conf", f"spark.{name}={value}")]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_tables_are_copied_by_both_machines_and_nothing_is_lost_or_repeated_whatever_dies(
    site: Callable[[], Site], cluster: Cluster
) -> None:
    case = site()
    writer = case.make("audit1", "keyed1", "counter1", "auditbig")
    unbounded = [*cluster.conf(), "--timeout", "30m"]
    case.subdb.execute(_HELD_UP)
    with case.subdb.connect() as session:  # so that all tasks of a table run at once: no machine has room for them
        session.execute("SELECT pg_advisory_lock(7)")
        words = ["--max-sync-workers", "4", "--copy-workers", "8", *unbounded, *both_machines()]
        process = case.create(*words, PGSUB_CHUNK_BYTES="50000")
        until(lambda: case.states() != "", case.said)  # before that there may be no state store to look at
        until(lambda: running_on(case, "copy auditbig") == set(ADDRESSES), case.said)
    case.end(process, timeout=10 * patience.SECONDS)
    assert case.all_ready()
    process = case.run(*unbounded, *both_machines())
    writer.some(20)
    until(lambda: stored(case, "stage") == "alive", case.said)
    until(lambda: shown(case)["state"] == "running", case.said)

    jobs = spark_pages(case, "jobs")
    assert f"apply {case.name}" in {job["description"] for job in jobs}
    assert {tag for job in jobs for tag in job["jobTags"]} == {"pgsub"}
    assert {stage["schedulingPool"] for stage in spark_pages(case, "stages")} <= {"apply", "check", "copy", "catch"}

    machine, epoch = cluster.machine_of(case.worker_pid()), case.epoch()
    for executor in cluster.executors(machine):
        os.kill(executor, signal.SIGKILL)
    begins(case, "an executor was killed", epoch)
    writer.some(20)

    machine, epoch = cluster.machine_of(case.worker_pid()), case.epoch()
    cluster.kill_worker(machine)  # its executor ends by itself
    begins(case, "a worker was killed", epoch)
    assert cluster.machine_of(case.worker_pid()) != machine
    cluster.join(machine)
    writer.some(20)

    epoch = case.epoch()
    for number in range(len(ADDRESSES)):
        cluster.lose(number)
    waiting = f'"$SPARK_HOME"/sbin/start-worker.sh {cluster.url}'
    until(lambda: stored(case, "next") == waiting, case.said)
    assert shown(case)["task"]["next"] == waiting
    ended = status(case, "--check")
    assert (ended.returncode, "a free task slot: Spark has none yet" in ended.stderr) == (3, True), ended.stderr
    cluster.join(0)
    begins(case, "no machine was left, and one came back", epoch)

    cluster.join(1)  # a new driver waits for both, as it was told
    epoch = case.epoch()
    os.kill(int(case.jvm_pid.read_text()), signal.SIGKILL)
    begins(case, "the driver's JVM was killed", epoch)

    epoch = case.epoch()
    process.kill()
    process.wait()
    process = case.run(*unbounded)
    begins(case, "the launcher was killed", epoch)
    for database in (case.pubdb, case.subdb):
        database.execute("CREATE TABLE later (id int)")
    case.pubdb.execute("INSERT INTO later SELECT generate_series(1, 1000); ALTER PUBLICATION p ADD TABLE later")
    case.end(case.start("refresh", case.name, "--timeout", "100s"))
    case.tables.append("later")
    case.wait_equal()
    case.terminate(process)
    case.check()
