"""``subskiplsn`` in the ledger: which remote transactions, or which of their rows, are not applied.

Mirrors AlterSubscription's SKIP (subscriptioncmds.c) and clear_subscription_skip_lsn (worker.c). The skip is a flag in
apply's control row, so setting it waits for no transaction, however large. pgsub adds two things. Several LSNs can be
set: each waits for its transaction, and those between are applied. Conflict rules can have a limit
(``skip-lsn --conflict``): each commit subtracts the rows that they decided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from pgsub.common import conflict_rules
from pgsub.common.conflict_rules import Rule
from pgsub.common.errors import LogText, StateForbids, StreamsMustRestart, log_text
from pgsub.common.query import row
from pgsub.protocol.lsn import format_lsn, parse_lsn
from pgsub.target.ledger import subscriptions
from pgsub.target.ledger.tables import held_tables
from pgsub.target.session import transactions
from pgsub.target.sql.jsonb import jsonb

WHOLE, CONFLICTING = "whole", "conflicting"
_APPLY = "subid = %s AND worker = 0"
_SET = f"UPDATE pgsub.control SET skip_lsn = %s, skip_rows = %s, skip_lsns = %s::pg_lsn[] WHERE {_APPLY}"
#: Columns of the control row, in the order of :func:`decoded`.
COLUMNS = "skip_lsn::text, skip_rows, skip_lsns::text[]"


@dataclass(frozen=True, slots=True)
class Skip:
    """The skip that is set.

    :ivar lsn: finish LSN of the transaction, or of the next one of several.
    :ivar rows: ``whole``, or ``conflicting``: only rows that cannot be applied.
    :ivar later: the other LSNs, ascending.
    :ivar waits: it was one of several, so a transaction before its own does not clear it.
    """

    lsn: int
    rows: str = WHOLE
    later: tuple[int, ...] = ()
    waits: bool = False

    @property
    def lsns(self) -> tuple[int, ...]:
        """All LSNs, ascending."""
        return (self.lsn, *self.later)

    def without(self, lsns: Sequence[int]) -> Skip | None:
        """Return the skip that is left once these LSNs were consumed or cleared."""
        left = [lsn for lsn in self.lsns if lsn not in lsns]
        return Skip(left[0], self.rows, tuple(left[1:]), self.waits) if left else None

    def missed_at(self, finish_lsn: int) -> tuple[int, ...]:
        """Return the LSNs that a later transaction clears (clear_subscription_skip_lsn). Transactions arrive in order.

        :param finish_lsn: of a transaction with changes, or the end of a prepared one.
        """
        if self.waits:
            return tuple(lsn for lsn in self.lsns if lsn < finish_lsn)
        return () if self.lsn == finish_lsn else self.lsns


def of(lsns: Sequence[int], rows: str = WHOLE) -> Skip:
    """Make a skip of one LSN, as the server has it, or of several LSNs."""
    first, *later = sorted(set(lsns))
    return Skip(first, rows, tuple(later), waits=bool(later))


def cleared(lsn: int, finish_lsn: int, subname: str) -> tuple[str, LogText]:
    """Return level and text of the log record about an LSN that was missed, in the server's words."""
    detail = f"Remote transaction's finish WAL location (LSN) {format_lsn(finish_lsn)} did not match skip-LSN"
    return "WARNING", log_text(f'skip-LSN of subscription "{subname}" cleared', detail=f"{detail} {format_lsn(lsn)}.")


def shown(skip: Skip | None, rules: Sequence[Rule]) -> tuple[str, ...]:
    """Format the skip and the rules: one text for each transaction and each rule."""
    lsns = () if skip is None else tuple(f"{format_lsn(lsn)} {skip.rows}" for lsn in skip.lsns)
    return (*lsns, *(f"{rule.conflict} {rule.table} {rule.limit}" for rule in rules))


def decoded(lsn: str | None, rows: str | None, several: Sequence[str] | None) -> Skip | None:
    """Decode a skip from the values of :data:`COLUMNS`."""
    if lsn is None or rows is None:
        return None
    later = tuple(parse_lsn(one) for one in (several or ())[1:])
    return Skip(parse_lsn(lsn), rows, later, waits=several is not None)


def _encoded(skip: Skip | None) -> tuple[str | None, str | None, list[str] | None]:
    if skip is None:
        return None, None, None
    return format_lsn(skip.lsn), skip.rows, [format_lsn(lsn) for lsn in skip.lsns] if skip.waits else None


def pending(connection: psycopg.Connection, subid: int) -> Skip | None:
    """Return the skip that is set and not consumed."""
    return decoded(*_control(connection, subid, COLUMNS))


def _control(connection: psycopg.Connection, subid: int, columns: str) -> tuple[Any, ...]:
    found = row(connection, f"SELECT {columns} FROM pgsub.control WHERE {_APPLY}", (subid,))
    if found is None:
        raise subscriptions.unknown(subid)
    return found


def decoded_rules(found: Mapping[str, int] | None) -> tuple[Rule, ...]:
    """Decode rules with their limits from ``skip_rules``."""
    return tuple(changed(conflict_rules.parse(text), limit=limit) for text, limit in (found or {}).items())


def _encoded_rules(connection: psycopg.Connection, rules: Sequence[Rule]) -> Jsonb | None:
    return jsonb(connection, {str(rule): rule.limit for rule in rules}) if rules else None


def pending_rules(connection: psycopg.Connection, subid: int) -> tuple[Rule, ...]:
    """Return the rules with a limit that are not used up."""
    return decoded_rules(*_control(connection, subid, "skip_rules"))


def set_rules(connection: psycopg.Connection, subid: int, rules: Sequence[Rule]) -> None:
    """Set all rules with a limit, durably."""
    with transactions.durable(connection):
        connection.execute(
            f"UPDATE pgsub.control SET skip_rules = %s WHERE {_APPLY}".encode(),
            (_encoded_rules(connection, rules), subid),
        )


def use(
    connection: psycopg.Connection, subid: int, rules: Sequence[Rule], used: Mapping[tuple[str, str], int]
) -> tuple[Rule, ...]:
    """Subtract the rows that rules with a limit have decided, in the transaction that leaves these rows out.

    :param rules: as they were read in that transaction.
    :param used: number of rows, by :attr:`Rule.place`.
    :return: the rules that are left.
    :raises StreamsMustRestart: an operator has changed them meanwhile.
    """
    counted = [changed(rule, limit=(rule.limit or 0) - used.get(rule.place, 0)) for rule in rules]
    left = tuple(rule for rule in counted if (rule.limit or 0) > 0)
    updated = connection.execute(
        f"UPDATE pgsub.control SET skip_rules = %s WHERE {_APPLY} AND skip_rules = %s".encode(),
        (_encoded_rules(connection, left), subid, _encoded_rules(connection, rules)),
    )
    _check_unchanged(updated)
    return left


def _check_unchanged(updated: psycopg.Cursor) -> None:
    if not updated.rowcount:
        raise StreamsMustRestart("what is to be skipped was changed meanwhile")


def check(skip: Skip, remote_lsn: int) -> None:
    """Check that no LSN lies before the position of apply.

    :raises StateForbids: one does; in the server's words.
    """
    if skip.lsn < remote_lsn:
        raise StateForbids(
            f"skip WAL location (LSN {format_lsn(skip.lsn)}) must be greater than origin LSN {format_lsn(remote_lsn)}",
            detail="What ends before the origin LSN is applied, or was left out, already.",
            sqlstate="22023",
        )


def is_held(connection: psycopg.Connection, subid: int, skip: Skip) -> bool:
    """Return whether the skip is of a single transaction that apply has passed except for changes of held tables."""
    return not skip.waits and held_tables.has_transaction(connection, subid, skip.lsn)


def set_pending(connection: psycopg.Connection, subid: int, skip: Skip | None) -> None:
    """Set the skip durably; None clears it."""
    with transactions.durable(connection):
        if skip is not None and not is_held(connection, subid, skip):
            check(skip, subscriptions.apply_position(connection, subid))
        connection.execute(_SET.encode(), (*_encoded(skip), subid))


def replace(connection: psycopg.Connection, subid: int, skip: Skip, left: Skip | None) -> None:
    """Store what is left of a skip, in the transaction that consumes it.

    :raises StreamsMustRestart: an operator has changed it meanwhile, so the decision must be made again.
    """
    unchanged = " AND skip_lsn = %s AND skip_rows = %s AND skip_lsns IS NOT DISTINCT FROM %s::pg_lsn[]"
    _check_unchanged(connection.execute(f"{_SET}{unchanged}".encode(), (*_encoded(left), subid, *_encoded(skip))))
