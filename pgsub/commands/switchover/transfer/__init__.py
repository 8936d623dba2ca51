"""The transfer of the right to write: the steps before, the right itself, the steps after, and the loss of a server.

The server has no counterpart. Starting, ending and showing a switchover is elsewhere. Entry points:
:mod:`~pgsub.commands.switchover.transfer.steps` (until the target takes the right),
:mod:`~pgsub.commands.switchover.transfer.turn` (from there to the end),
:mod:`~pgsub.commands.switchover.transfer.right_to_write` (the transactions on each server).
"""
