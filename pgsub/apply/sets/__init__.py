"""Many changes of one relation as a few statements: their net effect by key.

The server has nothing of the kind. Results equal those of the changes one by one, or the room gives up and
:mod:`pgsub.apply.rows` does them. Entry points: :class:`~pgsub.apply.sets.writer.SetWriter`,
:mod:`~pgsub.apply.sets.compaction`, :mod:`~pgsub.apply.sets.eligibility`.
"""
