"""The main slot of a subscription that is dropped, and whether it may be missing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import psycopg

from pgsub.catalog.store import StateStore
from pgsub.commands.reporter import Reporter
from pgsub.common.errors import SlotLost
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.publisher import connect as publisher
from pgsub.publisher import slots
from pgsub.target.ledger import subscriptions


@dataclass(frozen=True, slots=True)
class MainSlot:
    """A slot that is to be dropped. A missing one is an error, as for the server (ReplicationSlotDropAtPubNode).

    Unless its worker has found it lost, an earlier drop may have got as far as this, or no ledger knows.

    :ivar lost: its worker has found that it is.
    """

    sub: Subscription
    lost: bool

    @classmethod
    def of(cls, sub: Subscription, store: StateStore) -> MainSlot:
        """As the state store has it."""
        return cls(sub, any(row.class_ == SlotLost.__name__ for row in store.errors(sub.subid)))

    def drop(
        self, connection: publisher.Connection, name: str, session: psycopg.Connection | None, reporter: Reporter
    ) -> None:
        """Drop it on the publisher.

        :param session: on the target, where its ledger knows the subscription.
        :raises SlotLost: it is missing, and should be there.
        """
        with self._begun(session) as may_be_missing:
            try:
                slots.drop_slot(connection, name, missing_ok=False)
            except SlotLost as error:
                if not may_be_missing:
                    command = f"pgsub drop {word(self.sub.name)} --keep-slot --yes"
                    error.hint = f"To drop the subscription without its slot:\n{command}"
                    raise
                reporter.warning(f'replication slot "{name}" does not exist on the publisher')
                return
        reporter.notice(f'dropped replication slot "{name}" on publisher')

    @contextlib.contextmanager
    def _begun(self, session: psycopg.Connection | None) -> Iterator[bool]:
        """The ledger knows of the drop: the next one need not ask why the slot is missing. Gives whether it may be."""
        if session is None or self.lost:
            yield True
            return
        before = subscriptions.begin_slot_drop(session, self.sub.subid)
        try:
            yield before
        except SlotLost:
            subscriptions.registered(session, self.sub.subid)  # or the next drop would take it for its own work
            raise
