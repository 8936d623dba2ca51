"""Previews the effect of a transaction on the target. It is read from the publisher without moving its slot.

The server has no counterpart. Nothing here writes. Entry points: :mod:`~pgsub.apply.preview.slot_reader`,
:mod:`~pgsub.apply.preview.simulation`.
"""
