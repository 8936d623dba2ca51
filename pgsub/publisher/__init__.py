"""The publisher's side: sessions, walsender stream, slots, snapshots, and queries on publications by version.

Mirrors ``src/backend/replication/libpqwalreceiver/libpqwalreceiver.c`` and the publisher queries of ``tablesync.c`` and
``subscriptioncmds.c``. Nothing here decodes changes, and nothing but slots is written on the publisher. Errors of
psycopg leave the package as :class:`~pgsub.common.errors.PgsubError`. Entry points: :mod:`~pgsub.publisher.connect`
(every session), :mod:`~pgsub.publisher.identity` (checked at each), :mod:`~pgsub.publisher.stream.walsender` (changes).
"""
