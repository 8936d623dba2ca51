"""``pgsub switchover``: the order of its steps, its obstacles, and its reports.

The server has no counterpart. The reverse subscription is called "the way back" in messages and names.
:mod:`pgsub.switchover` contains the changes on both servers. Entry points:
:mod:`~pgsub.commands.switchover.switchover` (the command), :mod:`~pgsub.commands.switchover.abort`,
:mod:`~pgsub.commands.switchover.status`, :mod:`~pgsub.commands.switchover.obstacles.search` (obstacles in both
directions). :mod:`~pgsub.commands.switchover.transfer.steps` leads to the moment when the target takes the right to
write, :mod:`~pgsub.commands.switchover.transfer.turn` from there to the end.
"""
