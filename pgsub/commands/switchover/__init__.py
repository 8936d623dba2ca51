"""``pgsub switchover``: the order of the steps, what stands in the way, and what is told of it.

Nothing of the server corresponds to it. What both servers are told is in :mod:`pgsub.switchover`. Entry points:
:mod:`~pgsub.commands.switchover.switchover` (the command), :mod:`~pgsub.commands.switchover.steps` (the steps),
:mod:`~pgsub.commands.switchover.obstacles.search` (what stands in the way, in both directions).
"""
