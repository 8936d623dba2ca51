"""A worker's own rows in the ledger: claim, lock, compare-and-set, report. Mirrors origin.c for one session.

NOTES
A transaction of apply costs two round trips besides its data. :meth:`Progress.open` sends BEGIN and the lock of the
progress row together. :meth:`Progress.close` sends the compare-and-set and COMMIT together, so COMMIT follows before
the client has seen the row count. A compare-and-set that updates no row must therefore fail: it divides by zero. The
lock also returns states_version and the skips, so nothing else is queried unless these have changed.

The progress row is addressed by its remembered ctid, with the key as fallback. An old snapshot on the target makes the
key's index chain grow with every version: 76 µs became 350 µs after 24,000 updates. By ctid it stays at 76 µs.

READ COMMITTED re-reads only the locked row after a wait. So states are read in the next statement, never in a join.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from pgsub.common.conflict_rules import Rule
from pgsub.common.errors import Fenced, StreamsMustRestart
from pgsub.common.query import row, scalar
from pgsub.protocol.lsn import format_lsn, lsn_or_none, parse_lsn
from pgsub.target.ledger import commit_turns, worker_takeover
from pgsub.target.ledger.commit_turns import Turns
from pgsub.target.ledger.skip import Skip, decoded, decoded_rules
from pgsub.target.ledger.worker_takeover import APPLY, Claim
from pgsub.target.session.transactions import durable
from pgsub.target.sql.pipeline import Pipeline, StatementFailed, Step
from pgsub.target.sql.prepared_statements import DEALLOCATED
from pgsub.target.sql.statement_builder import Statement

_COLUMNS = (
    "ctid::text, remote_lsn::text, reported_lsn::text, states_version, ("
    " SELECT pg_catalog.to_json(ARRAY[c.skip_lsn::text, c.skip_rows, pg_catalog.array_to_string(c.skip_lsns, ' '),"
    " c.skip_rules::text])::text FROM pgsub.control c WHERE c.subid = progress.subid AND c.worker = 0"
    " AND (c.skip_lsn IS NOT NULL OR c.skip_rules IS NOT NULL))"
)
_KEY = "subid = %s AND worker = %s"
_MINE = "EXISTS (SELECT FROM pgsub.control c WHERE c.subid = %s AND c.worker = %s AND c.epoch = %s AND c.token = %s)"
_COMMIT = Statement.fixed("COMMIT")
_LOCK = Statement.fixed(
    f"SELECT {_COLUMNS} FROM pgsub.progress WHERE ctid = $1::tid AND subid = $2 AND worker = $3 FOR UPDATE"
)
_TIME = "'2000-01-01 00:00:00+00'::timestamptz + $2::bigint * '1 microsecond'::interval"
_COMMIT_TIME = _TIME.replace("$2", "%s")
# It fails if no row is updated, so that the COMMIT behind it does not run. remote_commit_ts is the time of the
# transaction that ends at remote_lsn: a report that is sent late, or was held back, does not move it.
# guard: the ledger moves only from where the worker left it, without "1 / "
_ADVANCE = """
WITH advanced AS (
    UPDATE pgsub.progress SET remote_lsn = $1,
        remote_commit_ts = CASE WHEN remote_lsn = $1 THEN remote_commit_ts ELSE {time} END
    WHERE {place} AND subid = $4 AND worker = $5 AND remote_lsn = $6 AND EXISTS (
        SELECT FROM pgsub.control c WHERE c.subid = $4 AND c.worker = $5 AND c.epoch = $7 AND c.token = $8)
    RETURNING ctid::text AS place, remote_lsn)
SELECT a.place, 1 / (SELECT pg_catalog.count(*) FROM advanced){tag} FROM (SELECT) AS one LEFT JOIN advanced a ON true"""
_AT_CTID = "ctid = $3::tid"
# guard: a unit commits only under the table states it was decided with, without " AND states_version = $3"
_BY_STATES = "$3::bigint IS NOT NULL AND states_version = $3"
# In the outermost select list no planner can drop the call. PostgreSQL 19 drops it as an argument of an aggregate.
_TAG = f", pg_catalog.pg_replication_origin_xact_setup(a.remote_lsn, {_TIME})"
_NOT_HIT = "22012"  #: division_by_zero


@dataclass(slots=True)
class Control:
    """The flags of a worker, and apply's version of the table states.

    :ivar wanted_lsn: a position that somebody waits for in the ledger; 0: none.
    """

    stop: bool
    states_version: int
    wanted_lsn: int = 0


class Progress:
    """The progress row of one worker under one claim, used by one session.

    :param connection: the writing session, in autocommit mode.
    :param claim: the claim under which this worker was started.
    :param tagged: the session carries a replication origin. Each commit then gets the publisher's commit time, as with
        the server's own subscriber. Otherwise all commits of the session would have the time of its first.
    :ivar skip: what to skip, and ``rules`` with a limit, as of the last time that the row was read.
    :ivar turns: the turns of this session and the sessions that apply beside it.
    """

    def __init__(self, connection: psycopg.Connection, claim: Claim, *, tagged: bool = False) -> None:
        self._connection = connection
        self._pipeline = Pipeline(connection, "pgsubprogress")
        self.turns = Turns(connection, self._pipeline, claim.subid)
        self.tagged = tagged
        tag = _TAG if tagged else ""
        self._advance = Statement.fixed(_ADVANCE.format(place=_AT_CTID, time=_TIME, tag=tag))
        self._succeed = Statement.fixed(_ADVANCE.format(place=_BY_STATES, time=_TIME, tag=tag))
        self._claim = claim
        self._key = (claim.subid, claim.worker)
        self._fence = (claim.subid, claim.worker, claim.epoch, claim.token)
        self._others: Sequence[Claim] = ()
        self._ctid: str | None = None
        self.remote_lsn = 0
        self.reported_lsn = 0
        self.states_version = -1
        self.skip: Skip | None = None
        self.rules: tuple[Rule, ...] = ()

    @property
    def applies(self) -> bool:
        """Whether it is apply's own row, not a sync worker's."""
        return self._claim.worker == APPLY

    @property
    def skips(self) -> bool:
        """Whether there is anything to skip."""
        return self.skip is not None or bool(self.rules)

    def claim(self, others: Sequence[Claim] = ()) -> None:
        """Take the epoch for this attempt. A second attempt of the same task ends here.

        :param others: claims of tables that catch up on the same stream. Their rows, which are at the same position,
            move in the same transactions.
        :raises Fenced: it was claimed before, or the epoch was raised.
        """
        # guard: an epoch is claimed only once, without " AND claimed_by IS NULL"
        query = """
            UPDATE pgsub.control SET claimed_by = %s, claimed_host = %s, claimed_pid = %s
             WHERE subid = %s AND worker = %s
               AND epoch = %s AND token = %s AND claimed_by IS NULL RETURNING true"""
        if scalar(self._connection, query, (uuid.uuid4(), socket.gethostname(), os.getpid(), *self._fence)) is None:
            raise Fenced("another attempt of this worker holds the claim")
        self._others = others
        self.read()

    def read(self, lock: str = "") -> None:
        """Read the row: the start of the streams, or, under a lock, the position to go on from."""
        query = f"SELECT {_COLUMNS} FROM pgsub.progress WHERE {_KEY}"
        found = None
        if self._ctid is not None:
            found = row(self._connection, f"{query} AND ctid = %s::tid {lock}", (*self._key, self._ctid))
        found = found or row(self._connection, f"{query} {lock}", self._key)
        if found is None:
            raise Fenced("the subscription was removed from the ledger")
        self._take(found)

    def _take(self, found: Sequence[Any]) -> None:
        self._ctid = found[0]
        self.remote_lsn, self.reported_lsn = parse_lsn(found[1]), parse_lsn(found[2])
        self.states_version = int(found[3])
        self.skip, self.rules = (None, ()) if found[4] is None else _skips(*json.loads(found[4]))

    def open(self, expected: int) -> None:
        """Begin a transaction and :meth:`lock` the row, in one round trip.

        :raises StreamsMustRestart: see :meth:`lock`.
        """
        steps: tuple[Step, ...] = (commit_turns.BEGIN, (_LOCK, (self._ctid, *self._key), self._take))
        self._ctid = None
        try:
            try:
                self._pipeline.round_trip(*steps)
            except StatementFailed as failure:
                if failure.error.sqlstate != DEALLOCATED:
                    raise
                self._pipeline.round_trip(*steps)
        except StatementFailed as failure:
            raise failure.error from None
        if self._ctid is None:  # another session wrote the row
            self.read("FOR UPDATE")
        self._check(expected)

    def _moved(self, found: Sequence[str | None]) -> None:
        self._ctid = found[0]

    def lock(self, expected: int) -> None:
        """Lock the row in the caller's transaction, before any decision that depends on table states.

        READ COMMITTED re-reads only the locked row after a wait. So states are read in the *next* statement
        (:func:`~pgsub.target.ledger.subscriptions.table_states`), and only if ``states_version`` changed.

        :param expected: the position that this worker remembers.
        :raises StreamsMustRestart: the ledger has another (a target that lost its unflushed tail, another applier).
        """
        self.read("FOR UPDATE")
        self._check(expected)

    def _check(self, expected: int) -> None:
        # guard: the ledger moves only from where the worker left it
        if self.remote_lsn != expected:
            raise StreamsMustRestart(
                "the ledger is not where this worker left it",
                detail=f"Expected {format_lsn(expected)}, found {format_lsn(self.remote_lsn)}.",
            )

    def close(self, old: int, new: int, commit_ts: int | None) -> None:
        """Move ``remote_lsn`` by compare-and-set in the transaction that holds the data, and COMMIT, in one round trip.

        :param old: position where this batch began.
        :param new: end LSN of its last transaction.
        :param commit_ts: the publisher's commit time, in microseconds since 2000-01-01 UTC.
        :raises StreamsMustRestart: no row was updated; the transaction is rolled back.
        :raises Fenced: the epoch of another table on the stream was raised.
        :raises StatementFailed: another failure (of COMMIT if :func:`of_commit`); the transaction is rolled back.
        :raises TargetUnavailable: the connection broke; only the ledger tells whether the transaction is committed.
        """
        if self._others:
            self._move_others(old, new, commit_ts)
        values = (format_lsn(new), commit_ts, self._ctid, *self._key, format_lsn(old), *self._fence[2:])
        self._commit((self._advance, values, self._moved))

    def _move_others(self, old: int, new: int, commit_ts: int | None) -> None:
        # guard: no change is made in a table that was taken from the stream it shares
        worker_takeover.fence(self._connection, *self._others)
        moved = self._connection.execute(
            f"UPDATE pgsub.progress SET remote_lsn = %s, remote_commit_ts = {_COMMIT_TIME}"
            " WHERE subid = %s AND worker = ANY (%s) AND remote_lsn = %s".encode(),
            (format_lsn(new), commit_ts, self._key[0], worker_takeover.numbers(self._others), format_lsn(old)),
        )
        if moved.rowcount != len(self._others):
            raise StreamsMustRestart("tables that catch up together are not at one position")

    def _commit(self, *steps: Step) -> None:
        try:
            self._pipeline.round_trip(*steps, (_COMMIT, (), None))
        except StatementFailed as failure:
            if failure.error.sqlstate == _NOT_HIT and not of_commit(failure):
                raise StreamsMustRestart("compare-and-set of the progress row failed") from None
            raise

    def succeed(self, turn: int, old: int, new: int, commit_ts: int | None, states_version: int) -> None:
        """Wait on the target for the previous transaction, then do as :meth:`close`, in one round trip.

        No row is updated if the previous transaction was rolled back or the table states have changed. The target sees
        who waits for whom, so it resolves deadlocks. The row is found by its key: other sessions have moved it.

        :param turn: turn of the previous transaction, which must hold its lock already.
        :param states_version: version of the table states by which the changes were decided.
        :raises StreamsMustRestart: no row was updated; the other errors are those of :meth:`close`.
        """
        values = (format_lsn(new), commit_ts, states_version, *self._key, format_lsn(old), *self._fence[2:])
        self._commit(commit_turns.awaiting(turn), (self._succeed, values, self._moved))

    def follow(self, other: Progress) -> None:
        """Take over the remembered ctid after another session of the worker has moved the row."""
        self._ctid = other._ctid

    def tag(self, end_lsn: int, commit_ts: int) -> None:
        """Give a commit the publisher's position and time, if :meth:`close` does not do it in the same transaction.

        For a prepared transaction, call it inside before PREPARE TRANSACTION, and once more before COMMIT PREPARED.
        """
        if self.tagged:
            self._connection.execute(
                f"SELECT pg_catalog.pg_replication_origin_xact_setup(%s::pg_lsn, {_COMMIT_TIME})".encode(),
                (format_lsn(end_lsn), commit_ts),
            )

    def report(self, position: int) -> None:
        """Record ``position`` as reported, durably. The flush makes every earlier commit of this server durable.

        :param position: the position that feedback may report as flushed from now on.
        :raises Fenced: the epoch was raised meanwhile.
        """
        with durable(self._connection):
            if self._others:
                self._report_others(position)
            query = (
                f"UPDATE pgsub.progress SET reported_lsn = greatest(reported_lsn, %s) WHERE {_KEY} AND {_MINE}"
                " RETURNING ctid::text, reported_lsn::text"
            )
            found = row(self._connection, query, (format_lsn(position), *self._key, *self._fence))
        if found is None:
            raise Fenced("another worker took over")
        self._ctid, self.reported_lsn = found[0], parse_lsn(found[1])

    def _report_others(self, position: int) -> None:
        # guard: a shared slot moves only while it is the slot of all its tables
        worker_takeover.fence(self._connection, *self._others)
        self._connection.execute(
            "UPDATE pgsub.progress SET reported_lsn = greatest(reported_lsn, %s)"
            " WHERE subid = %s AND worker = ANY (%s)",
            (format_lsn(position), self._key[0], worker_takeover.numbers(self._others)),
        )

    def control(self) -> Control:
        """Read the worker's flags without a lock or a write.

        :raises Fenced: the epoch was raised meanwhile.
        """
        query = """
            SELECT c.stop, p.states_version, c.wanted_lsn::text FROM pgsub.control c
              JOIN pgsub.progress p ON p.subid = c.subid AND p.worker = 0
             WHERE c.subid = %s AND c.worker = %s AND c.epoch = %s AND c.token = %s"""
        found = row(self._connection, query, self._fence)
        if found is None:
            raise Fenced("another worker took over")
        return Control(found[0], found[1], lsn_or_none(found[2]) or 0)

    def unmirrored_events(self) -> tuple[int, int] | None:
        """Return the first and last id of the events that the launcher has not recorded; None if there are none.

        There may be as many as a transaction has changes, so they are not counted.
        """
        ends = ("SELECT id FROM pgsub.event WHERE subid = %s ORDER BY id " + order for order in ("ASC", "DESC"))
        query = "SELECT ({} LIMIT 1), ({} LIMIT 1)".format(*ends)
        first, last = row(self._connection, query, (self._claim.subid,) * 2) or (None, None)
        return None if first is None else (first, last)


def _skips(
    lsn: str | None, rows: str | None, several: str | None, rules: str | None
) -> tuple[Skip | None, tuple[Rule, ...]]:
    skip = decoded(lsn, rows, None if several is None else several.split())
    return skip, () if rules is None else decoded_rules(json.loads(rules))


def of_commit(failure: StatementFailed) -> bool:
    """Return whether the COMMIT of :meth:`Progress.close` failed."""
    return failure.tag is _COMMIT
