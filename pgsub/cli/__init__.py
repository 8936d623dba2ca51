"""The command line: options, rendering, exit codes. Mirrors ``src/bin/psql`` and the other client programs.

No SQL here. Entry points: :mod:`~pgsub.cli.main` (the program), :mod:`~pgsub.cli.app` (the tree of commands). A
command's options and words live in ``subscription``, ``conflicts`` or ``operate``; its work is in
:mod:`pgsub.commands`.
"""
