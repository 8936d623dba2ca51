"""Executes row messages as change sets, relation by relation, and leaves the others to the row writer.

Changes of different relations are independent if no trigger or rule sees them and foreign keys are not checked. If they
may depend on each other, the whole block is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pgsub.apply.rows.set_fallback import RowByRow, SetFallback
from pgsub.apply.rows.writer import RowWriter
from pgsub.apply.sets import eligibility
from pgsub.apply.sets.change_set import ChangeSet, Updates
from pgsub.apply.sets.compaction import compact
from pgsub.protocol import columnar, columnar_copy
from pgsub.protocol.columnar import Changes, Messages, Rows
from pgsub.protocol.reader import BINARY
from pgsub.target.catalog.relation_map import RelationMap
from pgsub.target.sql import set_statements
from pgsub.target.sql.pipeline import StatementFailed
from pgsub.target.sql.set_statements import Parameter
from pgsub.target.sql.statement_builder import Statement

#: Minimum number of changes of one relation for which a set costs less than single statements.
PAYS_FROM = 50
#: Maximum number of cached statements per relation; each set of updated columns has one.
_STATEMENTS = 100


@dataclass(slots=True)
class SetResult:
    """The result of a block.

    :ivar left: positions of the messages to execute row by row, in order; they do not depend on the executed sets.
    :ivar changes: number of row messages executed as sets.
    :ivar folded: ``changes`` minus the number of affected rows.
    :ivar serial: why relations, by remote relid, were left; without those that have only a few changes.
    """

    left: list[int] = field(default_factory=list)
    changes: int = 0
    folded: int = 0
    serial: dict[int, str] = field(default_factory=dict)


class SetWriter:
    """A writer of blocks in one target session, inside the caller's transaction.

    :param rows: the session's writer of single rows, which shares its pipeline and role.
    :param replica: session_replication_role = replica is in effect there.
    """

    def __init__(self, rows: RowWriter, *, replica: bool) -> None:
        self._rows = rows
        self._replica = replica
        self._known: dict[int, _Known] = {}
        self._row_by_row = RowByRow()
        self._deviation: SetFallback | None = None

    def begin(self) -> None:
        """Begin a target transaction, and forget the deviation of an earlier one."""
        self._deviation = None

    def apply(
        self, messages: Messages | Sequence[bytes], target: Callable[[int], RelationMap | None], *, in_stream: bool
    ) -> SetResult:
        """Execute a block of row messages; :meth:`finish` reports their success.

        :param messages: INSERT, UPDATE and DELETE messages in order; with any other message, all are left.
        :param target: map of a remote relid, None if its changes are not applied; if it raises KeyError, all are left.
        :param in_stream: messages carry an xid.
        :raises SetFallback: see :meth:`finish`.
        :raises StatementFailed: the target transaction is aborted.
        :raises ProtocolViolation: a message is malformed.
        """
        groups, others = columnar.decode(messages, in_stream)
        by_relid: dict[int, list[Changes]] = {}
        for group in groups:
            by_relid.setdefault(group.relid, []).append(group)
        try:
            mapped = {relid: one for relid in by_relid if (one := target(relid)) is not None}
        except KeyError:
            mapped = None
        if mapped is None or others:
            count = sum(len(group.positions) for group in groups) + len(others)
            return SetResult(list(range(count)))
        result = SetResult()
        self._execute(self._sets(by_relid, mapped, result), result)
        result.left.sort()
        return result

    def _sets(
        self, by_relid: Mapping[int, list[Changes]], mapped: Mapping[int, RelationMap], result: SetResult
    ) -> list[ChangeSet]:
        together = self._reason_for_all(list(mapped.values()))
        sets = []
        for relid, relation in mapped.items():
            groups = by_relid[relid]
            made: ChangeSet | str | None = None
            if sum(len(group.positions) for group in groups) >= PAYS_FROM:
                made = together or self._made(relation, groups)
            if isinstance(made, ChangeSet):
                sets.append(made)
                continue
            if made is not None:
                result.serial[relid] = made
            for group in groups:
                result.left += group.positions.tolist()
        return sets

    def _reason_for_all(self, relations: Sequence[RelationMap]) -> str | None:
        """Return why all changes must keep their order across relations, None if they need not."""
        if not self._replica:
            return "session_replication_role is not replica"
        for relation in relations:
            reason = eligibility.order_matters(relation)
            if reason is not None:
                return f'{reason} at "{relation.target.schema}.{relation.target.name}"'
        # guard: actions of foreign keys keep their order among the changes of other tables
        if len(relations) > 1 and any(relation.target.foreign_keys_fire for relation in relations):
            return "a foreign key is enforced"
        if len({relation.target.oid for relation in relations}) < len(relations):
            return "two relations of the publisher are one of the target"
        if any(r.target.relkind == "p" for r in relations) and any(r.target.partition for r in relations):
            return "a partitioned table changes together with a partition"
        return None

    def _made(self, relation: RelationMap, groups: Sequence[Changes]) -> ChangeSet | str:
        reason = self._about(relation).reason
        if relation in self._row_by_row:
            return "its sets fell back a moment ago"
        if reason is not None and any(group.kind != "I" for group in groups):
            return reason
        return compact(relation, groups)

    def _about(self, relation: RelationMap) -> _Known:
        known = self._known.get(relation.remote.relid)
        if known is None or known.relation is not relation:
            known = self._known[relation.remote.relid] = _Known(relation, eligibility.reason(relation))
        return known

    def _execute(self, sets: Sequence[ChangeSet], result: SetResult) -> None:
        found = [one for one in sets if one.absent is not None or one.deletes is not None or one.updates]
        if found:
            self._rows.setting(_PINNED)
            for one in found:
                self._find(one)
            self._rows.setting(_UNPINNED)
        inserting = [one for one in sets if one.inserts is not None]
        if inserting and found:
            self.finish()
        for one in inserting:
            self._insert(one)
        for one in sets:
            result.changes += one.changes
            result.folded += one.changes - one.effects
            self._rows.changes += one.changes

    def _find(self, one: ChangeSet) -> None:
        if one.absent is not None:
            # guard: rows that a set inserts must be absent
            self._send(one, "present", one.absent, 0)
        if one.deletes is not None:
            self._send(one, "delete", one.deletes, one.deletes.kinds.shape[1])
        for updates in one.updates:
            self._send(one, "update", updates.keys, updates.keys.kinds.shape[1], updates)

    def _send(self, one: ChangeSet, verb: str, keys: Rows, expected: int, updates: Updates | None = None) -> None:
        relation = one.relation
        found = _parameters(relation.lookup, keys, range(len(relation.lookup)))
        values = () if updates is None else _parameters(updates.columns, updates.rows, updates.columns)
        statement = self._about(relation).statement(verb, found, values)
        arrays = [_array(one, parameter, keys, row) for row, parameter in enumerate(found)]
        if updates is not None:
            arrays += [_array(one, parameter, updates.rows, parameter.position) for parameter in values]

        def on_count(count: int) -> None:
            # guard: a set whose rows are missing is applied row by row
            if count != expected and self._deviation is None:
                self._deviation = SetFallback(relation, f"{verb} of {expected} rows found {count}")
                self._row_by_row.add(relation)

        self._rows.set_statement(relation, statement, arrays, on_count)

    def _insert(self, one: ChangeSet) -> None:
        assert one.inserts is not None and one.inserts.new is not None
        binary = columnar_copy.formats(one.inserts.new) == "binary"
        stream = columnar_copy.copy_stream(one.inserts, binary=binary)
        try:
            self._rows.copy_set(one.relation, stream, binary=binary)
        except StatementFailed as failure:
            self._failed(failure)
            raise

    def finish(self) -> None:
        """Wait until all statements have run, and check that the target was as the sets expected.

        :raises SetFallback: it was not; the target transaction must be rolled back and replayed row by row.
        :raises StatementFailed: see :meth:`RowWriter.sync`.
        """
        try:
            self._rows.sync()
        except StatementFailed as failure:
            self._failed(failure)
            raise
        if self._deviation is not None:
            raise self._deviation

    def _failed(self, failure: StatementFailed) -> None:
        """Avoid sets after a constraint violation, perhaps a temporary one: two rows may swap unique values."""
        if isinstance(failure.tag, RelationMap) and (failure.error.sqlstate or "").startswith("23"):
            self._row_by_row.add(failure.tag)


_PINNED, _UNPINNED = set_statements.plan(pinned=True), set_statements.plan(pinned=False)


class _Known:
    """A relation's statements, and the reason if sets cannot change it."""

    def __init__(self, relation: RelationMap, reason: str | None) -> None:
        self.relation = relation
        self.reason = reason
        self._statements: dict[tuple[str, tuple[Parameter, ...], tuple[Parameter, ...]], Statement] = {}

    def statement(self, verb: str, keys: tuple[Parameter, ...], values: tuple[Parameter, ...]) -> Statement:
        """Return the statement, the same object each time, so that the pipeline prepares it once."""
        shape = verb, keys, values
        known = self._statements.get(shape)
        if known is None:
            if verb == "update":
                known = set_statements.update(self.relation, keys, values)
            elif verb == "delete":
                known = set_statements.delete(self.relation, keys)
            else:
                known = set_statements.present(self.relation, keys)
            if len(self._statements) >= _STATEMENTS:
                self._statements.clear()
            self._statements[shape] = known
        return known


def _parameters(positions: Sequence[int], rows: Rows, places: Sequence[int]) -> tuple[Parameter, ...]:
    """Make parameters for columns.

    :param positions: positions of the remote columns; ``places`` are their array rows in ``rows``.
    """
    return tuple(
        Parameter(position, bool((rows.kinds[place] == BINARY).any()))
        for position, place in zip(positions, places, strict=True)
    )


def _array(one: ChangeSet, parameter: Parameter, rows: Rows, row: int) -> bytearray:
    column = one.relation.columns[parameter.position]
    oid = set_statements.element_type(column, binary=parameter.binary)
    return columnar_copy.array_parameter(one.buffer, rows, row, oid)
