"""Tables of the target as its catalogs describe them, and how remote relations map to them.

Mirrors ``relation.c``. Nothing here writes. Entry points: :mod:`~pgsub.target.catalog.relation`,
:mod:`~pgsub.target.catalog.relation_map`, :mod:`~pgsub.target.catalog.ddl_hints`.
"""
