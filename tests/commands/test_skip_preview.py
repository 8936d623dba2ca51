"""skip-lsn --preview: what skipping a transaction would lose, told row by row and without moving anything."""

from __future__ import annotations

import pytest
from fix_program import one_error
from fix_stuck import MakeStuck, lsn

from pgsub.protocol.lsn import parse_lsn

_SLOT = "SELECT restart_lsn, confirmed_flush_lsn, catalog_xmin FROM pg_replication_slots WHERE slot_name = 's'"


def outcomes(document):
    return [(row["operation"], row["outcome"], row["conflict"]) for row in document["rows"]]


def test_each_change_is_compared_as_apply_would_meet_it(stuck):
    it = stuck()
    it.subdb.execute("ALTER TABLE b ADD UNIQUE (n), ADD CHECK (n < 1000)")
    it.subdb.execute("INSERT INTO a VALUES (1, 'mine'), (2, 'same'); INSERT INTO b VALUES (1, 10), (2, 20)")
    it.pubdb.execute("DELETE FROM a; INSERT INTO a VALUES (7, 'x')")
    assert it.apply() is None
    it.subdb.execute("DELETE FROM a WHERE id = 7; INSERT INTO a VALUES (1, 'mine'), (2, 'same')")
    error = it.apply(
        """BEGIN;
        INSERT INTO a VALUES (3, 'new');           -- applies
        INSERT INTO a VALUES (2, 'same');          -- is there already
        INSERT INTO a VALUES (1, 'theirs');        -- the target has it otherwise
        UPDATE a SET t = 'more' WHERE id = 1;      -- depends on it
        UPDATE a SET t = 'newer' WHERE id = 3;     -- of a row that came with this transaction
        DELETE FROM a WHERE id = 7;                -- not there
        INSERT INTO b VALUES (3, 10);              -- another key
        INSERT INTO b VALUES (2, 10.0);            -- both keys
        INSERT INTO b VALUES (4, 2000);            -- a check of the target
        DELETE FROM a WHERE id = 3;
        INSERT INTO a VALUES (3, 'once more');
        COMMIT"""
    )
    assert error is not None and error.finish_lsn
    found = it.preview(code=6)
    assert outcomes(found) == [
        ("INSERT", "would_apply", None),
        ("INSERT", "identical", "insert_exists"),
        ("INSERT", "conflict", "insert_exists"),
        ("UPDATE", "dependent", None),
        ("UPDATE", "would_apply", None),
        ("DELETE", "missing", "delete_missing"),
        ("INSERT", "conflict", "insert_exists"),
        ("INSERT", "conflict", "multiple_unique_conflicts"),
        ("INSERT", "error", None),
        ("DELETE", "would_apply", None),
        ("INSERT", "would_apply", None),
    ]
    conflict = found["rows"][2]
    assert conflict["existing"] == [{"index": "a_pkey", "row": {"id": "1", "t": "mine"}, "differs": ["t"]}]
    assert conflict["remote"] == {"id": "1", "t": "theirs"}
    assert [other["index"] for other in found["rows"][7]["existing"]] == ["b_pkey", "b_n_key"]
    assert "check constraint" in found["rows"][8]["reason"]
    assert found["transaction"]["finish_lsn"] == error.finish_lsn
    assert (found["verdict"], found["lost"], found["changes"]) == ("risky", 9, 11)
    rest = it.preview("--rows", "conflicting", code=6)
    assert (rest["verdict"], rest["lost"]) == ("risky", 5)


def test_a_change_is_compared_with_what_came_into_its_table_from_another_one_of_the_publisher(stuck):
    it = stuck()
    error = it.apply(
        """BEGIN;
        INSERT INTO a VALUES (200, 'x');
        ALTER TABLE a RENAME TO c; ALTER TABLE b RENAME TO a; ALTER TABLE a RENAME n TO t;
        INSERT INTO a VALUES (200, 2);             -- the target's table has this key
        TRUNCATE a;
        ALTER TABLE a RENAME TO b; ALTER TABLE c RENAME TO a;
        DELETE FROM a WHERE id = 200;              -- it has none
        COMMIT"""
    )
    assert error is not None
    assert outcomes(it.preview(code=6)) == [
        ("INSERT", "would_apply", None),
        ("INSERT", "conflict", "insert_exists"),
        ("TRUNCATE", "would_apply", None),
        ("DELETE", "missing", "delete_missing"),
    ]


def test_a_preview_moves_nothing_on_either_side(stuck):
    it = stuck()
    it.subdb.execute(
        "ALTER TABLE b ADD COLUMN mine serial; CREATE TABLE told (n int);"
        "CREATE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql"
        " AS 'BEGIN INSERT INTO told VALUES (1); RETURN NEW; END';"
        "CREATE TRIGGER told BEFORE INSERT ON b FOR EACH ROW EXECUTE FUNCTION tell();"
        "ALTER TABLE b ENABLE ALWAYS TRIGGER told; INSERT INTO b VALUES (1, 1)"
    )
    it.apply("INSERT INTO b VALUES (5, 5), (1, 2)")
    look = "SELECT (SELECT last_value FROM b_mine_seq), (SELECT count(*) FROM told), (SELECT count(*) FROM b)"
    before = it.subdb.rows(look), it.pubdb.rows(_SLOT), it.position(), it.cli.sql("SELECT count(*) FROM pgsub_journal")
    found = it.preview(code=6)
    assert [row["outcome"] for row in found["rows"]] == ["would_apply", "conflict"]
    after = it.subdb.rows(look), it.pubdb.rows(_SLOT), it.position(), it.cli.sql("SELECT count(*) FROM pgsub_journal")
    assert after == before
    # the server drops a temporary slot when it notices that the session has ended
    it.pubdb.wait("SELECT count(*) FROM pg_replication_slots WHERE slot_name LIKE 'pgsub%preview%'", value=0)


@pytest.mark.long
@pytest.mark.parametrize(
    "wrong", ["ALTER TABLE b DROP COLUMN n", "DROP TABLE b", "ALTER TABLE b ALTER n TYPE date USING NULL"]
)
def test_rows_that_the_targets_table_cannot_take_are_shown_as_they_were_sent(stuck, wrong):
    it = stuck()
    it.subdb.execute(wrong)
    error = it.apply("BEGIN; INSERT INTO b VALUES (1, 1.5); UPDATE b SET n = 2 WHERE id = 1; DELETE FROM b; COMMIT")
    assert error is not None
    found = it.preview(code=6)
    assert {row["outcome"] for row in found["rows"]} <= {"error", "dependent", "missing"}
    assert [row["remote"] for row in found["rows"]] == [{"id": "1", "n": "1.5"}, {"id": "1", "n": "2"}, None]
    assert [row["key"] for row in found["rows"]] == [{"id": "1"}] * 3
    assert "id=1, n=1.5" in it.run("skip-lsn", "s", "--preview").stdout


def test_a_transaction_that_the_target_has_already_is_safe_to_skip(stuck):
    it = stuck()
    it.subdb.execute("INSERT INTO b VALUES (1, 1.50), (2, 2)")
    it.apply("BEGIN; INSERT INTO b VALUES (1, 1.50), (2, 2); UPDATE b SET n = 2 WHERE id = 2; COMMIT")
    found = it.preview(code=0)
    assert found["verdict"] == "safe" and found["lost"] == 0
    assert {row["outcome"] for row in found["rows"]} == {"identical"}


@pytest.mark.long
def test_a_preview_tells_what_a_rule_would_do_and_is_safe_where_nothing_is_lost_by_that(stuck):
    it = stuck()
    it.subdb.execute("INSERT INTO b VALUES (1, 10)")
    assert it.apply("BEGIN; INSERT INTO b VALUES (1, 20); DELETE FROM a WHERE id = 1; COMMIT") is not None
    assert it.preview(code=6)["verdict"] == "caution"
    it.ok("alter", "s", "--on-conflict", "public.b:insert_exists=keep_local")
    it.ok("skip-lsn", "s", "--conflict", "delete_missing", "--table", "public.a", "--limit", "1", "--yes")
    found = it.preview(code=0)
    assert (found["verdict"], found["unexplained"]) == ("safe", False)
    assert [(row["outcome"], row["conflict"], row["rule"]) for row in found["rows"]] == [
        ("kept", "insert_exists", "insert_exists=keep_local"),
        ("skipped", "delete_missing", "delete_missing=skip"),
    ]
    it.ok("alter", "s", "--on-conflict", "public.b:insert_exists=apply_remote")
    assert [row["outcome"] for row in it.preview(code=6)["rows"]] == ["would_apply", "skipped"]
    assert it.preview("--rows", "conflicting", code=0)["verdict"] == "safe"


def test_what_only_apply_can_see_is_never_called_safe(stuck):
    it = stuck()
    it.subdb.execute("CREATE EXTENSION IF NOT EXISTS btree_gist; ALTER TABLE b ADD EXCLUDE USING gist (n WITH =)")
    it.subdb.execute("INSERT INTO b VALUES (1, 1)")
    error = it.apply("BEGIN; DELETE FROM a WHERE id = 1; INSERT INTO b VALUES (2, 1); COMMIT")
    assert error is not None and error.sqlstate == "23P01"
    found = it.preview("--rows", "conflicting", code=6)
    assert found["unexplained"] and found["verdict"] == "caution"


@pytest.mark.long
def test_a_row_that_cannot_be_looked_for_is_refused_in_the_words_of_apply(stuck):
    # box has an operator = that compares areas
    it = stuck()
    for side in (it.pubdb, it.subdb):
        side.execute("ALTER TABLE b DROP CONSTRAINT b_pkey, ADD s box; ALTER TABLE b REPLICA IDENTITY FULL")
    error = it.apply(
        "INSERT INTO b VALUES (1, 1, '(1,1),(0,0)')",
        "BEGIN; INSERT INTO b VALUES (2, 2, '(6,6),(5,5)'), (3, 3, NULL); UPDATE b SET n = -n; COMMIT",
    )
    assert error is not None and "equality operator for type box" in error.message
    found = it.preview(code=6)
    assert [row["outcome"] for row in found["rows"]] == ["would_apply"] * 2 + ["error"] * 2 + ["would_apply"]
    assert {row["reason"] for row in found["rows"]} == {None, error.message}


@pytest.mark.long
@pytest.mark.parametrize("options", [(), ("--streaming", "off"), ("--two-phase",)])
def test_streamed_and_prepared_transactions_are_found_by_the_lsn_of_their_error(stuck, options):
    it = stuck("--streaming", "parallel", *options)
    it.pubdb.execute(f"ALTER DATABASE {it.pubdb.name} SET debug_logical_replication_streaming = immediate")
    it.subdb.execute("INSERT INTO b VALUES (500, 0)")
    end = "PREPARE TRANSACTION 'one'" if "--two-phase" in options else "COMMIT"
    error = it.apply(
        f"BEGIN; INSERT INTO b SELECT g, g FROM generate_series(1, 300) g; SAVEPOINT x; DELETE FROM b;"
        f" ROLLBACK TO x; INSERT INTO b SELECT g, g FROM generate_series(301, 600) g; {end}"
    )
    assert error is not None and error.conflict == "insert_exists"
    found = it.preview(code=6)
    assert found["transaction"]["kind"] == ("PREPARE" if "--two-phase" in options else "COMMIT")
    assert found["tables"] == [
        {
            "schemaname": "public", "relname": "b", "would_apply": 599, "conflict": 1, "dependent": 0, "error": 0,
            "kept": 0, "skipped": 0, "missing": 0, "identical": 0, "left": 0,
        }
    ]  # fmt: skip
    assert found["transaction"]["finish_lsn"] == error.finish_lsn


def test_a_subscription_that_runs_can_be_asked_too(stuck):
    it = stuck()
    it.apply("INSERT INTO b VALUES (1, 1)")
    task = it.start()
    it.pubdb.wait("SELECT active FROM pg_replication_slots WHERE slot_name = 's'")
    with it.subdb.connect() as blocker:
        blocker.execute("BEGIN; LOCK TABLE b IN SHARE MODE")  # apply cannot get on meanwhile
        before, after = it.ends("INSERT INTO b VALUES (2, 2)")
        said = one_error(it.run("skip-lsn", "s", lsn(after), "--preview"), 3, "no transaction that is still to be")
        meant = said.split("pgsub skip-lsn s ")[1].split()[0]
        assert before < parse_lsn(meant) < after
        assert [r["outcome"] for r in it.preview(meant, code=6)["rows"]] == ["would_apply"]
    assert not task.done()
    it.subdb.wait("SELECT count(*) FROM b", value=2)


@pytest.mark.long
def test_begin_end_and_neighbouring_lsns_name_the_transaction_that_was_meant(stuck: MakeStuck):
    it = stuck()
    it.subdb.execute("INSERT INTO b VALUES (1, 1)")
    assert it.apply("INSERT INTO a VALUES (1000, 'first')") is None
    error = it.apply("INSERT INTO b VALUES (1, 2)", "INSERT INTO b VALUES (2, 2)")
    transaction = it.preview(code=6)["transaction"]
    right = f"pgsub skip-lsn s {error.finish_lsn}"
    finish = parse_lsn(error.finish_lsn)
    for wrong, words in (
        (transaction["begin_lsn"], "begins"),
        (transaction["end_lsn"], "is the end LSN"),
        (lsn(finish + 1), "inside the last record"),
        (lsn(finish - 1), "lies inside"),
    ):
        for mode in ("--preview", "--yes"):
            said = one_error(it.run("skip-lsn", "s", wrong, mode), 3, words, "Did you mean")
            assert right in said
    one_error(it.run("skip-lsn", "s", "FFFF/0", "--yes"), 3, "WAL ends at", hint=False)
    one_error(it.run("skip-lsn", "s", "0/1", "--yes"), 3, "must be greater than origin LSN", hint=False)
    assert it.cli.sql("SELECT subskiplsn FROM pg_subscription") == [("0/0",)]


def test_a_row_that_no_partition_takes_is_an_error_and_one_that_moves_there_too(stuck, tables):
    pubdb, subdb = tables
    pubdb.execute("CREATE TABLE part (id int PRIMARY KEY, v int); ALTER PUBLICATION p ADD TABLE part")
    subdb.execute("CREATE TABLE part (id int PRIMARY KEY, v int) PARTITION BY RANGE (id)")
    subdb.execute("CREATE TABLE low PARTITION OF part FOR VALUES FROM (0) TO (10)")
    it = stuck()
    error = it.apply(
        "INSERT INTO part VALUES (5, 1); INSERT INTO part VALUES (50, 1); UPDATE part SET id = 60 WHERE id = 5"
    )
    assert error is not None and "no partition of relation" in error.message
    found = it.preview("--rows", "conflicting", code=6)
    assert [outcome for _, outcome, _ in outcomes(found)] == ["would_apply", "error", "error"]
    assert {row["reason"] for row in found["rows"][1:]} == {'no partition of relation "part" found for row'}
    it.ok("skip-lsn", "s", "--rows", "conflicting", "--yes")
    assert it.apply() is None and subdb.rows("SELECT * FROM part") == [(5, 1)]
