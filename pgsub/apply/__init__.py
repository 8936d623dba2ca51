"""The apply worker: whole transactions in, one target transaction for one or many of them, feedback out.

Mirrors ``src/backend/replication/logical/worker.c``. Its rooms, each of which depends only on those before it:

- ``stream``: from the walsender's bytes to whole transactions.
- ``conflicts``: what a conflict or fault is called, and its record.
- ``rows``: one change into one table.
- ``sets``: many changes of a table as one statement.
- ``resolve``: rules that decide conflicts.
- ``commit``: the end of a target transaction, together with the ledger.
- ``execute``: the changes of a transaction, in order.
- ``skip``: transactions and rows that are left out, and their replay.
- ``parallel``: transactions that are applied while they arrive.
- ``writers``: several sessions that apply at once, and commit in order.
- ``worker``: the loop and the task around all of it.
- ``preview``: what a transaction would do, without doing it.

Beside them :mod:`~pgsub.apply.verified_publisher` verifies for every room, and for who connects elsewhere, that the
publisher is the one of the ledger.

No module here opens the state store or prints. An error of a change is located: it names what is known of the relation,
the column and the remote transaction in question. Entry points: :func:`pgsub.apply.worker.worker.run`,
:class:`pgsub.apply.execute.executor.Executor`.
"""
