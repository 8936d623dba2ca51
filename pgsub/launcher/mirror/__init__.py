"""The contents of ``state.db``: read from the ledger, the publisher and the workers' heartbeats.

Mirrors the server's statistics views. Nothing here decides anything. Entry point:
:class:`~pgsub.launcher.mirror.mirror.Mirror`.
"""
