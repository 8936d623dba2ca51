"""pgsub: a PostgreSQL logical-replication subscriber that lives outside the server."""

__version__ = "0.1.0"
