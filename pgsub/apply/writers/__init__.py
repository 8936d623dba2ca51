"""Applies the units of one batch in several target sessions at once; the units commit in order.

A unit is a run of whole transactions. The server has no counterpart in its releases; it applies one transaction after
another. ``tests/models/writers_model.py`` shows the mistake that each rule prevents. Entry points:
:mod:`~pgsub.apply.writers.plan` (divides a batch into units), :mod:`~pgsub.apply.writers.pool` (the sessions),
:mod:`~pgsub.apply.writers.writer` (one session). This package never diagnoses a fault: the worker's own session
applies a failed unit again and names the fault.
"""
