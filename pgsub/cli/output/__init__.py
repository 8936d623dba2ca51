"""Output of commands: messages on stderr, tables and JSON on stdout, progress.

Mirrors ``src/fe_utils/print.c`` and ``src/common/logging.c``. Texts of servers are made printable here. Entry points:
:mod:`~pgsub.cli.output.console`, :mod:`~pgsub.cli.output.render`, :mod:`~pgsub.cli.output.documents`.
"""
