"""The launcher: starts workers, restarts them, and shows their state. Mirrors launcher.c.

Nothing here prints. Entry points: :class:`~pgsub.launcher.launcher.Launcher` serves all subscriptions of a state store,
:class:`~pgsub.launcher.runner.Runner` one of them over all its sessions, :class:`~pgsub.launcher.service.Service` one
of them during one session. The package ``workers`` starts and watches workers, ``mirror`` writes the state store,
``spark`` contains the Spark driver.
"""
