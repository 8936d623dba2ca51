"""Connection strings: what they say, what is wrong with them, and which role their sessions have.

Mirrors ``fe-connect.c`` as far as it reads parameters. Nothing here opens a connection. Entry point:
:mod:`~pgsub.common.connections.conninfo`.
"""
