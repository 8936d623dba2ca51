"""The ledger: schema ``pgsub`` of the target, where progress commits together with the data.

Mirrors pg_subscription_rel, pg_replication_origin_status and subskiplsn. Each module owns the statements of its tables.
Functions that change rows under a claim raise Fenced if the epoch was raised since, unless their docstrings say
otherwise. Functions that need the row of a subscription raise StateForbids if there is none. Entry points:
:mod:`~pgsub.target.ledger.subscriptions` (identity), :class:`~pgsub.target.ledger.progress.Progress` (a worker's own
rows), :mod:`~pgsub.target.ledger.tables` (srsubstate).
"""
