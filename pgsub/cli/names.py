"""``pgsub __complete``: names for completion scripts, from the state store only and without the option parser."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pgsub.common.errors import PgsubError


def complete(args: Sequence[str]) -> int:
    """Print the names of subscriptions, one per line. A missing or unreadable store has none.

    :param args: ``subscriptions`` and, if the completed line names one, the state folder.
    :return: the exit code, 2 for anything but subscriptions.
    """
    if not args or args[0] != "subscriptions":
        return 2
    from pgsub.catalog.state_folder import state_dir
    from pgsub.catalog.store import FILE_NAME, StateStore

    try:
        folder = state_dir(args[1] if len(args) > 1 else None)
        # Completion must not create anything.
        if not Path(folder, FILE_NAME).exists():
            return 0
        with StateStore.open(folder, create=False) as store:
            names = [subscription.name for subscription in store.subscriptions()]
    except PgsubError:
        return 0
    os.write(1, "".join(name + "\n" for name in names).encode("utf-8", "surrogateescape"))
    return 0
