"""Everything said to the target database. Its rooms, each of which depends only on those before it:

- ``catalog``: tables as apply sees them.
- ``session``: connections, roles, replication origins.
- ``sql``: statements of changes, and how they travel.
- ``ledger``: schema ``pgsub``, the truth about what is applied.

Mirrors ``src/backend/executor/execReplication.c``, ``relation.c``, ``origin.c`` and the catalogs of subscriptions.
Statements are composed, never formatted from strings. Nothing here knows messages or workers.
"""
