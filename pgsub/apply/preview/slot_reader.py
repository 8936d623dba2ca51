"""Reads what the publisher will send without moving the slot, whether the subscription runs, is disabled or is stuck.

It streams a temporary copy of the subscription's slot, which ends with the connection. The slot itself is never used.
Transactions in progress are not streamed, so whole transactions are received in the order of their ends, message by
message, and memory stays bounded. The copy of a two-phase slot requests two_phase, so a prepared transaction has its
prepare_lsn as in apply. Mirrors pg_logical_slot_peek_binary_changes (logicalfuncs.c), which needs memory, and a slot
that nobody streams.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from pgsub.apply.stream.receiver import now
from pgsub.apply.stream.transactions import Kind, RemoteTransaction, opened
from pgsub.apply.verified_publisher import recorded
from pgsub.common.subscription import Subscription
from pgsub.protocol import walsender_messages
from pgsub.protocol.decoder import Decoder
from pgsub.protocol.lsn import MAX_LSN
from pgsub.protocol.messages import Commit, Message, Prepare
from pgsub.protocol.walsender_messages import Keepalive
from pgsub.publisher import connect as publisher
from pgsub.publisher import identity, slots
from pgsub.publisher.stream import walsender
from pgsub.target.ledger.subscriptions import Identity

#: Seconds between requests for the position, and between the replies that keep the walsender from timing out.
_ASK, _ANSWER = 0.2, 5.0


@dataclass(frozen=True, slots=True)
class Change:
    """One message of a transaction: a relation, a type, a row change or a TRUNCATE.

    :ivar transaction: its ``size`` is the number of bytes received so far.
    """

    transaction: RemoteTransaction
    message: Message


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a transaction, or the decision of a prepared one."""

    transaction: RemoteTransaction


@dataclass(frozen=True, slots=True)
class Reached:
    """A position before which every transaction that ends has been read."""

    position: int


Step = RemoteTransaction | Change | Ended | Reached


class SlotReader:
    """The stream of a slot's copy.

    :param start: start position; transactions that it covers are not sent.
    :ivar flush_lsn: end of the publisher's WAL when reading began; reading stops there.
    """

    def __init__(self, sender: walsender.WalSender, start: int, flush_lsn: int) -> None:
        self._sender = sender
        self._start = start
        self.flush_lsn = flush_lsn

    def steps(self) -> Iterator[Step]:
        """Yield everything up to :attr:`flush_lsn`: each transaction without its messages, then its changes, then its
        end.

        :raises PgsubError: the connection is lost, or the publisher cannot decode.
        """
        decoder, transaction, position = Decoder(), None, self._start
        for lsn, payload in self._messages():
            if payload is None:
                position = max(position, lsn)
                if transaction is None:
                    yield Reached(position)
                    if position >= self.flush_lsn:
                        return
                continue
            message = decoder.decode(payload)
            begun = opened(message, lsn)
            if begun is not None:
                transaction = begun
                yield transaction
                if transaction.kind in (Kind.COMMIT, Kind.PREPARE):
                    continue
            if transaction is None:
                continue  # a non-transactional message
            transaction.size += len(payload)
            if isinstance(message, Commit | Prepare):
                transaction.end_lsn = message.end_lsn
            if transaction.end_lsn:
                yield Ended(transaction)
                transaction = None
            else:
                yield Change(transaction, message)

    def _messages(self) -> Iterator[tuple[int, bytes | None]]:
        """Yield LSNs and messages; without a message, the LSN is a position before which everything was sent."""
        answer = ask = time.monotonic() + _ASK
        received = self._start
        while True:
            frames = self._sender.receive()
            for frame in frames:
                parsed = walsender_messages.parse(frame)
                received = max(received, parsed.wal_end)
                if isinstance(parsed, Keepalive):
                    yield parsed.wal_end, None
                else:
                    yield parsed.start, parsed.payload
            clock = time.monotonic()
            if (not frames and clock >= ask) or clock >= answer:
                # also confirmed, because a publisher that is shutting down waits for that; the slot's copy is temporary
                self._sender.send(walsender_messages.standby_status(received, received, received, now(), not frames))
                ask, answer = clock + _ASK, clock + _ANSWER
            if not frames:
                self._sender.wait(_ASK)


@contextlib.contextmanager
def reading(
    sub: Subscription, known: Identity, start: int, *, two_phase: bool, must_use_password: bool = False
) -> Iterator[SlotReader]:
    """Read the subscription's slot from a position on.

    :param known: the publisher as recorded in the ledger.
    :param start: apply's ``remote_lsn``; reading starts at the slot's own position if that is later.
    :param two_phase: the subscription's slot sends prepared transactions.
    :raises PgsubError: unreachable, another system, slot lost, or no free slot on the publisher at the moment.
    """
    assert sub.slot_name is not None
    with contextlib.closing(
        publisher.connect(
            sub.connection, application_name=sub.name, replication=True, must_use_password=must_use_password
        )
    ) as replication:
        expected = recorded(known)
        actual = identity.verify_publisher(replication, expected, remote_lsn=start)
        state = slots.slot_state(replication, sub.slot_name)
        identity.check_slot(state, MAX_LSN, sub.slot_name, expected.dbname, in_recovery=actual.in_recovery)
        assert state is not None
        copy = f"pgsub_{sub.subid}_preview_{replication.info.backend_pid}"
        slots.copy_slot(replication, sub.slot_name, copy, temporary=True)
        options = walsender.start_options(
            replication.info.server_version,
            sub.publications,
            binary=False,
            streaming="off",
            origin=sub.origin,
            two_phase=two_phase,
        )
        start = max(start, state.confirmed_flush_lsn or 0)
        sender = walsender.WalSender(replication)
        sender.start(copy, start, options)
        yield SlotReader(sender, start, actual.flush_lsn)
