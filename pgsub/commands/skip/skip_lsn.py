"""``pgsub skip-lsn``: ALTER SUBSCRIPTION … SKIP, with a preview of what it would lose. Mirrors AlterSubscription.

The LSN that a worker recorded is accepted. Any other must be the finish LSN of a transaction that the publisher will
send. It is set in the ledger, where the apply worker reads it at its next transaction, and then in the state store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psycopg

from pgsub.catalog.rows import ErrorRow
from pgsub.catalog.store import StateStore
from pgsub.commands.reporter import Reporter
from pgsub.commands.sessions import ledger_session
from pgsub.commands.skip import preview
from pgsub.commands.skip.preview import Preview
from pgsub.commands.skip.transaction_search import TransactionSearch, read_from
from pgsub.common import failpoints
from pgsub.common.errors import StateForbids
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.launcher.error_handling import APPLY
from pgsub.protocol.lsn import format_lsn
from pgsub.target.ledger import skip, subscriptions
from pgsub.target.ledger.skip import WHOLE, Skip
from pgsub.target.ledger.tables import held_tables, subscription_tables
from pgsub.target.session import transactions


@dataclass(frozen=True, slots=True)
class SkipOptions:
    """The options of ``skip-lsn``.

    :ivar lsns: finish LSNs, empty for the recorded one, None to skip nothing.
    """

    name: str
    state_dir: Path
    lsns: tuple[int, ...] | None = ()
    rows: str = WHOLE


def skip_lsn(
    options: SkipOptions, *, reporter: Reporter, confirm: Callable[[str, Skip], None]
) -> tuple[Skip | None, Skip | None]:
    """Make apply leave out transactions or their conflicting rows, or undo that.

    :param confirm: called with the subscription's name before anything is set. It may raise an exception to refuse.
    :return: the transactions to skip, now and before.
    :raises StateForbids: the publisher will not send such a transaction, or none is recorded.
    """
    with StateStore.open(options.state_dir, create=False) as store:
        sub = store.subscription(options.name)
        with ledger_session(store, sub, reporter) as session:
            wanted = None
            if options.lsns is not None:
                recorded = _recorded(store, sub)
                wanted = skip.of(_wanted(options, recorded), options.rows)
                _check_position(session, sub, wanted)
                for lsn in wanted.lsns:
                    known = recorded is not None and recorded.finish_lsn == lsn
                    if not known and not _kept(session, sub, lsn, alone=not wanted.waits):
                        _check_in_stream(session, sub, lsn, reporter, alone=not wanted.waits)
                confirm(sub.name, wanted)
            with subscription_tables.maintenance(session, sub.subid, sub.name):
                previous, rules = skip.pending(session, sub.subid), skip.pending_rules(session, sub.subid)
                _set(session, store, sub, wanted, previous)
    if wanted is None and not (previous or rules):
        reporter.notice(f'subscription "{sub.name}" has nothing to skip')
    elif wanted is None:
        reporter.notice(f'subscription "{sub.name}" no longer skips anything')
    else:
        reporter.notice(_said(sub, wanted))
    if wanted is not None and not sub.enabled:
        reporter.notice(f"it is skipped once the subscription is enabled: pgsub enable {word(sub.name)}")
    return wanted, previous


def _said(sub: Subscription, wanted: Skip) -> str:
    what = "the transaction" if len(wanted.lsns) == 1 else "each transaction"
    rows = "" if wanted.rows == WHOLE else "rows in conflict of "
    return f'subscription "{sub.name}" skips {rows}{what} finished at {_lsns(wanted).replace(" ", ", ")}'


def show(options: SkipOptions) -> Preview:
    """Preview what :func:`skip_lsn` would lose of one transaction. Nothing is changed."""
    assert options.lsns is not None
    with StateStore.open(options.state_dir, create=False) as store:
        sub = store.subscription(options.name)
        recorded = _recorded(store, sub)
        with ledger_session(store, sub) as session:
            return _preview(session, sub, options, recorded)


def _preview(
    session: psycopg.Connection, sub: Subscription, options: SkipOptions, recorded: ErrorRow | None
) -> Preview:
    wanted = skip.of(_wanted(options, recorded), options.rows)
    _check_position(session, sub, wanted)
    if skip.is_held(session, sub.subid, wanted):
        raise StateForbids(
            f"transaction at LSN {format_lsn(wanted.lsn)} cannot be previewed: only kept changes of it are left",
            detail="Its changes of held tables are kept on the target; the publisher does not send it any more.",
            hint=f"See the row that is in the way:\npgsub conflicts list {word(sub.name)}",
            sqlstate="55000",
        )
    found = Preview(rows=wanted.rows)
    if recorded is not None and recorded.finish_lsn == wanted.lsn:
        found.error = recorded
    start = subscriptions.apply_position(session, sub.subid)
    with preview.simulate_skip(session, sub, wanted.lsn) as simulation, read_from(session, sub, start) as stream:
        TransactionSearch(session, sub, wanted.lsn).find(stream, simulation, found)
    return found


def _kept(session: psycopg.Connection, sub: Subscription, lsn: int, *, alone: bool) -> bool:
    """Return whether changes of a transaction are kept for a held table.

    :raises StateForbids: changes are kept, and the transaction was named together with others.
    """
    kept = held_tables.has_transaction(session, sub.subid, lsn)
    if kept and not alone:
        raise StateForbids(
            f"transaction at LSN {format_lsn(lsn)} cannot be skipped together with others",
            detail="Changes of it are kept for a held table, and are applied when that is released.",
            hint=f"Skip it by itself:\npgsub skip-lsn {word(sub.name)} {format_lsn(lsn)}",
            sqlstate="55000",
        )
    return kept


def _recorded(store: StateStore, sub: Subscription) -> ErrorRow | None:
    """Return the error with which apply last stopped."""
    return next((row for row in store.errors(sub.subid) if row.worker == APPLY and row.finish_lsn), None)


def _wanted(options: SkipOptions, recorded: ErrorRow | None) -> tuple[int, ...]:
    if options.lsns:
        return options.lsns
    if recorded is None or not recorded.finish_lsn:
        raise StateForbids(
            f'no failing transaction of subscription "{options.name}" is recorded',
            detail="Without an LSN, the command skips the transaction at which apply stopped last.",
            hint="Give the finish LSN of the transaction, which the CONTEXT of the error shows:\n"
            f"pgsub skip-lsn {word(options.name)} LSN",
        )
    return (recorded.finish_lsn,)


def _check_position(session: psycopg.Connection, sub: Subscription, wanted: Skip) -> None:
    if not held_tables.has_transaction(session, sub.subid, wanted.lsn):
        skip.check(wanted, subscriptions.apply_position(session, sub.subid))


def _check_in_stream(
    session: psycopg.Connection, sub: Subscription, lsn: int, reporter: Reporter, *, alone: bool
) -> None:
    """Check that the publisher will send the transaction, because the next transaction silently clears a wrong LSN.

    :param alone: whether this is the only LSN, which any other transaction clears.
    :raises StateForbids: the publisher will not send it. The error suggests an LSN that may be meant.
    """
    search = TransactionSearch(session, sub, lsn)
    with read_from(session, sub, subscriptions.apply_position(session, sub.subid)) as stream:
        found = search.find(stream)
    first = search.first
    if alone and first is not None and first.finish_lsn != lsn:
        reporter.warning(
            f"transaction {found.xid} is not the next one to be applied",
            detail=f"Transaction {first.xid}, finished at {format_lsn(first.finish_lsn)}, comes before it. Whichever"
            " has changes and ends next clears what is to be skipped, as in the server.",
            hint="Skip it once apply has reached it:\n"
            f"pgsub wait {word(sub.name)} --for error && pgsub skip-lsn {word(sub.name)}",
        )


def _set(
    session: psycopg.Connection, store: StateStore, sub: Subscription, wanted: Skip | None, previous: Skip | None
) -> None:
    """Set what is skipped. The journal gets an entry first, which remains if the command is killed."""
    detail = {"lsn": _lsns(wanted), "rows": wanted.rows if wanted else None, "previous": _lsns(previous)}
    with store.journal_attempt("skip-lsn", sub, detail) as attempt:
        failpoints.point("skip.before_ledger")
        with transactions.durable(session):
            skip.set_pending(session, sub.subid, wanted)
            if wanted is None:
                skip.set_rules(session, sub.subid, ())
    failpoints.point("skip.after_ledger")
    with store.batch():
        skips = skip.shown(wanted, skip.pending_rules(session, sub.subid))
        store.alter(sub.subid, skip_lsn=wanted.lsn if wanted else 0, skips=skips)
        store.journal_done(attempt)


def _lsns(wanted: Skip | None) -> str:
    """Return the LSNs in one line."""
    return "none" if wanted is None else " ".join(format_lsn(lsn) for lsn in wanted.lsns)
