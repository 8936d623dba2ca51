"""The copy of tables: in one transaction or in chunks, from socket to socket or row by row; or only what differs.

Mirrors copy_table (``tablesync.c``). What the publisher sends is checked before it is handed on. Entry points:
:mod:`~pgsub.tablesync.copy.task` (the Spark task), :mod:`~pgsub.tablesync.copy.plan` (chunks),
:mod:`~pgsub.tablesync.copy.copy_to_copy` (bytes of one COPY).
"""
