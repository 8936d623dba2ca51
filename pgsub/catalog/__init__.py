"""The local state store: SQLite catalogs, migrations, journal and locks. Only this package uses sqlite3.

Mirrors the catalogs and views of a subscription (pg_subscription.h, system_views.sql). Workers never open it. Entry
points: :mod:`~pgsub.catalog.store` (used by commands and the launcher), :mod:`~pgsub.catalog.schema` (tables by
version), :mod:`~pgsub.catalog.rows` (row types).
"""
