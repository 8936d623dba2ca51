"""A table is copied again while the others go on: ``refresh --resync`` through the program, between real servers."""

from __future__ import annotations

import itertools
import os
import pty
import subprocess
import threading
import time

import forked
import patience
import psycopg
import pytest
from fix_program import one_error, until
from psycopg.conninfo import make_conninfo

_SLOTS = "SELECT slot_name FROM pg_replication_slots WHERE database = current_database() ORDER BY 1"
_LEDGER = "SELECT relname, srsubstate::text FROM pgsub.subscription_rel ORDER BY 1"
_SAME = "SELECT count(*), sum(hashtextextended(t::text, 0)) FROM {} t"


@pytest.fixture
def stored(cli):
    """A subscription of the tables a and b, both ``r``, that nobody serves."""
    assert cli.create("s", "--no-wait", "--no-copy-data").returncode == 0
    return cli


def same(tables, name):
    """Whether both sides have the same rows, duplicates included."""
    pubdb, subdb = tables
    return pubdb.rows(_SAME.format(name)) == subdb.rows(_SAME.format(name))


@pytest.mark.long
def test_a_table_is_emptied_and_copied_again_and_no_other(served, tables):
    cli, name = served
    pubdb, subdb = tables
    subdb.execute("DELETE FROM a WHERE id < 50; UPDATE a SET t = 'wrong'; INSERT INTO a VALUES (5000, 'local')")
    subdb.execute("INSERT INTO b VALUES (7, 7)")
    ended = cli("refresh", name, "--resync", "public.a", "--yes")
    assert ended.returncode == 0, ended.stderr
    assert "tables: 1 to be copied again\n" in ended.stderr
    assert same(tables, "a")
    assert subdb.rows("SELECT id FROM b") == [(7,)]
    assert pubdb.rows(_SLOTS) == [(name,)]
    pubdb.execute("INSERT INTO a VALUES (6000, 'later')")
    subdb.wait("SELECT count(*) FROM a WHERE id = 6000", value=1)
    detail = cli.sql("SELECT detail FROM pgsub_journal WHERE action = 'refresh' AND subname = ?", name)[0][0]
    assert '"public.a"' in detail


#: Transactions that a writer may be ahead of the target: enough that apply is never idle, few enough that a machine on
#: which writing is faster than applying does not pile up what every later synchronization has to wait for.
_AHEAD = 100


class Busy:
    """A client that writes to a, b and audit without a pause, never more than ``_AHEAD`` transactions ahead of b.

    :ivar written: transactions that were committed.
    """

    def __init__(self, tables):
        self._tables = tables
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._error = None
        self.written = 0

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
        assert self._error is None, self._error

    def _run(self):
        try:
            with self._tables[0].connect() as source, self._tables[1].connect() as target:
                while not self._stop.is_set():
                    [(applied,)] = target.execute("SELECT coalesce(max(id), 0) FROM b").fetchall()
                    if self.written - applied >= _AHEAD:
                        time.sleep(0.01)
                    for _ in range(self.written, applied + _AHEAD):
                        self._write(source, self.written + 1)
        except psycopg.Error as error:
            self._error = error

    def _write(self, source, number):
        with source.transaction():
            source.execute("INSERT INTO audit VALUES (%s, repeat('x', 50))", (number,))
            source.execute("UPDATE a SET t = %s WHERE id = %s", (f"row {number}", 1 + number % 100))
            source.execute("INSERT INTO b VALUES (%s, 1)", (number,))
        self.written = number


@pytest.mark.long
def test_while_apply_is_busy_on_the_table_nothing_is_lost_and_nothing_comes_twice(served, tables):
    cli, name = served
    pubdb = tables[0]
    for database in tables:
        database.execute("CREATE TABLE audit (n bigint, pad text)")  # without a key: what comes twice shows
    pubdb.execute("ALTER PUBLICATION p ADD TABLE audit")
    assert cli("refresh", name).returncode == 0
    with Busy(tables) as busy:
        for _ in range(3):
            before = busy.written
            until(lambda before=before: busy.written > before + _AHEAD)
            before = busy.written
            ended = cli("refresh", name, "--resync", "public.audit", "--resync", "public.a", "--yes")
            assert ended.returncode == 0, ended.stderr
            # more than it may be ahead: apply took changes of the tables while they were copied
            assert busy.written > before + _AHEAD
    until(lambda: all(same(tables, table) for table in ("audit", "a", "b")))
    assert pubdb.value("SELECT count(*) FROM audit") == busy.written
    until(lambda: pubdb.rows(_SLOTS) == [(name,)])


@pytest.mark.long
def test_a_table_in_error_is_mended_by_copying_it_again(served, tables):
    cli, name = served
    pubdb, subdb = tables
    for database in tables:
        database.execute("CREATE TABLE c (id int PRIMARY KEY)")
    pubdb.execute("INSERT INTO c VALUES (1); ALTER PUBLICATION p ADD TABLE c")
    subdb.execute("INSERT INTO c VALUES (1)")
    assert cli("refresh", name, "--no-wait").returncode == 0
    until(lambda: cli.sql("SELECT 1 FROM pgsub_error"))
    ended = cli("refresh", name, "--resync", "public.c", "--yes", "--timeout", "60s")
    assert ended.returncode == 0, ended.stderr
    assert same(tables, "c")
    until(lambda: not cli.sql("SELECT 1 FROM pgsub_error"))


@pytest.mark.long
def test_a_large_copy_under_way_is_broken_off_and_begins_anew(served, tables, tmp_path):
    cli, name = served
    pubdb, subdb = tables
    for database in tables:
        database.execute("CREATE TABLE c (id int PRIMARY KEY, pad text)")
    pubdb.execute("INSERT INTO c SELECT g, repeat('x', 200) FROM generate_series(1, 60000) g")
    pubdb.execute("ALTER PUBLICATION p ADD TABLE c")
    with subdb.connect() as other:
        other.execute("BEGIN; LOCK TABLE c IN SHARE MODE")  # it is still under way when it is broken off
        assert cli("refresh", name, "--no-wait").returncode == 0
        subdb.wait("SELECT count(*) FROM pgsub.subscription_rel WHERE srsubstate = 'd'", value=1)
    for _ in range(3):
        ended = cli("refresh", name, "--resync", "public.c", "--yes", "--no-wait")
        assert ended.returncode == 0, ended.stderr
    until(lambda: same(tables, "c") and cli.states()["c"] == "r")
    until(lambda: pubdb.rows(_SLOTS) == [(name,)])


# what is refused


def test_without_a_terminal_it_needs_yes(stored, tables):
    said = one_error(
        stored("refresh", "s", "--resync", "public.a", "--resync", 'public."B c"'), 2, "emptying a table needs --yes"
    )
    assert said.splitlines()[-1] == """pgsub refresh s --resync public.a --resync 'public."B c"' --yes"""


def _on_terminal(cli, answer, *words):
    """Run a command on a terminal, and answer its question."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        forked.command(words),
        env=cli.environment,
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.write(ours, f"{answer}\n".encode())
    out, said = process.communicate(timeout=patience.SECONDS)
    os.close(theirs)
    os.close(ours)
    return process.returncode, out, said


@pytest.mark.long
def test_on_a_terminal_it_asks_and_names_the_rows(stored, tables):
    subdb = tables[1]
    subdb.execute(
        "INSERT INTO a SELECT g, 'row' FROM generate_series(1, 500) g; ALTER TABLE a SET (autovacuum_enabled = 0)"
    )
    said = _on_terminal(stored, "n", "refresh", "s", "--resync", "public.a", "--resync", "public.b", "--no-wait")[2]
    assert 'Table "public.a" on the target has 24 kB of rows, and was never analyzed.' in said
    assert 'Table "public.b" on the target has about 0 rows.' in said
    subdb.execute("ANALYZE a")
    code, _, said = _on_terminal(stored, "n", "refresh", "s", "--resync", "public.a", "--no-wait")
    assert code == 1 and "canceled" in said
    assert 'Table "public.a" on the target has about 500 rows.' in said
    assert subdb.value("SELECT count(*) FROM a") == 500
    assert subdb.rows(_LEDGER) == [("a", "r"), ("b", "r")]
    code, _, said = _on_terminal(stored, "y", "refresh", "s", "--resync", "public.a", "--no-wait")
    assert code == 0, said
    assert subdb.value("SELECT count(*) FROM a") == 0
    assert subdb.rows(_LEDGER) == [("a", "i"), ("b", "r")]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("public.nope", 3, 'table "public.nope" is not part of the subscription'),
        ("a", 2, '"a" is not a qualified table name'),
        ("x.y.z", 2, '"x.y.z" is not a qualified table name'),
        ('public."a', 2, "is not a qualified table name"),
    ],
)
def test_a_name_that_is_no_table_of_the_subscription_is_refused(stored, tables, name, code, said):
    one_error(stored("refresh", "s", "--resync", name, "--yes"), code, said)
    assert tables[1].rows(_LEDGER) == [("a", "r"), ("b", "r")]


def test_a_table_that_is_published_no_more_is_not_emptied(stored, tables):
    pubdb, subdb = tables
    subdb.execute("INSERT INTO a VALUES (1, 'kept')")
    pubdb.execute("ALTER PUBLICATION p DROP TABLE a")
    one_error(stored("refresh", "s", "--resync", "public.a", "--yes"), 3, 'table "public.a" is no longer published')
    assert subdb.value("SELECT count(*) FROM a") == 1
    assert subdb.rows(_LEDGER) == [("a", "r"), ("b", "r")]


def refused(stored, tables, code, *said, words=("--resync", "public.a")):
    """Nothing is emptied, nothing changes."""
    subdb = tables[1]
    subdb.execute("INSERT INTO a VALUES (1, 'kept') ON CONFLICT DO NOTHING")
    one_error(stored("refresh", "s", *words, "--yes", "--no-wait"), code, *said)
    assert subdb.value("SELECT count(*) FROM a") == 1
    assert subdb.rows(_LEDGER) == [("a", "r"), ("b", "r")]


def test_a_foreign_key_of_another_table_forbids_it_and_is_named(stored, tables):
    tables[1].execute("CREATE TABLE orders (id int PRIMARY KEY, a int CONSTRAINT to_a REFERENCES a)")
    refused(
        stored,
        tables,
        3,
        "cannot truncate a table referenced in a foreign key constraint",
        'Table public.orders references public.a by constraint "to_a".',
    )


@pytest.mark.long
def test_tables_that_reference_each_other_are_emptied_together(stored, tables):
    subdb = tables[1]
    subdb.execute("ALTER TABLE b ADD CONSTRAINT to_a FOREIGN KEY (id) REFERENCES a; INSERT INTO a VALUES (1, 'x')")
    subdb.execute("ALTER TABLE a ADD CONSTRAINT to_b FOREIGN KEY (id) REFERENCES b NOT VALID")
    refused(stored, tables, 3, 'Table public.b references public.a by constraint "to_a".')
    ended = stored("refresh", "s", "--resync", "public.a", "--resync", "public.b", "--yes", "--no-wait")
    assert ended.returncode == 0, ended.stderr
    assert subdb.rows(_LEDGER) == [("a", "i"), ("b", "i")]
    assert subdb.value("SELECT count(*) FROM a") == 0


@pytest.mark.long
def test_a_trigger_on_truncate_forbids_it_if_it_would_fire(stored, tables):
    subdb = tables[1]
    subdb.execute("CREATE FUNCTION alarm() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE 'fired'; END$$")
    subdb.execute("CREATE TRIGGER bell BEFORE TRUNCATE ON a EXECUTE FUNCTION alarm()")
    subdb.execute("ALTER TABLE a ENABLE ALWAYS TRIGGER bell")
    refused(stored, tables, 3, 'trigger "bell" of table public.a would fire')
    subdb.execute("ALTER TABLE a ENABLE TRIGGER bell")  # silent for replicated changes
    ended = stored("refresh", "s", "--resync", "public.a", "--yes", "--no-wait")
    assert ended.returncode == 0, ended.stderr


def test_a_table_that_another_subscription_writes_too_is_not_emptied(stored, tables):
    assert stored.create("t", "--no-wait", "--no-copy-data").returncode == 0
    subdb = tables[1]
    subdb.execute("INSERT INTO a VALUES (1, 'kept')")
    said = "table public.a has rows of another subscription too"
    one_error(stored("refresh", "s", "--resync", "public.a", "--yes"), 3, said, 'Subscription "t" writes it')
    assert subdb.value("SELECT count(*) FROM a") == 1


@pytest.mark.long
def test_a_missing_privilege_is_named_with_its_grant(make_cli, tables):
    pubdb, subdb = tables
    role = f"app_{subdb.name}"
    subdb.execute(f"CREATE ROLE {role} LOGIN; GRANT CREATE ON DATABASE {subdb.name} TO {role}")
    subdb.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON a, b TO {role}")
    cli = make_cli(pubdb.conninfo, make_conninfo(subdb.conninfo, user=role))
    try:
        assert cli.create("s", "--no-wait", "--no-copy-data").returncode == 0
        words = ("refresh", "s", "--resync", "public.a", "--yes", "--no-wait")
        said = one_error(cli(*words), 11, 'permission denied to truncate table "public"."a"')
        subdb.execute(said.splitlines()[-1])
        subdb.execute("CREATE PUBLICATION onward FOR TABLE a")
        one_error(cli(*words), 3, 'TRUNCATE of table public.a would be replicated by publication "onward"')
        subdb.execute("DROP PUBLICATION onward")
        subdb.execute(f"REVOKE UPDATE, INSERT ON b FROM {role}")
        planned = cli("refresh", "s", "--dry-run")
        assert planned.returncode == 0 and "GRANT INSERT, UPDATE" in planned.stderr, planned.stderr
        ended = cli(*words)
        assert ended.returncode == 0, ended.stderr
        assert cli("drop", "s", "--yes").returncode == 0
    finally:
        subdb.execute(f"DROP SCHEMA IF EXISTS pgsub CASCADE; DROP OWNED BY {role}; DROP ROLE {role}")


@pytest.mark.long
def test_a_table_that_may_not_be_read_any_more_keeps_its_rows(stored, tables):
    pubdb, subdb = tables
    role = f"rep_{pubdb.name}"
    pubdb.execute(f"CREATE ROLE {role} LOGIN REPLICATION; GRANT SELECT ON b TO {role}")
    subdb.execute("INSERT INTO a VALUES (1, 'kept')")
    try:
        changed = stored("alter", "s", "--connection", make_conninfo(pubdb.conninfo, user=role))
        assert changed.returncode == 0, changed.stderr
        for last in ("--dry-run", "--yes"):
            said = one_error(stored("refresh", "s", "--resync", "public.a", last), 11, "permission denied for")
            assert "Their rows cannot be copied." in said and "GRANT SELECT ON TABLE" in said
        assert subdb.rows("SELECT t FROM a") == [("kept",)] and subdb.rows(_LEDGER) == [("a", "r"), ("b", "r")]
    finally:
        assert stored("alter", "s", "--connection", pubdb.conninfo).returncode == 0
        pubdb.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_the_truncate_is_not_sent_to_a_peer_that_wants_local_changes_only(stored, tables):
    subdb = tables[1]
    subdb.execute("CREATE PUBLICATION back FOR TABLE a")
    subdb.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", f"back_{subdb.name}")
    subdb.execute("INSERT INTO a VALUES (1, 'local')")
    assert stored("refresh", "s", "--resync", "public.a", "--yes", "--no-wait").returncode == 0
    peek = (
        "SELECT substring(data FROM 1 FOR 1) FROM pg_logical_slot_peek_binary_changes("
        "%s, NULL, NULL, 'proto_version', '1', 'publication_names', 'back', 'origin', %s)"
    )
    sent = {
        origin: {bytes(kind) for (kind,) in subdb.rows(peek, f"back_{subdb.name}", origin)}
        for origin in ("any", "none")
    }
    assert b"I" in sent["none"] and b"T" not in sent["none"]
    assert b"T" in sent["any"]


@pytest.mark.long
def test_inheritance_children_and_other_partitions_keep_their_rows(cli, tables):
    pubdb, subdb = tables
    for database in tables:
        database.execute(
            "CREATE TABLE parent (id int); CREATE TABLE child () INHERITS (parent);"
            "CREATE TABLE root (id int) PARTITION BY RANGE (id);"
            "CREATE TABLE p1 PARTITION OF root FOR VALUES FROM (0) TO (10);"
            "CREATE TABLE p2 PARTITION OF root FOR VALUES FROM (10) TO (20);"
            "CREATE TABLE whole (id int) PARTITION BY RANGE (id);"
            "CREATE TABLE w1 PARTITION OF whole FOR VALUES FROM (0) TO (10)"
        )
        database.execute("INSERT INTO parent VALUES (1); INSERT INTO child VALUES (2)")
        database.execute("INSERT INTO root VALUES (1), (11); INSERT INTO whole VALUES (1)")
    pubdb.execute("CREATE PUBLICATION q FOR TABLE ONLY parent, child, root; CREATE PUBLICATION v FOR TABLE whole"
                  " WITH (publish_via_partition_root)")  # fmt: skip
    words = cli.words("s", "--no-wait", "--no-copy-data", "--publication", "v", publication="q")
    assert cli(*words).returncode == 0
    again = ("--resync", "public.parent", "--resync", "public.p1", "--resync", "public.whole")
    ended = cli("refresh", "s", *again, "--yes", "--no-wait")
    assert ended.returncode == 0, ended.stderr
    for name, count in {"ONLY parent": 0, "child": 1, "p1": 0, "p2": 1, "w1": 0}.items():
        assert subdb.value(f"SELECT count(*) FROM {name}") == count, name
    assert [row for row in subdb.rows(_LEDGER) if row[1] == "i"] == [("p1", "i"), ("parent", "i"), ("whole", "i")]


@pytest.mark.long
def test_names_that_need_quoting_are_found_as_written_and_as_sql(cli, tables):
    pubdb, subdb = tables
    for database in tables:
        database.execute('CREATE TABLE "A.b" (id int PRIMARY KEY); CREATE TABLE "tab\'le %%s" (id int PRIMARY KEY)')
    pubdb.execute('ALTER PUBLICATION p ADD TABLE "A.b", "tab\'le %%s"')
    assert cli.create("s", "--no-wait", "--no-copy-data").returncode == 0
    for written in ('public."A.b"', "public.A.b", "public.tab'le %%s"):
        ended = cli("refresh", "s", "--resync", written, "--yes", "--no-wait")
        assert ended.returncode == 0, ended.stderr
    assert subdb.value("SELECT count(*) FROM pgsub.subscription_rel WHERE srsubstate = 'i'") == 2


@pytest.mark.long
def test_readers_do_not_block_apply_for_long_and_who_holds_the_table_is_named(served, tables):
    cli, name = served
    pubdb, subdb = tables
    with subdb.connect(application_name="report") as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM a")
        refreshing = cli.start("refresh", name, "--resync", "public.a", "--yes", "--timeout", "12s")
        waiting = "SELECT count(*) > 0 FROM pg_locks WHERE relation = 'a'::regclass AND NOT granted"
        changes = itertools.count()
        while refreshing.poll() is None:
            if subdb.value(waiting):
                number = next(changes)
                pubdb.execute("INSERT INTO b VALUES (%s, 1)", number)
                subdb.wait("SELECT count(*) FROM b WHERE id = %s", number, value=1)
        assert refreshing.wait() == 8 and next(changes) > 0
        said = refreshing.log.read_text()
        assert 'timeout while waiting to truncate "public.a"' in said
        assert f"PID {reader.info.backend_pid} (postgres, report, idle in transaction): SELECT count(*) FROM a" in said
        assert reader.execute("SELECT count(*) FROM a").fetchone() == (100,)
    assert subdb.rows(_LEDGER) == [("a", "r"), ("b", "r")]


@pytest.mark.long
def test_a_reader_that_ends_in_time_only_delays_it(stored, tables):
    subdb = tables[1]
    subdb.execute("INSERT INTO a VALUES (1, 'x')")
    reader = subdb.connect()
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM a")
    refreshing = stored.start("refresh", "s", "--resync", "public.a", "--yes", "--no-wait")
    tries = "SELECT min(waitstart) FROM pg_locks WHERE relation = 'a'::regclass AND NOT granted"
    first = until(lambda: subdb.value(tries))
    until(lambda: (now := subdb.value(tries)) and now > first)  # the first try has given up
    reader.execute("COMMIT")
    reader.close()
    assert refreshing.wait(patience.SECONDS) == 0, refreshing.log.read_text()
    assert subdb.value("SELECT count(*) FROM a") == 0


@pytest.mark.long
def test_resync_of_a_partition_that_a_foreign_key_reaches_through_its_root_is_refused(cli, tables):
    pubdb, subdb = tables
    for database in tables:
        database.execute(
            "CREATE TABLE root (id int PRIMARY KEY) PARTITION BY RANGE (id);"
            "CREATE TABLE p1 PARTITION OF root FOR VALUES FROM (0) TO (10)"
        )
    subdb.execute("CREATE TABLE orders (root int CONSTRAINT to_root REFERENCES root)")
    pubdb.execute("ALTER PUBLICATION p ADD TABLE root")
    assert cli.create("s", "--no-wait", "--no-copy-data").returncode == 0
    said = "Table public.orders references public.p1 by constraint"
    one_error(cli("refresh", "s", "--resync", "public.p1", "--yes"), 3, said)


@pytest.mark.long
def test_nothing_is_emptied_when_the_publisher_is_away(stored, tables):
    subdb = tables[1]
    subdb.execute("INSERT INTO a VALUES (1, 'kept')")
    named = "format('pgsub_%s_sync_gone', subid)"
    subdb.execute(f"UPDATE pgsub.subscription_rel SET srsubstate = 'f', sync_slot = {named} WHERE relname = 'a'")
    tables[0].drop()
    with pytest.raises(psycopg.OperationalError):
        tables[0].connect()
    one_error(stored("refresh", "s", "--resync", "public.a", "--yes"), 4, "could not connect to the publisher")
    assert subdb.value("SELECT count(*) FROM a") == 1
    assert subdb.rows(_LEDGER) == [("a", "f"), ("b", "r")]
