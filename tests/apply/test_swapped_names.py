"""A name that another table bears when apply uses it: no code of that table is run, not even by planning a statement.

Whoever owns the database or a schema may drop a table of others there, and create one of that name.
"""

from __future__ import annotations

import pytest
from fix_pair import MakePair
from swapped import Swapped

from pgsub.apply.rows import relation_cache
from pgsub.common.errors import SchemaFault

TABLES = "CREATE TABLE t (id int PRIMARY KEY, v text, u int UNIQUE)"


@pytest.fixture(autouse=True)
def _nobody_looks_before_the_name_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relation_cache, "CHECK_SECONDS", 1e9)


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO t VALUES (1000, 'x')",
        "UPDATE t SET v = 'x' WHERE id = 1",
        "DELETE FROM t WHERE id = 1",
        "TRUNCATE t",
        "INSERT INTO t SELECT g, 'copied' FROM generate_series(1000, 1050) g",
        "UPDATE t SET v = 'in a set'",
        "DELETE FROM t",
    ],
)
def test_nothing_of_a_table_that_took_a_name_is_run(pair: MakePair, statement: str) -> None:
    p = pair(TABLES)
    task = p.start()
    p.pubdb.execute("INSERT INTO t SELECT g, 'before' FROM generate_series(1, 500) g")
    p.until("SELECT count(*) = 500 FROM t", task=task)
    swapped = Swapped(p.subdb)
    p.pubdb.execute(statement)
    with pytest.raises(SchemaFault, match="is not the table that was subscribed"):
        task.result()
    assert not swapped.ran


def test_rows_in_the_way_are_not_looked_up_in_a_table_that_took_the_name(pair: MakePair) -> None:
    p = pair(TABLES, on_conflict=("insert_exists=skip",))
    task = p.start()
    p.pubdb.execute("INSERT INTO t VALUES (1, 'before')")
    p.until("SELECT count(*) = 1 FROM t", task=task)
    swapped = Swapped(p.subdb)
    p.subdb.execute("SET session_replication_role = replica; ALTER TABLE t DISABLE TRIGGER fired")
    p.pubdb.execute("INSERT INTO t VALUES (2, 'x', 2)")
    with pytest.raises(SchemaFault, match="is not the table that was subscribed"):
        task.result()
    assert not swapped.ran
