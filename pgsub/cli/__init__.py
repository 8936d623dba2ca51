"""The command line: options, rendering, exit codes. Mirrors ``src/bin/psql`` and the other client programs.

There is no SQL here. Entry points: :mod:`~pgsub.cli.main` (the program), :mod:`~pgsub.cli.app` (the tree of commands).
The packages ``subscription``, ``conflicts`` and ``operate`` contain the options and texts of commands.
:mod:`pgsub.commands` does their work.
"""
