"""Ends target transactions: data, ledger and records in one commit.

Mirrors apply_handle_commit_internal, apply_handle_prepare and similar functions (``worker.c``). Nothing here executes
row changes. Entry points: :mod:`~pgsub.apply.commit.ledger_commit`, :mod:`~pgsub.apply.commit.prepared_transactions`,
:mod:`~pgsub.apply.commit.skipped_writer`.
"""
