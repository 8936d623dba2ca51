"""A pair of databases with a subscription between them: the words of the tests of apply and tablesync.

Tasks run in threads (:mod:`fix_engine`); the subscription is registered as
``pgsub/commands/subscription/registration.py`` does.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import patience
import pytest
from fix_engine import Subscriber, Task

from pgsub.apply.worker import feedback
from pgsub.target.catalog.relation import describe
from pgsub.target.ledger import subscriptions
from pgsub.target.ledger.subscriptions import RelationState
from pgsub.target.session import connect as target
from pgsub.target.session.connect import SessionName

if TYPE_CHECKING:
    from fix_servers import Database

_PUBLISHED = "SELECT DISTINCT schemaname, tablename FROM pg_publication_tables WHERE pubname = ANY (%s) ORDER BY 1, 2"


class Pair(Subscriber):
    """A subscription to all that its publications publish; every table is on both sides."""

    def subscribe(self, state: str, names: list[tuple[str, str]] | None) -> Pair:
        """Register the published tables (or these) in one state, and create the slot."""
        rows = []
        for schema, name in names if names is not None else self.pubdb.rows(_PUBLISHED, list(self.sub.publications)):
            found = describe(self.session, schema, name)
            assert found is not None, (schema, name)
            rows.append(RelationState(found.oid, schema, name, state))
        return self.registered(rows)

    def ddl(self, statements: str) -> None:
        """Run on both sides."""
        self.pubdb.execute(statements)
        self.subdb.execute(statements)

    def add(self, *names: str) -> None:
        """Subscribe to further tables of schema public, in state ``r``: what refresh without copy does."""
        subscriptions.add_relations(
            self.session, self.subid, [RelationState(self.relid(n), "public", n, "r") for n in names]
        )
        self.session.execute(
            "UPDATE pgsub.progress SET states_version = states_version + 1 WHERE subid = %s AND worker = 0",
            (self.subid,),
        )

    def published_names(self) -> list[tuple[str, str]]:
        """Schema and name of all tables that are subscribed to."""
        return self.subdb.rows("SELECT schemaname, relname FROM pgsub.subscription_rel WHERE subid = %s", self.subid)

    def set(self, **options: Any) -> None:
        """Change options of the subscription for the workers that start from now on."""
        self.sub = replace(self.sub, **options)

    def apply(self, *statements: str) -> None:
        """Run on the publisher, each string in a transaction of its own, then apply everything in one run."""
        for statement in statements:
            self.pubdb.execute(statement)
        assert self.catch_up().outcome == "reached"

    def same(self, *tables: str, columns: str = "*") -> None:
        """Assert that the tables hold the same rows on both sides, duplicates included.

        :param tables: as SQL.
        """
        for table in tables:
            query = f"SELECT r::text FROM (SELECT {columns} FROM {table} AS x) AS r ORDER BY 1"
            assert self.subdb.rows(query) == self.pubdb.rows(query), table

    def progress(self) -> tuple[int, int]:
        """Apply's remote_lsn and reported_lsn."""
        [(remote, reported)] = self.subdb.rows(
            "SELECT remote_lsn - '0/0'::pg_lsn, reported_lsn - '0/0'::pg_lsn FROM pgsub.progress"
            " WHERE subid = %s AND worker = 0",
            self.subid,
        )
        return int(remote), int(reported)

    def confirmed(self) -> int:
        """The slot's confirmed_flush_lsn."""
        query = "SELECT confirmed_flush_lsn - '0/0'::pg_lsn FROM pg_replication_slots WHERE slot_name = %s"
        return int(self.pubdb.value(query, self.sub.slot_name))

    def published(self) -> int:
        """Where the publisher's WAL ends now."""
        return int(self.pubdb.value("SELECT pg_current_wal_flush_lsn() - '0/0'::pg_lsn"))

    def events(self) -> list[dict[str, Any]]:
        """Conflicts and messages that wait for the launcher, and not what a copy or two_phase has to tell."""
        query = (
            "SELECT body FROM pgsub.event WHERE body ->> 'kind' <> 'two_phase'"
            " AND NOT (body ->> 'kind' = 'log' AND body ->> 'text' ~ '^(copy of )?table .* (continues|was adopted)')"
            " ORDER BY id"
        )
        return [body for (body,) in self.subdb.rows(query)]

    def until(self, query: str, *params: Any, value: Any = True, task: Task | None = None) -> None:
        """Poll the target until a query's value is the wanted one; a worker's error ends the wait."""
        deadline = time.monotonic() + patience.SECONDS
        while (seen := self.subdb.value(query, *params)) != value:
            assert task is None or task.error is None, task.error
            late = time.monotonic() >= deadline
            assert not late, f"{query}: still {seen!r}, not {value!r}\n{self._scene(task)}"
            time.sleep(0.02)

    def _scene(self, task: Task | None) -> str:
        """What both servers and the task are at, for a wait that was in vain."""
        sessions = (
            "SELECT application_name, state, wait_event_type, wait_event, backend_xid IS NOT NULL, left(query, 200)"
            " FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        slots = "SELECT slot_name, active, confirmed_flush_lsn, pg_current_wal_flush_lsn() FROM pg_replication_slots"
        seen = [*self.pubdb.rows(sessions), *self.pubdb.rows(slots), *self.subdb.rows(sessions)]
        return "\n".join([*map(repr, seen), "" if task is None else task.stack()])


MakePair = Callable[..., Pair]


def foreign_keys_fire(database: Database) -> None:
    """Let all foreign keys be enforced, as they are where a role may not set session_replication_role."""
    triggers = "SELECT tgrelid::regclass::text, tgname FROM pg_trigger WHERE tgisinternal"
    for table, name in database.rows(triggers):
        database.execute(f'ALTER TABLE {table} ENABLE ALWAYS TRIGGER "{name}"')


@contextlib.contextmanager
def elsewhere(p: Pair, statements: str) -> Iterator[Database]:
    """Let the address lead to another database, which has these tables and a publication of the same name."""
    there, conninfo = type(p.pubdb)(p.pubdb.server, f"{p.pubdb.name}_elsewhere"), p.sub.connection
    try:
        there.execute(f"{statements}; CREATE PUBLICATION p FOR ALL TABLES")
        p.set(connection=there.conninfo)
        yield there
    finally:
        p.set(connection=conninfo)
        there.drop()


@contextlib.contextmanager
def repaired_elsewhere(p: Pair, table: str) -> Iterator[None]:
    """Hold the lock of a table's repair in a session of a later attempt, which no take-over of this one ends."""
    with contextlib.closing(p.subdb.connect()) as session:
        name = SessionName(p.subid, f"copy:{p.relid(table)}", 99)
        session.execute("SELECT set_config('application_name', %s, false)", (str(name),))
        session.execute("SELECT pg_advisory_lock(%s, %s::regclass::oid::int)", (0x70677361, table))
        yield


@pytest.fixture
def untracked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the target track no commit times. Then no row is locked first to ask who wrote it."""
    monkeypatch.setattr(target, "tracks_commits", lambda connection: False)


@pytest.fixture(params=["tracked", "untracked"])
def commit_times(request: pytest.FixtureRequest) -> None:
    """Let the target track commit times, and then not. A race that waits for a row takes another way in each case."""
    if request.param == "untracked":
        request.getfixturevalue("untracked")


@pytest.fixture
def pair(pubdb: Database, subdb: Database, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePair]:
    """``pair(ddl, pub=…, sub=…, state="r", names=None, **options of Subscription)``.

    ``ddl`` runs on both sides, ``pub`` and ``sub`` on one of them; where ``pub`` makes no publication, ``p`` is one of
    all tables.
    """
    made: list[Pair] = []
    monkeypatch.setattr(feedback, "MIRROR_SECONDS", 0.0)  # there is no launcher to wait for

    def make(
        ddl: str = "",
        *,
        pub: str = "",
        sub: str = "",
        state: str = "r",
        names: list[tuple[str, str]] | None = None,
        **options: Any,
    ) -> Pair:
        pubdb.execute(f"{ddl};{pub}")
        subdb.execute(f"{ddl};{sub}")
        if not pubdb.value("SELECT count(*) FROM pg_publication"):
            pubdb.execute("CREATE PUBLICATION p FOR ALL TABLES")
        made.append(Pair(pubdb, subdb, **options))
        return made[-1].subscribe(state, names)

    yield make
    for one in made:
        one.close()
