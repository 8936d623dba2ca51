"""SQL for changes: statements for rows and sets, COPY, TRUNCATE, conflict search, and the pipeline that sends them.

Mirrors ``execReplication.c`` and ``execPartition.c``. Nothing here knows the ledger. Entry points:
:mod:`~pgsub.target.sql.statements`, :mod:`~pgsub.target.sql.set_statements`,
:class:`~pgsub.target.sql.pipeline.Pipeline`, :mod:`~pgsub.target.sql.conflict_search`.
"""
