"""NOT NULL, CHECK and partition constraints of a target table, for rows not yet written. Mirrors ExecConstraints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psycopg import sql

from pgsub.target.catalog.relation import TargetRelation
from pgsub.target.catalog.table_names import PARTITIONS

_CHECKS = """
SELECT conname::text, pg_catalog.pg_get_expr(conbin, conrelid) FROM pg_catalog.pg_constraint
 WHERE conrelid = %s::oid AND contype = 'c' ORDER BY conname
"""
_NOT_NULL = """
SELECT attname::text, NOT atthasdef AND attidentity = '' FROM pg_catalog.pg_attribute
 WHERE attrelid = %s::oid AND attnum > 0 AND NOT attisdropped AND attnotnull ORDER BY attnum
"""

Catalog = Callable[[str, int], list[tuple[Any, ...]]]


@dataclass(frozen=True, slots=True)
class RowConstraints:
    """The constraints of one table, each with the server's error for a row that violates it.

    :ivar required: NOT NULL columns; True if no default fills in a missing value.
    :ivar checks: error and condition, an expression over the table's columns.
    """

    table: str
    required: Mapping[str, bool]
    checks: Sequence[tuple[str, str]]

    @classmethod
    def read(cls, catalog: Catalog, target: TargetRelation) -> RowConstraints:
        """Read the constraints.

        :param catalog: runs a query on the catalogs about the table with an OID.
        """
        checks = [
            (f'new row for relation "{target.name}" violates check constraint "{name}"', text)
            for name, text in catalog(_CHECKS, target.oid)
        ]
        return cls(target.name, dict(catalog(_NOT_NULL, target.oid)), checks + _partitions(catalog, target))

    def missing(self, row: Mapping[str, str | None]) -> str | None:
        """Return the server's error for a row without the value of a NOT NULL column."""
        for name, nothing_fills_it in self.required.items():
            if row.get(name) is None and (name in row or nothing_fills_it):
                return f'null value in column "{name}" of relation "{self.table}" violates not-null constraint'
        return None

    def query(self, row: sql.Composed) -> sql.Composed:
        """Compose a SELECT that evaluates the conditions for the row of a subquery."""
        conditions = [sql.SQL("({}) IS NOT FALSE").format(sql.SQL(text)) for _, text in self.checks]
        return sql.SQL("SELECT {} FROM {}").format(sql.SQL(", ").join(conditions), row)

    def error(self, holds: Sequence[bool]) -> str | None:
        """Return the server's error for the first condition that does not hold."""
        return next((said for (said, _), true in zip(self.checks, holds, strict=True) if not true), None)


def _partitions(catalog: Catalog, target: TargetRelation) -> list[tuple[str, str]]:
    """Return the error if no partition accepts a row, and the condition that one does (ExecFindPartition)."""
    found = [text for *_, text in catalog(PARTITIONS, target.oid)]
    if target.relkind == "p":
        said = f'no partition of relation "{target.name}" found for row'
        return [] if None in found else [(said, " OR ".join(f"({text})" for text in found) or "false")]
    said = f'new row for relation "{target.name}" violates partition constraint'
    return [(said, text) for text in found if text is not None]
