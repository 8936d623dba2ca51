"""Transactions and rows that are left out on request, and their replay.

Mirrors maybe_start_skipping_changes (``worker.c``) and goes beyond it: rows instead of transactions, kept changes.
Entry points: :mod:`~pgsub.apply.skip.skip`, :mod:`~pgsub.apply.skip.partial_skip`, :mod:`~pgsub.apply.skip.replay`.
"""
