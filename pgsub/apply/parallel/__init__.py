"""Applies transactions while they are received (``streaming = parallel``).

Mirrors ``applyparallelworker.c``. Entry points: :mod:`~pgsub.apply.parallel.leader` (assigns transactions to workers),
:mod:`~pgsub.apply.parallel.worker` (one session for one transaction).
"""
