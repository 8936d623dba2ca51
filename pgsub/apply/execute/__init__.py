"""Executes the changes of transactions in order inside one open target transaction.

Mirrors apply_dispatch (``worker.c``). Nothing here commits, and nothing here reads the publisher. What fails is a
located PgsubError, and the target transaction is aborted then, as it is behind SetFallback; ``Executor.undoing`` alone
lets it go on. Entry points:
:class:`~pgsub.apply.execute.executor.Executor`, :class:`~pgsub.apply.execute.dispatch.Dispatch`.
"""
