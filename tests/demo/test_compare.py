"""Promises of the comparison: what is equal is called equal, and what differs is named."""

from __future__ import annotations

import psycopg
import pytest

from pgsub.demo.compare import compare

_TABLE = "CREATE TABLE t (id int, number numeric, text text, moment timestamptz)"
_ROWS = r"INSERT INTO t VALUES (1, 'NaN', E'a\tb\n\\N', 'infinity'), (2, NULL, NULL, NULL), (2, NULL, NULL, NULL)"


@pytest.fixture
def tables(pubdb, subdb):
    pubdb.execute(f"{_TABLE}; {_ROWS}; CREATE PUBLICATION p FOR TABLE t")
    return lambda: compare(pubdb.conninfo, subdb.conninfo, "p")


def test_order_of_rows_and_columns_and_settings_of_the_sessions_make_no_difference(tables, pubdb, subdb):
    subdb.execute("CREATE TABLE t (local text DEFAULT 'x', moment timestamptz, text text, id int, number numeric)")
    subdb.execute(r"INSERT INTO t (id) VALUES (2), (2)")
    subdb.execute(r"INSERT INTO t (id, number, text, moment) VALUES (1, 'NaN', E'a\tb\n\\N', 'infinity')")
    subdb.execute(f"ALTER DATABASE {subdb.name} SET datestyle = 'German'")
    (table,) = tables()
    assert (table.name, table.publisher_rows, table.target_rows, table.differences) == ("public.t", 3, 3, 0)
    assert table.lines() == []


def test_a_changed_row_is_named_on_both_sides_with_its_control_characters_written_out(tables, subdb):
    subdb.execute(f"{_TABLE}; {_ROWS}; UPDATE t SET number = 0 WHERE id = 1")
    (table,) = tables()
    assert table.differences == 2
    assert table.lines() == [
        r'public.t: only on the publisher: (1,NaN,"a\tb\n\\N",infinity)',
        r'public.t: only on the target: (1,0,"a\tb\n\\N",infinity)',
    ]


def test_a_twin_that_is_missing_and_null_for_an_empty_text_are_differences(tables, subdb):
    subdb.execute(f"{_TABLE}; {_ROWS}; DELETE FROM t WHERE ctid = (SELECT max(ctid) FROM t)")
    (table,) = tables()
    assert (table.publisher_rows, table.target_rows, table.missing, table.extra) == (3, 2, ["(2,,,)"], [])
    subdb.execute("UPDATE t SET text = '' WHERE id = 2")
    (table,) = tables()
    assert (table.missing, table.extra) == (["(2,,,)", "(2,,,)"], ['(2,,"",)'])


def test_of_many_differences_the_first_are_kept_and_all_are_counted(tables, pubdb, subdb):
    pubdb.execute("INSERT INTO t SELECT g FROM generate_series(100, 999) g")
    subdb.execute(_TABLE)
    (table,) = tables()
    assert (table.publisher_rows, table.target_rows, table.differences) == (903, 0, 903)
    assert len(table.lines()) == 3


def test_texts_beyond_the_basic_plane_sort_alike_on_both_sides(tables, pubdb, subdb):
    subdb.execute(f"{_TABLE}; {_ROWS}")
    texts = ["\ufffd", "🐘", "z", "ä", "\ue000", "\U0010ffff"]
    for database, order in ((pubdb, texts), (subdb, texts[::-1])):
        for text in order[:-1]:
            database.execute("INSERT INTO t (text) VALUES (%s)", text)
    (table,) = tables()
    assert (table.missing, table.extra, table.differences) == (["(,,\ufffd,)"], ["(,,\U0010ffff,)"], 2)


def test_a_table_that_the_target_lacks_is_an_error(tables):
    with pytest.raises(psycopg.errors.UndefinedTable):
        tables()
