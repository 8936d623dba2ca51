"""How a comparison reads tables: sessions that see a server's snapshot, and the statements that read a piece there.

Nothing here knows what the rows are compared for. Entry points: :class:`~pgsub.reconcile.reading.side.Side`,
:class:`~pgsub.reconcile.reading.sessions.Sessions`.
"""
