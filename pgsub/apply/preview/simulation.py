"""Predicts the effects of a transaction on the target, row by row, without changing anything.

Changes are compared in the order of apply. The effects of earlier changes of the transaction are kept in memory, over
the rows of the target. A change of a row that an earlier change could not write depends on that change. Mirrors
apply_handle_insert, _update and _delete (worker.c).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import psycopg

from pgsub.apply.commit.skipped_writer import changed
from pgsub.apply.conflicts import schema_fault
from pgsub.apply.preview.finding import Existing, Finding, Outcome, differences, sent, with_sent
from pgsub.apply.preview.row_versions import Done, Table, Version
from pgsub.apply.resolve.rules_preview import RulesPreview
from pgsub.apply.resolve.winner import Action
from pgsub.apply.rows.relation_cache import NEVER, RelationCache, local_name
from pgsub.common import server_words
from pgsub.common.errors import PgsubError, SchemaFault
from pgsub.protocol.messages import Delete, Insert, Message, Relation, Tuple, Update
from pgsub.protocol.reader import UNCHANGED, filled
from pgsub.target.catalog.relation_map import check_updatable
from pgsub.target.catalog.unique_indexes import UniqueIndex
from pgsub.target.sql.row_lookup import Found, ReadOnlySession, Row, TableLookup
from pgsub.target.sql.statement_builder import check_equality

#: Returns the oid of the subscribed table if a change is taken, or why it is not (see :class:`Simulation`).
Admits = Callable[[Relation, int], int | str]


class Simulation:
    """A comparison of changes with the target, in their order.

    :param relations: maps remote relations to the target's tables.
    :param admits: returns the oid of the subscribed table, or why apply would not take the change.
    :param rules: predicts the decisions of the conflict rules.
    """

    def __init__(self, reader: ReadOnlySession, relations: RelationCache, admits: Admits, rules: RulesPreview) -> None:
        self._reader = reader
        self._relations = relations
        self._admits = admits
        self._rules = rules
        self._tables: dict[int, Table] = {}  #: by remote relid
        #: by the target's oid: tables of the publisher may change their names in the transaction
        self._done: defaultdict[int, Done] = defaultdict(Done)
        self._number = 0

    def begin(self, commit_ts: int) -> None:
        """Begin a transaction.

        :param commit_ts: microseconds since 2000.
        """
        self._rules.commit_ts = commit_ts

    def learn(self, message: Message) -> None:
        """Process a Relation or Type message, also of other transactions."""
        self._relations.learn(message)

    def take(self, message: Message) -> list[Finding]:
        """Predict one change. A TRUNCATE has several findings; a message that changes nothing has none."""
        self.learn(message)
        relids = changed(message)
        self._number += bool(relids)
        return [self._one(message, relid) for relid in relids]

    def _one(self, message: Message, relid: int) -> Finding:
        remote = self._relations.remote(relid)
        finding = Finding(self._number, type(message).__name__.upper(), *local_name(remote), Outcome.ERROR)
        finding = with_sent(finding, remote, message)
        try:
            table = self._table(relid, remote)
            if isinstance(table, str):
                return replace(finding, outcome=Outcome.LEFT, reason=table)
            match message:
                case Insert():
                    return self._insert(table, finding, message.new)
                case Update():
                    return self._update(table, finding, message, filled(message).new)
                case Delete():
                    return self._delete(table, finding, message.old)
            return self._truncate(table, finding)
        except (psycopg.OperationalError, psycopg.errors.InsufficientPrivilege):
            raise  # concerns the preview, not the row
        except psycopg.Error as error:
            return replace(finding, reason=server_words.said(error).message)
        except PgsubError as error:
            return replace(finding, reason=error.message)

    def _table(self, relid: int, remote: Relation) -> Table | str:
        known = self._tables.get(relid)
        if known is not None and known.relation.remote == remote:
            return known
        oid = self._relations.oid(relid)
        if oid is None:
            oid = self._relations.find(relid)
        taken = self._admits(remote, oid)
        if oid == NEVER or isinstance(taken, str):
            return str(taken)
        relation = self._relations.known(relid) or self._relations.make(relid, taken)
        made = Table(relation, TableLookup(self._reader, relation.target), self._done[relation.target.oid])
        self._tables[relid] = made
        return made

    def _insert(self, table: Table, finding: Finding, new: Tuple) -> Finding:
        row = table.sent(new, nulls=True)
        finding = replace(finding, remote=row, key={name: row.get(name) for name in table.key_columns})
        return self._written(table, finding, new, row, None, None)

    def _update(self, table: Table, finding: Finding, message: Update, whole: Tuple) -> Finding:
        check_updatable(table.relation)
        new = message.new
        key = self._key(table, message.old or new)
        sent = table.sent(new)
        finding = replace(finding, remote=sent, key=key)
        if table.key(key) in table.done.tainted:
            table.done.tainted.add(table.key({**key, **sent}))
            return replace(finding, outcome=Outcome.DEPENDENT)
        found = self._find(table, key)
        if found is None:
            sent = table.sent(whole)
            return self._update_missing(table, replace(finding, remote=sent), whole, key)
        finding = replace(finding, local=found.row)
        assert found.row is not None
        finding, action = self._differing(table, finding, found)
        if action is not Action.APPLY:
            return self._ruled(table, finding, action, {**found.row, **sent}, key)
        if finding.rule is not None:  # a rule decides about the whole row
            new, sent = whole, table.sent(whole)
        if not differences(sent, found.row):
            return replace(finding, outcome=Outcome.IDENTICAL)
        return self._written(table, finding, new, {**found.row, **sent}, key, found)

    def _written(
        self, table: Table, finding: Finding, new: Tuple, row: Row, key: Row | None, found: Version | None
    ) -> Finding:
        """Check a new row or row version against the table's constraints."""
        excess = [c.name for i, c in enumerate(table.relation.columns) if schema_fault.exceeds(new, i, c)]
        reason = f'value too long for column "{excess[0]}"' if excess else table.lookup.violated(row)
        if reason is not None:
            return self._taint(table, row, key, finding, reason)
        existing = self._existing(table, row, key, found)
        if existing:
            same = found is None and not any(one.differs for one in existing)
            finding, action = self._unique_conflict(table, finding, existing, inserts=found is None, same=same)
            if same and action is not Action.SKIP:
                table.done.tainted.discard(table.key(row))
                return replace(finding, outcome=Outcome.IDENTICAL, rule=None if action is Action.STOP else finding.rule)
            if action is not Action.APPLY:
                return self._ruled(table, finding, action, row, key)
            row = _make_room(table, row, existing, became=found is None)
        self._put(table, row, key, found)
        return replace(finding, outcome=Outcome.WOULD_APPLY)

    def _unique_conflict(
        self, table: Table, finding: Finding, existing: Sequence[Existing], *, inserts: bool, same: bool
    ) -> tuple[Finding, Action]:
        several = len({one.index for one in existing}) > 1
        kind = "multiple_unique_conflicts" if several else "insert_exists" if inserts else "update_exists"
        action, rule = self._rules.existing(table.relation, kind, [one.xid for one in existing], identical=same)
        return replace(finding, conflict=kind, existing=tuple(existing), rule=rule), action or Action.STOP

    def _ruled(self, table: Table, finding: Finding, action: Action, row: Row, key: Row | None) -> Finding:
        """Simulate a change that is not made, by a rule or because apply stops."""
        if action is Action.STOP:
            self._taint(table, row, key, finding, "")
            return replace(finding, outcome=Outcome.CONFLICT)
        table.done.tainted.discard(table.key(row))
        return replace(finding, outcome=Outcome.KEPT if action is Action.KEEP else Outcome.SKIPPED)

    def _differing(self, table: Table, finding: Finding, found: Version) -> tuple[Finding, Action]:
        """Predict the decision about a row that another origin wrote last; without a rule it is changed."""
        kind = f"{finding.message_type.lower()}_origin_differs"
        action, rule = self._rules.differing(table.relation, kind, found.xid)
        return finding if action is None else replace(finding, conflict=kind, rule=rule), action or Action.APPLY

    def _missing(self, table: Table, finding: Finding) -> tuple[Finding, Action | None]:
        """Predict the decision about a missing row; None if there is no rule: then the change is skipped."""
        kind = f"{finding.message_type.lower()}_missing"
        action, rule = self._rules.missing(table.relation, kind)
        return replace(finding, outcome=Outcome.MISSING, conflict=kind, rule=rule), action

    def _update_missing(self, table: Table, finding: Finding, new: Tuple, key: Row) -> Finding:
        finding, action = self._missing(table, finding)
        assert finding.remote is not None
        if action is None:
            return finding
        row = {**key, **finding.remote}
        if action is not Action.APPLY:
            return self._ruled(table, finding, action, row, key)
        left_out = [c.name for i, c in enumerate(table.relation.columns) if new.kinds[i] == UNCHANGED]
        if left_out:
            reason = f"the publisher left out unchanged large values of {', '.join(left_out)}"
            return self._ruled(table, replace(finding, reason=reason), Action.STOP, row, key)
        return self._written(table, finding, new, row, None, None)

    def _taint(self, table: Table, row: Row, key: Row | None, finding: Finding, reason: str) -> Finding:
        table.done.tainted.add(table.key(row))
        if key is not None:
            table.done.tainted.add(table.key(key))
        return replace(finding, outcome=Outcome.ERROR, reason=reason)

    def _put(self, table: Table, row: Row, key: Row | None, found: Version | None) -> None:
        if key is not None and found is not None:
            table.gone(table.key(key), found)
        table.done.tainted.discard(table.key(row))
        table.done.put(table.key(row), Version(row), table.lookup.fingerprints.unique(row))

    def _delete(self, table: Table, finding: Finding, old: Tuple) -> Finding:
        check_updatable(table.relation)
        key = self._key(table, old)
        finding = replace(finding, key=key)
        if table.key(key) in table.done.tainted:
            return replace(finding, outcome=Outcome.DEPENDENT)
        found = self._find(table, key)
        if found is None:
            finding, stopped = self._missing(table, finding)
            return finding if stopped is None else self._ruled(table, finding, stopped, key, key)
        finding, action = self._differing(table, finding, found)
        if action is not Action.APPLY:
            return self._ruled(table, replace(finding, local=found.row), action, key, key)
        table.gone(table.key(key), found)
        return replace(finding, outcome=Outcome.WOULD_APPLY, local=found.row)

    def _truncate(self, table: Table, finding: Finding) -> Finding:
        rows = any(version.row is not None for version in table.done.versions.values())
        nothing = not rows and (table.done.emptied or table.lookup.empty())
        table.done.empty()
        return replace(finding, outcome=Outcome.IDENTICAL if nothing else Outcome.WOULD_APPLY)

    def _key(self, table: Table, values: Tuple) -> Row:
        relation = table.relation
        columns = relation.columns
        found = {columns[i].name: sent(values, i, columns[i]) for i in relation.lookup}
        for i in relation.lookup:
            if values.values[i] is not None:
                # also for a row that this transaction wrote: apply would search for it in the same way
                check_equality(relation.columns[i])
            if schema_fault.exceeds(values, i, relation.columns[i]):
                raise SchemaFault(f'value too long for column "{relation.columns[i].name}"', sqlstate="22001")
        return {**table.lookup.read(found), **{c.name: None for c in relation.local_only}}

    def _find(self, table: Table, key: Row) -> Version | None:
        known = table.done.versions.get(table.key(key))
        if known is not None:
            return None if known.row is None else known
        found = None if table.done.emptied else table.lookup.find(key)
        if found is None or found.place in table.done.superseded:
            return None
        return Version(found.values, found.place, found.xid)

    def _existing(self, table: Table, row: Row, key: Row | None, found: Version | None) -> list[Existing]:
        """Find other rows that have a unique key of this row."""
        own = found.place if found is not None else None
        there: list[tuple[UniqueIndex, Found]] = [] if table.done.emptied else table.lookup.taken(row)
        existing = [
            Existing(index.name, one.values, differences(row, one.values), one.place, one.xid)
            for index, one in there
            if one.place != own and one.place not in table.done.superseded
        ]
        own_key = None if key is None else table.key(key)
        for name, values in table.lookup.fingerprints.unique(row):
            other = table.done.taken.get((name, values))
            version = None if other is None or other == own_key else table.done.versions[other]
            if version is not None and version.row is not None:
                existing.append(Existing(name, version.row, differences(row, version.row)))
        return existing


def _make_room(table: Table, row: Row, existing: Sequence[Existing], *, became: bool) -> Row:
    """Delete the conflicting rows. One with the key of an INSERT becomes the new row and keeps its local columns."""
    kept: Row = {}
    for one in existing:
        if became and table.relation.by_identity and table.key(one.row) == table.key(row):
            kept = one.row
        table.gone(table.key(one.row), Version(one.row, one.place))
    return {**kept, **row}
