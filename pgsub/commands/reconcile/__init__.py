"""``reconcile``: moves a subscription to a new slot after its slot was lost or its publisher went back in time.

The server has no counterpart. Entry points: :mod:`~pgsub.commands.reconcile.reconcile`,
:mod:`~pgsub.commands.reconcile.diagnosis` (the problem, and obstacles to a new slot). The position is moved by
:mod:`pgsub.target.ledger.maintenance.reconciliation`.
"""
