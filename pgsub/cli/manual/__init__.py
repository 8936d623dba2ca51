"""Manual pages, made from the command tree and from texts in ``docs/``: see :mod:`pgsub.cli.docs`."""
