"""The walsender stream: START_REPLICATION, CopyData in and out, the end of a stream. Mirrors libpqrcv_receive.

It handles bytes only; nothing here decodes a change. Entry point: :mod:`~pgsub.publisher.stream.walsender`.
:mod:`~pgsub.publisher.stream.channel_socket` reads below libpq's framing.
:mod:`~pgsub.publisher.stream.channel_libpq` is for connections that only libpq can read.
"""
