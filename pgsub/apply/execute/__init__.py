"""Executes the changes of transactions in order inside one open target transaction.

Mirrors apply_dispatch (``worker.c``). Nothing here commits, and nothing here reads the publisher. Entry points:
:class:`~pgsub.apply.execute.executor.Executor`, :class:`~pgsub.apply.execute.dispatch.Dispatch`.
"""
