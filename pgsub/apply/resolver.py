"""Changes one by one, their conflicts resolved by rules: wherever apply met one, the changes come here in the end.

What is quick (sets, COPY, changes applied while they arrive) ends at a conflict, and its transactions are replayed row
by row; so the rules hold whatever way was tried first. Rows are tried together inside a savepoint, fewer after one that
failed, until it is alone. Goes beyond the server, whose conflict.c only reports.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import psycopg

from pgsub import conflict_rules as rules
from pgsub.apply import conflict, obstacles, resolution
from pgsub.apply.conflict import ConflictRecord, MissingRow, OtherOrigin, Place, Resolved
from pgsub.apply.deviation import Deviation
from pgsub.apply.obstacles import Moved, Obstacles
from pgsub.apply.relations import RelationCache
from pgsub.apply.resolution import Verdict
from pgsub.apply.rows import RowWriter
from pgsub.apply.transactions import RemoteTransaction
from pgsub.errors import TargetUnavailable
from pgsub.protocol.decoder import decode_change
from pgsub.protocol.messages import Delete, Insert, Message, Update
from pgsub.target.hits import Hit, Search
from pgsub.target.mapping import RelationMap
from pgsub.target.pipeline import StatementFailed

#: Rows that are tried together at most.
TOGETHER = 256
#: How often a row is looked at anew where others change rows in its way meanwhile.
TRIES = 10

_UNIQUE = "23505"
_DEALLOCATED = "26000"  #: no fault of a row: psycopg took away what was prepared
#: Failures after which rows are looked at one by one.
RESOLVABLE = (_UNIQUE, _DEALLOCATED)
_BINARY, _UNCHANGED = b"bu"

Change = tuple[RemoteTransaction, bytes]
#: Where a change goes; None: it is left out.
Target = Callable[[RemoteTransaction, str, int], RelationMap | None]


class Resolver:
    """Of one executor.

    :param connection: the session; the caller opens and ends transactions.
    :param rows: of that session.
    :param plain: applies a change as if there were no rules.
    """

    def __init__(
        self,
        connection: psycopg.Connection,
        rows: RowWriter,
        relations: RelationCache,
        plain: Callable[[RemoteTransaction, bytes], None],
        target: Target,
    ) -> None:
        self._connection = connection
        self._rows = rows
        self._relations = relations
        self._subid = relations.subid
        self._plain = plain
        self._target = target
        self._together = TOGETHER
        self._obstacles = Obstacles(connection)
        self._limits: dict[tuple[str, str], int] = {}  #: of rules for floods, what is left in this target transaction

    def begin(self) -> None:
        """A target transaction was opened: tables may have other indexes now."""
        self._obstacles.begin()
        self._limits = {one.place: one.limit for one in self._relations.floods}

    def run(self, changes: Sequence[Change], between: Callable[[], None]) -> None:
        """Apply row messages in their order.

        :param between: called now and then, where records may be written.
        :raises StatementFailed: no rule says what is to be done; the target transaction is aborted.
        :raises PgsubError: a rule makes it stop.
        """
        at = 0
        while at < len(changes):
            part = changes[at : at + self._together]
            if len(part) == 1:
                met = self._one(*part[0])
                self._together = 1 if met else 2
            elif self._group(part):
                self._together = min(TOGETHER, 2 * len(part))
            else:
                self._together = max(1, len(part) // 4)
                continue
            at += len(part)
            between()

    def _group(self, part: Sequence[Change]) -> bool:
        """All of them, or none."""
        try:
            with self._rows.undoing():
                for transaction, payload in part:
                    self._plain(transaction, payload)
        except StatementFailed as failure:
            if failure.error.sqlstate not in RESOLVABLE:
                raise
            return False
        except Deviation:
            return False
        return True

    def _one(self, transaction: RemoteTransaction, payload: bytes) -> bool:
        """A change by itself; whether it met a conflict."""
        message = decode_change(payload, transaction.in_stream)
        assert isinstance(message, Insert | Update | Delete)
        kind = type(message).__name__.upper()
        relation = self._target(transaction, kind, message.relid)
        if relation is None:
            return False
        new = None if isinstance(message, Delete) else message.new
        old = None if isinstance(message, Insert) else message.old
        change = _Change(Place(transaction, kind, relation, new, old), message)
        self._rows.sync()
        self._rows.resolving = True
        try:
            self._change(change)
        finally:
            self._rows.resolving = False
        return change.met

    def _change(self, change: _Change) -> None:
        place = change.place
        assert place.relation is not None
        if place.message_type != "INSERT" and place.relation.target.origins_of:
            ruled = change.rule(f"{place.message_type.lower()}_origin_differs") is not None
            differs = self._rows.written_by_others(place, lock=ruled)
            if differs is not None and not self._differing(change, differs):
                return
        self._rows.missed = False
        self._settle(change)
        if self._rows.missed:
            self._rows.missed = False
            self._missing(change)

    # rows that somebody else wrote, and rows that are not there

    def _differing(self, change: _Change, differs: OtherOrigin) -> bool:
        """Whether the change is to be made."""
        how = self._rule(change, f"{change.place.message_type.lower()}_origin_differs")
        record = differs.record(self._subid)
        verdict = self._decide(how or rules.APPLY_REMOTE, change, [differs.local])
        self._note(change, record, how, verdict)
        return verdict is Verdict.APPLY

    def _missing(self, change: _Change) -> None:
        place = change.place
        how = self._rule(change, f"{place.message_type.lower()}_missing")
        missing = conflict.missing_row(place)
        if how is None:
            change.met = True
            self._rows.records.append((self._rows.depth, missing))
            return
        record = self._with_leaf(missing).record(self._subid)
        verdict = self._decide(how, change, [])
        if verdict is Verdict.APPLY:
            self._insert_missing(change, record, how)
        else:
            self._note(change, record, how, verdict)

    def _with_leaf(self, missing: MissingRow) -> MissingRow:
        return conflict.with_leaves(self._connection, [missing])[0]

    def _insert_missing(self, change: _Change, record: ConflictRecord, how: str) -> None:
        """The row of an update is inserted, where the publisher sent all of it."""
        place = change.place
        assert place.new is not None and place.relation is not None
        kept = [c.name for i, c in enumerate(place.relation.columns) if place.new.kinds[i] == _UNCHANGED]
        if kept:
            error = conflict.stopped(self._subid, record, place)
            error.detail = (
                f"{record.detail}\nThe rule update_missing=apply_remote cannot insert the row, for the publisher left"
                f" out unchanged large values of {', '.join(kept)}."
            )
            error.hint = f"Insert the row on the target: apply goes on by itself. {self._other_ways()}"
            raise error
        inserting = _Change(place._replace(message_type="INSERT", old=None), change.message)
        self._settle(inserting)
        self._note(change, record, how, Verdict.KEEP if inserting.left else Verdict.APPLY)

    # rows that are in the way

    def _settle(self, change: _Change) -> None:
        """Insert, update or delete; what is in the way is dealt with by its rule."""
        place = change.place
        relation = place.relation
        assert relation is not None
        own = relation.target.schema, relation.target.name
        where = None if relation.target.relkind == "p" else own
        looks = place.message_type != "DELETE" and any(kind in _EXISTING for kind, _ in relation.rules)
        failure: StatementFailed | None = None
        for _ in range(TRIES):
            change.pending = None
            found = self._obstacles.search(place, where) if looks and where is not None else None
            if failure is not None and found is not None and not obstacles.indexed(failure, found):
                break
            verdict = Verdict.APPLY
            if found is not None and found.hits:
                verdict = self._met(change, found, where or own)
            if verdict in (Verdict.KEEP, Verdict.SKIP):
                return
            try:
                with self._rows.undoing():
                    self._make(change, found if verdict is Verdict.APPLY else None, where)
                return
            except Moved:
                continue
            except StatementFailed as error:
                if error.error.sqlstate not in RESOLVABLE:
                    raise
                failure = error
                if error.error.sqlstate == _DEALLOCATED:
                    continue
                at = error.error.diag.schema_name or "", error.error.diag.table_name or ""
                if not looks or verdict is Verdict.STOP or (where is not None and at != where):
                    raise  # no rule is asked, or it is a row of another table, which a trigger wrote
                where = at
        if failure is None:
            raise TargetUnavailable(f'rows of "{place.name()}" are changed by others again and again', sqlstate="40001")
        raise failure

    def _met(self, change: _Change, found: Search, where: tuple[str, str]) -> Verdict:
        place = change.place
        kind = "update_exists" if place.message_type == "UPDATE" and not found.moved else "insert_exists"
        if len(found.hits) > 1:
            kind = "multiple_unique_conflicts"
        how = self._rule(change, kind)
        same = len({hit.ctid for hit in found.hits}) == 1 and all(hit.identical for hit in found.hits)
        if same and place.message_type == "INSERT" and change.rule(rules.IDENTICAL) is not None:
            how, change.flood = f"{rules.IDENTICAL}={change.rule(rules.IDENTICAL)}", None
        if how is None:
            return Verdict.STOP
        verdict = self._decide(how.rpartition("=")[2], change, found.hits)
        if verdict is Verdict.STOP:
            return verdict
        record = obstacles.recorded(place, kind, found, where)
        record.context = conflict.context(self._subid, place)
        change.pending = self._resolved(change, record, how, verdict)
        if verdict is not Verdict.APPLY:
            self._record(change, change.pending)
            change.pending, change.left = None, True
        return verdict

    def _make(self, change: _Change, found: Search | None, where: tuple[str, str] | None) -> None:
        """Make room, and the change."""
        place = change.place
        became = found is not None and where is not None and self._obstacles.cleared(place, found, where)
        if became:
            self._rows.changes += 1
        else:
            if place.message_type == "INSERT":
                self._rows.insert_row(place)
            elif place.message_type == "UPDATE":
                self._rows.update(place)
            else:
                self._rows.delete(place)
        self._rows.sync()
        pending, change.pending = change.pending, None
        if pending is not None:
            self._record(change, pending)

    # what is decided, and told

    def _rule(self, change: _Change, kind: str) -> str | None:
        """How a type of conflict is resolved: by a rule for a flood as long as that lasts."""
        relation = change.place.relation
        assert relation is not None
        schema, name = relation.target.schema, relation.target.name
        place = f"{schema}.{name}", kind
        left = self._limits.get(place)
        change.flood = place if left else None
        if left is None:
            return change.rule(kind)
        return rules.SKIP if left else self._relations.lasting_rule(schema, name, kind)

    def _decide(self, how: str, change: _Change, local: Sequence[Hit]) -> Verdict:
        return resolution.decide(how, change.place.transaction.commit_ts, local, self._subid, self._tie)

    def _other_ways(self) -> str:
        return f"Other ways are told by:\npgsub status {self._relations.subname} --runbook"

    def _tie(self) -> Verdict:
        return resolution.tie(self._connection, self._subid)

    def _note(self, change: _Change, record: ConflictRecord, how: str | None, verdict: Verdict) -> None:
        """Record what became of a conflict, or stop at it."""
        if verdict is Verdict.STOP:
            error = conflict.stopped(self._subid, record, change.place)
            error.hint = f"Change the target, or the rule: apply goes on by itself. {self._other_ways()}"
            raise error
        self._record(change, self._resolved(change, record, how, verdict))

    def _resolved(self, change: _Change, record: ConflictRecord, how: str | None, verdict: Verdict) -> Resolved:
        letter = None
        if how is not None:
            rule = how if "=" in how else f"{record.conflict_type}={how}"
            record.action = verdict.value
            record.detail += f"\n{_TOLD[verdict]} by the rule {rule}."
            record.quiet = change.flood is not None
        if verdict is Verdict.SKIP:
            assert change.place.relation is not None
            record.letter = secrets.token_hex(8)
            reason = {
                "skipped": "rule",
                "ref": record.letter,
                "error": record.message,
                "detail": record.detail,
                "sqlstate": None,
            }
            letter = change.place.relation.remote, change.message, {**reason, "conflict": record.conflict_type}
        return Resolved(change.place.transaction, record, letter, change.flood)

    def _record(self, change: _Change, resolved: Resolved) -> None:
        change.met = True
        if resolved.flood is not None:
            self._limits[resolved.flood] -= 1
        self._rows.records.append((self._rows.depth, resolved))


_EXISTING = frozenset({"insert_exists", "update_exists", "multiple_unique_conflicts", rules.IDENTICAL})
_TOLD = {
    Verdict.APPLY: "The remote change was applied",
    Verdict.KEEP: "What is on the target was kept",
    Verdict.SKIP: "The remote change was skipped and is in pgsub.skipped_change",
}


class _Change:
    """A change that is being dealt with.

    :ivar met: it met a conflict that did not stop it.
    :ivar left: it was not made because of rows in its way.
    :ivar pending: is recorded once the change is made.
    :ivar flood: the place of the rule for a flood that decides.
    """

    def __init__(self, place: Place, message: Message) -> None:
        self.place = place
        self.message = message
        self.met = self.left = False
        self.pending: Resolved | None = None
        self.flood: tuple[str, str] | None = None

    def rule(self, kind: str) -> str | None:
        """How a type of conflict is resolved on its relation."""
        assert self.place.relation is not None
        return self.place.relation.rule(kind)
