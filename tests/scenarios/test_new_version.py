"""pgsub is upgraded while a worker of the older one stands in the middle of a batch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import psycopg
import pytest
from fix_faults import Site, until
from psycopg.conninfo import make_conninfo
from thorough import only_thorough

TABLES = ("audit1", "keyed1", "counter1")


def versions(case: Site) -> tuple[int, int]:
    """Of ledger and state store."""
    [(store,)] = case.sqlite("PRAGMA user_version")
    return case.subdb.value("SELECT max(version) FROM pgsub.ledger_version"), store


def spooled(case: Site) -> list[str]:
    """Folders of transactions in progress."""
    return sorted(path.name for path in (case.state / "spool").glob("*") if any(path.iterdir()))


def left_over(case: Site) -> psycopg.Connection:
    """What a worker of a killed launcher, which stands still on another machine, has in the target: locks."""
    [(subid, epoch)] = case.subdb.rows("SELECT subid, epoch FROM pgsub.control WHERE worker = 0")
    session = case.subdb.connect(application_name=f"pgsub {subid} apply {epoch}")
    session.autocommit = False
    session.execute("SELECT FROM pgsub.progress JOIN pgsub.control USING (subid, worker) FOR UPDATE OF progress")
    return session


@only_thorough
def test_an_upgrade_in_the_middle_of_a_batch_loses_and_repeats_nothing(
    site: Callable[[], Site], newer: dict[str, str]
) -> None:
    """Its launcher is killed with a batch open and a transaction in its spool; one more is left elsewhere."""
    case = site()
    case.pubdb.conninfo = make_conninfo(case.pubdb.conninfo, options="-c logical_decoding_work_mem=64kB")
    writer = case.make(*TABLES)
    case.end(case.create("--no-wait", "--streaming", "on"))
    ledger, store = versions(case)
    case.disarm("apply.before_target_commit")
    killed = case.serve(points={"apply.before_target_commit": "stop"})
    case.wait_ready()
    with case.pubdb.connect() as session, session.transaction():
        session.execute("INSERT INTO audit1 SELECT g, repeat('z', 100) FROM generate_series(1, 20000) g")
        until(lambda: bool(spooled(case)), "no transaction is spooled")
        left = spooled(case)
        case.arm("apply.before_target_commit")
        case.wait_fired("apply.before_target_commit")
        killed.kill()
        killed.wait()
        zombie = left_over(case)
        writer.some(20)
        process = case.serve(**newer)
        until(lambda: versions(case) == (ledger + 1, store + 1), case.said)
        until(lambda: spooled(case) != left, lambda: f"the spool of the older one is left: {left}")
    writer.some(20)
    case.wait_equal()
    with pytest.raises(psycopg.OperationalError):
        zombie.commit()
    zombie.close()
    assert (case.state / f"state.db.v{store}.bak").exists()
    case.terminate(process)
    case.check()
    command = [sys.executable, "-m", "pgsub", "--state-dir", str(case.state), "status"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 10, refused.stderr
