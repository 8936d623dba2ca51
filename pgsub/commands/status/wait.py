"""``pgsub wait``: returns when a subscription has reached a state. It polls the state store.

The server's counterpart is a loop around pg_subscription_rel and pg_stat_subscription, like
``wait_for_subscription_sync`` in ``src/test/perl/PostgreSQL/Test/Cluster.pm``.
"""

from __future__ import annotations

import threading
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pgsub.catalog.locks import launcher_lock
from pgsub.catalog.rows import ErrorRow, Time
from pgsub.catalog.store import StateStore
from pgsub.commands.status import blocked_state, wait_conditions
from pgsub.commands.status.subscription_status import error_class, read_status, serving
from pgsub.commands.status.wait_conditions import Condition, Reading
from pgsub.common.errors import (
    ApplyError,
    Directive,
    PublisherUnavailable,
    StateForbids,
    TargetUnavailable,
    TimeoutExpired,
)
from pgsub.common.plural import counted
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.launcher.error_handling import APPLY, SEQUENCES, sync_name
from pgsub.protocol.lsn import format_lsn

if TYPE_CHECKING:
    from pgsub.publisher.connect import Connection

_POLL = 0.1
#: Repetitions after which an error from before the wait counts as current. The first repetition may belong to an
#: attempt that began before a command that should fix it.
_REPEATS = 2
#: Seconds for which an error from which apply recovered may still be shown.
_CLEARED = 2.0
#: Seconds that a pgsub run may take to start or restart before it counts as absent.
_STARTING = 5.0
_ENABLE = "With --even-if-stopped the command waits until it is enabled; this enables it:"
_START = "With --even-if-stopped the command waits until one is started; this starts it:"


@dataclass(frozen=True)
class WaitOptions:
    """The options of ``wait``."""

    name: str
    state_dir: Path
    condition: str  #: synced, caught-up, lsn, disabled, error; two-phase: not pending, or no table
    lsn: int | None = None  #: for the condition lsn
    timeout: float | None = None  #: seconds, None for no limit
    tables: frozenset[int] | None = None  #: only these tables, by OID
    even_if_stopped: bool = True  #: wait even if the subscription is disabled or not served
    everything: bool = False  #: for caught-up: also no held table, no error of sequences, and no missing publication


def wait(options: WaitOptions, given_up: threading.Event | None = None) -> None:
    """Return as soon as the condition holds.

    :param given_up: ends the wait when another thread sets it.
    :raises SubscriptionNotFound: the subscription does not exist, or is dropped meanwhile.
    :raises PgsubError: the subscription's own error, if it fails while another state is awaited.
    :raises StateForbids: without ``even_if_stopped``: it is disabled, not served, or with ``everything`` has a held
        table.
    :raises PublicationMissing: with ``everything``: the publisher does not send all changes.
    :raises TimeoutExpired: the time is over. The error says what is missing.
    """
    begin = served_at = time.monotonic()
    with StateStore.open(options.state_dir, create=False) as store:
        before = {_identity(row): row.attempts for row in store.errors(store.subscription(options.name).subid)}
        condition = _condition(options, store)
        while given_up is None or not given_up.is_set():
            with store.snapshot():  # a dropped subscription has no tables, which would count as synced
                subscription = store.subscription(options.name)
                missing = condition(store, subscription)
                problem = _failure(options, store, subscription)
            if missing is None:
                _see_cleared(options, store, subscription)
                return
            elapsed = time.monotonic() - begin
            expired = options.timeout is not None and elapsed >= options.timeout
            if _served(store, options, subscription):
                served_at = time.monotonic()
            unserved = time.monotonic() - served_at
            # a failed attempt is repeated: the user may have fixed the cause and just started a run
            retried = subscription.enabled and unserved < _STARTING
            if problem and (expired or _of_now(problem, before) or not retried):
                raise _recorded(problem)
            if not options.even_if_stopped and options.condition != "disabled":
                _refuse_stopped(subscription, missing, unserved)
                if options.everything and options.condition == "caught-up":
                    _refuse_held(subscription, wait_conditions.held(store, subscription))
            if expired:
                raise _timeout(options, store, subscription, missing)
            time.sleep(_POLL)


def _condition(options: WaitOptions, store: StateStore) -> Condition:
    others = {"error": wait_conditions.failed, "disabled": wait_conditions.disabled}
    if options.condition not in ("synced", "lsn", "caught-up"):
        return {**others, "two-phase": wait_conditions.two_phase}[options.condition]
    tables = frozenset() if options.condition == "lsn" else _awaited(options, store)
    every = [wait_conditions.synced(tables)]
    position, known = options.lsn or 0, None
    if options.condition == "caught-up":
        position, known = _present(options, store)
    if position:
        every.append(wait_conditions.reached(position))
    if options.condition == "caught-up":
        every += [wait_conditions.released, *([wait_conditions.followed] if options.everything else [])]
    every.append(wait_conditions.in_ledger(position, tables, known))
    return lambda *now: next((missing for one in every if (missing := one(*now))), None)


def _awaited(options: WaitOptions, store: StateStore) -> frozenset[int]:
    """Return the tables to wait for. They are fixed at the start, so that a refresh does not change the goal."""
    if options.tables is not None:
        return options.tables
    return frozenset(row.srrelid for row in store.relations(store.subscription(options.name).subid))


def _present(options: WaitOptions, store: StateStore) -> tuple[int, Reading | None]:
    """Return the publisher's present position, and what the ledger says then, if the target can be asked.

    If the publisher is unreachable, first report that nobody applies.

    :raises WrongSystem: another server answers, or one that went back in time.
    """
    sub = store.subscription(options.name)
    try:
        return _committed(sub, everything=options.everything)
    except PublisherUnavailable:
        if not options.even_if_stopped:
            _refuse_stopped(sub, "The publisher cannot be reached.", unserved=0)
        raise


def _committed(sub: Subscription, *, everything: bool) -> tuple[int, Reading | None]:
    """Return where the publisher is; where the target cannot be asked, whoever answers is taken for it."""
    from pgsub.apply import verified_publisher
    from pgsub.publisher.connect import connect
    from pgsub.publisher.current_wal_lsn import committed_position

    try:
        with wait_conditions.ledger(sub) as session:
            position = verified_publisher.committed_position(session, sub)
            if everything:
                with closing(verified_publisher.connect(session, sub)) as connection:
                    # guard: a subscription without one of its publications is not reported as caught up
                    _refuse_incomplete(connection, sub)
            return position, wait_conditions.read_ledger(session, sub.subid)
    except TargetUnavailable:
        with closing(connect(sub.connection, application_name=sub.name)) as connection:
            position = committed_position(connection)
            if everything:
                _refuse_incomplete(connection, sub)
            return position, None


def _refuse_incomplete(connection: Connection, sub: Subscription) -> None:
    """Raise an error for a missing publication: apply passes the changes that the publisher leaves out."""
    from pgsub.publisher.publication import absence

    if (missing := absence(connection, sub)) is not None:
        raise missing


def _failure(options: WaitOptions, store: StateStore, subscription: Subscription) -> ErrorRow | None:
    """Return the recorded error that makes waiting pointless, None if there is none."""
    if options.condition == "error" or (
        options.condition == "disabled" and (subscription.disable_on_error or not subscription.enabled)
    ):
        return None
    for row in store.errors(subscription.subid):
        concerned = row.worker == APPLY or options.condition in ("synced", "two-phase", "caught-up")
        if row.worker == SEQUENCES and not (options.everything and subscription.sequences):
            continue  # errors of sequences do not matter here
        if options.tables is not None and row.worker not in (APPLY, *map(sync_name, options.tables)):
            continue
        if concerned and error_class(row).directive is not Directive.RETRY:
            return row
    return None


def _identity(row: ErrorRow) -> tuple[str, Time | None]:
    """Return what all attempts with the same error have in common."""
    return row.worker, row.first_at


def _of_now(row: ErrorRow, before: dict[tuple[str, Time | None], int]) -> bool:
    """Return whether an attempt that began during the wait ended with the error."""
    known = before.get(_identity(row))
    return known is None or row.attempts >= known + _REPEATS


def _served(store: StateStore, options: WaitOptions, subscription: Subscription) -> bool:
    """Return whether a launcher serves the subscription, or the whole folder and soon the subscription."""
    own = serving(store, options.state_dir, subscription.subid)
    return own or launcher_lock(options.state_dir).holder() is not None


def _refuse_stopped(subscription: Subscription, missing: str, unserved: float) -> None:
    """Raise an error for a state that cannot be reached.

    :param unserved: seconds for which nothing has served the subscription.
    """
    name = subscription.name
    if not subscription.enabled:
        raise StateForbids(
            f'subscription "{name}" is disabled', detail=missing, hint=f"{_ENABLE}\npgsub enable {word(name)}"
        )
    if unserved >= _STARTING:
        message = f'subscription "{name}" is not served by any pgsub run'
        raise StateForbids(message, detail=missing, hint=f"{_START}\npgsub run {word(name)}")


def _refuse_held(subscription: Subscription, held: list[str]) -> None:
    """Raise an error for kept changes, which are not applied until an operator releases their table."""
    # guard: a subscription with a held table is not reported as caught up
    if held:
        raise StateForbids(
            f'table "{held[0]}" of subscription "{subscription.name}" is held',
            detail=f"Its changes are kept and not applied. {counted(len(held), 'table')} held in all.",
            hint="With --even-if-stopped the command waits until it is released; this releases it:\n"
            f"pgsub alter {word(subscription.name)} --release {word(held[0])}",
        )


def _see_cleared(options: WaitOptions, store: StateStore, subscription: Subscription) -> None:
    """Wait until an error from which apply recovered is no longer shown."""
    if options.condition not in ("caught-up", "lsn"):
        return
    deadline = time.monotonic() + _CLEARED
    while serving(store, options.state_dir, subscription.subid) and time.monotonic() < deadline:
        if not any(row.worker == APPLY and row.finish_lsn for row in store.errors(subscription.subid)):
            return
        time.sleep(_POLL)


def _recorded(row: ErrorRow) -> Exception:
    """Return a recorded error as an exception of its class."""
    error = error_class(row)(row.message, detail=row.detail, hint=row.hint, context=row.context, sqlstate=row.sqlstate)
    if isinstance(error, ApplyError):
        error.relation, error.column, error.xid, error.conflict = row.relation, row.column, row.xid, row.conflict
        error.finish_lsn = None if row.finish_lsn is None else format_lsn(row.finish_lsn)
    return error


def _timeout(options: WaitOptions, store: StateStore, subscription: Subscription, missing: str) -> TimeoutExpired:
    what = options.condition if options.lsn is None else f"{options.condition}={format_lsn(options.lsn)}"
    details = [missing]
    if not subscription.enabled and options.condition != "disabled":
        details.append("The subscription is disabled.")
    elif not _served(store, options, subscription):
        details.append("No pgsub run serves the subscription.")
    elif waits_for := read_status(store, options.state_dir, subscription).waits_for:
        details.append(f"It waits for {waits_for}.")
    details += [f"Last error: {blocked_state.said(row)}." for row in store.errors(subscription.subid)[:1]]
    return TimeoutExpired(
        f'timeout while waiting for subscription "{options.name}" to be {what}',
        detail=" ".join(details),
        hint=f"See where it stands:\npgsub status {word(options.name)}",
    )
