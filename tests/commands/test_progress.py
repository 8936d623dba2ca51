"""How far a copy is can be seen while it runs: on stderr of the command, and by ``status`` in another process."""

from __future__ import annotations

import re
import signal
from dataclasses import replace

import patience
import pytest
from fix_program import until

from pgsub.catalog.rows import RelationRow, WorkerRow
from pgsub.catalog.store import StateStore
from pgsub.commands.reporter import CallbackReporter
from pgsub.commands.serve import synchronize
from pgsub.common.subscription import Subscription

_ROWS, _HELD = 40_000, 30_000


@pytest.mark.long
def test_a_running_copy_shows_bytes_rows_and_chunks_and_what_was_estimated(cli, tables):
    pubdb, subdb = tables
    pubdb.execute(f"INSERT INTO a SELECT g, repeat('x', 500) FROM generate_series(101, {_ROWS}) g")
    pubdb.execute("ANALYZE a")
    # one row of the copy waits for a lock that this test holds
    subdb.execute(f"""
        CREATE FUNCTION held() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN
            PERFORM pg_catalog.pg_advisory_xact_lock_shared(4711); RETURN NEW; END$$;
        CREATE TRIGGER held BEFORE INSERT ON a FOR EACH ROW WHEN (NEW.id = {_HELD}) EXECUTE FUNCTION held();
        ALTER TABLE a ENABLE ALWAYS TRIGGER held""")
    with subdb.connect() as holder:
        holder.execute("SELECT pg_advisory_lock(4711)")
        creating = cli.start(*cli.words("s"))
        until(lambda: (cli.state / "state.db").exists())
        subdb.wait("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted", value=1)
        copy = until(lambda: next((c for c in cli.status()["copies"] if c["bytes_processed"] > 10_000_000), None))
        shown = cli("status", "s").stdout
        line = until(lambda: re.search(r"^table public\.a: data copy.*$", creating.log.read_text(), re.MULTILINE))
        holder.execute("SELECT pg_advisory_unlock(4711)")
    assert creating.wait(patience.SECONDS) == 0, creating.log.read_text()
    assert (copy["relname"], copy["chunks_done"], copy["chunks_total"]) == ("a", 0, 1)
    assert copy["bytes_processed"] < copy["bytes_total"] and copy["tuples_total"] == _ROWS
    assert _HELD / 2 < copy["tuples_processed"] < _ROWS, copy
    assert copy["started_at"] is not None and copy["pid"] is not None
    head, row = shown.splitlines()[-2:]
    assert head.split("\t") == ["table", "done", "bytes", "rows", "chunks", "rate", "left"]
    assert re.match(rf"public\.a\t\d\d%\t\d+ MB of \d+ MB\t\d+ of {_ROWS}\t0 of 1\t", row), row
    assert re.match(rf"table public\.a: data copy, \d+% \(.* of \d+ MB, \d+ of {_ROWS} rows\)", line[0]), line[0]
    assert cli.status()["copies"] == []
    assert subdb.value("SELECT count(*) FROM a") == _ROWS


@pytest.mark.long
def test_rows_that_were_sent_are_shown_while_the_target_still_works_on_them(cli, tables):
    subdb = tables[1]
    subdb.execute("""
        CREATE FUNCTION held() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN
            PERFORM pg_catalog.pg_advisory_xact_lock_shared(4711); RETURN NEW; END$$;
        CREATE TRIGGER held BEFORE INSERT ON a FOR EACH ROW EXECUTE FUNCTION held();
        ALTER TABLE a ENABLE ALWAYS TRIGGER held""")
    with subdb.connect() as holder:
        holder.execute("SELECT pg_advisory_lock(4711)")
        creating = cli.start(*cli.words("s"))
        subdb.wait("SELECT count(*) > 0 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
        until(lambda: any(copy["bytes_processed"] > 0 for copy in cli.status()["copies"]))
        holder.execute("SELECT pg_advisory_unlock(4711)")
    assert creating.wait(patience.SECONDS) == 0, creating.log.read_text()


@pytest.mark.long
def test_an_adoption_shows_that_its_rows_were_compared_while_it_writes_those_that_differ(cli, tables):
    subdb = tables[1]
    subdb.execute("INSERT INTO a SELECT g, 'local' FROM generate_series(1, 50) g")
    subdb.execute("""
        CREATE FUNCTION held() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN
            PERFORM pg_catalog.pg_advisory_xact_lock_shared(4711); RETURN NEW; END$$;
        CREATE TRIGGER held BEFORE UPDATE ON a FOR EACH ROW EXECUTE FUNCTION held();
        ALTER TABLE a ENABLE ALWAYS TRIGGER held""")
    with subdb.connect() as holder:
        holder.execute("SELECT pg_advisory_lock(4711)")
        creating = cli.start(*cli.words("s", "--adopt", "--yes"))
        subdb.wait("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted", value=1)
        line = until(lambda: re.search(r"^table public\.a: writing.*$", creating.log.read_text(), re.MULTILINE))
        [copy] = [one for one in cli.status()["copies"] if one["relname"] == "a"]
        shown = cli("status", "s").stdout
        holder.execute("SELECT pg_advisory_unlock(4711)")
    assert creating.wait(patience.SECONDS) == 0, creating.log.read_text()
    assert re.fullmatch(r"table public\.a: writing what differs, \d+ \w+ compared", line[0]), line[0]
    assert copy["command"] == "COMPARE" and copy["seconds_left"] is None
    assert "\tcompared, writing what differs\t" in shown
    assert 'NOTICE:  table "public.a" was adopted: 50 rows missing, 0 extra, 50 different' in creating.log.read_text()


def test_a_table_that_catches_up_with_what_was_changed_meanwhile_is_told_as_such(cli, tables, tmp_path):
    go_on, marks = tmp_path / "go on", tmp_path / "marks"
    marks.mkdir()
    pubdb, subdb = tables
    pubdb.execute("ALTER PUBLICATION p DROP TABLE b")
    subdb.execute("INSERT INTO a SELECT g, 'local' FROM generate_series(1, 50) g")
    points = {"PGSUB_FAILPOINTS": f"adopt.after_commit=pause:{go_on}", "PGSUB_FAILPOINTS_DIR": str(marks)}
    creating = cli.start(*cli.words("s", "--adopt", "--yes"), env=points)
    until((marks / "adopt.after_commit").exists)
    pubdb.execute("INSERT INTO a VALUES (999, 'meanwhile')")
    written = pubdb.value("SELECT pg_current_wal_flush_lsn()")
    subdb.wait("SELECT remote_lsn >= %s::pg_lsn FROM pgsub.progress WHERE worker = 0", written)
    with subdb.connect() as holder:
        holder.execute("BEGIN; LOCK a IN SHARE MODE")
        go_on.touch()
        until(lambda: re.search(r"^table public\.a: catchup\b", creating.log.read_text(), re.MULTILINE))
    assert creating.wait(patience.SECONDS) == 0, creating.log.read_text()
    assert subdb.value("SELECT t FROM a WHERE id = 999") == "meanwhile"


def test_how_far_a_table_that_catches_up_is_behind_apply_is_read_from_the_state_store(tmp_path):
    seen = []
    sub = Subscription(5, "s", "host=p", "host=t", ("p",), "s")
    with StateStore.open(tmp_path / "state") as store:
        store.add_subscription(sub)
        store.put_relations(5, [RelationRow(n, "f", None, "public", f"t{n}") for n in (1, 2, 3)])
        store.put_origin(5, 0x5000, None)
        syncing = WorkerRow("table synchronization", 7, relid=1, received_lsn=0x6000)
        store.put_workers(5, [syncing, replace(syncing, relid=2, latest_end_lsn=0x2000)])
        service = synchronize.Service(store, tmp_path / "state", sub, CallbackReporter(progress=seen.append))
        service._progress()
    assert [(one.state, one.bytes_behind) for one in seen[0]] == [("c", None), ("c", 0x3000), ("f", None)]


def test_an_adoption_that_an_interrupted_command_leaves_to_the_launcher_is_not_called_finished(cli, tables, tmp_path):
    go_on, marks = tmp_path / "go on", tmp_path / "marks"
    marks.mkdir()
    tables[1].execute("INSERT INTO a SELECT g, 'local' FROM generate_series(1, 50) g")
    cli.launcher(env={"PGSUB_FAILPOINTS": f"adopt.after_commit=pause:{go_on}", "PGSUB_FAILPOINTS_DIR": str(marks)})
    creating = cli.start(*cli.words("s", "--adopt", "--yes"))
    until((marks / "adopt.after_commit").exists)
    assert cli.stop(creating, signal.SIGINT) == 0
    said = creating.log.read_text()
    assert 'NOTICE:  pgsub run continues to synchronize subscription "s"' in said
    assert re.search(r'table "public.a" is not adopted yet, so far: \d+ rows? missing', said)
    assert "was adopted" not in said
    go_on.touch()
    assert cli("wait", "s", "--for", "caught-up", "--timeout", "2m").returncode == 0


def test_a_create_that_is_interrupted_while_it_copies_does_not_call_the_subscription_ready(cli, tables):
    with tables[1].connect() as holder:
        holder.execute("BEGIN; LOCK a IN SHARE MODE")
        creating = cli.start(*cli.words("s"))
        tables[1].wait("SELECT count(*) > 0 FROM pg_locks WHERE relation = 'a'::regclass AND NOT granted")
        assert cli.stop(creating, signal.SIGINT) == 0
    said = creating.log.read_text()
    assert 'NOTICE:  subscription "s" is not synchronized yet, and nothing is running it' in said
    assert "Continue with:\npgsub run s" in said
