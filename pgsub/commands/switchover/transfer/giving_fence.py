"""The fence of the giving side, once the taking side has taken the right to write.

A giving side that has lost its fence (:mod:`pgsub.switchover.lost_side`) is fenced again, and says so in the journal,
because clients may have written there: neither this run nor a later one reports that the writes were moved.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator
from dataclasses import replace

import psycopg

from pgsub.apply import verified_publisher
from pgsub.catalog.store import StateStore
from pgsub.commands.sessions import connect_publisher, connect_target, ledger_session
from pgsub.commands.subscription import lost_switchover
from pgsub.commands.switchover.obstacles.obstacle import in_their_words
from pgsub.commands.switchover.parties import (
    DATABASE_LOCK,
    OTHER,
    PUBLISHER,
    SwitchoverOptions,
    lock,
    publisher_away,
    target_asked,
)
from pgsub.commands.switchover.transfer import right_to_write
from pgsub.commands.switchover.under_way import check_command
from pgsub.common.errors import (
    LedgerLost,
    PermissionMissing,
    StateForbids,
    TargetReplaced,
    TargetUnavailable,
)
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.protocol.lsn import format_lsn
from pgsub.switchover import fence, journal, way_back
from pgsub.switchover.journal import Entry
from pgsub.switchover.lost_side import LAGGED, has_journal, knows, lost_by
from pgsub.target.session import advisory_locks, ledger_privileges
from pgsub.target.session.transactions import durable

_MOVED = "the writes were moved, but the publisher has lost changes since it gave the right to write"
#: Errors for a giving side that is not the one of the switchover, or lacks what was made for it.
_NOT_RECOGNIZED = (LedgerLost, TargetReplaced)
_CAUSE = "It was restored, or a standby that lagged took its place."


class UndoUnfinished(StateForbids):
    """A switchover that an earlier abort has undone, except that the reverse subscription is still defined here."""


class PublisherLagged(StateForbids):
    """A publisher on which clients may have written after the target had taken the right to write."""


def check(options: SwitchoverOptions, store: StateStore, sub: Subscription, back: Subscription, here: Entry) -> None:
    """Check that the giving side has kept its fence. Otherwise fence it again.

    :param here: the row of the taking side, which has taken the right.
    :raises PublisherLagged: clients may have written there.
    :raises PublisherUnavailable: the giving side cannot be asked.
    """
    try:
        with ledger_session(store, back) as giving:
            there = journal.of(giving, here.id)
            # guard: the writes are not reported as moved while the publisher may have lost its fence, always
            if lost_by(there, here) is None:
                return
            _fence_again(giving, sub, back, there, here)
            right_to_write.commands(options, sub, back)("fence")
            fence.end_sessions(giving, [], time.monotonic() + right_to_write.END_SECONDS)
    except TargetUnavailable as error:
        raise publisher_away(error) from None
    except _NOT_RECOGNIZED as error:  # it may be any server, so nothing is changed there
        raise _not_recognized(
            error,
            "Keep clients away from it, and save what they wrote there. Then stop it, and end the switchover without"
            f" it:\n{options.command} --gone {PUBLISHER}",
        ) from None
    raise _lagged(back, "drop the subscription, which ends the switchover", f"pgsub drop {word(sub.name)} --yes")


def check_ended(options: SwitchoverOptions, store: StateStore) -> None:
    """Check that the giving side of a switchover that has ended has kept its fence. Otherwise fence it again.

    :raises PublisherLagged: clients may have written there.
    :raises UsageError: the fence is a command, and none is given.
    """
    active, name = options.names
    back = store.find(name) if store.find(active) is None else None
    there = None if back is None else _opened(options, store, back)
    if back is None or there is None:
        return
    with ledger_session(store, back) as giving, contextlib.closing(verified_publisher.connect(giving, back)) as taking:
        lock(taking)
        here, _ = lost_switchover.of_publisher(taking, back.way_back_of or 0, there)
        if here is None or here.phase not in journal.HAS_TAKEN:
            return
        check_command(here, options)
        # before the commit after which no run comes here again
        right_to_write.commands(options, replace(back, target=back.connection), back)("fence")
        # guard: a publisher that loses the right to write after the switchover is fenced again
        _fence_again(giving, None, back, there, here)
        fence.end_sessions(giving, [], time.monotonic() + right_to_write.END_SECONDS)
    raise _lagged(back, "make it equal", f"pgsub reconcile {word(back.name)}")


def _opened(options: SwitchoverOptions, store: StateStore, back: Subscription) -> Entry | None:
    """Return the row of a giving side that has lost its fence since the switchover has ended, None for any other.

    Of a server that cannot be reached or read it is said that the writes were moved, as they were.

    :raises WrongSystem: another server or database answers in place of the taking side.
    """
    with (
        contextlib.suppress(TargetUnavailable, PermissionMissing),
        recognized(options, back),
        ledger_session(store, back) as giving,
        target_asked(options),
    ):
        found = lost_switchover.found(giving, store, back)
        return found.there if found is not None and found.lost == journal.GIVING else None
    return None


@contextlib.contextmanager
def recognized(options: SwitchoverOptions, back: Subscription) -> Iterator[None]:
    """Raise PublisherLagged if the giving side has lost all of the switchover since that has ended.

    :raises UndoUnfinished: an abort was interrupted.
    """
    try:
        yield
    except _NOT_RECOGNIZED as error:
        if is_forgotten(back):
            message = "the abort of the switchover was interrupted, and clients write on the publisher"
            raise UndoUnfinished(message, hint=f"Let it finish:\n{options.command} --abort") from None
        # guard: a publisher that has lost all of the switchover after its end is told
        raise _not_recognized(
            error,
            "Find out on which of the two servers clients have written since, and keep them away from the other one. If"
            " they write on the target, save what they wrote on the publisher, drop the subscription, empty the tables"
            " of the publisher, and let a new subscription fill them:\n"
            f"pgsub drop {word(back.name)} --keep-target --yes",
        ) from None


def is_forgotten(back: Subscription) -> bool:
    """Return whether an undoing has ended after the giving side had forgotten the reverse subscription."""
    unread = (TargetUnavailable, StateForbids, PermissionMissing, psycopg.Error)
    with contextlib.suppress(*unread), connect_target(back, views=False) as giving:
        ledger_privileges.check(giving)
        there = journal.of_subscription(giving, journal.GIVING, back.subid) if has_journal(giving) else None
        undone = there is not None and there.phase in (journal.RELEASING, journal.RELEASED)
        return undone and not knows(giving, back.subid)
    return False


def end_forgotten(back: Subscription) -> None:
    """Record on the giving side that an undoing has ended after it had forgotten the reverse subscription."""
    with connect_target(back, views=False) as giving:
        ledger_privileges.check(giving)
        there = journal.of_subscription(giving, journal.GIVING, back.subid)
        if there is not None:
            with durable(giving):
                journal.move(giving, there.id, (journal.RELEASING, journal.RELEASED), journal.RELEASED)


def _lagged(back: Subscription, end: str, command: str) -> PublisherLagged:
    return PublisherLagged(
        _MOVED,
        detail=f"{_CAUSE} It is fenced again, but clients may have written there, and it may lack changes that the"
        " target has.",
        hint="See which rows differ, with the target as the publisher, and save what clients need of them. Then"
        f" {end}:\npgsub verify {word(back.name)} --rows\n{command}",
    )


def _not_recognized(error: StateForbids, hint: str) -> PublisherLagged:
    message, _, _ = in_their_words(error.message, None, None)
    return PublisherLagged(
        _MOVED,
        detail=f"{_CAUSE} It lacks what was made for the way back ({message}), so it was not fenced: clients may write"
        " on both servers.",
        hint=hint,
    )


def _fence_again(
    giving: psycopg.Connection, sub: Subscription | None, back: Subscription, there: Entry | None, here: Entry
) -> None:
    """Put up what is lost, in one transaction: the fence, the row of the journal, the start of the way back.

    :param sub: the ending subscription, None if it has been dropped.
    """
    assert here.position is not None
    roles = _roles(giving, sub, here.fence)
    with durable(giving):
        advisory_locks.take_for_transaction(giving, DATABASE_LOCK, OTHER)
        if there is None:
            names = (back.subid, here.subname, here.back_name, back.subid)
            there = Entry(here.id, journal.GIVING, *names, journal.OPEN, here.fence)
            journal.add(giving, there)
        stands = there.phase in (journal.FENCED, journal.GIVEN)
        saved = (there.saved or {}) if stands else fence.put(giving, here.fence, roles)
        way_back.begin_at(giving, back.subid, here.position)
        changes = {"position": format_lsn(here.position), "saved": journal.saved({**saved, LAGGED: True})}
        journal.move(giving, here.id, (there.phase,), journal.GIVEN, **changes)


def _roles(giving: psycopg.Connection, sub: Subscription | None, way: str) -> Collection[str]:
    """Return pgsub's roles on the giving side, which may connect behind the fence."""
    if way != fence.CONNECT:
        return set()
    if sub is None:
        return {giving.info.user}
    with connect_publisher(sub) as source:
        return {giving.info.user, source.info.user}
