"""Getting past a conflict: ``skip-lsn`` and its preview, ``origin-advance``, ``conflicts replay`` and ``prune``.

Mirrors ALTER SUBSCRIPTION … SKIP and pg_replication_origin_advance, and extends them. Entry points:
:mod:`~pgsub.commands.skip.skip_lsn`, :mod:`~pgsub.commands.skip.preview`.
"""
