"""The steps of a switchover, from the first row of the journal to the end of the subscription.

NOTES
Each step can be repeated, and where to go on is read from the journal of both sides. Before the right is given,
whatever fails leads back: the fence is lifted, and what was made for the way back is removed. Afterwards there is only
the way forward, until clients write on the taking side; then the subscription turns.
:mod:`pgsub.switchover.journal` says why nothing else can happen.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import psycopg

from pgsub.catalog import subscriptions as catalog
from pgsub.catalog.store import StateStore
from pgsub.commands.reporter import Reporter
from pgsub.commands.sessions import connect_publisher
from pgsub.commands.status.wait import WaitOptions, wait
from pgsub.commands.subscription.drop import drop
from pgsub.commands.subscription.enable_disable import disable, enable
from pgsub.commands.switchover.parties import TIMEOUT, SwitchoverOptions, giving_source
from pgsub.common import failpoints
from pgsub.common.errors import PgsubError, TargetSchemaError, TargetUnavailable, TimeoutExpired
from pgsub.common.subscription import Subscription
from pgsub.protocol.lsn import MAX_LSN, format_lsn
from pgsub.publisher import connect as publisher
from pgsub.publisher.position import flushed_position
from pgsub.sequences import reading, synchronization
from pgsub.switchover import drain, fence, journal, way_back
from pgsub.switchover.journal import Entry
from pgsub.target.session import connect as target
from pgsub.target.session.connect import SessionName
from pgsub.target.session.transactions import durable

#: Seconds in which apply must come near the publisher before the pause, and how long it may take from there.
APPROACH, NEAR = 300.0, 0.5
#: Seconds in which workers of the subscription must end.
END_SECONDS = 60.0


@dataclass(slots=True)
class Timing:
    """Seconds that each step took; ``pause``: those in which clients could write on neither side."""

    steps: dict[str, float] = field(default_factory=dict)
    pause: float | None = None

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Time a step."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.steps[name] = self.steps.get(name, 0.0) + time.monotonic() - began


class Switchover:
    """One run of the command, with a session on each side.

    :param sub: the subscription that ends, ``back`` the one that leads back.
    :param taking: a session on its target.
    :param giving: on the target of ``back``.
    """

    def __init__(
        self,
        options: SwitchoverOptions,
        store: StateStore,
        sub: Subscription,
        back: Subscription,
        taking: psycopg.Connection,
        giving: psycopg.Connection,
        reporter: Reporter,
    ) -> None:
        self._options = options
        self._store = store
        self._sub = sub
        self._back = back
        self._taking = taking
        self._giving = giving
        self._reporter = reporter
        self._command = commands(options, sub, back)
        self._kept = [giving.info.backend_pid]
        self.timing = Timing()

    # --- until the right is taken

    def until_taken(self, entry: Entry, alive: Callable[[], None]) -> None:
        """Move the right to the taking side, or leave everything as it was.

        :param entry: of the taking side, planned or prepared.
        :param alive: raises what ended apply.
        """
        try:
            self._prepare(entry)
            with contextlib.ExitStack() as stack:
                sessions = _Sessions(stack, self._sub, self._back, self._taking)
                self._kept.append(sessions.source.info.backend_pid)
                if self._phase(entry) == journal.OPEN:
                    self._approach(sessions.source, alive)
                self._pause(entry, sessions, alive)
        except BaseException:
            if self._phase(entry) in (journal.OPEN, journal.FENCED):
                self._reporter.warning(
                    "the switchover failed before the right to write was given: everything is left as it was"
                )
                self.release(entry)
            raise
        self.take(entry)

    def _phase(self, entry: Entry) -> str | None:
        """Return the phase of the giving side, None where it is not known."""
        with contextlib.suppress(psycopg.Error):
            found = journal.of(self._giving, entry.id)
            return None if found is None else found.phase
        return None

    def _prepare(self, entry: Entry) -> None:
        """Open the journal of the giving side, and fence the taking one."""
        sides = (self._back.subid, entry.subname, entry.back_name)
        with durable(self._giving):
            journal.add(self._giving, Entry(entry.id, journal.GIVING, *sides, journal.OPEN, entry.fence))
        if entry.phase != journal.PLANNED:
            return
        with self.timing.step("prepare"):
            with durable(self._taking):
                saved = fence.put(self._taking, entry.fence, self._roles())
                earlier = journal.latest(self._taking, journal.GIVING, entry.back_name)
                if earlier is not None and earlier.phase == journal.GIVEN and earlier.fence == entry.fence:
                    saved["lifted"] = dict(earlier.saved or {})  # what it replaced then is what clients had
                journal.move(
                    self._taking,
                    entry.id,
                    (journal.PLANNED,),
                    journal.PREPARED,
                    saved=journal.saved(saved),
                )
            if entry.fence != fence.COMMAND and "lifted" not in saved:
                fence.end_sessions(self._taking, [], time.monotonic() + APPROACH)
        failpoints.point("switchover.prepared")

    def _roles(self) -> set[str]:
        """Return the roles of pgsub on the two servers, which may connect to a fenced one."""
        return {self._taking.info.user, self._giving.info.user, *_users(self._sub, self._back)}

    def _approach(self, source: publisher.Connection, alive: Callable[[], None]) -> None:
        """Wait until apply is so near that the pause will be short."""
        deadline = time.monotonic() + APPROACH
        with self.timing.step("approach"):
            while True:
                began = time.monotonic()
                position = flushed_position(source)
                drain.covered(self._taking, self._sub.subid, position, deadline, self._check(alive))
                if time.monotonic() - began < NEAR:
                    drain.announce(self._taking, self._sub.subid, position)
                    return

    def _check(self, alive: Callable[[], None]) -> Callable[[], None]:
        options = WaitOptions(self._sub.name, self._options.state_dir, "lsn", MAX_LSN, 0.0, even_if_stopped=False)

        def check() -> None:
            alive()
            with contextlib.suppress(TimeoutExpired):  # an error that is recorded is raised before
                wait(options)

        return check

    def _pause(self, entry: Entry, sessions: _Sessions, alive: Callable[[], None]) -> None:
        """Fence the giving side, let the taking one have all of it, and give it the right."""
        with self.timing.step("fence"):
            self._fence(entry)
        there = journal.of(self._giving, entry.id)
        if there is None or there.phase != journal.FENCED:
            return  # another run went on
        deadline = time.monotonic() + self._timeout - (there.fenced_for or 0.0)
        with self.timing.step("end sessions"):
            fence.end_sessions(self._giving, self._kept, deadline)
        failpoints.point("switchover.sessions_ended")
        with self.timing.step("drain"):
            check = self._check(alive)
            drain.quiet(self._giving, self._taking, self._sub.subid, entry.id, deadline, check)
        failpoints.point("switchover.drained")
        with self.timing.step("sequences"):
            sessions.sequences(self._sub, deadline)
        failpoints.point("switchover.sequences")
        with self.timing.step("way back"):
            position = way_back.record(self._taking, entry.id)
            failpoints.point("switchover.recorded")
            way_back.advance(sessions.slots, self._back.slot_name or "", position)
        failpoints.point("switchover.advanced")
        if time.monotonic() > deadline:
            raise TimeoutExpired("timeout of the switchover", detail="It ran out before the right could be given.")
        with self.timing.step("give"), durable(self._giving):
            way_back.begin_at(self._giving, self._back.subid, position)
            journal.move(self._giving, entry.id, (journal.FENCED,), journal.GIVEN, position=format_lsn(position))
        failpoints.point("switchover.given")

    def _fence(self, entry: Entry) -> None:
        if self._phase(entry) == journal.OPEN:
            with durable(self._giving):
                saved = fence.put(self._giving, entry.fence, self._roles())
                journal.move(self._giving, entry.id, (journal.OPEN,), journal.FENCED, saved=journal.saved(saved))
            failpoints.point("switchover.fenced")
        if self._phase(entry) == journal.FENCED:
            self._command("fence")

    @property
    def _timeout(self) -> float:
        return TIMEOUT if self._options.timeout is None else self._options.timeout

    # --- it was given

    def take(self, entry: Entry) -> None:
        """Take the right that was given."""
        take(entry, self._giving, self._taking, self.timing)
        failpoints.point("switchover.taken")

    def turn(self, entry: Entry) -> None:
        """Tell the world, end the subscription, and let the one of the way back begin."""
        here = journal.of(self._taking, entry.id)
        assert here is not None
        if here.phase == journal.TAKEN:
            with self.timing.step("promote"):
                self._command("promote")
            with durable(self._taking):
                journal.move(self._taking, entry.id, (journal.TAKEN,), journal.PROMOTED)
            failpoints.point("switchover.promoted")
        name, folder = self._sub.name, self._options.state_dir
        with self.timing.step("turn"):
            if self._store.subscription(name).enabled:
                disable(folder, name, reporter=self._reporter)
            # what the way back writes must not be sent here again
            wait(WaitOptions(name, folder, "disabled", timeout=END_SECONDS))
            failpoints.point("switchover.disabled")
            if not self._store.subscription(self._back.name).enabled:
                enable(folder, self._back.name, reporter=self._reporter)
            failpoints.point("switchover.enabled")
            if here.phase != journal.DONE:
                with durable(self._taking):
                    journal.move(self._taking, entry.id, (journal.PROMOTED,), journal.DONE)
            failpoints.point("switchover.done")
            drop(folder, name, reporter=self._reporter)

    # --- the way back to how it was

    def release(self, entry: Entry) -> None:
        """Leave everything as it was: lift the fences, remove what was made for the way back.

        :raises StateForbids: the taking side has taken the right.
        """
        release(entry, self._giving, self._taking, self._command)
        drain.withdraw(self._taking, self._sub.subid)
        drop(self._options.state_dir, self._back.name, if_exists=True, reporter=self._reporter)
        failpoints.point("switchover.dropped")
        with durable(self._giving):
            journal.move(self._giving, entry.id, (journal.RELEASING, journal.RELEASED), journal.RELEASED)


def take(entry: Entry, giving: psycopg.Connection, taking: psycopg.Connection, timing: Timing) -> None:
    """Take the right that was given: clients may write on the taking side.

    :raises PgsubError: it was not given.
    :raises StateForbids: the taking side has declined it.
    """
    there, read = journal.of(giving, entry.id), time.monotonic()
    here = journal.of(taking, entry.id)
    # guard: the right is taken only after it was given
    if there is None or there.phase != journal.GIVEN:
        raise PgsubError(f"the right to write was not given, but is {there.phase if there else 'unknown'}")
    if here is None or here.phase in (journal.PREPARED, journal.DECLINED):
        saved = (here and here.saved) or {}
        with timing.step("take"), durable(taking):
            journal.move(taking, entry.id, (journal.PREPARED,), journal.TAKEN)
            fence.lift(taking, entry.fence, saved.get("lifted", saved))
        timing.pause = (there.fenced_for or 0.0) + time.monotonic() - read


def commands(options: SwitchoverOptions, sub: Subscription, back: Subscription) -> Callable[[str], None]:
    """Return what runs the user's command for an action, if there is one; it may run more than once."""

    def run(action: str) -> None:
        command = options.promote_command if action == "promote" else options.fence_command
        if command is not None:
            seconds = TIMEOUT if options.timeout is None else options.timeout
            fence.run(command, action, back.target, sub.target, seconds)

    return run


def release(
    entry: Entry,
    giving: psycopg.Connection,
    taking: psycopg.Connection | None,
    run_command: Callable[[str], None],
) -> None:
    """Let clients write on the giving side again, and take back what fenced the taking one.

    :param taking: None where it cannot be reached; what was given is not released then.
    :raises StateForbids: the taking side has taken the right.
    :raises TargetUnavailable: the right was given, and the taking side cannot be asked.
    """
    there = journal.of(giving, entry.id)
    if there is not None and there.phase == journal.GIVEN:
        if taking is None:
            raise TargetUnavailable("the right to write was given to a server that cannot be reached")
        # guard: what was given is released only after the taking side has declined
        decline(taking, entry)
    if there is not None and there.phase in (journal.OPEN, journal.FENCED, journal.GIVEN):
        with durable(giving):
            journal.move(giving, entry.id, (there.phase,), journal.RELEASING)
            if there.phase != journal.OPEN:
                fence.restore(giving, there.fence, there.saved or {})
        failpoints.point("switchover.releasing")
    if there is not None and there.phase not in (journal.OPEN, journal.RELEASED):
        run_command("release")
    if taking is not None:
        decline(taking, entry)
        failpoints.point("switchover.declined")


def decline(taking: psycopg.Connection, entry: Entry) -> None:
    """Decline the right for the taking side, which is what it was before then."""
    here = journal.of(taking, entry.id)
    if here is None or here.phase == journal.DECLINED:
        return
    with durable(taking):
        journal.move(taking, entry.id, (journal.PLANNED, journal.PREPARED), journal.DECLINED)
        if here.phase == journal.PREPARED:
            fence.restore(taking, here.fence, here.saved or {})


def plan(taking: psycopg.Connection, sub: Subscription, back_name: str, way: str) -> Entry:
    """Write the first row of the journal, on the taking side."""
    options = catalog.options(sub)
    entry = Entry(
        str(uuid.uuid4()), journal.TAKING, sub.subid, sub.name, back_name, journal.PLANNED, way, definition=options
    )
    with durable(taking):
        journal.add(taking, entry)
    failpoints.point("switchover.planned")
    return entry


class _Sessions:
    """Sessions that are opened before the pause."""

    def __init__(
        self, stack: contextlib.ExitStack, sub: Subscription, back: Subscription, taking: psycopg.Connection
    ) -> None:
        self.source = stack.enter_context(giving_source(taking, sub))
        name = SessionName(sub.subid, "sequences", 0)
        self._target = stack.enter_context(contextlib.closing(target.connect(sub.target, name, replica=False)))
        self.slots = stack.enter_context(connect_publisher(back))

    def sequences(self, sub: Subscription, deadline: float) -> None:
        """Bring the sequences of the taking side to the values of the giving side.

        :raises PgsubError: one cannot be set.
        """
        reading.prepare(self._target)
        reading.prepare(self.source)
        while True:
            compared = synchronization.look(self._target, self.source, sub)
            outcomes = synchronization.bring(self._target, compared, run_as_owner=sub.run_as_owner)
            failed = synchronization.failure(sub, outcomes, TargetSchemaError)
            if failed is not None:
                raise failed
            kept = synchronization.kept(sub, outcomes)
            if kept is None:
                return
            if time.monotonic() > deadline:
                raise kept


def _users(*subs: Subscription) -> set[str]:
    """Return the users that connection strings name."""
    from pgsub.common import conninfo as ci

    texts = [text for sub in subs for text in (sub.connection, sub.target)]
    return {user for text in texts if (user := ci.parse(text, "target").get("user"))}
