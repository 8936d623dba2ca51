"""Starts both streams of a worker: claim, checks, START_REPLICATION. Mirrors start_apply (worker.c)."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import psycopg

from pgsub.apply import verified_publisher
from pgsub.apply.rows.worker_sessions import TargetSession, WorkerStreams, target_session
from pgsub.apply.stream.assembler import Assembler
from pgsub.apply.stream.receiver import Timing
from pgsub.apply.stream.spool import Spool
from pgsub.apply.stream.spool_space import limit
from pgsub.apply.stream.synchronous_standby import StandbyNames, named
from pgsub.common import failpoints
from pgsub.common.errors import PublisherUnavailable, log_text
from pgsub.common.subscription import AUTO, Subscription, receiver_timeout
from pgsub.common.worker_heartbeat import HeartbeatAddress
from pgsub.publisher import connect as publisher
from pgsub.publisher import identity, slots
from pgsub.publisher.identity import PublisherIdentity
from pgsub.publisher.server_errors import translate
from pgsub.publisher.stream import walsender
from pgsub.target.ledger import definitions, events, right_to_write, subscriptions, two_phase_state, worker_takeover
from pgsub.target.ledger.maintenance import reconciliation
from pgsub.target.ledger.progress import Progress
from pgsub.target.ledger.worker_takeover import Claim
from pgsub.target.session import connect as target
from pgsub.target.session import origins
from pgsub.target.session.connect import SessionName, must_use_password

#: PGSUB_SET_BASED=off makes everything go row by row, to check whether sets cause a difference.
SET_BASED = os.environ.get("PGSUB_SET_BASED", "on") != "off"
#: Number of status updates per wal_sender_timeout of the publisher.
_ANSWERS = 4
_IN_USE = "55006"
#: Seconds to wait for another walsender to release the slot.
BUSY_SECONDS = 3.0
_RECEIVER = """
SELECT max(setting::bigint) FILTER (WHERE name = 'wal_receiver_timeout') / 1000.0,
       max(setting::bigint) FILTER (WHERE name = 'wal_receiver_status_interval')::float8
  FROM pg_catalog.pg_settings WHERE name IN ('wal_receiver_timeout', 'wal_receiver_status_interval')
"""
_SENDER = "SELECT setting::bigint / 1000.0 FROM pg_catalog.pg_settings WHERE name = 'wal_sender_timeout'"


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The input of a worker task; picklable, without secrets.

    :ivar slot_name: the slot to stream; ``application_name`` is shown on the publisher.
    :ivar spool_dir: folder for unfinished transactions, None for the executor's temporary folder.
    :ivar tables: target tables of a tablesync worker, by name, with their claims. ``claim`` is the first one's.
    """

    subscription: Subscription
    claim: Claim
    slot_name: str
    application_name: str
    heartbeat: HeartbeatAddress | None = None
    until_lsn: int = 0
    spool_dir: str | None = None
    tables: dict[tuple[str, str], Claim] = field(default_factory=dict)
    set_based: bool = SET_BASED
    spool_limit: int = field(default_factory=limit)

    @property
    def applies(self) -> bool:
        """Whether it is the apply worker, not a tablesync worker."""
        return self.claim.worker == worker_takeover.APPLY


@contextlib.contextmanager
def streams(spec: WorkerSpec) -> Iterator[WorkerStreams]:
    """Open both ends at the ledger's position, and take the claim.

    :raises Fenced: this is a second attempt of the same task.
    :raises PgsubError: unreachable servers, wrong system, lost slot: see identity.py.
    """
    with contextlib.ExitStack() as stack:
        try:
            opened = _open(spec, stack)
        except psycopg.Error as error:
            raise target.translate(error, "start a worker on the target") from None
        yield opened


def _open(spec: WorkerSpec, stack: contextlib.ExitStack) -> WorkerStreams:
    sub, claim = spec.subscription, spec.claim
    spool = Spool(spec.spool_dir, f"{sub.subid}-{claim.worker}", spec.spool_limit)
    stack.callback(spool.close)
    own = _session(spec)
    stack.callback(own.connection.close)
    own.progress.claim([one for one in spec.tables.values() if one != claim])
    replication = publisher.connect(
        sub.connection,
        application_name=spec.application_name,
        replication=True,
        must_use_password=must_use_password(own.connection, sub),
    )
    stack.callback(replication.close)
    slot = _check(own.connection, replication, spec, own.progress)
    pending, prepares, position = _two_phase(own.connection, replication, spec, slot)
    options = walsender.start_options(
        replication.info.server_version,
        sub.publications,
        binary=sub.binary,
        streaming=sub.streaming,
        origin=sub.origin,
        two_phase=prepares,
        messages=sub.messages and spec.applies,
    )
    parallel = options.get("streaming") == "parallel"
    standby = StandbyNames(sub.connection, spec.application_name, named(replication))
    timing = _timing(own.connection, replication, spec.subscription)
    sender = walsender.WalSender(replication)
    sender.start(spec.slot_name, max(own.progress.remote_lsn, position), options)
    if spec.applies and not own.progress.tagged and origins.allowed(own.connection):
        _say_untagged(own.connection, sub)
    return WorkerStreams(
        own,
        sender,
        Assembler(spool, parallel_streaming=parallel),
        partial(_further_session, spec, tagged=own.progress.tagged),
        partial(_further_session, spec, tagged=own.progress.tagged, spare=sub.apply_workers == AUTO),
        standby,
        timing,
        parallel_workers=sub.max_parallel_apply_workers if parallel and spec.applies else 0,
        writers=sub.apply_workers if spec.applies else 1,
        pending=pending,
        set_based=spec.set_based,
        confirmed=(slot and slot.confirmed_flush_lsn) or 0,
    )


def _session(spec: WorkerSpec, *, must: bool = False, spare: bool = False) -> TargetSession:
    """Open a writing session. A take-over finds it by its name; the ledger accepts it by the claim."""
    sub, role = spec.subscription, "apply" if spec.applies else f"sync:{spec.claim.worker}"
    name = SessionName(sub.subid, role, spec.claim.epoch)
    return target_session(sub, name, spec.claim, sub.synchronous_commit, must=must, spare=spare)


def _say_untagged(session: psycopg.Connection, sub: Subscription) -> None:
    """Log that changes carry no origin; ``status`` shows it as long as this is so."""
    text = log_text(
        f'no replication origin is free on the target for subscription "{sub.name}"',
        detail="What it writes counts as written locally. Nothing is known to depend on origins, so apply continues.",
        hint=origins.SHORT_HINT,
    )
    events.add(session, sub.subid, events.log_entry("WARNING", text))


def _further_session(spec: WorkerSpec, *, tagged: bool, spare: bool = False) -> TargetSession:
    """Open a further session if the claim still holds, because a take-over ends only existing sessions.

    :param tagged: the worker's own session has a replication origin. Without one, peers with ``origin = none`` would
        take the changes of this session for local ones and send them back.
    :param spare: the worker can do without this session.
    """
    session = _session(spec, must=tagged, spare=spare and tagged)
    try:
        session.progress.control()
    except BaseException:
        session.connection.close()
        raise
    return session


def _two_phase(
    session: psycopg.Connection, replication: publisher.Connection, spec: WorkerSpec, slot: slots.SlotState | None
) -> tuple[bool, bool, int]:
    """Return whether two_phase is pending, whether to request it, and the minimum start position.

    :raises StateForbids: the slot is two-phase but the subscription is not, or the publisher does not support it.
    """
    if not spec.applies:
        return False, False, 0
    state = two_phase_state.state(session, spec.claim.subid)
    if state == two_phase_state.DISABLED:
        identity.check_not_two_phase(slot, spec.subscription.name)
        return False, False, 0
    slots.check_two_phase(replication)
    enabled, position = two_phase_state.enable_if_ready(session, spec.claim)
    if not enabled:
        identity.check_not_two_phase(slot, spec.subscription.name, pending=True)
        return True, False, 0
    failpoints.point("apply.after_two_phase")
    return False, True, position


def _timing(session: psycopg.Connection, replication: publisher.Connection, sub: Subscription) -> Timing:
    """Read the timeouts of both ends: wal_receiver_* as for a subscription of the target's own, or the option.

    In the settings 0 means never. Status updates are sent often enough for wal_sender_timeout without a request: the
    request may lie behind a large value in transit, or behind messages that apply has not taken.
    """
    try:
        sender = replication.execute(_SENDER.encode()).fetchone()
    except psycopg.Error as error:
        raise translate(error, "read the publisher's settings") from None
    settings = session.execute(_RECEIVER.encode()).fetchone()
    timeout, interval = settings or (None, None)
    if (own := receiver_timeout(sub.wal_receiver_timeout)) is not None:
        timeout = own
    default, wanted = Timing(), float(sender[0] if sender else 0) / _ANSWERS
    asked = default.status_interval if interval is None else float(interval)
    return Timing(
        min((one for one in (asked, wanted) if one > 0), default=math.inf),
        default.timeout if timeout is None else float(timeout) or math.inf,
        float(interval or default.idle_interval),
    )


def _check(
    session: psycopg.Connection, replication: publisher.Connection, spec: WorkerSpec, progress: Progress
) -> slots.SlotState | None:
    right_to_write.check(session, spec.subscription.subid, spec.subscription.name)
    definitions.check_newest(session, spec.subscription)
    if spec.applies:
        # guard: apply does not start while its slot is replaced
        reconciliation.check_not_under_way(subscriptions.identity(session, spec.subscription.subid))
    # Without the slot nothing is recorded: another server's timeline would prevent the return to the former publisher.
    claims = [spec.claim] if slots.slot_state(replication, spec.slot_name) is not None else []
    actual = verified_publisher.verify(session, replication, spec.subscription.subid, claims)
    state = _slot(replication, spec.slot_name)
    if not max(progress.remote_lsn, progress.reported_lsn) and spec.applies and state is not None:
        _adopt_slot(session, spec, progress, state, actual)
    reported, standby = progress.reported_lsn, actual.in_recovery
    identity.check_slot(state, reported, spec.slot_name, actual.dbname, in_recovery=standby)
    at = progress.remote_lsn, spec.claim.worker
    verified_publisher.check_last_transaction(session, replication, spec.subscription, state, *at)
    return state


def _adopt_slot(
    session: psycopg.Connection, spec: WorkerSpec, progress: Progress, state: slots.SlotState, who: PublisherIdentity
) -> None:
    """Start at the position of a slot that was created by hand after ``create``; nothing was received yet.

    :raises ReplicationBroken: a table was synchronized before that position.
    """
    position = state.confirmed_flush_lsn or 0
    done = [one.srsublsn for one in subscriptions.table_states(session, spec.claim.subid).values() if one.srsublsn]
    # guard: a slot is not begun with behind a table that has been copied, without ", *done"
    known = min([position, *done])
    identity.check_slot(state, known, spec.slot_name, who.dbname, in_recovery=who.in_recovery)
    subscriptions.adopt_slot(session, spec.claim, position)
    progress.read()


def _slot(replication: publisher.Connection, slot_name: str) -> slots.SlotState | None:
    """Return the slot's state once it is inactive. The walsender of a killed predecessor ends within moments."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        state = slots.slot_state(replication, slot_name)
        if state is None or not state.active:
            return state
        if time.monotonic() > deadline:
            raise PublisherUnavailable(
                f'replication slot "{slot_name}" is active for PID {state.active_pid}', sqlstate=_IN_USE
            )
        time.sleep(0.1)
