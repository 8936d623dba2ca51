"""Transactions that are applied while they arrive (``streaming = parallel``).

Mirrors ``applyparallelworker.c``. Entry points: :mod:`~pgsub.apply.parallel.leader` (who applies what),
:mod:`~pgsub.apply.parallel.worker` (a session of its own for one transaction).
"""
