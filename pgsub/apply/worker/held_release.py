"""Applies the kept changes of released tables; the apply worker does this between batches.

They have a session of their own, because the stream has long replaced their relation descriptions. A commit applies
whole remote transactions and deletes them from the ledger, so a fault or a skip concerns all that was kept of one. A
transaction that is larger than a step goes through a file, as in the stream, and needs no more memory.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby

import psycopg

from pgsub.apply.rows.relation_cache import NEVER, local_name
from pgsub.apply.rows.table_state_filter import Decision
from pgsub.apply.rows.worker_sessions import TargetSession, WorkerStreams
from pgsub.apply.stream.spool import Spool
from pgsub.apply.stream.transaction_batch import Batch
from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.apply.worker.committer import Committer
from pgsub.apply.worker.policy import ChangePolicy
from pgsub.apply.worker.start import WorkerSpec
from pgsub.common import failpoints
from pgsub.common.errors import ApplyError, StateForbids, StreamsMustRestart
from pgsub.common.quoting import word
from pgsub.protocol import encoder
from pgsub.protocol.decoder import decode_change
from pgsub.protocol.frames import Frames, Segment
from pgsub.protocol.messages import Relation
from pgsub.target.catalog.table_names import names_of
from pgsub.target.ledger.skip import Skip
from pgsub.target.ledger.subscriptions import RelationState, table_states
from pgsub.target.ledger.tables import held_tables
from pgsub.target.ledger.tables.held_tables import HeldChanges, HeldPlace

#: Bytes of kept messages that are read and committed together, and the longest interruption of the stream in seconds.
STEP_BYTES, STEP_SECONDS = 8 << 20, 1.0
#: Seconds between checks whether the last table can return to its normal state.
PAUSE_SECONDS = 0.2


class HeldRelease:
    """The application of the kept changes of released tables, for one apply worker."""

    def __init__(self, streams: WorkerStreams, spec: WorkerSpec) -> None:
        self._streams = streams
        self._spec = spec
        self._tables: set[int] = set()
        self._version = -1
        self._work: tuple[TargetSession, _HeldPolicy, Committer] | None = None
        self._next_step = 0.0

    def tables(self, relids: set[int], version: int) -> None:
        """Set the tables being released, as of a ``states_version``."""
        self._tables, self._version = relids, version
        self._next_step = 0.0
        if not relids:
            self.close()

    def close(self) -> None:
        """Close the session."""
        if self._work is not None:
            self._work[0].connection.close()
            self._work = None

    def step(self, remote_lsn: int) -> bool:
        """Apply kept changes for a while.

        :param remote_lsn: the worker's position in the ledger.
        :return: whether the table states must be read again.
        :raises PgsubError: located, with the remote transaction of the change.
        """
        if not self._tables or time.monotonic() < self._next_step:
            return False
        if self._work is None:
            session = self._streams.open_session()
            policy = _HeldPolicy(session, self._spec.subscription.subid, self._streams.assembler.spool)
            self._work = session, policy, Committer(session, policy, set_based=self._streams.set_based)
        try:
            return self._drain(*self._work, remote_lsn)
        except ApplyError as error:
            error.hint = error.hint or (
                "The change was kept while the table was held. Remove what conflicts with it on the target, or hold"
                " the table again, so that the others continue:\n"
                f"pgsub alter {word(self._spec.subscription.name)}"
                f" --hold {word(str(error.relation))}"
            )
            raise

    def _drain(self, session: TargetSession, policy: _HeldPolicy, committer: Committer, remote_lsn: int) -> bool:
        deadline = time.monotonic() + STEP_SECONDS
        committer.remote_lsn = remote_lsn
        while time.monotonic() < deadline:
            batch = found = policy.read(self._tables, self._version)
            if not found:
                return self._finish(session)
            try:
                while batch:
                    done = committer.apply(batch)
                    if not done:
                        return True
                    batch = batch.cut(done)[1]
                    failpoints.point("apply.released")
            finally:
                found.release()
        return False

    def _finish(self, session: TargetSession) -> bool:
        self._next_step = time.monotonic() + PAUSE_SECONDS
        try:
            return held_tables.finish(session.connection, self._spec.claim, self._tables)
        except psycopg.errors.LockNotAvailable:
            return False


class _HeldPolicy(ChangePolicy):
    """The policy for kept changes; the transaction that applies them deletes them from the ledger."""

    def __init__(self, session: TargetSession, subid: int, spool: Spool) -> None:
        self._session = session
        self._subid = subid
        self._spool = spool
        self._version = -1
        self._skip: Skip | None = None
        self._places: dict[int, HeldPlace] = {}  #: by id() of the transactions of a batch
        self._names: dict[int, tuple[str, str]] = {}  #: present names of the tables
        #: tables by the names that the descriptions have; a relation of the publisher may have had the changes of
        #: several, because its tables may have changed their names since
        self._tables: dict[tuple[str, str], int] = {}
        self._states: dict[int, RelationState] = {}
        self._before = b""  #: the description that was returned last

    def read(self, tables: set[int], version: int) -> Batch:
        """Read kept changes as transactions, each with all visible changes.

        :param tables: oids of the tables.
        :param version: states_version that must hold.
        """
        self._version, self._places, self._before = version, {}, b""
        stretches, goes_on = held_tables.read(self._session.connection, self._subid, tables, STEP_BYTES)
        self._states = table_states(self._session.connection, self._subid) if stretches else {}
        self._names = names_of(self._session.connection, tables) if stretches else {}
        self._tables = {name: relid for relid, name in self._names.items()}
        batch = Batch()
        for _, group in groupby(stretches, lambda one: one.transaction):
            parts = list(group)
            transaction = RemoteTransaction(parts[0].xid, parts[0].finish_lsn, commit_ts=parts[0].commit_ts)
            place = self._places[id(transaction)] = HeldPlace.of(parts)
            messages = self._messages(parts)
            if goes_on:  # then the batch has this transaction only
                self._read_rest(transaction, messages, place, tables)
            else:
                transaction.received, transaction.size = [messages], messages.size
            batch.add(transaction)
        return batch

    def _read_rest(self, transaction: RemoteTransaction, messages: Segment, place: HeldPlace, tables: set[int]) -> None:
        """Read the rest of a large transaction into a file."""
        transaction.spooled = spooled = self._spool.open(transaction.xid, "held")
        spooled.append(messages)
        goes_on = True
        while goes_on:
            parts, goes_on = held_tables.read(self._session.connection, self._subid, tables, STEP_BYTES, after=place)
            if parts:
                spooled.append(self._messages(parts))
                place.extend(HeldPlace.of(parts))
        transaction.size = spooled.size

    def _messages(self, stretches: Sequence[HeldChanges]) -> Segment:
        """Return the messages in order, each after the description that was kept with it."""
        payloads: list[bytes] = []
        for one in stretches:
            described = self._described(one)
            payloads += [described] if described != self._before else []
            payloads += encoder.split(one.messages)
            self._before = described
        return Frames.around(payloads).all()

    def _described(self, one: HeldChanges) -> bytes:
        """Return the description with the table's present name, because both sides may have renamed it since."""
        relation = decode_change(one.relation, False)
        assert isinstance(relation, Relation)
        # guard: what was kept for a dropped table is not made in one that took its name
        if one.srrelid not in self._names:
            self._tables[local_name(relation)] = one.srrelid
        schema, name = self._names.get(one.srrelid, local_name(relation))
        return encoder.relation(relation._replace(namespace=schema, name=name))

    def admit(self, batch: Batch) -> int:
        """Delete the changes from the ledger, under the lock; a transaction to be skipped is admitted alone."""
        progress = self._session.progress
        if progress.states_version != self._version:
            return 0
        count, self._skip = len(batch), None
        if progress.skip is not None:  # the skip may be of the stream, or of a later kept transaction
            lsns = [one.finish_lsn for one in batch.transactions()]
            count = lsns.index(progress.skip.lsn) if progress.skip.lsn in lsns else count
            if not count:
                count, self._skip = 1, progress.skip
        gone = [self._places[id(one)] for one in batch.cut(count)[0].transactions()]
        # guard: held changes are deleted in the commit that applies them
        if not held_tables.remove(self._session.connection, self._subid, gone):
            raise StreamsMustRestart("kept changes were removed meanwhile")
        return count

    def should_apply(self, relation: Relation, oid: int | None, finish_lsn: int) -> Decision | None:
        """Apply all changes of subscribed tables; the decision was made when they were kept.

        :raises StateForbids: the table is not subscribed or is being synchronized, when pgsub keeps no changes.
        """
        relid = self._tables.get(local_name(relation), NEVER)
        state = self._states.get(relid)
        # guard: kept changes are applied only to subscribed tables
        if state is None or state.srsubstate not in "sr":
            why = "is not subscribed" if state is None else "is being synchronized"
            raise StateForbids(
                f'cannot apply kept changes of relation "{".".join(local_name(relation))}": the table {why}',
                detail="pgsub keeps no changes of such a table: somebody else wrote them into the ledger.",
                hint="Find out who writes into schema pgsub, and remove them:\n"
                f"DELETE FROM pgsub.held_change WHERE subid = {self._subid} AND srrelid = {relid};",
                sqlstate="55000",
            )
        return Decision(relid)

    def skip(self) -> Skip | None:
        """Return the skip if it is for the kept transaction being applied."""
        return self._skip
