"""``pgsub verify``: whether the target holds the publisher's rows, and what brings it there.

Nothing of the server corresponds to it. How tables are compared and repaired is in :mod:`pgsub.reconcile`. Entry
points: :mod:`~pgsub.commands.verify.verify` and :mod:`~pgsub.commands.verify.repair`, the commands;
:mod:`~pgsub.commands.verify.apply_to_point` (what makes apply go to a point, for other commands too).
"""
