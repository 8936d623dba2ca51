"""Connection strings: parsing, checks, and the role of their sessions.

Mirrors ``fe-connect.c`` as far as it reads parameters, and the import of snapshots. Nothing here opens a connection.
Entry point: :mod:`~pgsub.common.connections.conninfo`.
"""
