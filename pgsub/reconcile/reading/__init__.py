"""What a comparison reads: pieces of tables, in sessions that see a server's snapshot, and recorded rows of the ledger.

Nothing here depends on the purpose of the comparison. Entry points: :class:`~pgsub.reconcile.reading.side.Side`,
:class:`~pgsub.reconcile.reading.sessions.Sessions`.
"""
