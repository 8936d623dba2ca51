"""The synchronization of one table, or of several small ones together, as the launcher sees it.

Mirrors LogicalRepSyncTableStart (tablesync.c), divided between the launcher and Spark. The slot's snapshot is held
here, because its holder must live as long as the copy. Copying and catching up are jobs. Small tables share a slot, a
snapshot and a task: a slot and a job for each would take longer than the copy of its rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence

import psycopg

from pgsub.apply import verified_publisher
from pgsub.common import failpoints
from pgsub.common.errors import Fenced, PgsubError, log_text
from pgsub.publisher import slot_names
from pgsub.publisher.connect import Connection
from pgsub.publisher.snapshot import SlotSnapshot
from pgsub.tablesync import catch_up, sync_slots
from pgsub.tablesync.context import SyncContext
from pgsub.tablesync.copy import cleanup, preparation
from pgsub.tablesync.copy.preparation import Prepared
from pgsub.tablesync.copy.task import Piece
from pgsub.tablesync.copy_pool import CopyPool
from pgsub.target.catalog.relation import TargetRelation
from pgsub.target.ledger import subscriptions, worker_takeover
from pgsub.target.ledger.subscriptions import RelationState
from pgsub.target.ledger.tables import handover, states
from pgsub.target.ledger.worker_takeover import Claim
from pgsub.target.session import connect as target
from pgsub.target.session import ledger_guard, transactions
from pgsub.target.session.connect import SessionName, must_use_password


class TableSync:
    """The synchronization of tables from any state to ``s``. It is called again after an error.

    :param relids: OIDs of the target's tables. Several are copied together, and catch up together. Some may stay ``f``,
        if apply withdrew their claims: they are for another attempt.
    """

    def __init__(self, context: SyncContext, *relids: int) -> None:
        self._context = context
        self._sub = context.subscription
        self._relids = relids
        self._claims: dict[int, Claim] = {}
        self._errors: dict[int, PgsubError] = {}

    def run(self) -> dict[int, PgsubError]:
        """Run until ``s`` is committed and the sync slot is dropped, or until the launcher stops.

        :return: errors of single tables; the others are synchronized.
        :raises PgsubError: nothing could be done; the launcher retries by its directive.
        """
        name = SessionName(self._sub.subid, f"table:{self._relids[0]}", 0)
        with contextlib.closing(target.open_session(self._sub, name)) as session:
            try:
                ledger_guard.check(session)
                self._claims = worker_takeover.take_over_many(session, self._sub.subid, self._relids)
                self._advance(session)
            except psycopg.Error as error:
                raise target.translate(error, "synchronize a table", user=session.info.user) from None
        return self._errors

    def _in_state(self, session: psycopg.Connection, wanted: str) -> list[RelationState]:
        """Return our tables in these states that have not failed, in the given order."""
        rows = {row.srrelid: row for row in subscriptions.relations(session, self._sub.subid)}
        if len(self._relids) == 1 and self._relids[0] not in rows:
            raise Fenced("the table was removed from the subscription")
        ours = [rows[relid] for relid in self._relids if relid in rows and relid not in self._errors]
        return [row for row in ours if row.srsubstate in wanted]

    def _advance(self, session: psycopg.Connection) -> None:
        if to_copy := self._in_state(session, "id"):
            self._copy(session, to_copy)
        copied = self._in_state(session, "f")
        if copied and not self._context.stopping.is_set():
            failpoints.point("sync.after_f")
            self._errors |= catch_up.hand_over(self._context, session, self._claims, copied)
            self._raise_alone()
        if done := self._in_state(session, "sr"):
            failpoints.point("sync.after_s")
            sync_slots.finish_sync(session, self._sub, [self._claims[row.srrelid] for row in done])
            for row in done:
                self._log(row, "finished")

    def _log(self, row: RelationState, what: str) -> None:
        self._context.log(
            "LOG",
            log_text(
                f'logical replication table synchronization worker for subscription "{self._sub.name}",'
                f' table "{row.relname}" has {what}'
            ),
        )

    # copy

    def _copy(self, session: psycopg.Connection, rows: Sequence[RelationState]) -> None:
        found, self._errors = preparation.find_targets(session, self._sub, rows)
        self._raise_alone()
        for row in rows:
            if row.srrelid in found:
                self._log(row, "started")
        sync_slots.release(session, self._sub, *found, claims=[self._claims[relid] for relid in found])
        adopt = {row.srrelid for row in rows if row.adopt}
        resume = self._clean_up(session, found, adopt)
        if not found:
            return
        together = len(found) > 1
        claims = [self._claims[relid] for relid in found]
        slot = self._slot_name(session, claims)
        attempts = states.start_copy(session, claims, slot)
        if together:
            with contextlib.suppress(psycopg.errors.LockNotAvailable):
                handover.claim_before_copy(session, claims)
        try:
            self._copy_from_slot(session, found, attempts, slot, adopt, resume, together=together)
        finally:
            if together:
                self._let_go(session, slot)

    def _clean_up(
        self, session: psycopg.Connection, found: dict[int, TargetRelation], adopt: Collection[int]
    ) -> set[int]:
        """Remove the rows of interrupted copies; return the tables whose copy may go on instead."""
        goes_on = set()
        for relid in sorted(cleanup.begun_before(session, self._sub.subid, found)):
            relation = found[relid]
            try:
                if relid in adopt:
                    cleanup.keep_rows(session, self._claims[relid])
                    continue
                if len(found) == 1 and cleanup.may_go_on(session, self._sub, self._claims[relid], relation):
                    goes_on.add(relid)
                    continue
                cleanup.remove_rows(session, self._claims[relid], relation)
                continue
            except psycopg.Error as error:
                doing = f'remove the rows of an interrupted copy from "{relation.schema}.{relation.name}"'
                self._errors[relid] = target.translate(error, doing, user=session.info.user)
            except PgsubError as error:
                self._errors[relid] = error
            del found[relid]
        self._raise_alone()
        return goes_on

    def _slot_name(self, session: psycopg.Connection, claims: Sequence[Claim]) -> str:
        sub, system = self._sub, self._context.system_identifier
        if len(claims) == 1:
            return slot_names.sync_slot_name(sub.subid, claims[0].worker, system)
        return slot_names.group_slot_name(sub.subid, states.next_group(session, sub.subid), system)

    def _copy_from_slot(
        self,
        session: psycopg.Connection,
        found: dict[int, TargetRelation],
        attempts: dict[int, int],
        slot: str,
        adopt: Collection[int],
        resume: Collection[int],
        *,
        together: bool,
    ) -> None:
        claims = [self._claims[relid] for relid in found]
        failpoints.point("sync.before_slot")
        with SlotSnapshot.open(
            self._sub.connection,
            slot,
            slot,
            self._sub.failover,
            verify=lambda replication: self._verify(session, replication),
            must_use_password=must_use_password(session, self._sub),
            report=lambda message, detail, hint: self._context.log("LOG", log_text(message, detail=detail, hint=hint)),
            stop=self._context.stopping,
        ) as snapshot:
            try:
                states.slot_position(session, claims, snapshot.consistent_point)
            except Fenced:
                sync_slots.drop_unnamed(session, self._sub, slot, list(found))
                raise
            if together:
                with contextlib.suppress(psycopg.errors.LockNotAvailable):
                    handover.move_claims(session, claims, snapshot.consistent_point)
            failpoints.point("sync.after_slot")
            prepared = preparation.prepare(
                *(session, self._sub, found, self._claims, attempts, adopt, resume), application_name=slot
            )
            self._errors |= prepared.errors
            self._raise_alone()
            width = 1 if together else self._sub.copy_workers  # max_sync_workers limits the tables in progress
            self._run(session, snapshot, prepared.pieces, width)
            if prepared.resumed is not None:
                self._run(session, snapshot, preparation.rest(session, self._sub, prepared.resumed), width)
        self._finish_chunked(session, prepared, attempts)

    def _verify(self, session: psycopg.Connection, replication: Connection) -> None:
        """Verify the publisher. A timeline that it moved to is recorded before the slot is created."""
        verified_publisher.verify(session, replication, self._sub.subid, list(self._claims.values()))
        sync_slots.check_not_standby(replication, self._sub)

    def _run(self, session: psycopg.Connection, snapshot: SlotSnapshot, pieces: Sequence[Piece], width: int) -> None:
        pool = CopyPool(self._context, session, snapshot, pieces, width)
        pool.run()
        self._errors |= pool.errors

    def _finish_chunked(self, session: psycopg.Connection, prepared: Prepared, attempts: dict[int, int]) -> None:
        for relid in prepared.chunked:
            with transactions.durable(session):
                if not states.finish_copy(session, self._claims[relid], attempts[relid]):
                    raise Fenced("a chunk of the copy is not on the target")

    def _let_go(self, session: psycopg.Connection, slot: str) -> None:
        """Release tables that failed: apply must not wait at them, and the shared slot must not wait for them."""
        with contextlib.suppress(psycopg.Error, PgsubError):
            failed = {row.srrelid for row in self._in_state(session, "d")} | self._errors.keys()
            if not failed:
                return
            # a task that was given up may still commit ``f``, but none may once the slot is gone; an attempt of
            # another launcher must not be ended here
            with transactions.durable(session):
                worker_takeover.fence(session, *(self._claims[relid] for relid in failed))
            claims = worker_takeover.take_over_many(session, self._sub.subid, failed)
            rows = subscriptions.relations(session, self._sub.subid)
            left = [row.srrelid for row in rows if row.srrelid in failed and row.srsubstate in "id"]
            if left:
                handover.withdraw_claims(session, self._sub.subid, left)
                sync_slots.release_slot(session, self._sub, slot, left, claims=[claims[relid] for relid in left])

    def _raise_alone(self) -> None:
        """Raise the error of a table that is synchronized alone."""
        if len(self._relids) == 1:
            for error in self._errors.values():
                raise error
