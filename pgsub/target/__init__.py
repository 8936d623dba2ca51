"""The target's side: all communication with the target database. Each package depends only on those before it:

- ``catalog``: tables as apply sees them.
- ``session``: connections, roles, replication origins.
- ``sql``: statements of changes, and the pipeline that carries them.
- ``ledger``: schema ``pgsub``, which records what has been applied.

Mirrors ``src/backend/executor/execReplication.c``, ``relation.c``, ``origin.c`` and the catalogs of subscriptions.
Statements are composed, never formatted from strings. Nothing here depends on messages or workers.
"""
