"""``pgsub switchover``: the right to write goes to the target, with a way back; ``--back`` is the other direction."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import psycopg

from pgsub.catalog.store import StateStore
from pgsub.commands.reporter import Reporter
from pgsub.commands.sessions import ledger_session
from pgsub.commands.subscription.create import undone_by_sigterm
from pgsub.commands.switchover import definition, right, steps
from pgsub.commands.switchover.last_look import LastLook
from pgsub.commands.switchover.obstacles.obstacle import ERROR
from pgsub.commands.switchover.parties import SwitchoverOptions, found, giving_session, taking_session, the_one
from pgsub.commands.verify import EQUAL, VerifyOptions, served, verify
from pgsub.common.errors import (
    ApplyError,
    PgsubError,
    StateForbids,
    SubscriptionExists,
    TargetUnavailable,
    UsageError,
)
from pgsub.common.plural import counted
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.switchover import fence, journal
from pgsub.switchover.journal import Entry
from pgsub.target.session import connect as target

_SAME_PUBLISHER = """
SELECT o.subname FROM pgsub.subscription s JOIN pgsub.subscription o USING (system_identifier, publisher_dboid)
 WHERE s.subid = %(subid)s AND o.subid <> s.subid ORDER BY 1
"""
DONE, AS_BEFORE, UNDER_WAY, NONE, REHEARSED = "done", "as before", "under way", "none", "rehearsed"

_LATE = (journal.TAKEN, journal.PROMOTED, journal.DONE, journal.DECLINED)
#: What a phase means, that of the taking side first where it is one of these.
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
    journal.RELEASING: "Clients write on the publisher. What was made for the way back is to be removed.",
    journal.RELEASED: "Clients write on the publisher.",
}


@dataclass(slots=True)
class Outcome:
    """Result of a switchover.

    :ivar state: one of the words above.
    :ivar giving: phase of the giving side, ``taking`` of the other; None where there is no row.
    :ivar pause: seconds for which clients could write on neither side, or that are expected.
    """

    name: str
    back_name: str
    state: str
    giving: str | None = None
    taking: str | None = None
    pause: float | None = None
    steps: dict[str, float] = field(default_factory=dict)
    said: str | None = None
    obstacles: list[dict[str, Any]] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """Make the JSON object."""
        return {
            "subscription": self.name,
            "back": self.back_name,
            "state": self.state,
            "giving": self.giving,
            "taking": self.taking,
            "pause": None if self.pause is None else round(self.pause, 3),
            "steps": {name: round(seconds, 3) for name, seconds in self.steps.items()},
            "said": self.said,
            "obstacles": self.obstacles,
        }


def switchover(options: SwitchoverOptions, *, reporter: Reporter) -> Outcome:
    """Move the right to write to the target, or go on with what was begun.

    :raises StateForbids: something stands in the way, or the subscription was switched over already.
    :raises ApplyError: rows differ.
    :raises TimeoutExpired: the pause would have been too long; everything is as before.
    :raises PgsubError: what ended it; the same command goes on.
    """
    with undone_by_sigterm(), StateStore.open(options.state_dir, create=False) as store:
        sub = the_one(store, options)
        with taking_session(sub) as taking:
            try:
                return _Run(options, store, sub, taking, reporter).go_on()
            except psycopg.Error as error:
                failed = target.translate(error, "switch over", user=taking.info.user)
                raise _with_hint(failed, options) from None
            except PgsubError as error:
                raise _with_hint(error, options) from None


def _with_hint(error: PgsubError, options: SwitchoverOptions) -> PgsubError:
    """Return an error that says how to go on."""
    error.hint = error.hint or f"See where it stands, then let it go on:\n{options.command} --status\n{options.command}"
    return error


class _Run:
    """One run of the command."""

    def __init__(
        self,
        options: SwitchoverOptions,
        store: StateStore,
        sub: Subscription,
        taking: psycopg.Connection,
        reporter: Reporter,
    ) -> None:
        self._options = options
        self._store = store
        self._sub = sub
        self._taking = taking
        self._reporter = reporter

    def go_on(self) -> Outcome:
        """Do what is left of it."""
        entry = under_way(self._taking, self._sub, self._store)
        fresh = entry is None
        if entry is None:
            entry = self._begin()
        elif entry.phase == journal.PLANNED:
            self._compare()
        check_command(entry, self._options)
        back = self._way_back(entry, fresh=fresh)
        with ledger_session(back) as giving, LastLook(self._options, self._store, self._sub) as look:
            run = steps.Switchover(
                self._options, self._store, self._sub, back, self._taking, giving, self._reporter, look
            )
            there = journal.of(giving, entry.id)
            if entry.phase == journal.DECLINED or (there is not None and there.phase == journal.RELEASING):
                run.release(entry)
                return Outcome(self._sub.name, back.name, AS_BEFORE, journal.RELEASED, journal.DECLINED)
            if entry.phase in (journal.PLANNED, journal.PREPARED):
                if there is not None and there.phase == journal.GIVEN:
                    run.take(entry)
                else:
                    with served(self._store, self._options.state_dir, self._sub, self._reporter) as alive:
                        run.until_taken(entry, alive)
            run.turn(entry)
            pause, took = run.timing.pause, run.timing.steps
            done = Outcome(self._sub.name, back.name, DONE, journal.GIVEN, journal.DONE, pause, took)
            done.said = self._report(look, back)
            return done

    def _way_back(self, entry: Entry, *, fresh: bool) -> Subscription:
        """Return the subscription that leads back; it is created here where none was.

        :raises StateForbids: it was dropped, or there is another one of its name.
        """
        there = found(self._store, entry.back_name)
        if entry.back_subid is not None:
            # it would begin behind what clients wrote
            if there is None or there.subid != entry.back_subid:
                raise StateForbids(
                    f'subscription "{entry.back_name}", which is to lead back, is not the one that was made',
                    detail="It was dropped or renamed while the switchover was under way.",
                    hint="Without it what clients write on the target has no way back. Rename it back if it is there.",
                )
            return there
        if there is None or fresh:
            try:
                with giving_session(self._options, self._sub, self._store) as giving:
                    made = definition.way_back(self._options, self._sub, giving, self._taking, self._store)
                there = definition.created(made, self._store, steps.SILENT)
            except BaseException:
                right.decline(self._taking, entry)
                raise
        right.made(self._taking, entry, there.subid)
        return there

    def _report(self, look: LastLook, back: Subscription) -> str | None:
        """Report what the comparison of the last moment found.

        :raises ApplyError: rows differ.
        """
        if not self._options.verify:
            return None
        if look.found is None:
            return "The tables were not compared at the moment of the switchover, for it was interrupted."
        if look.found.equal and look.found.error is None:
            return "All tables were equal at the moment of the switchover."
        names = ", ".join(one.name for one in look.found.tables if one.outcome != EQUAL)
        raise ApplyError(
            "the writes were moved, but tables were not equal at the moment of the switchover, or not compared",
            detail=f'Tables: {names}. Clients write on the target, and subscription "{back.name}" leads back.',
            hint=f"See which rows differ, with the target as the publisher:\npgsub verify {word(back.name)} --rows\n"
            f"To move the writes back:\npgsub switchover {word(self._options.name)}"
            f"{'' if self._options.back else ' --back'}",
        )

    def _begin(self) -> Entry:
        """Check everything, compare the tables, and write the first row."""
        sub, options = self._sub, self._options
        if not sub.enabled:
            raise StateForbids(
                f'subscription "{sub.name}" is disabled', hint=f"Enable it:\npgsub enable {word(sub.name)}"
            )
        if found(self._store, options.names[1]) is not None:
            raise SubscriptionExists(
                f'subscription "{options.names[1]}" already exists',
                detail="The subscription that leads back would have this name.",
                hint=f"Rename it:\npgsub alter {word(options.names[1])} --rename-to NEW",
            )
        check_only(self._taking, sub)
        self._look_around()
        self._compare()
        return right.plan(self._taking, sub, options.names[1], options.way)

    def _compare(self) -> None:
        """Compare all tables, if that is asked for.

        :raises ApplyError: some differ, or were not compared.
        """
        sub = self._sub
        if not self._options.verify:
            return
        result = verify(VerifyOptions(sub.name, self._options.state_dir), reporter=self._reporter)
        if any(one.outcome != EQUAL for one in result.tables):
            raise ApplyError(
                f'the tables of subscription "{sub.name}" differ from the publisher\'s, or could not be compared',
                hint=f"See which rows, and repair them:\npgsub verify {word(sub.name)} --rows\n"
                f"pgsub verify {word(sub.name)} --repair",
            )

    def _look_around(self) -> None:
        """Warn of what will be different, and refuse what stands in the way.

        :raises StateForbids: something does.
        """
        seen = definition.obstacles(self._options, self._sub, self._taking, self._store)
        errors = [one for one in seen if one.severity == ERROR]
        if errors:
            hints = [one.hint for one in errors if one.hint]
            raise StateForbids(
                f"{counted(len(errors), 'thing')} must be mended before the switchover",
                detail="\n".join(one.message for one in errors),
                hint="\n".join([*hints, f"To see all, and what to know before:\n{self._options.command} --dry-run"]),
            )
        for one in seen:
            self._reporter.warning(one.message, one.detail, one.hint)


def check_only(taking: psycopg.Connection, sub: Subscription) -> None:
    """Check that no other subscription of this target follows the same database, whose writes would move with it.

    :raises StateForbids: one does.
    """
    others = [row[0] for row in taking.execute(_SAME_PUBLISHER, {"subid": sub.subid}).fetchall()]
    if others:
        raise StateForbids(
            f"the writes of a database can only be moved with one subscription, and there are {len(others) + 1}",
            detail=f"These follow the same database of the publisher: {', '.join(others)}.",
            hint="Clients write to a database as a whole. Subscribe to all its tables with one subscription, and drop"
            " the others.",
        )


def check_command(entry: Entry, options: SwitchoverOptions) -> None:
    """Check that a switchover whose fence is a command has one.

    :raises UsageError: it has none now.
    """
    # guard: a fence that is a command is not left out
    if entry.fence == fence.COMMAND and options.fence_command is None:
        raise UsageError(
            "the switchover that is under way was begun with --fence-command",
            hint=f"Give the same command again:\n{options.command} --fence-command COMMAND",
        )


def _made(store: StateStore, entry: Entry) -> Subscription | None:
    """Return the subscription that was made to lead back; what was made last may not be recorded yet."""
    if entry.back_subid is not None:
        return store.subscription_by_id(entry.back_subid)
    return found(store, entry.back_name) if entry.phase == journal.PLANNED else None


def under_way(taking: psycopg.Connection, sub: Subscription, store: StateStore) -> Entry | None:
    """Return the row of a switchover of this very subscription that is not over, None where there is none."""
    entry = journal.of_subscription(taking, journal.TAKING, sub.subid)
    if entry is None:
        return None
    back = _made(store, entry)
    # only the way back that was made for it is removed
    if entry.phase == journal.DECLINED and back is None:
        return None
    return entry


def abort(options: SwitchoverOptions, *, reporter: Reporter) -> Outcome:
    """Leave everything as it was before a switchover that has not come to its end; where there is none, it is.

    :raises StateForbids: clients may write on the target already.
    :raises TargetUnavailable: what is left is done when the command is run again.
    """
    with undone_by_sigterm(), StateStore.open(options.state_dir, create=False) as store:
        sub = the_one(store, options)
        back = found(store, options.names[1])
        with contextlib.ExitStack() as stack:
            try:
                taking = stack.enter_context(taking_session(sub))
            except TargetUnavailable:
                if back is None:
                    raise
                return _without_taking(options, sub, back, reporter)
            entry = under_way(taking, sub, store)
            if entry is None:
                return Outcome(sub.name, options.names[1], AS_BEFORE)
            check_command(entry, options)
            back = _made(store, entry)
            if entry.phase in (journal.TAKEN, journal.PROMOTED, journal.DONE):
                raise StateForbids(
                    "the switchover cannot be aborted any more: clients may write on the target",
                    hint=f"Let it come to its end, then go back:\n{options.command}\n"
                    f"pgsub switchover {word(options.name)}{'' if options.back else ' --back'}",
                )
            if back is None:
                right.decline(taking, entry)
            else:
                with ledger_session(back) as giving:
                    look = LastLook(options, store, sub)
                    steps.Switchover(options, store, sub, back, taking, giving, reporter, look).release(entry)
    return Outcome(sub.name, options.names[1], AS_BEFORE, journal.RELEASED, journal.DECLINED)


def _without_taking(options: SwitchoverOptions, sub: Subscription, back: Subscription, reporter: Reporter) -> Outcome:
    """Let clients write on the giving side again although the other cannot be reached."""
    with ledger_session(back) as giving:
        entry = journal.latest(giving, journal.GIVING, sub.name)
        if entry is None or entry.subid != back.subid:
            raise StateForbids(f'no switchover of subscription "{sub.name}" is under way')
        right.release(entry, giving, None, right.commands(options, sub, back))
    reporter.warning(
        "the target cannot be reached: what was made there for the way back stays",
        hint=f"Run this again when it can:\n{options.command} --abort",
    )
    return Outcome(sub.name, back.name, AS_BEFORE, journal.RELEASING, None)


def status(options: SwitchoverOptions) -> Outcome:
    """Tell where a switchover stands; nothing is changed."""
    with StateStore.open(options.state_dir, create=False) as store:
        active, back_name = options.names
        sub, back = found(store, active), found(store, back_name)
        if sub is None and back is not None:
            return Outcome(active, back_name, DONE, said=f'Subscription "{back_name}" replicates now.')
        sub = store.subscription(active)
        with ledger_session(sub) as taking:
            entry = under_way(taking, sub, store)
        if entry is None:
            return Outcome(active, back_name, NONE)
        there = None
        if back is not None:
            with ledger_session(back) as giving:
                there = journal.of(giving, entry.id)
        said = next((_SAID[phase] for phase in (entry.phase, there and there.phase) if phase in _LATE), None)
        said = said or _SAID[there.phase if there is not None else entry.phase]
        pause = there.fenced_for if there is not None and entry.phase in (journal.PLANNED, journal.PREPARED) else None
        return Outcome(active, back_name, UNDER_WAY, there.phase if there else None, entry.phase, pause, {}, said)
