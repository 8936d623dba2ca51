"""What a target says in its ledger makes pgsub do nothing on the publisher beyond what the subscription is about."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from pgsub.common.errors import SchemaFault
from pgsub.publisher import connect as publisher
from pgsub.tablesync import sync_slots
from pgsub.tablesync.sequences import reading, synchronization

if TYPE_CHECKING:
    from fix_pair import MakePair, Pair

_NAMED = """
INSERT INTO pgsub.subscription_rel (subid, srrelid, schemaname, relname, srsubstate)
SELECT %s, c.oid, n.nspname, c.relname, 'i' FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.oid = %s::regclass
"""


@pytest.mark.parametrize("column", ["sync_slot", "spare_slot"])
def test_slots_of_others_stay_whatever_the_ledger_says(pair: MakePair, column: str) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY)")
    for other in (f"other_{p.subid}", f"pgsub_{p.subid - 1}_sync_1_2", f"pgsub_{p.subid}_sync_1_2"):
        p.pubdb.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", other)
        p.subdb.execute(f"UPDATE pgsub.subscription_rel SET {column} = %s WHERE subid = %s", other, p.subid)
        ours = other == f"pgsub_{p.subid}_sync_1_2"
        assert sync_slots.own_slots(p.session, p.sub, [p.relid("t")]) == ([other] if ours else [])
        sync_slots.release(p.session, p.sub, p.relid("t"))
    left = "SELECT slot_name FROM pg_replication_slots WHERE slot_name <> %s AND database = current_database()"
    names = {name for (name,) in p.pubdb.rows(left, p.sub.slot_name)}
    assert names == {f"other_{p.subid}", f"pgsub_{p.subid - 1}_sync_1_2"}


def _copied(p: Pair, table: str) -> None:
    p.subdb.execute(_NAMED, p.subid, table)
    p.sync_oid(p.subdb.value("SELECT %s::regclass::oid::bigint", table))


def test_a_table_that_is_not_published_is_not_read_because_the_target_names_it(pair: MakePair) -> None:
    p = pair(
        "CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE secret (id int)",
        pub="INSERT INTO secret VALUES (42); CREATE PUBLICATION p FOR TABLE t",
    )
    with pytest.raises(SchemaFault, match=r'"public\.secret" is not published by the publications of the subscription'):
        _copied(p, "public.secret")
    assert p.subdb.rows("SELECT * FROM secret") == []


def test_a_sequence_of_a_table_that_is_not_published_is_not_read_because_the_target_names_it(pair: MakePair) -> None:
    tables = """
        CREATE TABLE t (id serial); CREATE TABLE secret (id serial);
        CREATE TABLE r (id serial) PARTITION BY RANGE (id); CREATE TABLE r1 PARTITION OF r DEFAULT
    """
    p = pair(tables, pub="CREATE PUBLICATION p FOR TABLE t, r", names=[("public", "t")])
    for table in ("secret", "r"):
        p.subdb.execute(_NAMED, p.subid, table)
    with contextlib.closing(publisher.connect(p.sub.connection, application_name=p.sub.name)) as source:
        reading.prepare(source)
        reading.prepare(p.session)
        found = synchronization.look(p.session, source, p.sub)
    assert sorted(one.local.name for one in found.wanted) == ["r_id_seq", "t_id_seq"]
    assert found.obstacles == ()


def test_a_partition_of_a_published_root_is_copied_by_itself_where_the_ledger_has_it(pair: MakePair) -> None:
    p = pair(
        "CREATE TABLE r (id int) PARTITION BY RANGE (id); CREATE TABLE r1 PARTITION OF r DEFAULT",
        pub="INSERT INTO r VALUES (1); CREATE PUBLICATION p FOR TABLE r WITH (publish_via_partition_root)",
        names=[],
    )
    _copied(p, "public.r1")
    assert p.subdb.rows("SELECT * FROM r1") == [(1,)]


_OWN_PARTS = """
CREATE TABLE r (id int, mine bool, secret text) PARTITION BY LIST (id);
CREATE TABLE r1 PARTITION OF r FOR VALUES IN (1);
CREATE TABLE r2 PARTITION OF r FOR VALUES IN (2)
"""
#: A partition whose columns have other numbers than those of the root.
_OTHER_NUMBERS = """
DROP TABLE r2; CREATE TABLE r2 (secret text, gone int, mine bool, id int);
ALTER TABLE r2 DROP gone; ALTER TABLE r ATTACH PARTITION r2 FOR VALUES IN (2)
"""
_ROWS = "INSERT INTO r VALUES (1, true, 'x'), (1, false, 'x'), (2, true, 'x'), (2, false, 'x')"


@pytest.mark.since(15)  # row filters and column lists
def test_a_partition_is_copied_with_no_more_rows_and_columns_than_its_root_publishes(pair: MakePair) -> None:
    p = pair(
        _OWN_PARTS,
        pub=f"{_OTHER_NUMBERS}; {_ROWS};"
        " CREATE PUBLICATION p FOR TABLE r (id, mine) WHERE (mine) WITH (publish = insert, publish_via_partition_root)",
        names=[],
    )
    _copied(p, "public.r2")
    assert p.subdb.rows("SELECT * FROM r") == [(2, True, None)]


@pytest.mark.since(15)
@pytest.mark.parametrize(
    "published", ["r1", "r1, r2 WHERE (mine)", "r1, r2 (id, mine)"], ids=["rows", "filtered", "columns"]
)
def test_a_root_is_not_read_because_a_part_of_it_is_published(pair: MakePair, published: str) -> None:
    p = pair(_OWN_PARTS, pub=f"{_ROWS}; CREATE PUBLICATION p FOR TABLE {published} WITH (publish = insert)", names=[])
    with pytest.raises(SchemaFault, match=r'"public\.r" is not published by the publications of the subscription'):
        _copied(p, "public.r")
    assert p.subdb.rows("SELECT * FROM r") == []


def test_a_root_is_copied_where_all_of_its_partitions_are_published(pair: MakePair) -> None:
    p = pair(_OWN_PARTS, pub=f"{_ROWS}; CREATE PUBLICATION p FOR TABLE r1, r2", names=[])
    _copied(p, "public.r")
    assert p.subdb.value("SELECT count(*) FROM r") == 4


@pytest.mark.parametrize("table", ["pg_catalog.pg_default_acl", "information_schema.sql_features"])
def test_catalogs_are_never_copied(pair: MakePair, table: str) -> None:
    p = pair("CREATE TABLE t (id int PRIMARY KEY)", pub="CREATE PUBLICATION p FOR TABLE t")
    p.pubdb.execute(  # as t is published, with whatever columns this version has
        "INSERT INTO pg_publication_rel SELECT (jsonb_populate_record(r, jsonb_build_object('oid', 9, 'prrelid',"
        " %s::regclass::oid))).* FROM pg_publication_rel r JOIN pg_publication p ON p.oid = prpubid AND pubname = 'p'",
        table,
    )
    try:
        with pytest.raises(SchemaFault, match="cannot use relation"):
            _copied(p, table)
    finally:
        p.pubdb.execute("DELETE FROM pg_publication_rel WHERE oid = 9")
