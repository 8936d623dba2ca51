"""Executes the changes of transactions in order inside one open target transaction.

Mirrors apply_dispatch (``worker.c``). Nothing here commits or reads the publisher. A failure raises a located
PgsubError or SetFallback, and the target transaction is then aborted; only ``Executor.undoing`` lets it continue. Entry
points: :class:`~pgsub.apply.execute.executor.Executor`, :class:`~pgsub.apply.execute.dispatch.Dispatch`.
"""
