"""Operations on the position of apply: stop it there, move it, or begin at another slot.

Each module is one operation with its rules. Entry points: :func:`~pgsub.target.ledger.maintenance.barrier.put`,
:func:`~pgsub.target.ledger.maintenance.origin_advance.advance`,
:func:`~pgsub.target.ledger.maintenance.reconciliation.move`.
"""
