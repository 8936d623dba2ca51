"""Several writers: units of one batch are executed by several target sessions at once, and commit in order.

A unit is a run of whole transactions. The server has nothing of the kind in its releases; it applies one transaction
after the other. ``tests/models/writers_model.py`` shows the mistake that each rule prevents. Entry points:
:mod:`~pgsub.apply.writers.plan` (which units), :mod:`~pgsub.apply.writers.pool` (who executes them),
:mod:`~pgsub.apply.writers.writer` (one session). This room never decides: what fails is applied again by the worker's
own session, which names the fault.
"""
