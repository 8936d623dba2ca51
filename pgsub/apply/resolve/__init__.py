"""Resolves conflicts by conflict rules (``--on-conflict``): finds the rule, the winner and the action.

The server's ``conflict.c`` only reports conflicts. Changes are applied here one by one. Entry points:
:class:`~pgsub.apply.resolve.resolver.Resolver`, :mod:`~pgsub.apply.resolve.winner`,
:mod:`~pgsub.apply.resolve.decision_record`.
"""
