"""The right to write, as it moves between the servers or stays, each time in one transaction of a server."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import psycopg

from pgsub.catalog import subscriptions as catalog
from pgsub.commands.reporter import Reporter
from pgsub.commands.switchover.parties import SwitchoverOptions
from pgsub.commands.switchover.under_way import TargetLagged
from pgsub.common import failpoints, quoting, server_words
from pgsub.common.errors import Log, LogText, PermissionMissing, PgsubError, TargetUnavailable
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.switchover import fence, journal, lost_side
from pgsub.switchover.journal import Entry
from pgsub.target.ledger.tables import subscription_tables
from pgsub.target.session.transactions import durable

#: Seconds within which sessions that would stay read-only must end.
END_SECONDS = 10.0


#: Messages when steps begin. None is written during the pause, because writing to a terminal may block.
_SAID = {
    "prepare": "switchover: fencing the target",
    "approach": "switchover: waiting until apply is near the publisher",
    "fence": "switchover: fencing the publisher; clients can write nowhere until the target has taken over",
    "promote": "switchover: the target has taken over, and clients may write there",
    "turn": "switchover: ending the subscription, because the way back begins",
}


@dataclass(slots=True)
class Timing:
    """The duration of each step in seconds, and in ``pause`` the time in which clients could write on neither side.

    :ivar log: receives a record at the beginning of each step.
    """

    steps: dict[str, float] = field(default_factory=dict)
    pause: float | None = None
    log: Log = lambda level, text: None

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Measure a step."""
        if name in _SAID and name not in self.steps:
            self.log("LOG", LogText(_SAID[name]))
        began = time.monotonic()
        try:
            yield
        finally:
            self.steps[name] = self.steps.get(name, 0.0) + time.monotonic() - began


def take(entry: Entry, giving: psycopg.Connection, taking: psycopg.Connection, timing: Timing) -> None:
    """Take the right that was given, so that clients may write on the taking side.

    :raises PgsubError: the right was not given.
    :raises TargetLagged: the taking side is not the one that had applied everything.
    :raises StateForbids: the taking side has declined it.
    """
    there, read = journal.of(giving, entry.id), time.monotonic()
    here = journal.of(taking, entry.id)
    # guard: the right to write is taken only after it was given
    if there is None or there.phase != journal.GIVEN:
        raise PgsubError(f"the right to write was not given, but is {there.phase if there else 'unknown'}")
    # guard: a target that has lost changes since the right was given does not take it
    if here is None or lost_side.lost_by(there, here) == journal.TAKING:
        raise TargetLagged()
    if here.phase in (journal.PREPARED, journal.DECLINED):
        saved = here.saved or {}
        with timing.step("take"), durable(taking):
            journal.move(taking, entry.id, (journal.PREPARED,), journal.TAKEN)
            fence.lift(taking, entry.fence, saved)
            # Also lift the fence from the earlier switchover that moved the writes away from this server.
            earlier = saved.get("earlier")
            if earlier is not None:
                fence.lift(taking, earlier["fence"], earlier["saved"])
        timing.pause = (there.fenced_for or 0.0) + time.monotonic() - read


def commands(options: SwitchoverOptions, sub: Subscription, back: Subscription | None) -> Callable[[str], None]:
    """Return a function that runs the user's command for an action, if there is one. It may run more than once."""
    giving = sub.connection if back is None else back.target

    def run(action: str) -> None:
        command = options.promote_command if action == "promote" else options.fence_command
        if command is not None:
            fence.run(command, action, giving, sub.target, options.limit)

    return run


def name_way_back(taking: psycopg.Connection, entry: Entry, back_subid: int) -> None:
    """Record the reverse subscription's number before it is created, so that others' are never used."""
    with durable(taking):
        journal.move(taking, entry.id, (journal.PLANNED,), journal.PLANNED, back_subid=back_subid)
    failpoints.point("switchover.named")


def release(
    entry: Entry,
    giving: psycopg.Connection,
    taking: psycopg.Connection | None,
    run_command: Callable[[str], None],
    keep: Collection[int] = (),
    *,
    taking_is_gone: bool = False,
) -> None:
    """Let clients write on the giving side again, and remove the fence of the taking side.

    :param keep: PIDs of the command's own sessions on the giving side.
    :param taking: None if it cannot be reached. A given right is then not released unless ``taking_is_gone``.
    :raises StateForbids: the taking side has taken the right.
    :raises TargetUnavailable: the right was given, and the taking side cannot be asked.
    """
    there = journal.of(giving, entry.id)
    if there is not None and there.phase == journal.GIVEN:
        if taking is None and not taking_is_gone:
            raise TargetUnavailable(
                "the right to write was given to a server that cannot be reached",
                hint="It may have been taken there. Bring the target up, then let the switchover continue, or abort"
                " it. If it will never come back, abort with --gone target.",
            )
        # guard: a given right is released only after the taking side has declined it
        if taking is not None:
            decline(taking, entry)
    if there is not None and there.phase in (journal.OPEN, journal.FENCED, journal.GIVEN):
        with durable(giving):
            journal.move(giving, entry.id, (there.phase,), journal.RELEASING)
            if there.phase != journal.OPEN:
                fence.restore(giving, there.fence, there.saved or {})
        if there.phase != journal.OPEN:
            let_write(giving, there.fence, keep)
        failpoints.point("switchover.releasing")
    if there is not None and there.phase not in (journal.OPEN, journal.RELEASED) and entry.fence == fence.COMMAND:
        run_command("release")
    if taking is not None:
        decline(taking, entry)
        failpoints.point("switchover.declined")


def let_write(session: psycopg.Connection, way: str, keep: Collection[int]) -> None:
    """End sessions, for example of a pool, that would stay read-only after the fence is lifted.

    If this fails, clients must reconnect by themselves.

    :param keep: PIDs of sessions that are not ended.
    """
    if way == fence.READ_ONLY:
        with contextlib.suppress(PgsubError):
            fence.end_sessions(session, [session.info.backend_pid, *keep], time.monotonic() + END_SECONDS)


def decline(taking: psycopg.Connection, entry: Entry) -> None:
    """Decline the right for the taking side, and restore its former state."""
    here = journal.of(taking, entry.id)
    if here is None or here.phase == journal.DECLINED:
        return
    with durable(taking):
        journal.move(taking, entry.id, (journal.PLANNED, journal.PREPARED), journal.DECLINED)
        if here.phase == journal.PREPARED:
            fence.restore(taking, here.fence, here.saved or {})


def keep_out(
    taking: psycopg.Connection, entry: Entry, keep: Collection[int], back: Subscription, reporter: Reporter
) -> None:
    """Keep clients from writing on a taking side that has lost the right, where they may be led, and decline the right.

    It is declined last, so that the run after a failure does all of this again.

    :param keep: PIDs of sessions that are not ended.
    :raises PermissionMissing: the role may not prevent writes, end sessions, or change the journal.
    """
    here = journal.of(taking, entry.id) if lost_side.has_journal(taking) else None
    if here is not None and here.phase in journal.HAS_TAKEN:
        raise journal.moved(taking, entry.id, (journal.PLANNED, journal.PREPARED))
    before = fence.setting(taking)
    # guard: clients do not write on a target that has lost the right while they may write on the publisher
    if before != "on":
        statement = f"ALTER DATABASE {quoting.name(taking.info.dbname)} SET default_transaction_read_only = on;"
        hint = f"Let the owner of the database run this there, and repeat the command:\n{statement}"
        with _privileged("keep clients from writing on the target", hint), durable(taking):
            fence.put(taking, fence.READ_ONLY, ())
    fence.end_sessions(taking, keep, time.monotonic() + END_SECONDS)
    failpoints.point("switchover.kept_out")
    if here is not None and here.phase != journal.DECLINED:
        with as_owner("decline the right to write on the target", back), durable(taking):
            journal.move(taking, entry.id, (journal.PLANNED, journal.PREPARED), journal.DECLINED)
            if here.phase == journal.PREPARED and here.fence == fence.CONNECT:
                fence.restore(taking, here.fence, here.saved or {})
        if here.phase == journal.PREPARED and here.fence == fence.READ_ONLY:
            before = (here.saved or {}).get("setting")
    if before != "on":
        reporter.warning(
            "the target was made read-only, because clients may still be led there",
            hint="Lead them to the publisher. If they may write on the target then, run this there:\n"
            f"{fence.reopening(taking.info.dbname, before)}",
        )


def as_owner(what: str, back: Subscription) -> contextlib.AbstractContextManager[None]:
    """Tell what to do if the reverse subscription's role on the taking side may not change the ledger there.

    :param what: what could not be done.
    :return: a context that raises PermissionMissing.
    """
    hint = (
        "Let the subscription that leads back connect with the role that owns schema pgsub there, and repeat the"
        f" command:\npgsub alter {word(back.name)} --connection CONNINFO"
    )
    return _privileged(what, hint)


@contextlib.contextmanager
def _privileged(what: str, hint: str) -> Iterator[None]:
    try:
        yield
    except psycopg.errors.InsufficientPrivilege as error:
        message = f"could not {what}: {server_words.said(error).message}"
        raise PermissionMissing(message, hint=hint, sqlstate=error.sqlstate) from None


def plan(taking: psycopg.Connection, sub: Subscription, back_name: str, way: str) -> Entry:
    """Write the first row of the journal, on the taking side."""
    options = catalog.options(sub)
    names = (sub.subid, sub.name, back_name, None)
    entry = Entry(str(uuid.uuid4()), journal.TAKING, *names, journal.PLANNED, way, definition=options)
    with durable(taking):
        # Other commands that checked the journal before must not change tables, sequences or rows later.
        subscription_tables.hold_still(taking, sub.subid, sub.name)
        journal.check_alone(taking, entry.id)
        journal.add(taking, entry)
    failpoints.point("switchover.planned")
    return entry
