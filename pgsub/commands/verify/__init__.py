"""``pgsub verify``: compares the target's rows with the publisher's, and repairs differences.

The server has no counterpart. :mod:`pgsub.reconcile` compares and repairs tables. Entry points: the commands
:mod:`~pgsub.commands.verify.verify` and :mod:`~pgsub.commands.verify.repair`.
"""
