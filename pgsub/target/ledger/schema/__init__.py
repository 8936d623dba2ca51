"""Schema ``pgsub`` of the target database: its tables by version, its installation and upgrades.

Mirrors what ``initdb`` and ``pg_upgrade`` are to the server's catalogs. Nothing here reads or writes rows of a
subscription. Entry points: :mod:`~pgsub.target.ledger.schema.versions` (the tables),
:func:`~pgsub.target.ledger.schema.installation.install`.
"""
