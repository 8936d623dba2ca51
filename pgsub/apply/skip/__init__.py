"""Skips transactions and rows on request, and replays them.

Mirrors maybe_start_skipping_changes (``worker.c``). Unlike the server, it can skip single rows, and keeps the changes.
Entry points: :mod:`~pgsub.apply.skip.skip`, :mod:`~pgsub.apply.skip.partial_skip`, :mod:`~pgsub.apply.skip.replay`.
"""
