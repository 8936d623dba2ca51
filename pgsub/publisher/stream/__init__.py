"""The walsender stream: START_REPLICATION, CopyData in and out, the end of a stream. Mirrors libpqrcv_receive.

Bytes only; nothing here decodes a change. Entry point: :mod:`~pgsub.publisher.stream.walsender`. Of the two channels,
:mod:`~pgsub.publisher.stream.channel_socket` reads below libpq's framing; libpq itself reads where that cannot be.
"""
