"""The comparison of a table range by range of its key, between two databases: which are divided, and what is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fix_servers import Database
from verified import compare

from pgsub.common.errors import TableRewritten
from pgsub.reconcile.comparison import TableResult
from pgsub.reconcile.key_ranges import EqualRanges, Ranges
from pgsub.reconcile.reading import read_rate
from pgsub.reconcile.rows import DIFFERENT, EXTRA, MISSING

#: Compares ``t``, and gives its ranges too.
Compare = Callable[..., tuple[TableResult, Ranges]]

_LSN, _EARLIER = 0x200, 0x100
_TABLE = "CREATE TABLE t (id int PRIMARY KEY, v text)"
_ROWS = "INSERT INTO t SELECT g, repeat('x', 200) FROM generate_series(1, 4000) g; ANALYZE t"


def new_ranges() -> Ranges:
    """Nothing is known yet."""
    return Ranges(_LSN, lambda ranges: None)


@pytest.fixture
def both(pubdb: Database, subdb: Database, monkeypatch: pytest.MonkeyPatch) -> Compare:
    """``both(ddl, pub=…, sub=…)``; tables of some blocks are large here."""
    monkeypatch.setattr(read_rate, "MOST_BLOCKS", 2)

    def run(
        ddl: str = "", *, pub: str = "", sub: str = "", ranges: Ranges | None = None, **options: Any
    ) -> tuple[TableResult, Ranges]:
        for database, own in ((pubdb, pub), (subdb, sub)):
            for statements in filter(None, (ddl, own)):
                database.execute(statements)
        if not pubdb.value("SELECT count(*) FROM pg_publication"):
            pubdb.execute("CREATE PUBLICATION p FOR TABLE t WITH (publish_via_partition_root)")
        known = new_ranges() if ranges is None else ranges
        return compare(pubdb, subdb, ranges=known, **options), known

    return run


def counts(result: TableResult) -> tuple[int, int, int]:
    """Rows that are missing, extra, different."""
    found = result.differences.counts
    return found[MISSING], found[EXTRA], found[DIFFERENT]


def numbers(ranges: Ranges) -> set[int]:
    """Those that are equal."""
    return {number for one in ranges.equal for number in range(one.first, one.until)}


def test_a_large_table_is_divided_and_all_its_ranges_are_equal(both: Compare) -> None:
    seen: list[tuple[int, int]] = []
    result, ranges = both(_TABLE, pub=_ROWS, sub=_ROWS, progress=lambda done, total: seen.append((done, total)))
    assert counts(result) == (0, 0, 0)
    assert (result.publisher_rows, result.target_rows) == (4000, 4000)
    assert ranges.count > 40 and numbers(ranges) == set(range(ranges.count))
    assert sum(one.rows for one in ranges.equal) == 4000 and ranges.earlier() == []
    assert [one.lsn for one in ranges.joined()] == [_LSN]
    done, totals = [done for done, _ in seen], {total for _, total in seen}
    assert done == sorted(done) and len(totals) == 1 and done[-1] <= max(totals) < done[-1] + 2 * ranges.count


@pytest.mark.long
def test_rows_that_differ_are_found_in_every_range_and_theirs_are_not_kept(both: Compare) -> None:
    _, ranges = both(_TABLE, pub=_ROWS, sub=_ROWS)
    low, high = ranges.bounds[0], ranges.bounds[-1]
    result, ranges = both(
        sub=f"DELETE FROM t WHERE id IN (1, {low}, 4000); UPDATE t SET v = 'y' WHERE id IN (2000, {high});"
        "INSERT INTO t VALUES (-7, 'extra'), (5000, 'extra'); ANALYZE t"
    )
    assert counts(result) == (3, 2, 2)
    assert (result.publisher_rows, result.target_rows) == (4000, 3999)
    assert 0 < len(numbers(ranges)) < ranges.count
    assert not numbers(ranges) & {0, ranges.count - 1}


def test_what_is_known_to_be_equal_is_not_read_and_the_rest_is(both: Compare, pubdb: Database) -> None:
    _, before = both(_TABLE, pub=_ROWS, sub=_ROWS)
    known = Ranges(_LSN, lambda ranges: None, before.bounds, [EqualRanges(0, 20, _EARLIER, 77)])
    result, ranges = both(
        sub=f"UPDATE t SET v = 'y' WHERE id IN (1, {before.bounds[19]}); DELETE FROM t WHERE id = 4000", ranges=known
    )
    assert counts(result) == (1, 0, 1)  # the first row is not looked at
    assert result.publisher_rows == 77 + pubdb.value(f"SELECT count(*) FROM t WHERE id >= {before.bounds[19]}")
    assert [(one.first, one.until, one.lsn, one.rows) for one in ranges.earlier()] == [(0, 20, _EARLIER, 77)]


def test_a_null_of_the_publisher_is_in_a_range(both: Compare) -> None:
    result, ranges = both(
        pub=f"CREATE TABLE t (id int, v text); CREATE INDEX ON t (id); ALTER TABLE t REPLICA IDENTITY FULL; {_ROWS};"
        "INSERT INTO t VALUES (NULL, 'null')",
        sub=f"{_TABLE}; {_ROWS}",
    )
    assert ranges.bounds and counts(result) == (1, 0, 0)


@pytest.mark.long
def test_a_table_in_partitions_is_divided_through_its_root(both: Compare) -> None:
    parts = "".join(f"CREATE TABLE t{n} PARTITION OF t FOR VALUES FROM ({n}000) TO ({n + 1}000);" for n in range(6))
    made = f"CREATE TABLE t (id int PRIMARY KEY, v text) PARTITION BY RANGE (id); {parts}"
    result, ranges = both(pub=f"{made} {_ROWS}", sub=f"{_TABLE}; {_ROWS}; UPDATE t SET v = 'y' WHERE id = 2500")
    assert ranges.bounds and counts(result) == (0, 0, 1)
    result, ranges = both(sub=f"DROP TABLE t; {made} {_ROWS}; DELETE FROM t WHERE id = 2500")
    assert ranges.bounds and counts(result) == (1, 0, 0)


_BY_TYPE = {
    "bigint": "g::bigint - 2000",
    "date": "date '1999-01-01' + g",
    "timestamp": "timestamp '0044-03-15 12:00 BC' + g * interval '1 year'",
    "timestamptz": "timestamptz '2026-03-29 00:00+00' + g * interval '7 min'",
    "uuid": "lpad(to_hex(g), 32, '0')::uuid",
}


@pytest.mark.parametrize("kind", _BY_TYPE)
def test_keys_of_each_type_that_servers_order_alike_are_divided(both: Compare, kind: str) -> None:
    value = _BY_TYPE[kind]
    filled = f"INSERT INTO t SELECT {value}, repeat('x', 200) FROM generate_series(1, 4000) g; ANALYZE t"
    result, ranges = both(
        f"CREATE TABLE t (id {kind} PRIMARY KEY, v text); {filled}",
        sub=f"UPDATE t SET v = 'y' WHERE id = (SELECT {value} FROM generate_series(3333, 3333) g)",
    )
    assert ranges.bounds and counts(result) == (0, 0, 1)


def test_integers_of_different_length_are_divided(both: Compare) -> None:
    result, ranges = both(pub=f"{_TABLE}; {_ROWS}", sub=f"{_TABLE.replace('int', 'bigint')}; {_ROWS}")
    assert ranges.bounds and counts(result) == (0, 0, 0)


_WIDE = "repeat('x', 200)"
#: What is not divided: tables of the publisher and of the target, and what is put into both.
_WHOLE = {
    "texts, which each server orders in its own way": ("id text PRIMARY KEY, v text", "g::text"),
    "times that the target rounds": (
        "id timestamp{} PRIMARY KEY, v text",
        "timestamp '2026-01-01' + g * interval '1 s'",
    ),
    "values in no order": ("id int PRIMARY KEY, v text", "(g * 7919) % 4001"),
    "a value that many rows have": ("id int, n serial, v text, PRIMARY KEY (id, n)", "g / 2000"),
}


@pytest.mark.long
@pytest.mark.parametrize("why", _WHOLE)
def test_other_tables_are_compared_in_one_go(both: Compare, why: str) -> None:
    columns, value = _WHOLE[why]
    filled = f"INSERT INTO t (id, v) SELECT {value}, {_WIDE} FROM generate_series(1, 4000) g; ANALYZE t"
    result, ranges = both(
        pub=f"CREATE TABLE t ({columns.format('')}); {filled}",
        sub=f"CREATE TABLE t ({columns.format('(0)')}); {filled}; DELETE FROM t WHERE id = (SELECT max(id) FROM t)",
    )
    assert not ranges.bounds and not ranges.equal
    assert counts(result)[0] > 0 and result.publisher_rows == 4000


@pytest.mark.long
@pytest.mark.parametrize(
    "without",
    [
        "TRUNCATE t; INSERT INTO t VALUES (1, 'x')",
        "DELETE FROM pg_statistic WHERE starelid = 't'::regclass",
        "ALTER TABLE t DROP CONSTRAINT t_pkey; ALTER TABLE t REPLICA IDENTITY FULL",
    ],
    ids=["few rows", "no statistics", "no index"],
)
def test_a_table_is_not_divided_unless_both_servers_find_its_ranges(both: Compare, without: str) -> None:
    both(_TABLE, pub=_ROWS, sub=_ROWS)
    few = "TRUNCATE" in without
    _, ranges = both(pub=without, sub=without if few else "")
    assert not ranges.bounds


def test_ranges_of_a_table_that_was_emptied_meanwhile_are_not_kept(
    both: Compare, pubdb: Database, subdb: Database
) -> None:
    kept: list[Ranges] = []
    known = Ranges(_LSN, kept.append, ("1000", "2000", "3000"))

    def emptied() -> None:
        for database in (pubdb, subdb):
            database.execute("TRUNCATE t")  # both snapshots show no row, and so the same

    with pytest.raises(TableRewritten):
        both(_TABLE, pub=_ROWS, sub=_ROWS, ranges=known, meanwhile=emptied)
    assert kept == [] and known.equal == []


def test_ranges_that_are_left_are_together_as_far_as_they_may_be() -> None:
    bounds = tuple(map(str, range(1, 10)))
    ranges = Ranges(_LSN, lambda one: None, bounds, [EqualRanges(0, 2, 1, 5), EqualRanges(6, 7, 1, 5)])
    assert ranges.left(3) == [range(2, 5), range(5, 6), range(7, 10)]
    assert ranges.between(0, 2) == (None, "2") and ranges.between(7, 10) == ("7", None)
    ranges.equal += [EqualRanges(2, 6, 1, 9), EqualRanges(7, 10, _LSN, 9)]
    assert ranges.joined() == [EqualRanges(0, 7, 1, 19), EqualRanges(7, 10, _LSN, 9)]
    assert ranges.earlier() == [EqualRanges(0, 7, 1, 19)] and ranges.left(3) == []
