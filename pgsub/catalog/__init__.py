"""The local state store: SQLite catalogs, migrations, journal and locks. The only room that uses sqlite3."""
