"""What a transaction would do to the target, read from the publisher without moving its slot.

The server has nothing of the kind. Nothing here writes. Entry points: :mod:`~pgsub.apply.preview.slot_reader`,
:mod:`~pgsub.apply.preview.simulation`.
"""
