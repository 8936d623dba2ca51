"""Shows the state of a switchover, as far as its servers can be reached, and the next steps. Nothing is changed."""

from __future__ import annotations

import contextlib

import psycopg

from pgsub.catalog.store import StateStore
from pgsub.commands.sessions import ledger_session
from pgsub.commands.subscription import lost_switchover
from pgsub.commands.switchover.obstacles.obstacle import in_their_words
from pgsub.commands.switchover.outcome import DONE, NONE, UNDER_WAY, Choice, Outcome
from pgsub.commands.switchover.parties import PUBLISHER, TARGET, SwitchoverOptions, ended_way_back, giving_session
from pgsub.commands.switchover.transfer import giving_fence, server_gone
from pgsub.commands.switchover.under_way import promotes, under_way
from pgsub.common.errors import (
    LedgerLost,
    PermissionMissing,
    PublisherUnavailable,
    SwitchedOver,
    TargetReplaced,
    TargetUnavailable,
    WrongSystem,
)
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.switchover import fence, journal
from pgsub.switchover.journal import Entry
from pgsub.switchover.lost_side import lost_by

#: Meanings of phases. The taking side's phase has priority if it has taken or declined the right.
_SAID = {
    journal.PLANNED: "It was begun. Clients write on the publisher.",
    journal.PREPARED: "The target is fenced. Clients write on the publisher.",
    journal.OPEN: "The way back is made. Clients write on the publisher.",
    journal.FENCED: "Clients are kept from writing on either server.",
    journal.GIVEN: "The publisher has given the right to write, and the target is to take it.",
    journal.TAKEN: "Clients may write on the target.",
    journal.PROMOTED: "Clients write on the target. The subscription is to end.",
    journal.DONE: "Clients write on the target. The subscription is to be dropped.",
    journal.DECLINED: "Clients write on the publisher. What was made for the way back is to be removed.",
    journal.LOST: "The target has lost changes since the publisher gave the right to write, and does not take it.",
    journal.RELEASING: "Clients write on the publisher. What was made for the way back is to be removed.",
    journal.RELEASED: "Clients write on the publisher.",
}
_UNKNOWN = {
    journal.GIVING: "The publisher cannot be reached, so it is not known whether clients write there.",
    journal.TAKING: "The target cannot be reached.",
}
_AWAY = {journal.GIVING: "The publisher cannot be reached.", journal.TAKING: _UNKNOWN[journal.TAKING]}
_LAGGED = "The publisher has lost changes since it gave the right to write, so clients may write there, too."
_DROPPED = (
    "The target does not know the switchover: it was restored to an earlier time, or only its schema pgsub was dropped."
    " In the second case do not undo the switchover, because clients may write on the target."
)
_UNREADABLE = "Whether the target has lost this since is not known, because its journal may not be read."
_GIVING_LOST = (
    "The publisher has lost what was made there for the way back: it was restored, or its schema pgsub was dropped, or"
    " an abort was interrupted."
)
_STILL_CLOSED = "The target has declined the right to write, and the publisher still keeps clients from writing."
_RETURNED = "The publisher, which was said to be gone, is back, and keeps clients from writing. The target declined."
_MAY_BE_TAKEN = "The publisher has given the right to write. The target, which may have taken it, cannot be reached."
#: Seconds that a longer pause adds to the elapsed time.
_MORE = 60


def status(options: SwitchoverOptions) -> Outcome:
    """Return the state of a switchover.

    :raises TargetUnavailable: no server that knows it can be reached.
    """
    with StateStore.open(options.state_dir, create=False) as store:
        active, back_name = options.names
        sub, back = store.find(active), store.find(back_name)
        if (ended := ended_way_back(store, options)) is not None:
            found = _of_ended(options, store, ended)
            if sub is None or found.choices:  # another subscription of the name does not hide what has to be done
                return found
        if sub is None and back is not None:
            return _of_ended(options, store, back)
        sub = store.subscription(active)
        try:
            with ledger_session(store, sub) as taking:
                here = under_way(taking, sub, store)
                if here is None:
                    return _of_declined(options, store, sub, taking)
        except (LedgerLost, TargetReplaced):
            if back is None or back.way_back_of != sub.subid:
                raise
            found = _of_ended(options, store, back, UNDER_WAY)
            if found.giving is None:  # nor does the publisher know a switchover
                raise
            return found
        except SwitchedOver:  # a run was killed in its last step
            if back is None or back.way_back_of != sub.subid:
                raise
            last = Choice("finish it", options.command)
            return Outcome(*options.names, UNDER_WAY, None, journal.DONE, said=_SAID[journal.DONE], choices=[last])
        except TargetUnavailable:
            if back is None or back.way_back_of != sub.subid:
                raise
            return _of_giving(options, store, back)
        back = store.way_back_of(here.subid)
        if back is None and here.phase == journal.PREPARED:
            return _of_unknown_way_back(options, store, sub, here)
        return _of_both(options, store, here, back)


def _of_ended(options: SwitchoverOptions, store: StateStore, back: Subscription, state: str = DONE) -> Outcome:
    """Return that the writes were moved, and whether one of the servers has lost that since.

    :param state: of the switchover, if the taking side has lost it.
    """
    said, there = f'Subscription "{back.name}" replicates now.', None
    try:
        with giving_fence.recognized(options, back), ledger_session(store, back) as giving:
            there = journal.of_subscription(giving, journal.GIVING, back.subid)
            found = lost_switchover.found(giving, store, back)
    except TargetUnavailable:
        return Outcome(*options.names, DONE, said=f"{said} {_AWAY[journal.GIVING]}", unreachable=(journal.GIVING,))
    except (PublisherUnavailable, WrongSystem) as error:
        said = _replaced(back, error) if isinstance(error, WrongSystem) else f"{said} {_AWAY[journal.TAKING]}"
        away = Outcome(*options.names, state, said=said, unreachable=(journal.TAKING,))
        if there is not None:
            away.giving, away.choices = there.phase, [_without_lost_target(options, there, lost_writes=True)]
        return away
    except giving_fence.UndoUnfinished:
        rest = Choice("leave everything as it was", f"{options.command} --abort")
        return Outcome(*options.names, DONE, journal.RELEASING, said=_SAID[journal.RELEASING], choices=[rest])
    except giving_fence.PublisherLagged as error:
        found, said = None, " ".join(f"{_LAGGED} {error.detail} {error.hint}".split("\n"))
    except PermissionMissing as error:
        found, said = None, " ".join(f"{said} {_UNREADABLE} {error.hint or ''}".split("\n"))
    if found is None or not (found.undone or found.lost):
        return Outcome(*options.names, DONE, said=said)
    again, undo = _commands(options, found.there)
    if found.lost == journal.GIVING:
        choice = Choice("keep clients from writing there again", again)
        return Outcome(*options.names, DONE, found.there.phase, said=_LAGGED, choices=[choice])
    choice = Choice("let clients write on the publisher again", undo)
    taking = None if found.undone else journal.LOST
    said = _DROPPED if found.dropped else _SAID[taking or found.there.phase]
    return Outcome(*options.names, state, found.there.phase, taking, said=said, choices=[choice])


def _replaced(back: Subscription, error: WrongSystem) -> str:
    """Return what is said about another server or another database that answers in place of the taking side."""
    _, detail, _ = in_their_words("", error.detail, None)
    name = word(back.name)
    return (
        f"Another database answers in place of the target. {detail} If its address is wrong, correct it with pgsub"
        f" alter {name} --connection; if pg_upgrade made it of the target, use pgsub disable {name}, pgsub alter {name}"
        f" --publisher-upgraded, and pgsub enable {name}."
    )


def _of_declined(
    options: SwitchoverOptions, store: StateStore, sub: Subscription, taking: psycopg.Connection
) -> Outcome:
    """Return whether a publisher that was declared gone is back and still fenced."""
    away = contextlib.suppress(TargetUnavailable, PublisherUnavailable)
    with away, server_gone.returned(options, store, sub, taking) as back_again:
        if back_again is not None:
            there, _ = back_again
            found = Outcome(*options.names, UNDER_WAY, there.phase, journal.DECLINED, said=_RETURNED)
            found.choices = _choices(options, there, journal.of(taking, there.id), there, ())
            return found
    return Outcome(*options.names, NONE)


def _of_giving(options: SwitchoverOptions, store: StateStore, back: Subscription) -> Outcome:
    """Return the giving side's knowledge when the taking side cannot be reached."""
    with ledger_session(store, back) as giving:
        there = journal.of_subscription(giving, journal.GIVING, back.subid)
    away = (journal.TAKING,)
    if there is None or there.phase == journal.RELEASED:
        return Outcome(*options.names, NONE, said=_UNKNOWN[journal.TAKING], unreachable=away)
    given = there.phase == journal.GIVEN
    said = _MAY_BE_TAKEN if given else f"{_SAID[there.phase]} {_UNKNOWN[journal.TAKING]}"
    pause = None if given else there.fenced_for
    found = Outcome(*options.names, UNDER_WAY, there.phase, None, pause, {}, said, unreachable=away)
    found.choices = _choices(options, there, None, there, away)
    return found


def _of_unknown_way_back(options: SwitchoverOptions, store: StateStore, sub: Subscription, here: Entry) -> Outcome:
    """Return what the publisher knows of a reverse subscription that this state store does not have."""
    there: Entry | None = None
    away: tuple[str, ...] = (journal.GIVING,)
    with (
        contextlib.suppress(TargetUnavailable, PublisherUnavailable),
        giving_session(options, sub) as giving,
    ):
        there, away = server_gone.left(giving, here, sub, store), ()
    said = _UNKNOWN[journal.GIVING] if away else _SAID[here.phase if there is None else there.phase]
    phase = None if there is None else there.phase
    found = Outcome(*options.names, UNDER_WAY, phase, here.phase, said=said, unreachable=away)
    found.choices = [Choice("leave everything as it was", _commands(options, here)[1])]
    return found


def _of_publisher_lost(options: SwitchoverOptions, here: Entry) -> Outcome:
    """Return that the publisher has lost what was made for the way back, before the right to write was taken."""
    found = Outcome(*options.names, UNDER_WAY, None, here.phase, said=_GIVING_LOST)
    found.choices = [Choice("leave the target as it was", _commands(options, here)[1])]
    return found


def _of_both(options: SwitchoverOptions, store: StateStore, here: Entry, back: Subscription | None) -> Outcome:
    there: Entry | None = None
    away: tuple[str, ...] = ()
    if back is not None:
        try:
            with ledger_session(store, back) as giving:
                there = journal.of(giving, here.id)
        except TargetUnavailable:
            away = (journal.GIVING,)
        except (LedgerLost, TargetReplaced):
            if here.phase not in journal.HAS_TAKEN:
                return _of_publisher_lost(options, here)
    if here.phase == journal.DECLINED and there is not None and there.phase in (journal.FENCED, journal.GIVEN):
        said = _STILL_CLOSED
    elif here.phase == journal.DECLINED and away:
        said = _UNKNOWN[journal.GIVING]
    elif here.phase in (*journal.HAS_TAKEN, journal.DECLINED, journal.LOST):
        said = _SAID[here.phase]
        if here.phase in journal.HAS_TAKEN and back is not None and not away and lost_by(there, here):
            said = f"{said} {_LAGGED}"
    elif away:
        said = _UNKNOWN[journal.GIVING]
    else:
        said = _SAID[here.phase if there is None else there.phase]
    pause = there.fenced_for if there is not None and here.phase in (journal.PLANNED, journal.PREPARED) else None
    giving_phase = None if there is None else there.phase
    found = Outcome(*options.names, UNDER_WAY, giving_phase, here.phase, pause, {}, said, unreachable=away)
    found.choices = _choices(options, here, here, there, away)
    return found


def _choices(
    options: SwitchoverOptions, entry: Entry, here: Entry | None, there: Entry | None, away: tuple[str, ...]
) -> list[Choice]:
    """Return the possible next steps, the usual one first.

    :param entry: a row that is known. ``here`` is the taking side's row, ``there`` the giving side's, None if unknown.
    :param away: sides that cannot be reached.
    """
    go_on, abort = _commands(options, entry)
    if here is not None and here.phase in journal.HAS_TAKEN:
        end = Choice("finish it", go_on)
        lost = Choice("end it without the publisher, to which nothing leads back then", f"{go_on} --gone {PUBLISHER}")
        return [end, lost] if away else [end]
    undone = (here is not None and here.phase in (journal.DECLINED, journal.LOST)) or (
        there is not None and there.phase == journal.RELEASING
    )
    if undone:
        found = [Choice("leave everything as it was", abort)]
    elif journal.TAKING in away:
        found = _without_target(entry, go_on, abort)
    elif there is not None and _is_over(options, there):
        longer = f"{go_on} --timeout {int(there.fenced_for or 0) + _MORE}s"
        found = [
            Choice("leave everything as it was, as the next run does because the time of the pause is over", abort),
            Choice("let it continue with a longer pause", longer),
        ]
    else:
        found = [Choice("let it continue", go_on), Choice("leave everything as it was", abort)]
    if journal.GIVING in away:
        found.append(
            Choice("leave the target as it was, if the publisher is gone for good", f"{abort} --gone {PUBLISHER}")
        )
    if journal.TAKING in away:
        found.append(_without_lost_target(options, entry, lost_writes=entry.phase == journal.GIVEN))
    return found


def _without_lost_target(options: SwitchoverOptions, entry: Entry, *, lost_writes: bool) -> Choice:
    """Return the step for a target that is gone for good.

    :param lost_writes: clients may have written there.
    """
    _, abort = _commands(options, entry)
    lost = " and what was written there is lost" if lost_writes else ""
    return Choice(
        f"let clients write on the publisher, if the target is gone for good{lost}", f"{abort} --gone {TARGET}"
    )


def _is_over(options: SwitchoverOptions, there: Entry) -> bool:
    """Return whether the next run can only undo the switchover, because the pause has lasted too long."""
    return there.phase == journal.FENCED and (there.fenced_for or 0.0) > options.limit


def _without_target(entry: Entry, go_on: str, abort: str) -> list[Choice]:
    if entry.phase == journal.GIVEN:
        return [Choice("let it continue, once the target is back", go_on)]
    return [Choice("let clients write on the publisher again", abort)]


def _commands(options: SwitchoverOptions, entry: Entry) -> tuple[str, str]:
    """Return the commands that continue and that undo the switchover, with the options that they need."""
    fenced = entry.fence == fence.COMMAND and options.fence_command is None
    told = promotes(entry) and options.promote_command is None
    more = " --fence-command COMMAND" if fenced else ""
    return (
        f"{options.command}{more}{' --promote-command COMMAND' if told else ''}",
        f"{options.command}{more} --abort",
    )
