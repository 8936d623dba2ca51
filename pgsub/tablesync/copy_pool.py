"""The copy tasks that work on the pieces of one slot's snapshot: their number, retries and failures."""

from __future__ import annotations

import time
from collections.abc import Sequence

import psycopg

from pgsub.common.errors import Directive, Fenced, PgsubError, TargetUnavailable
from pgsub.publisher.snapshot import SlotSnapshot
from pgsub.tablesync.context import Job, SyncContext
from pgsub.tablesync.copy import task
from pgsub.tablesync.copy.task import CopyResult, CopySpec, Piece
from pgsub.tablesync.task_watch import TaskWatch
from pgsub.target.ledger import worker_takeover
from pgsub.target.ledger.tables import chunks

_POLL = 0.02
#: Maximum number of attempts at one piece while the snapshot lives.
TRIES = 5


class CopyPool:
    """A number of concurrent tasks that copy pieces. Each takes piece after piece.

    :param session: the coordinator's session on the target. The ledger tells which pieces are done.
    :param width: maximum number of concurrent tasks.
    :ivar errors: by table. The other pieces of such a table are not copied any more.
    """

    def __init__(
        self,
        context: SyncContext,
        session: psycopg.Connection,
        snapshot: SlotSnapshot,
        pieces: Sequence[Piece],
        width: int,
    ) -> None:
        self._context = context
        self._session = session
        self._snapshot = snapshot
        self._pieces = list(pieces)
        self._wanted = min(width, len(pieces))
        self._running: list[Job] = []
        self._tries: dict[chunks.ChunkKey | None, int] = {}
        claims = list({piece.key.claim.worker: piece.key.claim for piece in pieces}.values())
        self._watch = TaskWatch(session, claims, context.patience, snapshot.connection)
        self._alone = len({piece.key.claim.worker for piece in pieces}) == 1
        self.errors: dict[int, PgsubError] = {}

    def run(self) -> None:
        """Run until every piece is done or its table has failed.

        :raises Fenced: a stop was requested.
        :raises PgsubError: no further piece can be copied: the snapshot is gone, or a server cannot be reached.
        """
        try:
            while self._pieces:
                self._wanted = max(self._wanted, 1)
                while len(self._running) < self._wanted:
                    self._start()
                self._wait()
        finally:
            for job in self._running:
                job.cancel()

    def _start(self) -> None:
        context, first = self._context, self._pieces[0]
        spec = CopySpec(
            context.subscription,
            tuple(self._pieces),
            self._snapshot.exported,
            self._snapshot.slot_name,
            context.heartbeat,
            spare=bool(self._running),
            grouped=not self._alone,
        )
        name = f"copy {first.table.relation.name}" + ("" if self._alone else f" and {len(self._pieces) - 1} more")
        self._running.append(context.submit(name, task.run, [spec]))

    def _wait(self) -> None:
        """Wait until a task has ended or was killed. The ledger tells which pieces are left."""
        while not any(job.done() for job in self._running):
            self._watch.look()
            if self._context.stopping.is_set():
                raise Fenced("asked to stop")
            time.sleep(_POLL)
        for job in [job for job in self._running if job.done()]:
            self._running.remove(job)
            self._ended(job)
        self._leave_taken_over()
        undone = chunks.undone(self._session, [piece.key for piece in self._pieces])
        if len(undone) < len(self._pieces):
            self._tries.pop(None, None)  # something was done meanwhile
        self._pieces = [p for p in self._pieces if p.key in undone and p.key.claim.worker not in self.errors]
        if self._pieces and not self._running and self._wanted <= 0:
            self._failed(None, TargetUnavailable("a piece of the copy is locked by a session whose task has ended"))
            self._context.stopping.wait(1)  # the next take-over ends that session

    def _leave_taken_over(self) -> None:
        """Give up tables that another attempt has taken over. It ends every session that copies them here."""
        claims = list({piece.key.claim.worker: piece.key.claim for piece in self._pieces}.values())
        for worker in worker_takeover.taken_over(self._session, claims):
            self.errors[worker] = Fenced("another worker took over")
            if self._alone:
                raise self.errors[worker]

    def _ended(self, job: Job) -> None:
        try:
            results: list[CopyResult] = job.result(0)
        except PgsubError as error:
            self._failed(None, error)
            return
        if results[0].error is not None:
            self._failed(results[0].failed, results[0].error)
        else:
            self._wanted -= 1  # it found no piece that nobody else copies

    def _failed(self, piece: chunks.ChunkKey | None, error: PgsubError) -> None:
        """Retry a piece as long as that may help; otherwise its table has failed.

        :param piece: None: a task could not begin, or was killed.
        """
        self._tries[piece] = self._tries.get(piece, 0) + 1
        hopeless = error.directive is not Directive.RETRY or self._tries[piece] >= TRIES
        hopeless |= error.sqlstate == task.LOCKED and not self._alone  # the table leaves the group, and waits alone
        if piece is None or not self._snapshot.alive():
            if hopeless or not self._snapshot.alive():
                raise error
        elif hopeless and self._alone:
            raise error
        elif hopeless:
            self.errors[piece.claim.worker] = error
