"""The reading of tables for a comparison: sessions that see a server's snapshot, and the statements that read a piece.

Nothing here depends on the purpose of the comparison. Entry points: :class:`~pgsub.reconcile.reading.side.Side`,
:class:`~pgsub.reconcile.reading.sessions.Sessions`.
"""
