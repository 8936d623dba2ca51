"""Whether two databases hold the same rows: every published table of the publisher against the target, row by row.

Both sides send their rows as sorted text (``COPY`` of a query) and are merged, so no table has to fit into memory.
Values are compared in their text form, so they differ wherever the server sees a difference.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter

import psycopg
from psycopg import sql

_SHOWN = 3  #: differing rows that are kept of each side of a table
_WIDTH = 160  #: of a row that is shown

#: so that a value has the same text in both sessions
_SETTINGS = """
SET datestyle = 'ISO, YMD'; SET intervalstyle = 'postgres'; SET timezone = 'UTC'; SET bytea_output = 'hex';
SET extra_float_digits = 3; SET client_encoding = 'UTF8'; SET search_path = pg_catalog; SET work_mem = '64MB'
"""

_TABLES = """
SELECT p.schemaname, p.tablename, array_agg(a.attname::text ORDER BY a.attnum)
  FROM (SELECT DISTINCT schemaname, tablename FROM pg_publication_tables WHERE pubname = %s) AS p
  JOIN pg_attribute a ON a.attrelid = format('%%I.%%I', p.schemaname, p.tablename)::regclass
   AND a.attnum > 0 AND NOT a.attisdropped
 GROUP BY 1, 2 ORDER BY 1, 2
"""


@dataclass(slots=True)
class TableComparison:
    """The comparison of one table.

    :ivar missing: the first rows that only the publisher has, as text.
    :ivar extra: the first rows that only the target has.
    :ivar differences: how many there are of both kinds.
    """

    name: str
    publisher_rows: int = 0
    target_rows: int = 0
    differences: int = 0
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Format the differing rows that were kept, a line for each."""
        sides = (("only on the publisher", self.missing), ("only on the target", self.extra))
        return [f"{self.name}: {side}: {_shortened(row)}" for side, rows in sides for row in rows]


def _shortened(row: str) -> str:
    text = row.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}…"


def compare(publisher: str, target: str, publication: str) -> list[TableComparison]:
    """Compare all tables of a publication; changes should not be under way.

    :param publisher: connection string.
    :param target: connection string.
    :return: by name.
    :raises psycopg.Error: a table cannot be read.
    """
    with (
        contextlib.closing(psycopg.connect(publisher, autocommit=True)) as ours,
        contextlib.closing(psycopg.connect(target, autocommit=True)) as theirs,
    ):
        tables = ours.execute(_TABLES.encode(), (publication,)).fetchall()
        for connection in (ours, theirs):
            connection.execute(_SETTINGS.encode())
        return [_compare_table(ours, theirs, *table) for table in tables]


def _compare_table(
    publisher: psycopg.Connection, target: psycopg.Connection, schema: str, name: str, columns: list[str]
) -> TableComparison:
    # the same columns in the same order, whatever their order on the target
    query = sql.SQL('COPY (SELECT ROW({})::text COLLATE "C" AS line FROM {} ORDER BY line) TO STDOUT').format(
        sql.SQL(", ").join(map(sql.Identifier, columns)), sql.Identifier(schema, name)
    )
    result = TableComparison(f"{schema}.{name}")
    with publisher.cursor() as here, target.cursor() as there:
        with here.copy(query) as copy, there.copy(query) as other:  # both sort at the same time
            _merge(result, _rows(copy), _rows(other))
    return result


def _rows(copy: psycopg.Copy) -> Iterator[str]:
    for row in copy.rows():
        yield row[0]


def _merge(result: TableComparison, publisher: Iterator[str], target: Iterator[str]) -> None:
    """Count rows and differences of two sorted sequences; UTF-8 sorts as code points do."""
    tagged = heapq.merge(((row, True) for row in publisher), ((row, False) for row in target))
    for row, equal in itertools.groupby(tagged, key=itemgetter(0)):
        sides = Counter(ours for _, ours in equal)
        result.publisher_rows += sides[True]
        result.target_rows += sides[False]
        surplus = sides[True] - sides[False]
        result.differences += abs(surplus)
        if surplus:
            kept = result.missing if surplus > 0 else result.extra
            kept += [row] * min(abs(surplus), _SHOWN - len(kept))
