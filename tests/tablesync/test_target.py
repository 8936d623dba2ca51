"""What a target says in its ledger makes pgsub do nothing on the publisher beyond what the subscription is about."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pgsub.common.errors import SchemaFault
from pgsub.tablesync import sync_slots

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


def test_a_partition_of_a_published_root_is_copied_by_itself_where_the_ledger_has_it(pair: MakePair) -> None:
    p = pair(
        "CREATE TABLE r (id int) PARTITION BY RANGE (id); CREATE TABLE r1 PARTITION OF r DEFAULT",
        pub="INSERT INTO r VALUES (1); CREATE PUBLICATION p FOR TABLE r WITH (publish_via_partition_root)",
        names=[],
    )
    _copied(p, "public.r1")
    assert p.subdb.rows("SELECT * FROM r1") == [(1,)]


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
