"""What ``state.db`` shows: read from the ledger, the publisher and the workers' heartbeats.

Mirrors the statistics views of the server. Nothing here decides anything. Entry point:
:class:`~pgsub.launcher.mirror.mirror.Mirror`.
"""
