"""The end of a soak: every committed transaction exactly once, sums equal, nothing left over."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator

from fix_faults import until
from fix_servers import Database
from soak_ground import COMMON, LIMIT, NAME, Ground
from workload import Table
from workload_compare import rows, unlike_publisher

_SUM = "SELECT count(*), sum(hashtextextended(t::text, 0)) FROM {} t"
#: Transactions by their table: each of them wrote one row into it, and none has a key that would refuse a second one.
_AUDITED = ("audit", "audit_prepared", "looped")
_LEDGER = (
    *(
        "copy_chunk",
        "event",
        "prepared_xact",
        "prepared_pending",
        "skipped_change",
        "held_table",
        "held_change",
        "barrier",
    ),
)
_OF_A_SUBSCRIPTION = ("subscription", "control", "progress", "subscription_rel")


def differences(ground: Ground, tables: tuple[str, ...] = COMMON) -> list[str]:
    """What is not equal while nobody writes.

    :param tables: besides those of the random workload.
    """
    found = [f"{t.name.as_string()} on both targets: {rest}" for t in ground.tables if (rest := _unlike(ground, t))]
    for target in (ground.subdb, ground.native):
        found += unlike_publisher(ground.pubdb, target, ground.tables)
        found += [f"{name} on {target.name}" for name in tables if not _same(ground.pubdb, target, name)]
    if not _same(ground.pubdb, ground.subdb, "holes"):
        found.append("holes")
    return found


def _unlike(ground: Ground, table: Table) -> list[tuple[str, str]]:
    """Some of the rows that only one target has, and which."""
    ours, native = Counter(rows(ground.subdb, table)), Counter(rows(ground.native, table))
    found = [("pgsub", str(row)) for row in ours - native] + [("native", str(row)) for row in native - ours]
    return [(side, row[:300]) for side, row in found[:6]]


def _same(one: Database, other: Database, table: str) -> bool:
    return one.rows(_SUM.format(table)) == other.rows(_SUM.format(table))


def exactly_once(ground: Ground) -> Iterator[str]:
    """Transactions that are not on a target, that are there twice, or that nobody committed."""
    for table in _AUDITED:
        query = f"SELECT id, pad, count(*) FROM {table} GROUP BY id, pad"
        committed = set(ground.pubdb.rows(query))
        if repeated := [row for row in committed if row[2] != 1]:
            yield f"{table} on the publisher: {repeated[:5]}"
        for target in (ground.subdb, ground.native):
            if unlike := committed ^ set(target.rows(query)):
                yield f"{table} on {target.name}: {len(unlike)} transactions, as {sorted(unlike)[:5]}"


def transactions(ground: Ground) -> int:
    """Count those that :func:`exactly_once` looks at."""
    return sum(int(ground.pubdb.value(f"SELECT count(*) FROM {table}")) for table in _AUDITED)


def end(ground: Ground) -> Iterator[str]:
    """End the launcher, then drop the subscriptions; what is left over."""
    ground.alive()
    ground.disarm()
    ground.launcher.send_signal(signal.SIGTERM)
    if (code := ground.launcher.wait(LIMIT)) != 0:
        yield f"the launcher ended with {code}:\n{ground.site.said()}"
    yield from _processes(ground)
    yield from _sessions(ground)
    yield from _ledger(ground.subdb)
    yield from _files(ground)
    ground.ok("drop", NAME, "--yes")
    ground.native.execute("DROP SUBSCRIPTION native")
    ground.pubdb.execute("DROP SUBSCRIPTION back")
    yield from _after_drop(ground)


def _processes(ground: Ground) -> Iterator[str]:
    try:
        until(lambda: not ground.processes(), "", 30)
    except AssertionError:
        yield f"processes are left: {ground.processes()}"


def _sessions(ground: Ground) -> Iterator[str]:
    query = "SELECT count(*) FROM pg_stat_activity WHERE application_name ~ '^(pgsub|copied)( |_|$)'"
    for database in (ground.pubdb, ground.subdb):
        try:
            database.wait(query, value=0, seconds=30)
        except AssertionError:
            yield f"sessions are left on {database.name}: {database.rows('SELECT * FROM pg_stat_activity')}"
    found = ground.pubdb.rows("SELECT slot_name::text FROM pg_replication_slots ORDER BY 1")
    if found != [("native",), (NAME,)]:
        yield f"slots are left: {found}"
    for database in (ground.pubdb, ground.subdb):
        if prepared := database.rows("SELECT gid, database FROM pg_prepared_xacts"):
            yield f"prepared transactions are left on {database.name}: {prepared}"


def _ledger(target: Database) -> Iterator[str]:
    for table in _LEDGER:
        if found := target.rows(f"SELECT * FROM pgsub.{table} LIMIT 5"):
            yield f"rows are left in pgsub.{table}: {found}"
    for table in ("control", "progress"):
        if found := target.rows(f"SELECT * FROM pgsub.{table} WHERE worker <> 0"):
            yield f"rows of workers are left in pgsub.{table}: {found}"
    query = "SELECT * FROM pgsub.subscription_rel WHERE srsubstate <> 'r' OR sync_slot <> '' OR spare_slot <> ''"
    if found := target.rows(query):
        yield f"tables are not ready: {found}"


def _files(ground: Ground) -> Iterator[str]:
    if found := [path.name for path in ground.scratch.iterdir()]:
        yield f"temporary files are left: {found}"


def dropped(target: Database) -> Iterator[str]:
    """What is left in a ledger once its only subscription was dropped, but for what was skipped or replaced."""
    for table in (*set(_LEDGER) - {"skipped_change"}, *_OF_A_SUBSCRIPTION):
        if found := target.rows(f"SELECT * FROM pgsub.{table}"):
            yield f"rows are left in pgsub.{table} of {target.name} after drop: {found}"


def _after_drop(ground: Ground) -> Iterator[str]:
    for database in (ground.pubdb, ground.subdb):
        if found := database.rows("SELECT slot_name::text FROM pg_replication_slots"):
            yield f"slots are left on {database.server.port}: {found}"
        if found := database.rows("SELECT roname FROM pg_replication_origin"):
            yield f"replication origins are left on {database.server.port}: {found}"
    yield from dropped(ground.subdb)
    if found := ground.site.sqlite("SELECT subname FROM pg_subscription"):
        yield f"subscriptions are left in the state store: {found}"
