"""Whose rows are whose: targets that are not empty, attempts that failed beside local writers, publishers that rewrite.

A failed attempt of a chunked copy removes exactly its own rows, whatever else happens in the table.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from embedded import Server
from fix_failpoints import At
from fix_pair import MakePair, Pair
from fix_program import until
from fix_servers import Database

from pgsub.apply.worker import feedback
from pgsub.common.errors import ApplyError, PublisherUnavailable, TargetUnavailable
from pgsub.tablesync import copy_pool
from pgsub.tablesync.copy import plan
from pgsub.target.session import ledger_privileges

TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"
ROWS = "INSERT INTO t SELECT g, md5(g::text) FROM generate_series(1, 3000) g"


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of some blocks."""
    monkeypatch.setattr(plan, "CHUNK_BYTES", 50_000)
    monkeypatch.setattr(plan, "CHUNKED_FROM_BYTES", 50_000)


@pytest.mark.long
@pytest.mark.publishers(long=True)
def test_a_table_that_is_rewritten_between_its_chunks_is_copied_anew(
    pair: MakePair, at: At, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = pair(TABLE, pub=ROWS, state="i", copy_workers=1)
    p.pubdb.execute("DELETE FROM t WHERE id <= 1500")  # VACUUM FULL moves the others into blocks that are done
    release = tmp_path / "release"
    monkeypatch.setenv("PGSUB_FAILPOINTS_DIR", str(tmp_path))
    at(f"copy.middle=pause:{release}@2;copy.before_commit=error@2")  # the task that reads the table ends
    syncing = p.submit("sync", lambda name: p.sync(name), ["t"])
    until(lambda: (tmp_path / "copy.middle").exists())  # it reads the second chunk
    with closing(p.pubdb.connect()) as session:
        rewriting = p.submit("rewrite", session.execute, ["VACUUM FULL t"])
        p.pubdb.wait("SELECT count(*) = 1 FROM pg_locks WHERE relation = 't'::regclass AND NOT granted")
        release.touch()
        with pytest.raises(PublisherUnavailable, match="was rewritten on the publisher"):
            syncing.result()
        rewriting.result()
    p.sync("t")
    assert p.subdb.rows("SELECT copy_mode, attempt FROM pgsub.subscription_rel") == [("chunked", 2)]
    p.apply()
    p.same("t")


def test_a_root_whose_partitions_may_not_be_read_by_themselves_is_copied_whole(pair: MakePair) -> None:
    partitioned = (
        "CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);"
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (9999)"
    )
    p = pair(
        partitioned,
        pub=f"{ROWS}; CREATE PUBLICATION p FOR TABLE t WITH (publish_via_partition_root)",
        state="i",
    )
    role, owner = f"reader_{p.subid}", p.sub.connection
    p.pubdb.execute(f"CREATE ROLE {role} LOGIN REPLICATION; GRANT SELECT ON t TO {role}")
    try:
        p.set(connection=p.pubdb.server.conninfo(p.pubdb.name, role))
        p.sync("t")
        p.set(connection=owner)
    finally:
        p.pubdb.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
    p.same("t")
    assert p.subdb.value("SELECT copy_mode FROM pgsub.subscription_rel") == "atomic"


def _half_a_copy(pair: MakePair, at: At, monkeypatch: pytest.MonkeyPatch, sub: str, pub: str = ROWS) -> Pair:
    """Some chunks of t are committed, the attempt is over, and the next one will begin again."""
    monkeypatch.setattr(copy_pool, "TRIES", 1)
    p = pair(pub=f"{TABLE}; {pub}", sub=sub, state="i", copy_workers=1)
    at("copy.before_commit=error@3")
    with pytest.raises(TargetUnavailable):
        p.sync("t")
    assert p.state("t") == "d"
    assert p.subdb.value("SELECT count(xid) FROM pgsub.copy_chunk") == 2
    assert 0 < p.subdb.value("SELECT count(*) FROM t") < 3000
    p.set(copy_atomic=True)
    return p


def _copied(p: Pair, table: str = "t") -> set[int]:
    return {key for (key,) in p.subdb.rows(f"SELECT id FROM {table}")}


def _arrives(p: Pair) -> None:
    """The next attempt ends well, and so do the changes after it."""
    p.sync("t")
    p.apply("UPDATE t SET v = 'streamed' WHERE id = 3; DELETE FROM t WHERE id = 9; INSERT INTO t VALUES (4000, 'new')")
    p.same("(SELECT * FROM t WHERE id > 0)")
    assert p.events() == []


def test_rows_of_a_failed_attempt_go_although_local_writers_are_at_work_in_the_table(
    pair: MakePair, at: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = _half_a_copy(pair, at, monkeypatch, TABLE)
    copied = _copied(p)
    over, written = threading.Event(), list[int]()

    def write(first: int) -> None:
        with closing(p.subdb.connect()) as session:
            for number in range(first, -100_000_000, -3):
                if over.is_set():
                    return
                session.execute("INSERT INTO t VALUES (%s, 'mine')", (number,))
                session.execute("UPDATE t SET v = 'still mine' WHERE id = %s", (number,))
                written.append(number)

    at("sync.before_slot=error")  # after the clean-up, before anything is copied again
    writers = [threading.Thread(target=write, args=(first,)) for first in (-1, -2, -3)]
    for writer in writers:
        writer.start()
    try:
        with pytest.raises(TargetUnavailable):
            p.sync("t")
        assert copied and not copied & _copied(p)
    finally:
        over.set()
        for writer in writers:
            writer.join()
    assert written and _copied(p) == set(written)
    _arrives(p)
    assert {key for key in _copied(p) if key < 0} == set(written)


def test_a_local_transaction_that_stays_open_puts_the_clean_up_off_and_blocks_no_other_writer(
    pair: MakePair, at: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "LOCK_TIMEOUT", "100ms")
    p = _half_a_copy(pair, at, monkeypatch, TABLE)
    at("")
    with closing(p.subdb.connect()) as session:
        session.execute("BEGIN; INSERT INTO t VALUES (-1, 'mine')")
        with pytest.raises(TargetUnavailable, match="lock timeout"):
            p.sync("t")
        p.subdb.execute("SET lock_timeout = '5s'; INSERT INTO t VALUES (-2, 'mine')")
        session.execute("COMMIT")
    _arrives(p)
    assert p.subdb.value("SELECT count(*) FROM t WHERE v = 'mine'") == 2


def test_a_local_transaction_that_stays_open_keeps_no_table_from_being_copied(
    pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "LOCK_TIMEOUT", "100ms")
    p = pair(TABLE, pub=ROWS, state="i", copy_workers=3)
    with closing(p.subdb.connect()) as session:
        session.execute("BEGIN; INSERT INTO t VALUES (-1, 'mine')")
        p.sync("t")
        session.execute("COMMIT")
    assert p.subdb.value("SELECT copy_mode FROM pgsub.subscription_rel") == "atomic"
    _arrives(p)
    assert p.subdb.value("SELECT count(*) FROM t WHERE v = 'mine'") == 1


def test_rows_of_a_failed_attempt_go_from_under_the_foreign_keys_of_local_rows(
    pair: MakePair, at: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = "CREATE TABLE child (id int REFERENCES t ON DELETE CASCADE); CREATE TABLE other (id int REFERENCES t)"
    p = _half_a_copy(pair, at, monkeypatch, f"{TABLE}; {child}")
    p.subdb.execute("INSERT INTO child SELECT id FROM t; INSERT INTO other SELECT id FROM t LIMIT 5")
    before = p.subdb.rows("SELECT id FROM child ORDER BY id")
    _arrives(p)
    assert p.subdb.rows("SELECT id FROM child ORDER BY id") == before
    p.subdb.execute("DELETE FROM child WHERE id = 9; DELETE FROM other WHERE id = 9")
    for table in ("child", "other"):  # the foreign keys hold again
        p.subdb.execute(f"ALTER TABLE {table} DROP CONSTRAINT {table}_id_fkey")
        p.subdb.execute(f"ALTER TABLE {table} ADD FOREIGN KEY (id) REFERENCES t")


def test_rows_of_a_failed_attempt_go_from_every_partition_and_only_they(
    pair: MakePair, at: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = (
        "CREATE TABLE t (v text, id int PRIMARY KEY) PARTITION BY RANGE (id);"
        "CREATE TABLE mine PARTITION OF t FOR VALUES FROM (-999) TO (0);"
        "CREATE TABLE few PARTITION OF t FOR VALUES FROM (0) TO (400);"
        "CREATE TABLE others PARTITION OF t FOR VALUES FROM (400) TO (9999) PARTITION BY LIST (id);"
        "CREATE TABLE others_ PARTITION OF others DEFAULT"
    )
    p = _half_a_copy(pair, at, monkeypatch, parts)
    assert all(p.subdb.value(f"SELECT count(*) FROM {part}") for part in ("few", "others_"))
    p.subdb.execute("INSERT INTO t (id, v) VALUES (-1, 'mine'), (3500, 'mine')")
    at("sync.before_slot=error")
    with pytest.raises(TargetUnavailable):
        p.sync("t")
    assert _copied(p) == {-1, 3500}
    p.subdb.execute("DELETE FROM t WHERE id = 3500")
    p.sync("t")
    p.same("(SELECT id, v FROM t WHERE id > 0)")


def test_rows_of_a_failed_attempt_go_without_firing_local_triggers(
    pair: MakePair, at: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    trigger = (
        "CREATE TABLE fired (what text);"
        "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " INSERT INTO public.fired VALUES (TG_OP); RETURN NULL; END $$;"
        "CREATE TRIGGER x AFTER INSERT OR DELETE ON t FOR EACH ROW EXECUTE FUNCTION f();"
        "CREATE TRIGGER y AFTER INSERT OR DELETE ON t FOR EACH STATEMENT EXECUTE FUNCTION f()"
    )
    p = _half_a_copy(pair, at, monkeypatch, f"{TABLE}; {trigger}")
    p.subdb.execute("INSERT INTO t VALUES (-1, 'mine')")
    mine = p.subdb.rows("SELECT what FROM fired")
    assert mine == [("INSERT",), ("INSERT",)]
    _arrives(p)
    assert p.subdb.rows("SELECT what FROM fired") == mine
    assert p.subdb.value("SELECT v FROM t WHERE id = -1") == "mine"


def test_rows_are_added_to_a_target_that_is_not_empty(pair: MakePair) -> None:
    p = pair(TABLE, pub=ROWS, sub="INSERT INTO t VALUES (-5, 'mine'), (9000, 'mine')", state="i")
    p.sync("t")
    assert p.subdb.rows("SELECT count(*), count(*) FILTER (WHERE v = 'mine') FROM t") == [(3002, 2)]
    assert p.subdb.value("SELECT copy_mode FROM pgsub.subscription_rel") == "atomic"


def test_a_table_without_a_key_that_is_not_empty_gets_the_rows_once_however_often_the_copy_fails(
    pair: MakePair, at: At, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_pool, "TRIES", 1)
    p = pair(
        "CREATE TABLE t (id int, v text)",
        pub=ROWS,
        sub="INSERT INTO t SELECT 5, 'mine' FROM generate_series(1, 3)",
        state="i",
    )
    for point in ("copy.middle", "copy.before_commit"):
        at(f"{point}=error")
        with pytest.raises(TargetUnavailable):
            p.sync("t")
        assert p.subdb.value("SELECT count(*) FROM t") == 3
    at("")
    p.sync("t")
    assert p.subdb.rows("SELECT count(*), count(*) FILTER (WHERE v = 'mine') FROM t") == [(3003, 3)]


def test_a_duplicate_key_among_chunks_leaves_only_local_rows_and_ends_well_once_it_is_gone(
    pair: MakePair, at: At
) -> None:
    p = pair(TABLE, pub=ROWS, state="i", copy_workers=1)
    with closing(p.subdb.connect()) as session:
        submit, written = p.submit, threading.Event()

        def late(name: str, function: Callable[[object], object], items: list[object]) -> object:
            if name.startswith("copy") and not written.is_set():
                written.set()
                session.execute("INSERT INTO t VALUES (2500, 'mine')")  # the table was seen empty already
            return submit(name, function, items)

        p.submit = late  # type: ignore[method-assign, assignment]
        with pytest.raises(ApplyError, match="duplicate key") as caught:
            p.sync("t")
    assert caught.value.relation == "public.t"
    assert 1 < p.subdb.value("SELECT count(*) FROM t") < 3000
    with pytest.raises(ApplyError, match="duplicate key"):  # it goes on, and meets the same row
        p.sync("t")
    p.set(copy_atomic=True)
    with pytest.raises(ApplyError, match="duplicate key"):  # now whole
        p.sync("t")
    assert p.subdb.rows("SELECT id, v FROM t") == [(2500, "mine")]
    p.subdb.execute("DELETE FROM t")
    _arrives(p)


def test_a_role_that_cannot_silence_triggers_copies_the_table_whole(pair: MakePair) -> None:
    p = pair(TABLE, pub=ROWS, state="i")
    role = f"plain_{p.subid}"
    p.subdb.execute(
        f"CREATE ROLE {role} LOGIN; GRANT ALL ON SCHEMA pgsub, public TO {role};"
        f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}; {ledger_privileges.grants(role)}"
        f"GRANT ALL ON ALL SEQUENCES IN SCHEMA pgsub TO {role}"
    )
    try:
        p.set(target=p.subdb.server.conninfo(p.subdb.name, role))
        p.sync("t")
    finally:
        p.set(target=p.subdb.conninfo)
        p.subdb.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
    p.same("t")
    assert p.subdb.value("SELECT copy_mode FROM pgsub.subscription_rel") == "atomic"


def test_a_value_that_the_targets_encoding_lacks_fails_its_table_by_name_and_ends_well_once_it_is_gone(
    pubdb: Database, target: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feedback, "MIRROR_SECONDS", 0.0)
    latin = Database(target, f"{pubdb.name}_latin", "LATIN1")
    pubdb.execute(f"{TABLE}; {ROWS}; UPDATE t SET v = '表' WHERE id = 7; CREATE PUBLICATION p FOR TABLE t")
    latin.execute(TABLE)
    p = Pair(pubdb, latin).subscribe("i", None)
    try:
        with pytest.raises(ApplyError, match="has no equivalent in encoding") as caught:
            p.sync("t")
        assert caught.value.relation == "public.t" and 'synchronizing table "public.t"' in (caught.value.context or "")
        pubdb.execute("UPDATE t SET v = 'é' WHERE id = 7")
        p.sync("t")
        p.apply("UPDATE t SET v = v || 'ü' WHERE id < 9")
        p.same("t")
    finally:
        p.close()
        latin.drop()
