"""The running switchover as the row of the taking side has it.

That row could name any subscription as the reverse one, so :meth:`StateStore.way_back_of` decides which it is.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial

import psycopg

from pgsub.catalog.store import StateStore
from pgsub.commands.sessions import ledger_session
from pgsub.commands.switchover.parties import SwitchoverOptions
from pgsub.common.errors import LedgerLost, StateForbids, TargetReplaced, TargetUnavailable, UsageError
from pgsub.common.subscription import Subscription
from pgsub.switchover import fence, journal, lost_side
from pgsub.switchover.journal import Entry

#: Key in ``saved`` of the taking side: whether a command redirects clients there.
PROMOTES = "promotes"


class TargetLagged(StateForbids):
    """A target that lacks the changes with which it was to take the right to write.

    Nothing is undone by itself: clients may have written on the lost server after it had taken the right.
    """

    def __init__(self) -> None:
        super().__init__(
            "the target has lost changes that it had when the publisher gave the right to write",
            detail="It was restored, or a standby that lagged took its place. It does not take the right.",
        )


def under_way(taking: psycopg.Connection, sub: Subscription, store: StateStore) -> Entry | None:
    """Return the row of this subscription's unfinished switchover, None if there is none.

    If the taking side has lost changes since the right was given, the row is in phase :data:`journal.LOST`.
    """
    entry, back = journal.of_subscription(taking, journal.TAKING, sub.subid), store.way_back_of(sub.subid)
    if entry is not None and entry.phase in journal.HAS_TAKEN:
        return entry
    if entry is not None and entry.phase != journal.DECLINED:
        lost = back is not None and _is_lost(taking, store, sub, back)
        return replace(entry, phase=journal.LOST) if lost else entry
    # A declined switchover is unfinished only while its own reverse subscription exists.
    if entry is not None and back is not None and entry.back_subid == back.subid:
        return entry
    return _lost(store, sub, back)


def _is_lost(taking: psycopg.Connection, store: StateStore, sub: Subscription, back: Subscription) -> bool:
    """Return whether the taking side, which has a row, is back at a time before it took the right."""
    look = partial(lost_side.of_taking, taking, sub.subid)
    with contextlib.suppress(TargetUnavailable, LedgerLost, TargetReplaced), ledger_session(store, back) as giving:
        found = lost_side.read(giving, back.subid, look)
        return found is not None and found.lost == journal.TAKING
    return False


def _lost(store: StateStore, sub: Subscription, back: Subscription | None) -> Entry | None:
    """Return the row that the taking side has lost, as the giving side knows it.

    The reverse subscription may be enabled: it is from when the right was taken until the other one is dropped.
    """
    if back is None:
        return None
    with ledger_session(store, back) as giving:
        there = journal.of_subscription(giving, journal.GIVING, back.subid)
    if there is None or there.phase == journal.RELEASED:
        return None
    return replace(there, side=journal.TAKING, subid=sub.subid, back_subid=back.subid, phase=journal.LOST)


def check_command(entry: Entry, options: SwitchoverOptions, *, abort: bool = False) -> None:
    """Check that a fence command is given if the switchover was started with one.

    :param abort: the switchover is to be undone.
    """
    # guard: a fence command is not skipped
    if entry.fence == fence.COMMAND and options.fence_command is None:
        more = f"{' --abort' if abort else ''}{'' if options.gone is None else f' --gone {options.gone}'}"
        raise UsageError(
            "the switchover that is under way was begun with --fence-command",
            hint=f"Give the same command again:\n{options.command}{more} --fence-command COMMAND",
        )


def promotes(entry: Entry) -> bool:
    """Return whether a command must still redirect clients to the taking side, according to that side's row."""
    return entry.phase in (journal.PREPARED, journal.TAKEN) and bool((entry.saved or {}).get(PROMOTES))


def check_promote_command(entry: Entry, options: SwitchoverOptions) -> None:
    """Check that a promote command is given if the switchover was started with one."""
    # guard: a promote command is not skipped
    if promotes(entry) and options.promote_command is None:
        raise UsageError(
            "the switchover that is under way was begun with --promote-command",
            hint=f"Give the same command again, or true if clients have been redirected already:\n{options.command}"
            " --promote-command COMMAND",
        )
