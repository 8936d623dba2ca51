"""``pgsub switchover``: the order of the steps, what stands in the way, and what is told of it.

Nothing of the server corresponds to it. What both servers are told is in :mod:`pgsub.switchover`. Entry points:
:mod:`~pgsub.commands.switchover.switchover` (the command), :mod:`~pgsub.commands.switchover.abort` and
:mod:`~pgsub.commands.switchover.status`, :mod:`~pgsub.commands.switchover.obstacles.search` (what stands in the way, in
both directions). :mod:`~pgsub.commands.switchover.transfer.steps` leads to the moment in which the target takes the
right, :mod:`~pgsub.commands.switchover.transfer.turn` from there to the end.
"""
