"""``run``, and the part of ``create`` and similar commands that serves a subscription or follows its launcher.

Entry points: :mod:`~pgsub.commands.serve.run`, :mod:`~pgsub.commands.serve.synchronize`,
:mod:`~pgsub.commands.serve.apply_to_point` (makes apply reach a position, for other commands).
"""
