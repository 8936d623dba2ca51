"""Tables of the target as its catalogs describe them, and what of a remote relation fits them.

Mirrors ``relation.c``. Nothing here writes. Entry points: :mod:`~pgsub.target.catalog.relation`,
:mod:`~pgsub.target.catalog.relation_map`, :mod:`~pgsub.target.catalog.ddl_hints`.
"""
