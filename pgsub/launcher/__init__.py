"""The launcher: starts workers, restarts them, and shows their state. Mirrors launcher.c.

Nothing here prints. Entry points: :class:`~pgsub.launcher.launcher.Launcher` (all subscriptions of a state store),
:class:`~pgsub.launcher.runner.Runner` (one of them, over all its sessions), :class:`~pgsub.launcher.service.Service`
(while one session lasts). What starts and watches workers lives in ``workers``, what goes into the state store in
``mirror``, the Spark driver that runs them in ``spark``.
"""
