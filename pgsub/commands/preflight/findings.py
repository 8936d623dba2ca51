"""The findings of pre-flight checks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pgsub.commands.reporter import Reporter
from pgsub.common import quoting
from pgsub.common.errors import TargetSchemaError
from pgsub.common.plural import about
from pgsub.publisher.tables import Name, RemoteTable
from pgsub.target.catalog.relation import TargetRelation
from pgsub.target.ledger.subscriptions import RelationState


@dataclass(frozen=True, slots=True)
class Caution:
    """A warning with its remedy. ``unavailable`` names a feature that the subscription lacks permanently."""

    message: str
    detail: str | None = None
    hint: str | None = None
    unavailable: str | None = None
    tables: tuple[str, ...] = ()  #: qualified names of the tables concerned, empty for warnings of servers
    stops: bool = False  #: whether replication of the tables stops at their next change


@dataclass(slots=True)
class Table:
    """A published table and its target."""

    remote: RemoteTable
    target: TargetRelation
    mode: str = "none"  #: none, atomic, chunked or adopt
    reason: str | None = None  #: the reason why it is not copied in chunks
    chunks: int = 0
    empty: bool | None = None  #: whether the target table is empty, None if that is not known

    @property
    def name(self) -> str:
        """Schema and name, unquoted, as in the server's messages."""
        return f"{self.remote.schema}.{self.remote.name}"

    def relation(self, state: str, *, adopt: bool = False, keep: int = 0) -> RelationState:
        """Return the table's row of the ledger.

        :param state: srsubstate.
        :param adopt: whether existing rows are compared.
        :param keep: the maximum number of replaced or deleted rows to keep.
        """
        to = self.target
        return RelationState(to.oid, to.schema, to.name, state, copy_bytes=self.remote.bytes, adopt=adopt, keep=keep)

    def document(self) -> dict[str, Any]:
        """Return the table's object in JSON documents. Its schema is part of the contract."""
        remote = self.remote
        return {
            "schemaname": remote.schema,
            "relname": remote.name,
            "copy": self.mode,
            "reason": self.reason,
            "chunks": self.chunks,
            "rows_estimate": int(remote.reltuples) if remote.reltuples >= 0 else None,
            "bytes_estimate": remote.bytes,
            "filtered": remote.row_filter is not None,
            "target_empty": self.empty,
        }


@dataclass(slots=True)
class Preflight:
    """The findings: tables, warnings, and the state of two_phase."""

    tables: list[Table] = field(default_factory=list)
    warnings: list[Caution] = field(default_factory=list)
    two_phase: str = "d"  #: subtwophasestate, present or initial

    def document(self) -> dict[str, Any]:
        """Return the document of ``--dry-run --json``."""
        warnings = [
            {"message": w.message, "detail": w.detail, "hint": w.hint, "tables": list(w.tables)} for w in self.warnings
        ]
        tables = [table.document() for table in self.tables]
        return {"two_phase": self.two_phase, "tables": tables, "warnings": warnings}


def report(warnings: Sequence[Caution], reporter: Reporter, *, strict: bool = False) -> None:
    """Report the warnings, or raise an error for them if ``strict`` is set.

    :raises TargetSchemaError: the first warning, with the others in the detail.
    """
    if strict and warnings:
        first, *more = warnings
        raise TargetSchemaError(
            first.message,
            detail="\n".join([first.detail or "", *(f"Also: {w.message}." for w in more)]).strip() or None,
            hint=first.hint or "Without --strict this is a warning.",
        )
    for warning in warnings:
        reporter.warning(warning.message, warning.detail, warning.hint)


def concerning(
    tables: Sequence[str],
    message: str,
    detail: str,
    hint: str | None,
    *,
    schemas: Sequence[str] = (),
    most: int = 20,
    stops: bool = False,
) -> Iterator[Caution]:
    """Yield one warning for all of these tables, or none if there are no tables.

    :param tables: qualified names.
    :param message: see :func:`~pgsub.common.plural.about`.
    :param schemas: if given, the message and the detail name these instead of the tables.
    :param most: the maximum number of names in the detail.
    """
    if tables:
        nouns = ("schema", "schemas") if schemas else ("table", "tables")
        said = about(schemas or tables, nouns, message, detail, most=most)
        yield Caution(*said, hint, tables=tuple(tables), stops=stops)


def grant(privileges: str, kind: str, objects: Iterable[Name | str], role: str) -> str:
    """Return a GRANT statement for all objects.

    :param kind: TABLE or SCHEMA.
    """
    named = ", ".join(quoting.name(*([one] if isinstance(one, str) else one)) for one in dict.fromkeys(objects))
    return f"GRANT {privileges} ON {kind} {named} TO {quoting.name(role)};"
