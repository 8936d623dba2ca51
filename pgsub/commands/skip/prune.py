"""``pgsub conflicts prune``: permanently removes skipped changes from the target.

The server has no counterpart, because ALTER SUBSCRIPTION ... SKIP keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pgsub.catalog.rows import SkippedRow
from pgsub.catalog.store import StateStore
from pgsub.commands.sessions import ledger_session
from pgsub.target.ledger import skipped_changes
from pgsub.target.ledger.skipped_changes import Pruning, Usage


def prune(
    folder: Path,
    name: str,
    *,
    replayed: bool = False,
    older_than: float | None = None,
    dry_run: bool = False,
    confirm: Callable[[Usage], None],
) -> Usage:
    """Remove skipped changes in batches, each with its own commit. A killed command can be repeated.

    :param replayed: remove only replayed changes.
    :param older_than: remove only changes skipped more than this many seconds ago, None for all.
    :param confirm: called before anything is removed. It may raise an exception to refuse.
    :return: what was removed, or with ``dry_run`` would be removed.
    """
    with StateStore.open(folder, create=False) as store:
        sub = store.subscription(name)
        with ledger_session(store, sub) as session:
            pruning = Pruning(replayed, None if older_than is None else skipped_changes.time_ago(session, older_than))
            found = skipped_changes.usage(session, sub.subid, pruning)
            if dry_run or not (found.waiting or found.replayed):
                return found
            confirm(found)
            store.journal("prune", sub.subid, sub.name, pruning._asdict() | {"changes": found.waiting + found.replayed})
            while skipped_changes.prune(session, sub.subid, pruning) == skipped_changes.CHUNK:
                pass
            store.put_skipped(sub.subid, SkippedRow(*skipped_changes.usage(session, sub.subid)))
    return found
