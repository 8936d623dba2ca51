"""The copy of tables: in one transaction or in chunks, from socket to socket or row by row, or only differences.

Mirrors copy_table (``tablesync.c``). Data from the publisher is checked before it is passed on. Entry points:
:mod:`~pgsub.tablesync.copy.task` (the Spark task), :mod:`~pgsub.tablesync.copy.plan` (chunks),
:mod:`~pgsub.tablesync.copy.copy_to_copy` (bytes of one COPY).
"""
