"""The local state store: SQLite catalogs, migrations, journal and locks. The only room that uses sqlite3.

Mirrors the catalogs and views of a subscription (pg_subscription.h, system_views.sql). Workers never open it. Entry
points: :mod:`~pgsub.catalog.store` (what commands and the launcher use), :mod:`~pgsub.catalog.schema` (tables, by
version), :mod:`~pgsub.catalog.rows` (their rows).
"""
