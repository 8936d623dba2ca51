"""Tables in the ledger: the tables of a subscription, their srsubstate, chunks of their copies, and held tables.

Mirrors pg_subscription_rel.c and the transitions of tablesync.c. Nothing here moves the progress of apply. Entry
points: :mod:`~pgsub.target.ledger.tables.states` (a table from one state to the next),
:mod:`~pgsub.target.ledger.tables.handover` (from the sync worker to apply),
:mod:`~pgsub.target.ledger.tables.subscription_tables` (what REFRESH and ALTER change).
"""
