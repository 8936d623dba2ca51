"""What the target publishes of a table, its partitions and the tables that it is a partition of."""

from __future__ import annotations

import pytest
from fix_servers import Database

from pgsub.target.session.publications import publication_of


@pytest.mark.parametrize(
    ("published", "found"),
    [
        ("TABLE t WITH (publish_via_partition_root)", "t"),
        ("TABLE t", "t1"),
        ("TABLE t1", "t1"),
        ("TABLES IN SCHEMA public", "t1"),
    ],
)
def test_a_partition_is_published_with_its_table_and_a_table_with_its_partition(
    subdb: Database, published: str, found: str
) -> None:
    subdb.execute(
        "CREATE TABLE t (id int PRIMARY KEY) PARTITION BY LIST (id);"
        "CREATE TABLE t1 PARTITION OF t FOR VALUES IN (1); CREATE TABLE other (id int PRIMARY KEY)"
    )
    oids = [subdb.value("SELECT %s::regclass::oid", name) for name in ("t", "t1", "other")]
    assert [publication_of(subdb.connection, oid) for oid in oids] == [None] * 3
    subdb.execute(f"CREATE PUBLICATION p FOR {published}")
    seen = [publication_of(subdb.connection, oid) for oid in oids]
    assert seen[:2] == [("p", found)] * 2
    assert ("SCHEMA" in published) == (seen[2] is not None)
