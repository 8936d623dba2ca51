"""The hand-over of a table from its tablesync worker to the apply worker, who share nothing but the ledger.

The WAL holds transactions 1 to N; each inserts one row into the table, which has no key, so that doubles show. The
commit record of transaction i starts at :func:`commit_lsn` and ends at :func:`end_lsn`; other records lie between, so a
keepalive may name any position from the end of one to the start of the next, both included.

Both workers may crash at any point (``CRASHES`` times together): what they remember is lost, what the ledger and the
publisher hold stays. The rules under test are the switches of :class:`Rules`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import NamedTuple, TypeAlias

N = 4
CRASHES = 2
RECEIVE_BUFFER = 2
CHUNKS = 2
#: A transaction that moves the row of the first one from one chunk to the other.
MOVES = 2


class Failure(Enum):
    """What can go wrong."""

    LOST = "a row is missing although both workers are through"
    DOUBLED = "a row came twice or out of order"


@dataclass(frozen=True)
class Rules:
    """The rules, all on; then the freedoms that an implementation may take, all off."""

    #: Apply takes a transaction whose finish LSN equals srsublsn (not covered by it).
    finish_lsn_equal_to_srsublsn_is_applied: bool = True
    #: Apply reads the table states after it has the lock on its progress row, not before or with it.
    states_are_read_under_the_lock: bool = True
    #: A transaction of which nothing is applied moves remote_lsn all the same.
    filtered_transactions_move_remote_lsn: bool = True
    #: The sync worker compares (or claims) while it holds the lock on apply's progress row.
    sync_looks_under_the_lock: bool = True
    #: The table becomes r only when apply's remote_lsn has passed srsublsn.
    ready_waits_for_srsublsn: bool = True
    #: srsublsn is kept and checked in state r too.
    srsublsn_counts_in_ready: bool = True
    #: Before the first change beyond a claim apply waits.
    apply_waits_at_the_claim: bool = True
    #: The sync worker applies only what its claim covers.
    sync_stops_at_the_claim: bool = True
    #: After a bounded wait apply takes the claim away and goes on.
    apply_takes_a_claim_away: bool = True
    #: The table changes hands where the sync worker is, which may be beyond its claim.
    hands_over_where_it_is: bool = True
    #: What chunks of an earlier attempt brought is compared at the new snapshot.
    compares_what_was_brought: bool = True
    #: The rows of a chunk commit together with the record of it.
    a_chunk_commits_with_its_record: bool = True
    #: A new attempt ends the tasks of older ones before it looks at what they brought.
    ends_older_tasks: bool = True
    #: A resumed copy hands over from the new slot's consistent point.
    begins_at_the_new_slot: bool = True

    #: The sync worker fixes the point of hand-over beforehand instead of waiting for apply to fall behind it.
    claims: bool = False
    #: The sync worker claims where apply is before it copies, so that apply waits for the copy.
    claims_before_the_copy: bool = False
    #: Keepalives move remote_lsn.
    keepalives_move_remote_lsn: bool = False
    #: The received position, keepalives included, may lead to r.
    ready_by_received_position: bool = False
    #: The sync worker may fail for good, at any point after the copy.
    sync_may_fail_for_good: bool = False
    #: The table is copied in chunks, each with a commit of its own, and a copy that broke off is resumed.
    resumes_copies: bool = False


class Table(NamedTuple):
    """The table's row in the ledger."""

    srsubstate: str = "i"
    srsublsn: int = 0
    claim: int | None = None


class Copy(NamedTuple):
    """A copy in chunks: what its attempts brought, and the one at work."""

    snapshot: int | None = None  #: last transaction that the attempt at work sees
    compared: bool = True
    recorded: tuple[tuple[int, ...] | None, ...] = (None,) * CHUNKS  #: rows of each chunk that is done
    unrecorded: tuple[int, ...] = ()  #: rows of which there is no record
    late: tuple[int, int] | None = None  #: chunk and snapshot of a task that outlived its attempt


class State(NamedTuple):
    """Everything: publisher, ledger, target rows, and what the two workers remember."""

    committed: int = 0  #: transactions committed on the publisher
    confirmed: int = 0  #: confirmed_flush_lsn of the subscription's slot
    remote_lsn: int = 0  #: apply's progress in the ledger
    table: Table = Table()
    sync_lsn: int = 0  #: the sync worker's progress in the ledger
    rows: tuple[int, ...] = ()
    crashes: int = 0
    apply_next: int | None = None  #: apply's stream position; None: not running
    received: tuple[int, ...] = ()
    apply_sees: Table | None = None  #: the table's state as apply read it
    batch: tuple[int, ...] | None = None  #: transactions of the open target transaction, which holds the lock
    sync_next: int | None = None  #: the sync worker's stream position; None: not running
    sync_sees: int | None = None  #: remote_lsn as the sync worker read it, if it does so without the lock
    sync_failed: bool = False
    copy: Copy = Copy()


Steps: TypeAlias = Iterator[tuple[str, State]]


def commit_lsn(transaction: int) -> int:
    """Where the commit record begins: the finish LSN."""
    return 10 * transaction


def end_lsn(transaction: int) -> int:
    """Where the commit record ends."""
    return 10 * transaction + 5 if transaction else 1


def first_sent_from(lsn: int) -> int:
    """The first transaction that a publisher sends when streaming starts at an LSN: the first not covered by it."""
    return next((i for i in range(1, N + 1) if commit_lsn(i) >= lsn), N + 1)


@dataclass(frozen=True)
class Handover:
    """The model."""

    rules: Rules

    def first(self) -> State:
        """Nothing committed, the table in state i."""
        return State()

    def failure(self, state: State) -> Failure | None:
        """Doubles show at once, a loss when both are through."""
        if any(a >= b for a, b in pairwise(state.rows)):
            return Failure.DOUBLED
        if self._is_through(state) and state.table.srsubstate in "sr" and len(state.rows) != N:
            return Failure.LOST
        return None

    def is_end(self, state: State) -> bool:
        """Everything is applied and the table handed over, or its sync worker has failed for good."""
        return self._is_through(state) and (state.table.srsubstate in "sr" or state.sync_failed)

    def _is_through(self, state: State) -> bool:
        idle = not state.received and state.batch is None
        return state.committed == N and state.apply_next == N + 1 and idle

    def steps(self, state: State) -> Steps:
        """Everything that may happen next."""
        if state.committed < N:
            yield f"publisher commits {state.committed + 1}", state._replace(committed=state.committed + 1)
        if state.apply_next is None:
            start = first_sent_from(max(state.remote_lsn, state.confirmed))
            yield "apply starts", state._replace(apply_next=start)
        else:
            yield from self._apply_receives(state, state.apply_next)
            yield from self._apply_begins(state)
            yield from self._apply_commits(state)
            yield from self._apply_hears_a_keepalive(state, state.apply_next)
            yield from self._apply_changes_the_state(state, state.apply_next)
            yield from self._apply_crashes(state)
        if not state.sync_failed:
            yield from self._sync(state)

    # --- apply

    def _choice(self, table: Table, transaction: int) -> str:
        """What apply does with a change of the table, given the state it read."""
        inclusive = self.rules.finish_lsn_equal_to_srsublsn_is_applied
        beyond = commit_lsn(transaction) >= table.srsublsn + (0 if inclusive else 1)
        if table.srsubstate in "df" and table.claim is not None and self.rules.apply_waits_at_the_claim:
            return "skip" if commit_lsn(transaction) < table.claim else "wait"
        if table.srsubstate == "r" and not self.rules.srsublsn_counts_in_ready:
            return "apply"
        return "apply" if table.srsubstate in "sr" and beyond else "skip"

    def _apply_receives(self, state: State, position: int) -> Steps:
        if position <= state.committed and len(state.received) < RECEIVE_BUFFER and state.batch is None:
            received = (*state.received, position)
            yield f"apply receives {position}", state._replace(received=received, apply_next=position + 1)
        early = not self.rules.states_are_read_under_the_lock
        if early and state.received and state.apply_sees is None and state.batch is None:
            yield "apply reads the states without the lock", state._replace(apply_sees=state.table)

    def _apply_begins(self, state: State) -> Steps:
        table = state.table if self.rules.states_are_read_under_the_lock else state.apply_sees
        if state.batch is not None or table is None:
            return
        for size in range(1, len(state.received) + 1):
            batch = state.received[:size]
            choices = {self._choice(table, transaction) for transaction in batch}
            if "wait" in choices:
                return
            if choices == {"skip"} and not self.rules.filtered_transactions_move_remote_lsn:
                yield f"apply forgets {batch}", state._replace(received=state.received[size:], apply_sees=None)
            else:
                yield f"apply begins {batch} seeing {table.srsubstate}", state._replace(apply_sees=table, batch=batch)

    def _apply_commits(self, state: State) -> Steps:
        if state.batch is None or state.apply_sees is None:
            return
        table = state.apply_sees
        taken = tuple(transaction for transaction in state.batch if self._choice(table, transaction) == "apply")
        yield (
            f"apply commits {state.batch}",
            state._replace(
                rows=state.rows + taken,
                remote_lsn=end_lsn(state.batch[-1]),
                received=state.received[len(state.batch) :],
                batch=None,
                apply_sees=None,
            ),
        )

    def _apply_hears_a_keepalive(self, state: State, position: int) -> Steps:
        if not state.received and state.batch is None:
            for lsn in (end_lsn(position - 1), commit_lsn(position)):
                if self.rules.keepalives_move_remote_lsn and lsn > state.remote_lsn:
                    yield f"a keepalive moves remote_lsn to {lsn}", state._replace(remote_lsn=lsn)
                if lsn > state.confirmed:
                    yield f"apply confirms a keepalive's {lsn}", state._replace(confirmed=lsn)
        if state.remote_lsn > state.confirmed:
            yield "apply confirms remote_lsn", state._replace(confirmed=state.remote_lsn)

    def _apply_changes_the_state(self, state: State, position: int) -> Steps:
        table = state.table
        if state.batch is not None:
            return
        if table.srsubstate in "df" and table.claim is not None and self.rules.apply_takes_a_claim_away:
            yield "apply takes the claim away", state._replace(table=table._replace(claim=None))
        if table.srsubstate == "s":
            ready = state._replace(table=table._replace(srsubstate="r"))
            if state.remote_lsn >= table.srsublsn or not self.rules.ready_waits_for_srsublsn:
                yield "apply sets r", ready
            elif self.rules.ready_by_received_position and self._has_received(state, position, table.srsublsn):
                yield "apply sets r by the received position", ready

    def _has_received(self, state: State, position: int, lsn: int) -> bool:
        return not state.received and commit_lsn(position) >= lsn

    def _apply_crashes(self, state: State) -> Steps:
        if state.crashes < CRASHES:
            forgets = state._replace(apply_next=None, received=(), apply_sees=None, batch=None)
            yield "apply crashes", forgets._replace(crashes=state.crashes + 1)

    # --- tablesync

    def _sync(self, state: State) -> Steps:
        if state.table.srsubstate in "id" and self.rules.claims_before_the_copy and state.batch is None:
            yield (
                f"sync claims {state.remote_lsn} before it copies",
                state._replace(table=Table("d", claim=state.remote_lsn)),
            )
        if self.rules.resumes_copies and state.table.srsubstate in "id":
            yield from self._sync_copies_chunks(state, state.copy)
        elif state.table.srsubstate == ("d" if self.rules.claims_before_the_copy else "i"):
            # The slot's consistent point may lie anywhere between two transactions.
            for lsn in (end_lsn(state.committed), commit_lsn(state.committed + 1)):
                yield (
                    f"sync copies at {lsn}",
                    state._replace(
                        table=Table("f", claim=state.table.claim),
                        sync_lsn=lsn,
                        rows=tuple(range(1, state.committed + 1)),
                        sync_next=state.committed + 1,
                    ),
                )
        elif state.table.srsubstate == "f":
            if self.rules.sync_may_fail_for_good:
                yield "sync fails for good", state._replace(sync_next=None, sync_sees=None, sync_failed=True)
            if state.sync_next is None:
                yield "sync restarts", state._replace(sync_next=first_sent_from(state.sync_lsn))
            else:
                yield from self._sync_streams(state, state.sync_next)
                claims = self.rules.claims or state.table.claim is not None
                yield from self._sync_claims(state) if claims else self._sync_compares(state)
                if state.crashes < CRASHES:
                    forgets = state._replace(sync_next=None, sync_sees=None)
                    yield "sync crashes", forgets._replace(crashes=state.crashes + 1)

    def _sync_copies_chunks(self, state: State, copy: Copy) -> Steps:
        if copy.late is not None:
            yield "a task of an older attempt commits", state._replace(copy=_brought(copy, *copy.late, record=True))
        if copy.snapshot is None:
            lsn = end_lsn(state.committed)
            if state.table.srsubstate == "d" and not self.rules.begins_at_the_new_slot:
                lsn = state.sync_lsn
            begun = copy._replace(snapshot=state.committed, compared=all(rows is None for rows in copy.recorded))
            yield f"sync makes a slot at {lsn}", state._replace(table=Table("d"), sync_lsn=lsn, copy=begun)
            return
        for chunk in (n for n in range(CHUNKS) if copy.compared and copy.recorded[n] is None):
            done = state._replace(copy=_brought(copy, chunk, copy.snapshot, record=True))
            yield f"sync copies chunk {chunk}", done
            if state.crashes < CRASHES:
                broken = state._replace(crashes=state.crashes + 1)
                yield f"chunk {chunk} breaks off", broken._replace(copy=copy._replace(snapshot=None))
                if not self.rules.a_chunk_commits_with_its_record:
                    lost = _brought(copy, chunk, copy.snapshot, record=False)._replace(snapshot=None)
                    yield f"chunk {chunk} breaks off before its record", broken._replace(copy=lost)
                if not self.rules.ends_older_tasks:
                    late = copy._replace(snapshot=None, late=(chunk, copy.snapshot))
                    yield f"the snapshot of chunk {chunk} is lost", broken._replace(copy=late)
        if not copy.compared:
            yield "sync compares what was brought", state._replace(copy=self._compared(copy, copy.snapshot))
        elif None not in copy.recorded:
            rows = sorted([*copy.unrecorded, *(row for rows in copy.recorded for row in rows or ())])
            after = first_sent_from(state.sync_lsn)
            yield (
                "sync has copied",
                state._replace(table=Table("f"), rows=tuple(rows), sync_next=after, copy=Copy()),
            )

    def _compared(self, copy: Copy, snapshot: int) -> Copy:
        if not self.rules.compares_what_was_brought:
            return copy._replace(compared=True)
        now = tuple(None if rows is None else _rows_of(n, snapshot) for n, rows in enumerate(copy.recorded))
        return copy._replace(compared=True, recorded=now)

    def _sync_streams(self, state: State, position: int) -> Steps:
        limit = state.table.claim if self.rules.sync_stops_at_the_claim else None
        if position <= state.committed and (limit is None or commit_lsn(position) < limit):
            applied = state._replace(rows=(*state.rows, position), sync_lsn=end_lsn(position))
            yield f"sync applies {position}", applied._replace(sync_next=position + 1)
        lsn = commit_lsn(position) if limit is None else min(commit_lsn(position), limit)
        if lsn > state.sync_lsn:
            yield f"sync hears a keepalive {lsn}", state._replace(sync_lsn=lsn)

    def _looks(self, state: State) -> Iterator[int]:
        """The values of remote_lsn on which the sync worker may act in this very step."""
        if not self.rules.sync_looks_under_the_lock:
            if state.sync_sees is not None:
                yield state.sync_sees
        elif state.batch is None:
            yield state.remote_lsn

    def _looks_early(self, state: State) -> Steps:
        if not self.rules.sync_looks_under_the_lock and state.sync_sees != state.remote_lsn:
            yield "sync reads remote_lsn without the lock", state._replace(sync_sees=state.remote_lsn)

    def _sync_compares(self, state: State) -> Steps:
        yield from self._looks_early(state)
        for remote_lsn in self._looks(state):
            if remote_lsn <= state.sync_lsn:
                yield f"sync sets s at {state.sync_lsn}", self._sync_done(state, state.sync_lsn)

    def _sync_claims(self, state: State) -> Steps:
        claim = state.table.claim
        if claim is None:
            yield from self._looks_early(state)
            for remote_lsn in self._looks(state):
                lsn = max(remote_lsn, state.sync_lsn)
                claimed = state._replace(table=state.table._replace(claim=lsn), sync_sees=None)
                yield f"sync claims {lsn}", claimed
        elif state.sync_lsn >= claim and state.batch is None:
            lsn = state.sync_lsn if self.rules.hands_over_where_it_is else claim
            yield f"sync sets s at {lsn}", self._sync_done(state, lsn)

    def _sync_done(self, state: State, lsn: int) -> State:
        return state._replace(table=Table("s", lsn), sync_sees=None)


def _rows_of(chunk: int, snapshot: int) -> tuple[int, ...]:
    """The rows that a snapshot sees in a chunk's blocks."""
    return tuple(row for row in range(1, snapshot + 1) if _chunk_of(row, snapshot) == chunk)


def _chunk_of(row: int, snapshot: int) -> int:
    return (row + (row == 1 and snapshot >= MOVES)) % CHUNKS


def _brought(copy: Copy, chunk: int, snapshot: int, *, record: bool) -> Copy:
    rows = _rows_of(chunk, snapshot)
    if not record or copy.recorded[chunk] is not None:  # a second record of one chunk replaces no rows
        return copy._replace(unrecorded=(*copy.unrecorded, *rows), late=None if record else copy.late)
    recorded = (*copy.recorded[:chunk], rows, *copy.recorded[chunk + 1 :])
    return copy._replace(recorded=recorded, late=None if copy.late == (chunk, snapshot) else copy.late)
