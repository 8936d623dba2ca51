"""What stops apply, what is skipped, and how it goes on.

Mirrors t/029_on_error.pl, t/035_conflicts.pl and t/100_bugs.pl.
"""

from __future__ import annotations

import contextlib
from contextlib import closing

import pytest
from fix_pair import MakePair, Pair

from pgsub.apply.conflicts import conflict_text
from pgsub.apply.worker import batch_size
from pgsub.common.errors import ApplyError, Directive, PermissionMissing, PgsubError, ProtocolViolation, SchemaFault
from pgsub.protocol.frames import Frames
from pgsub.protocol.lsn import parse_lsn
from pgsub.publisher.stream.walsender import WalSender

TABLES = "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (id int PRIMARY KEY, v text)"


def _finish_lsn(p: Pair, statement: str) -> int:
    """Run a transaction and give its commit_lsn: what the publisher inserts next."""
    with closing(p.pubdb.connect()) as session:
        session.execute("BEGIN")
        session.execute(statement.encode())
        before = parse_lsn(session.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()[0])
        session.execute("COMMIT")
    return before


def _fault(p: Pair, words: str = ".") -> ApplyError:
    with pytest.raises(ApplyError, match=words) as caught:
        p.catch_up()
    return caught.value


@pytest.mark.parametrize("rows", [1, 60], ids=["insert", "copy"])
def test_an_existing_key_stops_apply_behind_everything_before_it(pair: MakePair, rows: int) -> None:
    p = pair(TABLES)
    p.subdb.execute("INSERT INTO t VALUES (1000, 'mine')")
    for number in range(10):
        p.pubdb.execute(f"INSERT INTO t VALUES ({number}, 'before')")
    p.pubdb.execute("UPDATE t SET v = 'changed' WHERE id = 1")
    finish = _finish_lsn(p, f"INSERT INTO t SELECT g, 'theirs' FROM generate_series({1001 - rows}, 1000) g")
    p.pubdb.execute("INSERT INTO u VALUES (1, 'after')")
    error = _fault(p)
    assert error.conflict == "insert_exists" and error.sqlstate == "23505"
    assert error.relation == "public.t"
    assert parse_lsn(error.finish_lsn or "") >= finish
    assert error.xid == int(p.pubdb.value("SELECT xmin::text FROM t WHERE id = 1000"))
    assert "(1000, theirs)" in (error.detail or "") and "t_pkey" in (error.detail or "")
    position = conflict_text.lsn(parse_lsn(error.finish_lsn or ""), p.session.info.server_version)
    assert f"finished at {position}" in (error.context or "")
    assert p.subdb.value("SELECT count(*) FROM t") == 11 and p.subdb.value("SELECT v FROM t WHERE id = 1") == "changed"
    assert p.subdb.value("SELECT count(*) FROM u") == 0
    remote, _ = p.progress()
    assert remote <= parse_lsn(error.finish_lsn or "")
    assert _fault(p).finish_lsn == error.finish_lsn  # again and again
    p.subdb.execute("DELETE FROM t WHERE id = 1000")
    p.apply()
    p.same("t", "u")


def test_a_fault_in_the_middle_of_a_long_batch_is_found_after_much_else_was_prepared(pair: MakePair) -> None:
    # psycopg forgets its prepared statements at a ROLLBACK and deallocates all of the session, the pipeline's too
    p = pair(TABLES)
    task = p.start()
    for number in range(15):
        p.pubdb.execute(f"INSERT INTO t VALUES ({number}, 'x'); UPDATE t SET v = 'y' WHERE id = {number}")
        p.until("SELECT v = 'y' FROM t WHERE id = %s", number, task=task)
    p.subdb.execute("INSERT INTO t VALUES (1060, 'mine')")
    p.pubdb.execute(
        "INSERT INTO t SELECT 1000 + g, 'copy' FROM generate_series(1, 60) g; UPDATE t SET v = 'z' WHERE id = 3"
    )
    with pytest.raises(ApplyError) as caught:
        task.result()
    assert caught.value.conflict == "insert_exists"
    p.subdb.execute("DELETE FROM t WHERE id = 1060")
    p.apply()
    p.same("t")


def test_an_update_to_an_existing_key_is_update_exists(pair: MakePair) -> None:
    p = pair(TABLES)
    p.apply("INSERT INTO t VALUES (1, 'a')")
    p.subdb.execute("INSERT INTO t VALUES (2, 'mine')")
    p.pubdb.execute("UPDATE t SET id = 2")
    error = _fault(p, "conflict=update_exists")
    assert error.conflict == "update_exists" and "replica identity (id)=(1)" in (error.detail or "")


def test_a_missing_row_is_skipped_and_recorded_in_the_same_commit(pair: MakePair) -> None:
    p = pair(TABLES)
    p.apply("INSERT INTO t SELECT g, 'x' FROM generate_series(1, 4) g")
    p.subdb.execute("DELETE FROM t WHERE id < 3")
    p.apply("UPDATE t SET v = 'new' WHERE id = 1; DELETE FROM t WHERE id = 2; UPDATE t SET v = 'found' WHERE id = 3")
    assert p.subdb.rows("SELECT id, v FROM t ORDER BY id") == [(3, "found"), (4, "x")]
    update, delete = p.events()
    assert (update["conflict_type"], delete["conflict_type"]) == ("update_missing", "delete_missing")
    assert (update["schemaname"], update["relname"], update["key"]) == ("public", "t", "(id)=(1)")
    assert update["remote_tuple"] == {"id": "1", "v": "new"} and delete["remote_tuple"] is None
    assert update["message"] == 'conflict detected on relation "public.t": conflict=update_missing'
    version, identity = p.session.info.server_version, "replica identity (id)=(1)"
    assert update["detail"] == conflict_text.missing(version, "UPDATE", {"id": "1", "v": "new"}, identity)
    assert delete["detail"] == conflict_text.missing(version, "DELETE", None, identity.replace("1", "2"))
    assert update["remote_xid"] == delete["remote_xid"]
    assert conflict_text.lsn(parse_lsn(update["finish_lsn"]), version) in update["context"]


def test_a_missing_row_is_recorded_with_bytes_that_are_no_characters(pair: MakePair) -> None:
    p = pair('CREATE TABLE c (id int PRIMARY KEY, letter "char", zero "char", high "char", many "char"[])', binary=True)
    p.apply("INSERT INTO c VALUES (1, 'a', '', (-61)::\"char\", '{a,\"\"}')")
    p.subdb.execute("DELETE FROM c")
    p.apply("UPDATE c SET letter = 'b'")
    [update] = p.events()
    row = update["remote_tuple"]
    assert [row[name] for name in ("letter", "zero", "high")] == ["b", "", "\\303"]
    assert row["many"].startswith("\\x")


def test_feedback_waits_until_a_conflict_was_recorded(pair: MakePair) -> None:
    p = pair(TABLES)
    p.apply("INSERT INTO t VALUES (1, 'x')")
    p.subdb.execute("DELETE FROM t")
    task = p.start()
    p.pubdb.execute("DELETE FROM t WHERE id = 1")
    p.until("SELECT count(*) = 1 FROM pgsub.event", task=task)
    at = p.progress()[0]
    for number in range(3):
        p.pubdb.execute(f"INSERT INTO t VALUES ({number + 10}, 'later')")
        p.until("SELECT count(*) = 1 FROM t WHERE id = %s", number + 10, task=task)
    assert p.progress()[1] < at and p.confirmed() < at
    p.stop(task)
    assert p.progress()[1] < at and p.confirmed() < at
    task = p.start()  # another worker does not pass it either
    p.pubdb.execute("INSERT INTO t VALUES (20, 'later')")
    p.until("SELECT count(*) = 1 FROM t WHERE id = 20", task=task)
    p.until("SELECT pg_sleep(0.3) IS NOT NULL")
    assert p.progress()[1] < at and p.confirmed() < at
    p.subdb.execute("DELETE FROM pgsub.event")
    p.until("SELECT reported_lsn >= remote_lsn FROM pgsub.progress WHERE worker = 0", task=task)
    p.pubdb.wait("SELECT confirmed_flush_lsn - '0/0'::pg_lsn > %s FROM pg_replication_slots", at)
    p.stop(task)


def test_a_missing_table_is_named_and_apply_goes_on_once_it_is_back(pair: MakePair) -> None:
    p = pair(TABLES)
    p.subdb.execute("ALTER TABLE t RENAME TO elsewhere")
    p.pubdb.execute("INSERT INTO u VALUES (1, 'before')")
    p.pubdb.execute("INSERT INTO t VALUES (1, 'x')")
    error = _fault(p, 'logical replication target relation "public.t" does not exist')
    assert isinstance(error, SchemaFault) and error.relation == "public.t" and error.finish_lsn and error.xid
    assert p.subdb.value("SELECT count(*) FROM u") == 1
    p.subdb.execute("ALTER TABLE elsewhere RENAME TO t")
    p.apply()
    p.same("t", "u")


def test_a_missing_column_is_named_and_apply_goes_on_once_it_is_there(pair: MakePair) -> None:
    p = pair(TABLES)
    p.pubdb.execute("ALTER TABLE t ADD b int, ADD c int; INSERT INTO t VALUES (1, 'x', 2, 3)")
    error = _fault(p, 'is missing replicated columns: "b", "c"')
    assert error.relation == "public.t" and error.finish_lsn
    p.subdb.execute("ALTER TABLE t ADD b int, ADD c int")
    p.apply()
    p.same("t")


def test_ddl_on_the_target_while_a_worker_runs_is_noticed(pair: MakePair) -> None:
    p = pair(TABLES)
    task = p.start()
    p.pubdb.execute("INSERT INTO t VALUES (1, 'x'); UPDATE t SET v = 'y'")
    p.until("SELECT v = 'y' FROM t", task=task)
    p.subdb.execute("ALTER TABLE t ADD b int DEFAULT 7, ALTER id TYPE bigint")
    p.pubdb.execute("INSERT INTO t VALUES (2, 'x'); UPDATE t SET v = 'z' WHERE id = 1; ALTER TABLE t ADD b int")
    p.pubdb.execute("INSERT INTO t VALUES (3, 'x', 9)")
    p.until("SELECT count(*) = 3 FROM t", task=task)
    assert p.subdb.rows("SELECT id, v, b FROM t ORDER BY id") == [(1, "z", 7), (2, "x", 7), (3, "x", 9)]
    p.subdb.execute("ALTER TABLE t RENAME v TO w")
    p.pubdb.execute("UPDATE t SET v = 'again' WHERE id = 1")
    with pytest.raises(SchemaFault, match='missing replicated column: "v"'):
        task.result()
    p.subdb.execute("ALTER TABLE t RENAME w TO v")
    p.apply()
    p.same("t", columns="id::int, v")


def test_a_table_dropped_and_created_again_is_another_table(pair: MakePair) -> None:
    p = pair(TABLES)
    p.apply("INSERT INTO t VALUES (1, 'x')")
    p.subdb.execute("DROP TABLE t; CREATE TABLE t (id int PRIMARY KEY, v text)")
    p.pubdb.execute("UPDATE t SET v = 'y'")
    error = _fault(p, "was dropped and created again")
    assert isinstance(error, SchemaFault) and error.relation == "public.t" and error.finish_lsn
    assert f"pgsub refresh {p.sub.name} --adopt" in str(error.hint)  # pg_restore may have filled it


def test_a_table_dropped_and_created_again_under_a_running_worker_is_not_written_to(pair: MakePair) -> None:
    # prepared statements would find the new table by its name
    p = pair(TABLES)
    task = p.start()
    p.pubdb.execute("INSERT INTO t VALUES (1, 'x')")
    p.until("SELECT count(*) = 1 FROM t", task=task)
    p.subdb.execute("DROP TABLE t; CREATE TABLE t (id int PRIMARY KEY, v text)")
    p.pubdb.execute("INSERT INTO t VALUES (2, 'y')")
    with pytest.raises(SchemaFault, match="was dropped and created again"):
        task.result()
    assert p.subdb.value("SELECT count(*) FROM t") == 0


@pytest.mark.parametrize("change", ["UPDATE t SET v = 'y'", "DELETE FROM t"])
def test_a_target_without_any_key_cannot_take_a_key(pair: MakePair, change: str) -> None:
    p = pair(pub="CREATE TABLE t (id int PRIMARY KEY, v text)", sub="CREATE TABLE t (id int, v text)")
    p.apply("INSERT INTO t VALUES (1, 'x')")
    p.pubdb.execute(change)
    error = _fault(p, "neither REPLICA IDENTITY index nor PRIMARY KEY")
    assert isinstance(error, SchemaFault) and error.relation == "public.t" and error.finish_lsn
    p.subdb.execute("ALTER TABLE t ADD PRIMARY KEY (id)")
    p.apply()
    p.same("t")


def test_the_targets_key_must_be_sent(pair: MakePair) -> None:
    p = pair(pub="CREATE TABLE t (id int PRIMARY KEY, v text)", sub="CREATE TABLE t (id int, v text PRIMARY KEY)")
    p.apply("INSERT INTO t VALUES (1, 'x')")
    p.pubdb.execute("DELETE FROM t")
    assert _fault(p, "publisher did not send replica identity column expected").relation == "public.t"


@pytest.mark.parametrize("kind", ["VIEW t AS SELECT 1 AS id, ''::text AS v", "SEQUENCE t"])
def test_what_is_no_table_is_no_target(pair: MakePair, kind: str) -> None:
    p = pair(TABLES)
    p.subdb.execute(f"DROP TABLE t; CREATE {kind}")
    p.subdb.execute("UPDATE pgsub.subscription_rel SET srrelid = 't'::regclass WHERE relname = 't'")
    p.pubdb.execute("INSERT INTO t VALUES (1, 'x')")
    assert _fault(p, 'cannot use relation "public.t" as logical replication target').relation == "public.t"


def test_a_deferred_constraint_names_the_transaction_at_its_commit(pair: MakePair) -> None:
    p = pair(
        pub=TABLES,
        sub="CREATE TABLE t (id int PRIMARY KEY, v text UNIQUE DEFERRABLE INITIALLY DEFERRED);"
        "CREATE TABLE u (id int PRIMARY KEY, v text)",
    )
    # session_replication_role = replica silences the trigger that checks it, for the server's own subscriber as well
    [(trigger,)] = p.subdb.rows("SELECT tgname FROM pg_trigger WHERE tgrelid = 't'::regclass")
    p.subdb.execute(f'ALTER TABLE t ENABLE ALWAYS TRIGGER "{trigger}"')
    p.pubdb.execute("INSERT INTO t VALUES (1, 'a'); INSERT INTO t VALUES (2, 'b')")
    p.pubdb.execute("UPDATE t SET v = 'b' WHERE id = 1; UPDATE t SET v = 'a' WHERE id = 2")  # only its end counts
    finish = _finish_lsn(p, "INSERT INTO t VALUES (3, 'a')")
    p.pubdb.execute("INSERT INTO u VALUES (1, 'after')")
    error = _fault(p, "duplicate key value")
    assert parse_lsn(error.finish_lsn or "") >= finish
    assert error.xid == int(p.pubdb.value("SELECT xmin::text FROM t WHERE id = 3"))
    assert 'message type "COMMIT"' in (error.context or "")
    assert p.subdb.rows("SELECT * FROM t ORDER BY id") == [(1, "b"), (2, "a")]
    assert p.subdb.value("SELECT count(*) FROM u") == 0


@pytest.mark.parametrize(
    ("ddl", "words"),
    [
        ("ALTER TABLE t ADD CHECK (v <> 'bad')", "violates check constraint"),
        ("ALTER TABLE t ALTER v SET NOT NULL", "violates not-null constraint"),
        ("ALTER TABLE t ALTER v TYPE int USING 0", "invalid input syntax for type integer"),
        ("ALTER TABLE t ADD EXCLUDE USING hash (v WITH =)", "conflicting key value violates exclusion constraint"),
    ],
)
@pytest.mark.parametrize("rows", [1, 60], ids=["insert", "copy"])
def test_data_that_the_target_refuses_is_located(pair: MakePair, ddl: str, words: str, rows: int) -> None:
    p = pair(TABLES)
    p.subdb.execute(ddl)
    value = "NULL" if "NOT NULL" in ddl else "'bad'"
    p.pubdb.execute(f"INSERT INTO t SELECT g, {value} FROM generate_series(1, {max(rows, 2)}) g")
    error = _fault(p, words)
    assert error.relation == "public.t" and error.finish_lsn and error.xid and error.directive is Directive.FAULT
    assert p.subdb.value("SELECT count(*) FROM t") == 0


def test_a_trigger_of_the_targets_own_may_refuse_a_row(pair: MakePair) -> None:
    p = pair(TABLES)
    p.subdb.execute(
        "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not here'; END $$;"
        "CREATE TRIGGER ordinary BEFORE INSERT ON u FOR EACH ROW EXECUTE FUNCTION no();"
        "CREATE TRIGGER replica BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION no();"
        "ALTER TABLE t ENABLE REPLICA TRIGGER replica"
    )
    p.pubdb.execute("INSERT INTO u VALUES (1, 'x')")
    p.pubdb.execute("INSERT INTO t VALUES (1, 'x')")
    assert _fault(p, "not here").relation == "public.t"
    p.same("u")


def test_a_missing_privilege_is_a_fault_with_the_grant(pair: MakePair) -> None:
    p = pair(TABLES)
    role = f"writer_{p.subid}"
    p.subdb.execute(f"CREATE ROLE {role} LOGIN; GRANT USAGE ON SCHEMA pgsub TO {role}")
    p.subdb.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA pgsub TO {role}")
    p.set(target=p.subdb.server.conninfo(p.subdb.name, role))
    try:
        p.pubdb.execute("INSERT INTO t VALUES (1, 'x')")
        with pytest.raises(PermissionMissing, match='cannot SET ROLE to "postgres"') as caught:
            p.catch_up()
        assert "GRANT" in (caught.value.hint or "") and "public.t" in (caught.value.context or "")
        p.subdb.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON t TO {role}")
        p.apply("UPDATE t SET v = 'y'")
        p.same("t")
    finally:
        p.subdb.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_a_malformed_message_is_a_protocol_violation_and_nothing_else(
    pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = pair(TABLES)
    p.pubdb.execute("INSERT INTO t VALUES (1, 'xxxxxxxxxxxxxxxxxxxxxxxxxxxx'); UPDATE t SET v = 'y'; DELETE FROM t")
    receive, where = WalSender.receive, [0]

    def corrupted(self: WalSender, *limits: int) -> Frames:
        frames = receive(self, *limits)
        kinds = (b"I", b"U", b"D", b"R")
        return Frames.of(_cut(f, where[0]) if f[:1] == b"w" and f[25:26] in kinds else f for f in frames)

    monkeypatch.setattr(WalSender, "receive", corrupted)
    violations = 0
    for where[0] in range(60):
        with contextlib.suppress(ProtocolViolation):  # anything else fails the test
            p.catch_up()
            break
        violations += 1
        assert p.progress()[0] == 0
    assert violations > 30


def _cut(frame: bytes, where: int) -> bytes:
    return frame[: 25 + where] if where < len(frame) - 25 else frame


def test_a_transaction_before_a_malformed_one_is_kept_or_sent_again(
    pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = pair(TABLES)
    p.pubdb.execute("INSERT INTO t VALUES (1, 'good')")
    p.pubdb.execute("INSERT INTO t VALUES (2, 'bad')")
    receive = WalSender.receive
    monkeypatch.setattr(
        WalSender,
        "receive",
        lambda self, *limits: Frames.of(f[:-2] if b"bad" in f else f for f in receive(self, *limits)),
    )
    with pytest.raises(ProtocolViolation):
        p.catch_up()
    monkeypatch.undo()
    p.apply()
    p.same("t")


def test_a_lost_target_session_is_transient_and_nothing_is_lost(
    pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = pair(TABLES)
    task = p.start()
    p.pubdb.execute("INSERT INTO t VALUES (1, 'x')")
    p.until("SELECT count(*) = 1 FROM t", task=task)
    p.subdb.execute(
        f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'pgsub {p.subid} apply %'"
    )
    p.pubdb.execute("INSERT INTO t VALUES (2, 'x')")
    with pytest.raises(PgsubError) as caught:
        task.result()
    assert caught.value.directive is Directive.RETRY
    monkeypatch.setattr(batch_size, "BATCH_BYTES", 1)
    p.apply()
    p.same("t")
