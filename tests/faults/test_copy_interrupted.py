"""The publisher ends a COPY in the middle: what arrived until then must not count as the table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from fix_engine import Subscriber
from fix_faults import Child, until
from fix_servers import Database
from thorough import long

from pgsub.common.errors import PgsubError
from pgsub.tablesync.copy import plan


@pytest.mark.parametrize("ending", ["pg_terminate_backend", *long(["pg_cancel_backend"])])
@pytest.mark.parametrize("chunk_bytes", [*long([1 << 40]), 16 << 20], ids=["atomic", "chunked"])
def test_a_copy_that_the_publisher_broke_off_is_not_taken_for_the_whole_table(
    pubdb: Database,
    subdb: Database,
    subscriber: Callable[..., Subscriber],
    child: Callable[..., Child],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    ending: str,
    chunk_bytes: int,
) -> None:
    monkeypatch.setattr(plan, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(plan, "CHUNKED_FROM_BYTES", chunk_bytes)
    monkeypatch.setattr(plan, "CHUNKS_PER_TASK", 1)  # a small chunk would be in the sockets' buffers, its COPY over
    for database in (pubdb, subdb):
        database.execute("CREATE TABLE log (n bigint, pad text)")
    pubdb.execute("CREATE PUBLICATION p FOR TABLE log")
    pubdb.execute("INSERT INTO log SELECT g, repeat('x', 1000) FROM generate_series(1, 30000) g")
    sub = subscriber(copy_workers=1).register("log", state="i")
    release = tmp_path / "release"
    real = sub.submit

    def submit(name: str, function: Callable[..., object], items: list[object]) -> object:
        if not name.startswith("copy"):
            return real(name, function, items)
        return _Job(child("pgsub.tablesync.copy.task:run", items[0], {"copy.middle": f"pause:{release}"}))

    monkeypatch.setattr(sub, "submit", submit)
    syncing = real("sync", lambda _: sub.sync("log"), [None])
    until(lambda: (tmp_path / "copy.middle").exists(), "no copy")
    query = (
        f"SELECT count({ending}(pid)) FROM pg_stat_activity WHERE datname = current_database() AND state = 'active'"
        " AND query LIKE 'COPY %'"
    )
    assert pubdb.value(query) > 0
    release.touch()
    try:
        syncing.result()
    except PgsubError:
        sub.sync("log")
    sub.catch_up()
    assert subdb.value("SELECT count(*) FROM log") == 30000


class _Job:
    """A child as a job."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def done(self) -> bool:
        return self._child.process.poll() is not None

    def result(self, timeout: float | None = None) -> list[object]:
        outcome = self._child.outcome()
        if isinstance(outcome, BaseException):
            raise outcome
        return [outcome]

    def cancel(self) -> None:
        self._child.close()
