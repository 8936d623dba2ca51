"""``run``, and the part of ``create`` and its like that serves a subscription or watches who does.

Entry points: :mod:`~pgsub.commands.serve.run`, :mod:`~pgsub.commands.serve.synchronize`.
"""
