"""Deployments that are wrong, or only small: what a command says of them, on a real cluster."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import patience
import pytest
from fix_faults import Site, until
from fix_servers import Pair
from fix_spark import ADDRESSES, WAITING, Cluster, other_python, python
from psycopg.conninfo import conninfo_to_dict
from spark.seen import begins, status, stored
from thorough import only_thorough

import pgsub
from pgsub.common.connections import passfile
from pgsub.demo.servers import free_port

pytestmark = [only_thorough, pytest.mark.timeout(900)]

_BOUNDED = ("--until-caught-up", "--timeout", "5m")


def said_of(case: Site, code: int, words: list[str]) -> str:
    """What a bounded run printed, which ended with a code."""
    case.output.write_bytes(b"")
    case.end(case.run(*_BOUNDED, *words), code, timeout=300)
    return case.output.read_text()


def test_each_fault_of_a_deployment_ends_a_bounded_run_with_its_line_and_code_and_an_unbounded_one_tries_again(
    site: Callable[[], Site], cluster: Cluster
) -> None:
    case = site()
    case.make("audit1").stop()
    case.end(case.create("--no-wait"))
    long = f"{WAITING}={patience.SECONDS:.0f}s"
    plain = ["--master", cluster.url, "--conf", "spark.executor.memory=512m", "--conf", long]

    said = said_of(case, 13, [*plain, "--conf", f"spark.pyspark.python={python()}"])
    assert 'the executors cannot import "pgsub"' in said
    assert "DETAIL:  ModuleNotFoundError: No module named 'pgsub'." in said and "pgsub.spark.archive" in said

    said = said_of(case, 13, [*plain, "--conf", "spark.pyspark.python=/nowhere/python"])
    assert 'the Python interpreter "/nowhere/python" cannot be run on the executors' in said

    nowhere = f"spark://127.0.0.1:{free_port()}"
    said = said_of(case, 13, ["--master", nowhere])
    assert f'Spark master "{nowhere}" cannot be reached' in said

    said = said_of(case, 13, [*plain, "--conf", "spark.network.timeout=1s"])
    assert "Spark did not start" in said and "spark.network.timeout" in said

    said = said_of(case, 3, [*cluster.conf(), "--conf", "spark.cores.max=1"])
    assert f'Spark master "{cluster.url}" has 1 task slot, but 2 are needed' in said
    assert said.rstrip().endswith("--conf spark.cores.max=2")

    said = said_of(case, 3, [*plain, "--conf", "spark.executor.memory=100g", "--conf", f"{WAITING}=3s"])
    assert f'Spark master "{cluster.url}" has 0 task slots, but 2 are needed' in said
    assert "HINT:  Start another worker of Spark" in said and said.rstrip().endswith(f"--conf {WAITING}=5m")

    case.output.write_bytes(b"")
    process = case.run(*plain, "--conf", "spark.pyspark.python=/nowhere/python", "--timeout", "10m")
    until(lambda: case.output.read_text().count("cannot be run on the executors") >= 2, case.said, 300)
    case.terminate(process)


def test_another_minor_version_of_python_on_the_executors_is_named_with_the_launchers_own(
    site: Callable[[], Site], cluster: Cluster
) -> None:
    other = other_python(cluster.folder)
    case = site()
    case.make("audit1").stop()
    case.end(case.create("--no-wait"))
    said = said_of(case, 13, [*cluster.conf(), "--conf", f"spark.pyspark.python={other}"])
    assert "the executors run Python 3." in said, said
    assert f"but this launcher runs Python 3.{sys.version_info.minor}" in said, said


def test_executors_with_another_pgsub_than_the_launchers_run_nothing_of_it(
    site: Callable[[], Site], cluster: Cluster, tmp_path: Path
) -> None:
    case = site()
    case.make("audit1").stop()
    case.end(case.create("--no-wait"))
    with tarfile.open(cluster.archive) as tar:
        tar.extractall(tmp_path / "env", filter="fully_trusted")
    [module] = (tmp_path / "env").glob("lib/*/site-packages/pgsub/__init__.py")
    source = module.read_text()
    other = cluster.folder / "other.tar.gz"

    def said_with(text: str) -> str:
        module.write_text(text)
        with tarfile.open(other, "w:gz", compresslevel=1) as tar:
            tar.add(tmp_path / "env", ".")
        return said_of(case, 13, cluster.conf(spark_archives=f"{other}#env"))

    said = said_with(source.replace(f'"{pgsub.__version__}"', '"0.0.9"'))
    assert f"the executors have pgsub 0.0.9, but this launcher is {pgsub.__version__}" in said
    said = said_with(source + "# of another day\n")
    assert f"the executors have another build of pgsub {pgsub.__version__} than this launcher" in said
    assert said.rstrip().endswith("python -m pgsub.spark.archive pgsub_env.tar.gz")
    said_of(case, 0, cluster.conf())
    case.check()


def test_where_only_apply_and_one_copy_fit_copies_take_turns(site: Callable[[], Site], cluster: Cluster) -> None:
    case = site()
    writer = case.make("audit1", "keyed1", "counter1", "auditbig")
    words = [*cluster.conf(), "--conf", "spark.cores.max=2", "--conf", "spark.executor.cores=2"]
    case.end(case.create("--timeout", "5m", "--max-sync-workers", "4", "--copy-workers", "4", *words), timeout=300)
    writer.rest()
    assert case.all_ready()
    assert said_of(case, 0, words)
    case.check()


def test_where_only_apply_fits_it_goes_on_and_a_copy_waits_which_is_shown_until_there_is_a_slot(
    site: Callable[[], Site], cluster: Cluster
) -> None:
    case = site()
    writer = case.make_ready("audit1", "counter1")
    for name in ("first", "later"):
        for database in (case.pubdb, case.subdb):
            database.execute(f"CREATE TABLE {name} (id int)")
    case.pubdb.execute("INSERT INTO later SELECT generate_series(1, 1000); CREATE PUBLICATION q FOR TABLE first")
    other = f"{case.name}_other"
    ends = ("--connection", case.pubdb.conninfo, "--target", case.target, "--publication", "q", "--no-copy-data")
    case.end(case.start("create", other, *ends, "--no-wait"))
    cluster.lose(0)
    words = [*cluster.conf(spark_executor_cores="1"), "--conf", f"{WAITING}=5s"]  # a machine has memory for two
    process = case.start("run", *words, "--timeout", "15m")
    alive = "SELECT count(*) FROM pgsub_task WHERE stage = 'alive' AND waits_for IS NULL"
    until(lambda: case.sqlite(alive) == [(2,)], case.said)
    assert re.search("Spark has only [12] of the 3 task slots that are needed", case.output.read_text())

    case.pubdb.execute("ALTER PUBLICATION q ADD TABLE later")
    case.end(case.start("refresh", other, "--no-wait"))
    waiting = "a free task slot for its tables: Spark has 2 in all, and 3 are needed"
    shown = [("alive", waiting, f'"$SPARK_HOME"/sbin/start-worker.sh {cluster.url}')]
    until(lambda: case.sqlite("SELECT stage, waits_for, next FROM pgsub_task WHERE waits_for > ''") == shown, case.said)
    assert status(case, "--check", name=other).returncode == 3
    assert status(case, "--check").returncode == 0
    cluster.join(0)
    until(case.all_ready, case.said)
    assert case.subdb.value("SELECT count(*) FROM later") == 1000
    until(lambda: case.sqlite(alive) == [(2,)], case.said)
    writer.some(20)
    case.wait_equal()
    case.terminate(process)
    case.end(case.start("drop", other, "--yes"))
    case.check()


def test_what_only_one_of_the_machines_lacks_is_named_with_it_by_the_first_task_that_runs_there(
    site: Callable[[], Site], cluster: Cluster
) -> None:
    case = site()
    writer = case.make_ready("audit1", "counter1")
    good, bad = (cluster.folder / f"work{number}" / "env" for number in range(2))
    for place in (good, bad):
        with tarfile.open(cluster.archive) as tar:
            tar.extractall(place, filter="fully_trusted")
    [module] = bad.glob("lib/*/site-packages/pgsub/__init__.py")
    source = module.read_text()
    module.write_text(source + "# of another day\n")
    interpreter = "../../env/bin/python"  # of each machine its own
    cluster.lose(1)  # so that the look at an executor finds nothing
    process = case.run(*cluster.conf(spark_pyspark_python=interpreter), "--timeout", "15m")
    until(lambda: stored(case, "stage") == "alive", case.said)
    writer.some(10)
    cluster.join(1)
    cluster.lose(0)

    def said(message: str) -> None:
        until(lambda: case.sqlite("SELECT class, message FROM pgsub_error") == [("SparkUnusable", message)], case.said)
        assert status(case, "--check").returncode == 13

    said(f"the executors have another build of pgsub {pgsub.__version__} than this launcher")
    (bad / "bin" / "python").unlink()
    for executor in cluster.executors(1):
        os.kill(executor, signal.SIGKILL)  # which has a process of that interpreter left
    said(f'the Python interpreter "{interpreter}" cannot be run on the executors')
    printed = case.output.read_text()
    assert 'CONTEXT:  executor on "' in printed and f'CONTEXT:  executor on "{ADDRESSES[1]}"' in printed
    shutil.rmtree(bad)
    shutil.copytree(good, bad, symlinks=True)
    begins(case, "the machine has what it lacked", case.epoch())
    assert cluster.machine_of(case.worker_pid()) == 1
    cluster.join(0)
    writer.some(10)
    case.wait_equal()
    case.terminate(process)
    case.check()


def test_executors_read_passwords_from_their_own_files_only(
    site: Callable[..., Site], cluster: Cluster, own_pair: Callable[..., Pair], tmp_path: Path
) -> None:
    pair = own_pair(password="of the servers")
    case = site(pair.pubdb, pair.subdb)
    case.make("audit1").stop()
    case.end(case.create("--no-wait"))

    said = said_of(case, 13, cluster.conf())
    assert "the passfile of the target cannot be read on the executors" in said
    assert "--conf spark.executorEnv.PGPASSFILE=/etc/pgsub/pgpass" in said

    mounted = cluster.folder / "mounted"
    words = cluster.conf(spark_executorEnv_PGPASSFILE=str(mounted))
    assert f'the passfile of the target cannot be read on the executors: "{mounted}"' in said_of(case, 13, words)
    for number, database in enumerate((pair.pubdb, pair.subdb)):
        passfile.store(conninfo_to_dict(database.conninfo), tmp_path / str(number))
    mounted.write_text("".join((tmp_path / str(number)).read_text() for number in range(2)))
    cluster.give(mounted)
    mounted.chmod(0o440)  # as Kubernetes mounts a secret for a pod with fsGroup
    said = said_of(case, 13, words)
    assert f'the passfile on the executors is open to others: "{mounted}"' in said
    mounted.chmod(0o400)
    said_of(case, 0, words)
    case.check()


def test_a_service_that_executors_lack_stops_only_the_subscription_that_needs_it(
    site: Callable[[], Site], cluster: Cluster, tmp_path: Path
) -> None:
    case = site()
    writer = case.make("audit1")
    case.end(case.create("--no-wait"))
    services = tmp_path / "pg_service.conf"
    words = conninfo_to_dict(case.pubdb.conninfo).items()
    services.write_text("[elsewhere]\n" + "".join(f"{name}={value}\n" for name, value in words))
    ends = ("--connection", "service=elsewhere", "--target", case.target, "--publication", "p", "--no-copy-data")
    knows = {"PGSERVICEFILE": str(services)}  # the launcher's machine does
    case.end(case.start("create", f"{case.name}_other", *ends, "--no-wait", **knows))
    process = case.start("run", *cluster.conf(), "--timeout", "10m", **knows)
    case.wait_ready()
    writer.some(20)
    case.wait_equal()
    lacks = [("SparkUnusable", 'service "elsewhere" of the publisher is not defined on the executors')]
    until(lambda: case.sqlite("SELECT class, message FROM pgsub_error") == lacks, case.said)
    case.terminate(process)
    case.end(case.start("drop", f"{case.name}_other", "--yes", **knows))
    case.check()


def test_transactions_in_progress_are_spooled_where_the_executor_is_told_to_and_within_the_launchers_limit(
    site: Callable[[], Site], cluster: Cluster
) -> None:
    case = site()
    case.make("audit1").stop()
    case.pubdb.execute(f"ALTER DATABASE {case.pubdb.name} SET logical_decoding_work_mem = '64kB'")
    case.end(case.create("--no-wait"))
    spool = cluster.folder / "spool"
    words = [*cluster.conf(), "--conf", f"spark.pgsub.spool.dir={spool}", "--timeout", "10m"]
    process = case.run(*words, PGSUB_SPOOL_LIMIT="4MB")
    case.wait_ready()
    rows = "INSERT INTO audit1 SELECT g, repeat('z', 100) FROM generate_series(1, {}) g"
    with case.pubdb.connect() as session:
        session.execute("BEGIN")
        session.execute(rows.format(20_000))
        until(lambda: any(path.is_file() for path in spool.glob("*/*")), case.said)
        session.execute("COMMIT")
    until(lambda: case.digest(case.subdb) == case.digest(case.pubdb), case.said)
    case.pubdb.execute(rows.format(80_000))
    until(lambda: "Set PGSUB_SPOOL_LIMIT to a larger value" in case.said(), case.said)
    case.terminate(process)
    case.end(case.run(*cluster.conf(), *_BOUNDED), timeout=300)
    case.check()
