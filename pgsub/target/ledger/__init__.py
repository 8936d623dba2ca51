"""The ledger: schema ``pgsub`` of the target, where progress commits together with the data.

Mirrors pg_subscription_rel, pg_replication_origin_status and subskiplsn. Each module owns the statements of its tables.
Entry points: :mod:`~pgsub.target.ledger.subscriptions` (identity, take-over),
:class:`~pgsub.target.ledger.progress.Progress` (a worker's own rows), :mod:`~pgsub.target.ledger.tables` (srsubstate).
"""
