"""Applies many changes of one relation by a few statements: their net effect on each key.

The server has no counterpart. The results are those of the changes one by one; otherwise this package gives up and
:mod:`pgsub.apply.rows` applies them. Entry points: :class:`~pgsub.apply.sets.writer.SetWriter`,
:mod:`~pgsub.apply.sets.compaction`, :mod:`~pgsub.apply.sets.eligibility`.
"""
