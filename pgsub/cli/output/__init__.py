"""What goes out: messages on stderr, tables and JSON on stdout, progress.

Mirrors ``src/fe_utils/print.c`` and ``src/common/logging.c``. Whatever a server said is made printable here. Entry
points:
:mod:`~pgsub.cli.output.console`, :mod:`~pgsub.cli.output.render`, :mod:`~pgsub.cli.output.documents`.
"""
