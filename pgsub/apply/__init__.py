"""The apply worker: receives remote transactions, commits them on the target, and sends feedback to the publisher.

Mirrors ``src/backend/replication/logical/worker.c``. Each package depends only on those before it:

- ``stream``: assembles the walsender's bytes into whole transactions.
- ``conflicts``: names conflicts and faults, and makes their records.
- ``rows``: applies one change to one table.
- ``sets``: applies many changes of a table as one statement.
- ``resolve``: decides conflicts by the conflict rules.
- ``commit``: ends a target transaction together with the ledger.
- ``execute``: executes the changes of a transaction in order.
- ``skip``: skips transactions and rows, and replays what was skipped.
- ``parallel``: applies transactions while they are still being received.
- ``writers``: applies in several sessions that commit in order.
- ``worker``: the main loop, and the Spark task around it.
- ``preview``: shows the effects of a transaction without applying it.

:mod:`~pgsub.apply.verified_publisher` verifies that the publisher is the one in the ledger. All packages use it, and so
do other packages that connect to the publisher.

No module here opens the state store or prints. The error of a change names its relation, column and remote transaction
as far as they are known. Entry points: :func:`pgsub.apply.worker.worker.run`,
:class:`pgsub.apply.execute.executor.Executor`.
"""
