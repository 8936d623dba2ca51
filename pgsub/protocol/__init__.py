"""The replication protocol as pure functions and values: bytes in, values out; no I/O, no clock, no driver.

Mirrors ``src/backend/replication/logical/proto.c`` (messages) and the checks of ``worker.c`` on their order.
"""
