"""What is measured: the tables of each case, what both sides hold before, and the backlog."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.arena import PUBLICATION, Database

#: The last transaction of every backlog inserts here: whoever shows its row has applied everything before it.
_MARKER = "CREATE TABLE marker (id int PRIMARY KEY)"
_COLUMNS = "id bigint PRIMARY KEY, number int, label text, at timestamptz, amount numeric"
_ITEMS = f"CREATE TABLE items ({_COLUMNS})"
_ROW = "{0}, {0} % 1000, 'item number ' || {0}, timestamptz '2026-01-01' + {0} * interval '1 second', {0} * 1.01"


class Case:
    """One kind of work.

    :cvar unit: what ``size`` counts, for the report.
    :cvar copy: the tables are copied; else what they hold before is made on both sides and a backlog is applied.
    :cvar link: bytes a second that each connection to the publisher gets, None for as much as there is.
    :cvar writes: transactions a second that are written to random tables while they are copied.
    :cvar copy_workers: chunks of a table that pgsub copies at once, None for its default.
    :cvar each: what one of the unit is, where its share of the time is reported too.
    :cvar both_formats: text and binary values are two measurements; else only text, unless binary is asked for.
    :cvar heap: of pgsub's JVM, as ``--driver-memory`` takes it; None for its default.
    :cvar master: of pgsub's Spark; None for its default, one JVM.
    :cvar synchronous_commit: of the subscription, on every side; None for what the run says.
    :cvar apply_workers: as ``--apply-workers`` takes it, None for the default.
    :cvar apply_mode: likewise.
    :cvar target_settings: of the target server for this case, on every side.
    :cvar baseline: the side that pgsub is compared with.
    :cvar beside: further sides, whose figures are only shown.
    :cvar default: part of a run that names no cases.
    """

    name: str
    title: str
    unit: str = "rows"
    full: int
    quick: int
    copy = False
    link: int | None = None
    writes: int | None = None
    copy_workers: int | None = None
    each: str | None = None
    both_formats = False
    heap: str | None = None
    master: str | None = None
    synchronous_commit: str | None = None
    apply_workers: str | None = None
    apply_mode: str | None = None
    target_settings: Mapping[str, str] = {}
    baseline = "native"
    beside: tuple[str, ...] = ()
    default = True
    publication = "FOR ALL TABLES"

    def tables(self, size: int) -> tuple[str, ...]:
        """What is compared; where tables are copied, all that are published."""
        return ("items", "marker")

    def schema(self, database: Database, size: int) -> None:
        """Tables of one database, and the rows that source and targets hold from the start."""
        database.execute(_MARKER, _ITEMS)

    def target(self, database: Database, size: int) -> None:
        """What only the targets have."""

    def source(self, database: Database, size: int) -> None:
        """What only the source holds before the subscriptions are created; its publication."""
        database.execute(f"CREATE PUBLICATION {PUBLICATION} {self.publication}")

    def backlog(self, source: Database, size: int) -> None:
        """The transactions to catch up with, written while both subscriptions are disabled."""


class Sync(Case):
    """The initial copy of one large table, its primary key present on the target."""

    name, title = "sync", "sync of pgbench_accounts"
    full, quick = 5_000_000, 600_000
    copy = True
    publication = "FOR TABLE pgbench_accounts"

    def tables(self, size: int) -> tuple[str, ...]:
        """One."""
        return ("pgbench_accounts",)

    def schema(self, database: Database, size: int) -> None:
        """Only empty tables."""
        database.pgbench("-i", "-q", "-I", "dtp")

    def source(self, database: Database, size: int) -> None:
        """The table as pgbench fills it."""
        database.pgbench("-i", "-q", "-s", str(size // 100_000), "-I", "dtgvp")
        super().source(database, size)


class SyncLink(Sync):
    """The same where the network is slow: one connection is a tenth of what a disk gives, eight are most of it."""

    name, title = "sync-link", "sync, each connection 10 MB/s"
    link = 10_000_000
    copy_workers = 8


class SyncExecutors(SyncLink):
    """The same eight tasks in two executors, each a process of its own, and in one JVM."""

    name, title = "sync-executors", "sync, each connection 10 MB/s, 2 executors to one JVM"
    quick = 2_000_000
    master = "local-cluster[2,5,1024]"  # one slot is apply's
    baseline = "one_jvm"


class SyncMany(Case):
    """The initial copy of a schema of small tables."""

    name, title, unit = "sync-many", "sync of tables of 5,000 rows", "tables"
    full, quick = 200, 30
    copy = True
    each = "table"
    rows = 5_000

    def tables(self, size: int) -> tuple[str, ...]:
        """That many."""
        return tuple(f"items_{number}" for number in range(1, size + 1))

    def schema(self, database: Database, size: int) -> None:
        """Only empty tables."""
        database.execute(_for_each_table(size, f"CREATE TABLE %1$I ({_COLUMNS})"))

    def source(self, database: Database, size: int) -> None:
        """Their rows."""
        if self.rows:
            rows = f"INSERT INTO %1$I SELECT {_ROW.format('g')} FROM generate_series(1, {self.rows}) g"
            database.execute(_for_each_table(size, rows.replace("% 1000", "%% 1000")), "VACUUM (ANALYZE)")
        super().source(database, size)


class SyncEmpty(SyncMany):
    """What a table costs before its first row."""

    name, title = "sync-empty", "sync of empty tables"
    full, quick = 1_000, 100
    rows = 0


class SyncWritten(SyncMany):
    """The same of very small tables, in which apply meets changes all the time."""

    name, title = "sync-written", "sync of small tables that are written to"
    full, quick = 400, 50
    rows = 5
    writes = 70

    def tables(self, size: int) -> tuple[str, ...]:
        """One more, by which the end is seen."""
        return (*super().tables(size), "marker")

    def schema(self, database: Database, size: int) -> None:
        """That one, too."""
        super().schema(database, size)
        database.execute(_MARKER)


class SyncWide(Case):
    """The initial copy of rows of 50 MB: what it takes of memory."""

    name, title = "sync-wide", "sync of rows of 50 MB"
    full, quick = 40, 8
    copy = True

    def tables(self, size: int) -> tuple[str, ...]:
        """One."""
        return ("wide",)

    def schema(self, database: Database, size: int) -> None:
        """Only an empty table."""
        database.execute("CREATE TABLE wide (id int PRIMARY KEY, body text)")

    def source(self, database: Database, size: int) -> None:
        """Rows that are small on disk; what is sent is not."""
        rows = "SELECT g, repeat(chr(97 + g % 26), 50000000) FROM generate_series"
        database.execute(f"INSERT INTO wide {rows}(1, {size}) g")
        super().source(database, size)


class InsertTransaction(Case):
    """Many rows in one transaction."""

    name, title = "insert", "one INSERT transaction"
    full, quick = 1_000_000, 50_000
    both_formats = True

    def backlog(self, source: Database, size: int) -> None:
        """One statement."""
        source.execute(f"INSERT INTO items SELECT {_ROW.format('g')} FROM generate_series(1, {size}) g")


class UpdateTransaction(Case):
    """Every second row of a table in one transaction."""

    name, title = "update", "one UPDATE transaction"
    full, quick = 500_000, 25_000
    both_formats = True

    def schema(self, database: Database, size: int) -> None:
        """Twice as many rows as are updated."""
        super().schema(database, size)
        database.execute(
            f"INSERT INTO items SELECT {_ROW.format('g')} FROM generate_series(1, {2 * size}) g",
            "VACUUM (ANALYZE) items",
        )

    def backlog(self, source: Database, size: int) -> None:
        """One statement."""
        source.execute("UPDATE items SET number = number + 1, amount = amount * 2 WHERE id % 2 = 0")


class DeleteTransaction(UpdateTransaction):
    """Every second row of a table goes in one transaction."""

    name, title = "delete", "one DELETE transaction"

    def backlog(self, source: Database, size: int) -> None:
        """One statement."""
        source.execute("DELETE FROM items WHERE id % 2 = 0")


class Pgbench(Case):
    """pgbench's own transactions: three updates and an insert each."""

    name, title, unit = "pgbench", "pgbench backlog", "transactions"
    full, quick = 100_000, 5_000
    both_formats = True

    def tables(self, size: int) -> tuple[str, ...]:
        """All of pgbench's."""
        return ("pgbench_accounts", "pgbench_branches", "pgbench_history", "pgbench_tellers", "marker")

    def schema(self, database: Database, size: int) -> None:
        """Scale 10, below 100,000 transactions less."""
        database.pgbench("-i", "-q", "-s", str(max(2, size // 10_000)), "-I", "dtgvp")
        database.execute(_MARKER)

    def backlog(self, source: Database, size: int) -> None:
        """Four clients."""
        source.pgbench("-n", "-M", "prepared", "-c", "4", "-j", "2", "-t", str(size // 4))


class Singles(Case):
    """The smallest transactions there are."""

    name, title, unit = "singles", "transactions of one insert", "transactions"
    full, quick = 200_000, 10_000
    both_formats = True

    def backlog(self, source: Database, size: int) -> None:
        """One block that commits each row."""
        source.execute(
            "SET synchronous_commit = off",
            f"DO $$ BEGIN FOR i IN 1..{size} LOOP INSERT INTO items SELECT {_ROW.format('i')}; COMMIT;"
            " END LOOP; END $$",
            "RESET synchronous_commit",
        )


class Latency(Case):
    """Transactions of one insert at a steady rate; what is measured is the delay of each."""

    name, title, unit = "latency", "commit to visible at 200/s", "transactions"
    full, quick = 60_000, 1_000
    rate = 200


class SlowStatements(Singles):
    """A target that takes 5 ms for each row, in which its other sessions can go on: what eight of them give."""

    name, title = "slow-statements", "5 ms a row, 8 sessions to 1"
    full, quick = 4_000, 600
    both_formats = False
    apply_workers = "8"
    baseline = "one_session"
    beside = ("native",)

    def target(self, database: Database, size: int) -> None:
        """A constraint that takes its time."""
        database.execute("ALTER TABLE items ADD CHECK (pg_sleep(0.005) IS NOT NULL)")


class SlowStatementsAuto(SlowStatements):
    """The same where apply decides how many sessions there are."""

    name, title = "slow-auto", "5 ms a row, auto to 1 session"
    apply_workers = "auto"


class SlowCommits(Singles):
    """A target that takes 5 ms to flush a commit, as with a distant disk, each transaction a commit of its own."""

    name, title = "slow-commits", "5 ms a commit, 8 sessions to 1"
    full, quick = 4_000, 600
    both_formats = False
    apply_workers = "8"
    apply_mode = "transactional"
    synchronous_commit = "on"
    target_settings = {"commit_delay": "5000", "commit_siblings": "0"}
    baseline = "one_session"
    beside = ("native",)


class WideIndexes(Singles):
    """A target that computes: ten indexes, of expressions that take some 0.1 ms a row together. Two cores are there."""

    name, title = "wide-indexes", "CPU-bound indexes, 8 sessions to 1"
    full, quick = 40_000, 4_000
    both_formats = False
    apply_workers = "8"
    baseline = "one_session"
    beside = ("native",)

    def target(self, database: Database, size: int) -> None:
        """Indexes that only the target has."""
        for number in range(10):
            word = "label || " * 40 + f"'{number}'"
            database.execute(f"CREATE INDEX ON items (md5(md5(md5({word}))), number, at)")


class LocalSessions(Singles):
    """Where one session is enough: apply decides so, and loses nothing by it."""

    name, title = "local-auto", "transactions of one insert, auto to 1 session"
    both_formats = False
    apply_workers = "auto"
    baseline = "one_session"


class StreamedTransaction(Case):
    """One transaction that is larger than what publisher, worker and JVM may keep of it: what it takes of memory."""

    name, title, unit = "stream-5gb", "one streamed transaction", "MB"
    full, quick = 5_000, 100
    heap = "512m"
    default = False

    def tables(self, size: int) -> tuple[str, ...]:
        """One."""
        return ("large",)

    def schema(self, database: Database, size: int) -> None:
        """Only an empty table, whose values are not compressed."""
        database.execute(
            _MARKER,
            "CREATE TABLE large (id int PRIMARY KEY, body text)",
            "ALTER TABLE large ALTER body SET STORAGE EXTERNAL",
        )

    def backlog(self, source: Database, size: int) -> None:
        """Rows of 10 kB."""
        source.execute(f"INSERT INTO large SELECT g, repeat('x', 10000) FROM generate_series(1, {size * 100}) g")


CASES: tuple[Case, ...] = (
    Sync(),
    SyncLink(),
    SyncExecutors(),
    SyncMany(),
    SyncEmpty(),
    SyncWritten(),
    SyncWide(),
    InsertTransaction(),
    UpdateTransaction(),
    DeleteTransaction(),
    Pgbench(),
    Singles(),
    Latency(),
    SlowStatements(),
    SlowStatementsAuto(),
    SlowCommits(),
    WideIndexes(),
    LocalSessions(),
    StreamedTransaction(),
)


def _for_each_table(count: int, statement: str) -> str:
    """A block that runs a statement for each small table.

    :param statement: format string of the server's format(); the table is ``%1$I``.
    """
    return (
        f"DO $block$ BEGIN FOR n IN 1..{count} LOOP"
        f" EXECUTE format($statement${statement}$statement$, 'items_' || n); END LOOP; END $block$"
    )
