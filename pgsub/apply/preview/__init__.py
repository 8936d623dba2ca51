"""Previews: the effect that a transaction would have on the target, read from the publisher without moving its slot.

The server has no counterpart. Nothing here writes. Entry points: :mod:`~pgsub.apply.preview.slot_reader`,
:mod:`~pgsub.apply.preview.simulation`.
"""
