"""The ledger: schema ``pgsub`` of the target, where progress commits together with the data.

Mirrors pg_subscription_rel, pg_replication_origin_status and subskiplsn. Each module owns the statements of its tables.
A function that changes rows under a claim raises Fenced if the epoch was raised since, unless its docstring says
otherwise. One that needs the row of a subscription raises StateForbids if there is none. Entry points:
:mod:`~pgsub.target.ledger.subscriptions` (identity), :class:`~pgsub.target.ledger.progress.Progress` (a worker's own
rows), :mod:`~pgsub.target.ledger.tables` (srsubstate).
"""
