"""Apply workers keep their slots of Spark: what is shown of tables that none is left for, and how they get one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fix_faults import Site, until
from spark.seen import status, stored

from pgsub.launcher.spark.task_slots import more_slots

_MASTER = "spark://h:7077"


@pytest.mark.long
@pytest.mark.own_spark  # which has two slots
def test_tables_that_no_slot_is_left_for_are_shown_with_the_command_that_helps_and_copied_once_there_is_one(
    site: Callable[[], Site],
) -> None:
    case = site()
    writer = case.make_ready("audit1", "counter1")
    process = case.start("run", "--master", "local[2]", "--timeout", "15m")
    until(lambda: stored(case, "stage") == "alive", case.said)
    for database in (case.pubdb, case.subdb):
        database.execute("CREATE TABLE later (id int)")
    case.pubdb.execute("INSERT INTO later SELECT generate_series(1, 1000); CREATE PUBLICATION q FOR TABLE later")
    ends = ("--connection", case.pubdb.conninfo, "--target", case.target, "--publication", "q")
    other = f"{case.name}_other"
    case.end(case.start("create", other, *ends, "--no-wait"))

    waits = "a free task slot for its tables: Spark has 2 in all, and 3 are needed"
    more = "pgsub run --master 'local[16]'"
    waiting = "SELECT stage, waits_for, next FROM pgsub_task WHERE waits_for IS NOT NULL"
    until(lambda: case.sqlite(waiting) == [("alive", waits, more)], case.said)
    ended = status(case, "--check", name=other)
    assert (ended.returncode, f'subscription "{other}" waits for {waits}' in ended.stderr) == (3, True), ended.stderr
    assert more in ended.stdout
    assert "End pgsub run, and start it again with more task slots." in status(case, "--runbook", name=other).stdout
    writer.some(10)
    case.wait_equal()  # the other subscription goes on
    assert status(case, "--check").returncode == 0
    assert case.output.read_text().count(f'subscription "{other}" waits for a free task slot') == 1

    case.end(case.start("disable", case.name))
    until(case.all_ready, case.said)
    assert case.subdb.value("SELECT count(*) FROM later") == 1000
    until(lambda: case.sqlite(waiting) == [], case.said)
    case.terminate(process)
    case.end(case.start("drop", other, "--yes"))


@pytest.mark.parametrize(
    ("chosen", "command"),
    [
        ({}, "pgsub run"),
        ({"spark.master": "local[2]"}, "pgsub run --master 'local[16]'"),
        ({"spark.master": _MASTER}, f'"$SPARK_HOME"/sbin/start-worker.sh {_MASTER}'),
        ({"spark.master": _MASTER, "spark.cores.max": "9"}, f'"$SPARK_HOME"/sbin/start-worker.sh {_MASTER}'),
        ({"spark.master": _MASTER, "spark.cores.max": "2"}, "pgsub run --conf spark.cores.max=3"),
        (
            {"spark.master": _MASTER, "spark.cores.max": "4", "spark.task.cpus": "2"},
            "pgsub run --conf spark.cores.max=6",
        ),
        ({"spark.master": "yarn"}, None),
    ],
)
def test_the_command_for_more_slots_is_the_one_of_the_master(chosen: dict[str, str], command: str | None) -> None:
    assert more_slots(chosen, 3) == command
