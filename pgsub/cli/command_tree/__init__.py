"""Registration of commands in the tree, and the tree as values: options, pages, completion scripts.

Entry points: :mod:`~pgsub.cli.command_tree.command`, :mod:`~pgsub.cli.command_tree.tree`.
"""
