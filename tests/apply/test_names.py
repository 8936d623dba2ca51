"""Which table a change goes to: the one that bears the published name, by its oid. Mirrors logicalrep_rel_open."""

from __future__ import annotations

import pytest
from fix_failpoints import At
from fix_pair import MakePair, Pair

from pgsub.common.errors import PgsubError, SchemaFault
from pgsub.target.ledger import subscriptions

TABLES = "CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE u (id int PRIMARY KEY, v text)"
NEW = "CREATE TABLE fresh (id int PRIMARY KEY, v text)"


def _refused(p: Pair, words: str) -> SchemaFault:
    with pytest.raises(SchemaFault, match=words) as caught:
        p.catch_up()
    return caught.value


def test_a_published_table_that_the_target_lacks_stops_apply_though_it_was_never_refreshed(pair: MakePair) -> None:
    p = pair(TABLES)
    p.pubdb.execute(NEW)
    p.pubdb.execute("INSERT INTO u VALUES (1, 'before')")
    p.pubdb.execute("INSERT INTO t VALUES (1, 'x'); INSERT INTO fresh VALUES (1, 'x')")
    error = _refused(p, 'logical replication target relation "public.fresh" does not exist')
    assert error.relation == "public.fresh" and error.finish_lsn and error.xid and error.sqlstate == "55000"
    p.same("u")
    assert p.subdb.value("SELECT count(*) FROM t") == 0  # nothing of that transaction
    p.subdb.execute(NEW)
    p.apply("UPDATE fresh SET v = 'y'", "TRUNCATE fresh")
    p.same("t", "u")


@pytest.mark.parametrize("statement", ["UPDATE fresh SET v = 'y'", "DELETE FROM fresh", "TRUNCATE fresh, t"])
def test_any_change_of_a_table_that_the_target_lacks_stops_apply(pair: MakePair, statement: str) -> None:
    p = pair(TABLES, pub=f"{NEW}; INSERT INTO fresh VALUES (1, 'x')", names=[("public", "t"), ("public", "u")])
    p.pubdb.execute(statement)
    assert _refused(p, '"public.fresh" does not exist').relation == "public.fresh"


def test_a_table_that_is_there_but_not_subscribed_is_left_alone(pair: MakePair) -> None:
    p = pair(TABLES, sub="INSERT INTO u VALUES (7, 'mine')", names=[("public", "t")])
    p.apply("INSERT INTO u VALUES (1, 'x'); INSERT INTO t VALUES (1, 'x')", "UPDATE u SET v = 'y'; TRUNCATE u")
    p.same("t")
    assert p.subdb.rows("SELECT * FROM u") == [(7, "mine")]


def test_the_ledger_of_another_pgsub_is_never_subscribed(pair: MakePair) -> None:
    p = pair(TABLES, pub="CREATE SCHEMA pgsub; CREATE TABLE pgsub.subscription (subid int PRIMARY KEY)")
    p.pubdb.execute("CREATE TABLE pgsub.nowhere (id int PRIMARY KEY)")
    p.apply("INSERT INTO pgsub.subscription VALUES (1); INSERT INTO pgsub.nowhere VALUES (1); INSERT INTO t VALUES (1)")
    p.same("t")
    assert p.subdb.value("SELECT count(*) FROM pgsub.subscription") == 1


@pytest.mark.parametrize(
    ("ddl", "name"),
    [
        ("ALTER TABLE t RENAME TO renamed", "renamed"),
        ("CREATE SCHEMA s; ALTER TABLE t SET SCHEMA s", "s.t"),
        ("ALTER SCHEMA public RENAME TO was_public", "was_public.t"),
    ],
)
def test_a_table_renamed_on_both_sides_goes_on_without_a_refresh(pair: MakePair, ddl: str, name: str) -> None:
    p = pair(TABLES)
    task = p.start()
    p.pubdb.execute("INSERT INTO t VALUES (1, 'before')")
    p.until("SELECT count(*) = 1 FROM t", task=task)
    oid = p.relid("t")
    p.ddl(ddl)
    p.pubdb.execute(f"INSERT INTO {name} VALUES (2, 'after')")
    p.pubdb.execute(f"UPDATE {name} SET v = 'both'; INSERT INTO {name} SELECT g, 'copy' FROM generate_series(3, 99) g")
    p.until(f"SELECT count(*) = 99 FROM {name}", task=task)
    p.stop(task)
    p.apply(f"DELETE FROM {name} WHERE id = 50")  # a new worker finds it too
    p.same(name)
    [row] = [row for row in subscriptions.relations(p.session, p.subid) if row.srrelid == oid]
    assert f"{row.schemaname}.{row.relname}".removeprefix("public.") == name
    assert row.recorded == ("public", "t")


def test_tables_that_changed_their_names_for_each_others_on_both_sides_keep_their_rows(pair: MakePair) -> None:
    p = pair(TABLES)
    task = p.start()
    p.pubdb.execute("INSERT INTO t VALUES (1, 'of t'); INSERT INTO u VALUES (2, 'of u')")
    p.until("SELECT count(*) = 1 FROM u", task=task)
    p.ddl("BEGIN; ALTER TABLE t RENAME TO x; ALTER TABLE u RENAME TO t; ALTER TABLE x RENAME TO u; COMMIT")
    p.pubdb.execute("UPDATE t SET v = 'was u'; UPDATE u SET v = 'was t'")
    p.until("SELECT v = 'was t' FROM u", task=task)
    p.same("t", "u")
    p.stop(task)


def test_a_table_renamed_on_the_publisher_alone_stops_apply_until_the_target_follows(pair: MakePair) -> None:
    p = pair(TABLES)
    p.pubdb.execute("INSERT INTO t VALUES (1, 'x'); ALTER TABLE t RENAME TO renamed; INSERT INTO renamed VALUES (2)")
    assert _refused(p, '"public.renamed" does not exist').relation == "public.renamed"
    p.subdb.execute("ALTER TABLE t RENAME TO renamed")
    # what was written before the rename cannot find its table by the old name any more: as with the server
    p.subdb.execute("CREATE VIEW t AS SELECT * FROM renamed")
    assert _refused(p, "is not the table that was subscribed").detail


def test_a_table_that_got_the_name_of_a_subscribed_one_is_not_written_to(pair: MakePair) -> None:
    p = pair(TABLES)
    task = p.start()
    p.pubdb.execute("INSERT INTO t VALUES (1, 'x')")
    p.until("SELECT count(*) = 1 FROM t", task=task)
    p.subdb.execute("BEGIN; ALTER TABLE t RENAME TO old; CREATE TABLE t (LIKE old INCLUDING ALL); COMMIT")
    p.pubdb.execute("INSERT INTO t VALUES (2, 'y')")
    with pytest.raises(SchemaFault, match="is not the table that was subscribed") as caught:
        task.result()
    assert 'which is "public.old" now' in (caught.value.detail or "") and "pgsub refresh" in (caught.value.hint or "")
    assert p.subdb.value("SELECT count(*) FROM t") == 0
    p.subdb.execute("BEGIN; DROP TABLE t; ALTER TABLE old RENAME TO t; COMMIT")
    p.apply()
    p.same("t")


def test_a_subscribed_table_that_gets_the_name_of_one_left_alone_is_noticed_in_the_same_batch(pair: MakePair) -> None:
    p = pair(TABLES, names=[("public", "t")])
    task = p.start()
    p.pubdb.execute("INSERT INTO u VALUES (1, 'left alone')")
    p.pubdb.execute("INSERT INTO t VALUES (1, 'x')")
    p.until("SELECT count(*) = 1 FROM t", task=task)
    p.subdb.execute("BEGIN; ALTER TABLE u RENAME TO other; ALTER TABLE t RENAME TO u; COMMIT")
    p.pubdb.execute("INSERT INTO u VALUES (2, 'taken')")  # no Relation message comes: nothing changed there
    p.until("SELECT count(*) = 2 FROM u", task=task)
    p.stop(task)


@pytest.mark.parametrize("both", [True, False], ids=["both sides", "publisher first"])
def test_a_renamed_table_catches_up_under_its_new_name(pair: MakePair, at: At, both: bool) -> None:
    p = pair(TABLES, pub="INSERT INTO t VALUES (1, 'copied')", state="i")
    oid = p.relid("t")
    p.sync("u")
    at("sync.after_f=error")
    with pytest.raises(PgsubError):
        p.sync("t")
    p.pubdb.execute("ALTER TABLE t RENAME TO renamed")
    if both:
        p.subdb.execute("ALTER TABLE t RENAME TO renamed")
    else:
        p.pubdb.execute("INSERT INTO renamed VALUES (2, 'sent'); INSERT INTO u VALUES (1, 'x')")
        assert p.try_sync(oid) == {}  # nobody is ahead: it changes hands at once
        assert _refused(p, '"public.renamed" does not exist').relation == "public.renamed"
        p.subdb.execute("ALTER TABLE t RENAME TO renamed")
    p.apply("UPDATE renamed SET v = 'changed'; INSERT INTO renamed VALUES (3, 'streamed')")
    p.sync_oid(oid)
    p.apply("INSERT INTO renamed VALUES (4, 'applied')")
    p.same("renamed", "u")
