"""Inserts that each server counts for itself, and the order in which the target commits them.

A CHECK constraint calls a function that notes the row in a table without a key, in the row's own transaction: a row
that was inserted twice shows, also where its key would not let it stay. A trigger could do the same, but would leave
everything to one session. On the target the function takes its time, so that several sessions pay.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from fix_faults import Site, until

if TYPE_CHECKING:
    from fix_servers import Database

TABLES = ("account", "audit", "log")
#: Seconds that a row takes on the target.
SECONDS = 0.004
_DDL = """
CREATE TABLE counted (what text, n int);
CREATE FUNCTION count_one(what text, n int, seconds float8) RETURNS bool LANGUAGE plpgsql AS $$
    BEGIN INSERT INTO public.counted VALUES (what, n); PERFORM pg_sleep(seconds); RETURN true; END $$;
CREATE TABLE log (n int PRIMARY KEY, CHECK (count_one('log', n, {0})));
CREATE TABLE audit (n int, CHECK (count_one('audit', n, 0)));
CREATE TABLE account (id int PRIMARY KEY, balance int);
"""
_COUNTED = "SELECT what, n, count(*) FROM counted GROUP BY 1, 2 ORDER BY 1, 2"
_DECODED = """
SELECT data FROM pg_logical_slot_get_binary_changes('in_order', NULL, NULL,
       'proto_version', '1', 'publication_names', 'in_order')
"""
#: Of the apply worker's sessions, the oldest first: that is its own.
SESSIONS = """
SELECT pid, state, coalesce(wait_event, '') FROM pg_stat_activity
 WHERE datname = current_database() AND application_name LIKE 'pgsub % apply %' ORDER BY backend_start, pid
"""


class Counted:
    """A site whose subscription of such tables several sessions apply; every transaction bears a number in ``log``.

    :param words: of ``create``.
    """

    def __init__(self, case: Site, *words: str) -> None:
        self.case, self.written, self.missed = case, 0, 0
        case.pubdb.execute(_DDL.format(0))
        case.subdb.execute(_DDL.format(SECONDS))
        case.pubdb.execute(f"CREATE PUBLICATION p FOR TABLE {', '.join(TABLES)}")
        case.tables = list(TABLES)
        case.end(case.create("--no-wait", "--no-copy-data", *words))
        case.subdb.execute("CREATE PUBLICATION in_order FOR TABLE log")
        case.subdb.rows("SELECT pg_create_logical_replication_slot('in_order', 'pgoutput')")
        case.pubdb.execute("INSERT INTO account SELECT g, 0 FROM generate_series(1, 1003) g WHERE g <= 50 OR g > 1000")
        case.end(case.run())
        case.subdb.execute("DELETE FROM account WHERE id > 1000")

    def write(self, count: int, *, apart: bool = False) -> None:
        """So many transactions, one after the other.

        :param apart: they also change a table without a key, and rows that the target misses: one session applies them.
        """
        with closing(self.case.pubdb.connect()) as session:
            for n in range(self.written + 1, self.written + count + 1):
                session.execute("BEGIN")
                session.execute("INSERT INTO log VALUES (%s)", (n,))
                session.execute("UPDATE account SET balance = balance + %s WHERE id = 1 + %s %% 50", (n, n))
                if apart and n % 2:
                    session.execute("INSERT INTO audit SELECT %s FROM generate_series(1, 3)", (n,))
                elif apart:
                    session.execute("UPDATE account SET balance = %s WHERE id = 1001 + %s %% 3", (n, n))
                    self.missed += 1
                session.execute("COMMIT")
        self.written += count

    def waiting(self) -> int:
        """How many of them the target does not have yet."""
        return self.written - int(self.case.subdb.value("SELECT count(*) FROM log"))

    def applied(self) -> None:
        """Wait until everything that was written is there."""
        until(lambda: not self.waiting(), lambda: f"{self.waiting()} are missing\n{self.case.said()}")

    def check(self) -> None:
        """With the launcher gone and all applied: each row once, in the order of the publisher, conflicts counted once.

        Ledger and origins are at the last commit.
        """
        case = self.case
        case.pubdb.execute("DELETE FROM account WHERE id > 1000")
        case.end(case.run())
        case.check()
        assert case.subdb.rows(_COUNTED) == case.pubdb.rows(_COUNTED)
        assert order(case.subdb) == list(range(1, self.written + 1))
        stats = "SELECT confl_update_missing, confl_delete_missing FROM pg_stat_subscription_stats"
        assert case.sqlite(stats) == [(self.missed, 3)]
        origins = (
            "SELECT max(remote_lsn) FROM pg_replication_origin_status, pgsub.subscription"
            " WHERE external_id ~ ('^pgsub_' || subid || '(_|$)')"
        )
        ledger = "SELECT remote_lsn FROM pgsub.progress WHERE worker = 0"
        assert case.subdb.value(origins) == case.subdb.value(ledger)
        case.subdb.rows("SELECT pg_drop_replication_slot('in_order')")


def order(subdb: Database) -> list[int]:
    """The numbers of ``log`` in the order in which their transactions were committed.

    Of pgoutput's message Insert: after the relation and ``N`` the count of columns, then kind, length and text of each.
    """
    found = [data for (data,) in subdb.rows(_DECODED) if data[:1] == b"I"]
    return [int(data[13 : 13 + int.from_bytes(data[9:13])]) for data in found]
