"""Comparison of a table on both servers at one point.

The server has nothing like it. A point is a snapshot of the publisher at an LSN, and one of the target when apply has
applied what that LSN covers and nothing else. Nothing here may open the state store. Only
:mod:`~pgsub.reconcile.repair` writes to tables other than the ledger's. (Adopted tables are written by
:mod:`pgsub.tablesync.copy.adoption_writer`.) Entry points: :mod:`~pgsub.reconcile.point` (both snapshots),
:mod:`pgsub.target.ledger.maintenance.barrier` (how apply is stopped), :mod:`~pgsub.reconcile.comparison` (one table).
``reading`` has the sessions and what they read.
"""
