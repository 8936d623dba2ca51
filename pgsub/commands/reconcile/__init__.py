"""``reconcile``: a subscription whose slot is lost, or whose publisher went back in time, goes on from another slot.

The server has nothing like it. Entry points: :mod:`~pgsub.commands.reconcile.reconcile`,
:mod:`~pgsub.commands.reconcile.diagnosis` (what is wrong, and what is in the way). What moves the position is
:mod:`pgsub.target.ledger.maintenance.reconciliation`.
"""
