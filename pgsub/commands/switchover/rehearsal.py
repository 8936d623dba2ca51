"""The rehearsal of a switchover: its obstacles, and the present duration of the steps of the pause."""

from __future__ import annotations

import contextlib
import secrets
import time
from dataclasses import asdict

import psycopg

from pgsub.apply.verified_publisher import committed_position
from pgsub.catalog.store import StateStore
from pgsub.commands.reporter import Reporter
from pgsub.commands.serve.apply_to_point import served
from pgsub.commands.sessions import ledger_session, verified_publisher
from pgsub.commands.status.wait import WaitOptions, wait
from pgsub.commands.switchover.obstacles.obstacle import ERROR
from pgsub.commands.switchover.outcome import REHEARSED, Outcome
from pgsub.commands.switchover.parties import SwitchoverOptions, giving_session, the_one
from pgsub.commands.switchover.transfer import way_back_subscription
from pgsub.commands.switchover.transfer.right_to_write import Timing
from pgsub.commands.switchover.transfer.steps import APPROACH
from pgsub.commands.switchover.under_way import under_way
from pgsub.common.errors import StateForbids
from pgsub.common.plural import counted
from pgsub.common.subscription import Subscription
from pgsub.protocol.lsn import format_lsn
from pgsub.publisher import connect as publisher
from pgsub.publisher import slots
from pgsub.publisher.current_wal_lsn import flushed_position
from pgsub.publisher.server_errors import translating
from pgsub.switchover import drain, fence
from pgsub.tablesync.sequences import synchronization
from pgsub.target.session import connect as target
from pgsub.target.session.connect import SessionName

#: Number of times that the pause waits for apply.
_ROUNDS = 2
_PAUSE = ("drain", "sequences", "way back")


def rehearse(options: SwitchoverOptions, *, reporter: Reporter) -> Outcome:
    """Search for obstacles and, if there are none, measure the steps. Nothing is changed.

    :raises StateForbids: a switchover is under way.
    :raises PgsubError: a server cannot be reached, or apply does not reach the publisher's position.
    """
    with StateStore.open(options.state_dir, create=False) as store:
        sub = the_one(store, options)
        timing = Timing()
        with contextlib.ExitStack() as stack:
            taking = stack.enter_context(ledger_session(store, sub))
            # guard: nobody is told to remove what a switchover that is under way has made
            if under_way(taking, sub, store) is not None:
                raise _begun(options)
            giving = stack.enter_context(giving_session(options, sub))
            try:
                seen = way_back_subscription.obstacles(options, sub, taking)
                listed = [asdict(one) for one in seen]
                if any(one.severity == ERROR for one in seen):
                    return Outcome(sub.name, options.names[1], REHEARSED, obstacles=listed)
                ended = len(fence.sessions(giving, []))
                with served(store, options.state_dir, sub, reporter):
                    _apply(options, sub, taking, timing)
                _sequences(sub, taking, timing)
                _slot(options, sub, timing)
            except psycopg.Error as error:
                raise target.translate(error, "rehearse the switchover", user=taking.info.user) from None
    pause = sum(timing.steps[name] for name in _PAUSE)
    said = f"{counted(ended, 'session')} of clients would be ended on the publisher."
    found = Outcome(sub.name, options.names[1], REHEARSED, pause=pause, steps=timing.steps, said=said, obstacles=listed)
    found.sessions = ended
    return found


def _begun(options: SwitchoverOptions) -> StateForbids:
    return StateForbids(
        "a switchover of the subscription is under way, so it cannot be rehearsed",
        hint=f"See where it stands, and what can be done:\n{options.command} --status",
    )


def _apply(options: SwitchoverOptions, sub: Subscription, taking: psycopg.Connection, timing: Timing) -> None:
    """Wait for apply like a switchover."""
    position = committed_position(taking, sub)
    wait(WaitOptions(sub.name, options.state_dir, "lsn", position, APPROACH, even_if_stopped=False))
    for _ in range(_ROUNDS):
        position = committed_position(taking, sub)
        with timing.step("drain"):
            drain.covered(taking, sub.subid, position, time.monotonic() + APPROACH, lambda: None)


def _sequences(sub: Subscription, taking: psycopg.Connection, timing: Timing) -> None:
    name = SessionName(sub.subid, "sequences", 0)
    with (
        verified_publisher(taking, sub, sub.connection) as source,
        contextlib.closing(target.open_session(sub, name, replica=False)) as session,
    ):
        with timing.step("sequences"):
            synchronization.look(session, source, sub)


def _slot(options: SwitchoverOptions, sub: Subscription, timing: Timing) -> None:
    """Create a temporary slot on the taking side and advance it."""
    name = f"pgsub_{sub.subid}_rehearsal_{secrets.token_hex(4)}"
    opened = publisher.connect(options.to_taking(sub), application_name=options.names[1], replication=True)
    with contextlib.closing(opened) as connection:
        slots.create_slot(connection, name, temporary=True)
        with timing.step("way back"), translating(connection, "advance a replication slot"):
            connection.execute(
                "SELECT pg_catalog.pg_replication_slot_advance(%s, %s::pg_lsn)",
                (name, format_lsn(flushed_position(connection))),
            )
