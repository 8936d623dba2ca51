"""The transfer of the right to write: the steps up to it, the right itself, what follows, and what if a server is gone.

Nothing of the server corresponds to it. What begins, ends or shows a switchover is outside. Entry points:
:mod:`~pgsub.commands.switchover.transfer.steps` (up to the moment in which the target takes the right),
:mod:`~pgsub.commands.switchover.transfer.turn` (from there to the end),
:mod:`~pgsub.commands.switchover.transfer.right_to_write` (each server's own transaction).
"""
