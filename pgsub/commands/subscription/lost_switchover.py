"""The switchover that created a reverse subscription, read from both servers, one of which may have lost it.

A way back does not make a publisher equal to a target that has lost what clients wrote.
"""

from __future__ import annotations

import contextlib

import psycopg

from pgsub.apply import verified_publisher
from pgsub.catalog.store import StateStore
from pgsub.commands.sessions import ledger_session
from pgsub.common import quoting
from pgsub.common.errors import LedgerLost, PermissionMissing, StateForbids, SwitchedOver, TargetReplaced
from pgsub.common.quoting import word
from pgsub.common.subscription import BACK_SUFFIX, Subscription
from pgsub.publisher import slots
from pgsub.publisher.server_errors import standby_lags, translating
from pgsub.switchover import journal, lost_side
from pgsub.switchover.journal import Entry
from pgsub.switchover.lost_side import Found
from pgsub.target.session import ledger_guard

#: Part of a detail.
_DROPPED = " Or its schema pgsub was dropped, in which the switchover is recorded."


def check(session: psycopg.Connection, store: StateStore, sub: Subscription) -> None:
    """Check that the switchover that made a subscription is not lost on the server that took the right to write.

    :param session: a session on the subscription's target, which gave the right.
    :raises StateForbids: only this target may still have what clients wrote.
    """
    if sub.way_back_of is None:
        return
    switchover = found(session, store, sub)
    # guard: a target that has lost the switchover does not overwrite the publisher
    if switchover is not None and (switchover.undone or switchover.lost == journal.TAKING):
        ended = store.way_there(sub)
        command = _command(sub, ended)
        raise StateForbids(
            f'subscription "{sub.name}" leads back from a server that has lost its switchover',
            detail="That server was restored, or a standby that lagged took its place. The command would delete what"
            f" only this target still has.{_DROPPED if switchover.dropped else ''}",
            hint=f"See where the switchover stands, and undo it:\n{command} --status\n{command} --abort"
            f"{_kept(switchover, sub) if ended is None else ''}",
        )


def found(giving: psycopg.Connection, store: StateStore, back: Subscription) -> Found | None:
    """Read the switchover that created a subscription, None if none did.

    :param giving: a session on the target of the subscription, which gave the right to write.
    :raises TargetUnavailable: the taking side cannot be reached, or PublisherUnavailable once the switchover has ended.
    :raises PermissionMissing: the subscription's role on the taking side may not read the journal.
    :raises WrongSystem: another server or database answers in its place.
    """
    subid = back.way_back_of
    if subid is None:
        return None
    ended = store.subscription_by_id(subid)
    with contextlib.ExitStack() as stack:

        def look(there: Entry) -> tuple[Entry | None, bool]:
            if ended is not None:
                with contextlib.suppress(LedgerLost, TargetReplaced, SwitchedOver):
                    return lost_side.of_taking(stack.enter_context(ledger_session(store, ended)), subid, there)
            source = stack.enter_context(contextlib.closing(verified_publisher.connect(giving, back)))
            return of_publisher(source, subid, there)

        return lost_side.read(giving, back.subid, look, ended=ended is None)


def of_publisher(source: psycopg.Connection, subid: int, there: Entry) -> tuple[Entry | None, bool]:
    """Return what :func:`pgsub.switchover.lost_side.of_taking` returns, with the role of the reverse subscription.

    :param source: a session on the taking side.
    :raises PermissionMissing: the role may not read the journal.
    :raises StateForbids: the ledger there cannot be trusted. It is not read.
    :raises PublisherUnavailable: a standby of that server answers.
    """
    # guard: a standby that has not been promoted does not show what its primary has lost
    if slots.in_recovery(source):
        raise standby_lags(
            "a standby of the publisher answers, which has not been promoted",
            "It does not show whether the switchover is lost.",
        )
    ledger_guard.guard(source)
    try:
        with translating(source, "read the journal of the switchover"):
            return lost_side.of_taking(source, subid, there)
    except PermissionMissing as error:
        error.detail = "It shows whether this server has lost the switchover."
        error.hint = "\n".join(["Run this there:", *lost_side.grants(source.info.user)])
        # guard: a role that may not read the journal does not hide that a switchover is lost
        raise


def _kept(switchover: Found, sub: Subscription) -> str:
    """Return the part of the hint for a server that has everything but its ledger."""
    if not switchover.dropped:
        return ""
    known = f"""'{{"{lost_side.LEDGER_DROPPED}": true}}'"""
    return (
        f'\nIf only its schema pgsub was dropped, run this on the target of "{sub.name}" instead, and repeat the'
        " command:\n"
        f"BEGIN READ WRITE; UPDATE pgsub.switchover SET saved = (coalesce(saved::jsonb, '{{}}') || {known})::json"
        f" WHERE id = {quoting.literal(switchover.there.id)}; COMMIT;"
    )


def _command(sub: Subscription, ended: Subscription | None) -> str:
    """Return the command of the switchover, which has the names that the subscriptions have now."""
    if ended is None:
        return sub.switchover
    back = ended.name == f"{sub.name}{BACK_SUFFIX}"
    return f"pgsub switchover {word(sub.name if back else ended.name)}{' --back' if back else ''}"
