"""Comparison of a table on both servers at one point.

Nothing of the server corresponds to it. A point is a snapshot of the publisher at an LSN and one of the target where
apply has applied what that LSN covers, and nothing else. May not open the state store. Only
:mod:`~pgsub.reconcile.repair` writes to tables that are not the ledger's; a table that is adopted is written by
:mod:`pgsub.tablesync.copy.adoption_writer`. Entry points:
:mod:`~pgsub.reconcile.point` (both snapshots), :mod:`pgsub.target.ledger.maintenance.barrier` (how apply is stopped
there), :mod:`~pgsub.reconcile.comparison` (one table); ``reading`` has the sessions and what they read.
"""
