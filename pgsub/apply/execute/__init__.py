"""Executes the changes of transactions in order inside one open target transaction.

Mirrors apply_dispatch (``worker.c``). Nothing here commits or reads the publisher. After a failure (a located
PgsubError, or SetFallback) the caller must roll back; only ``Executor.undoing`` lets the target transaction continue.
Entry points: :class:`~pgsub.apply.execute.executor.Executor`, :class:`~pgsub.apply.execute.dispatch.Dispatch`.
"""
