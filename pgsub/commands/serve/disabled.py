"""Disabled subscriptions in a bounded ``run``: they do not reach its goal, so it must not exit with 0."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pgsub.catalog.store import StateStore
from pgsub.commands.reporter import Reporter
from pgsub.common.errors import StateForbids
from pgsub.common.plural import some
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription


def check(store: StateStore, names: Sequence[str]) -> None:
    """Check that a bounded run has something to serve.

    :param names: the subscriptions to serve, empty for all.
    :raises StateForbids: a named subscription is disabled, or all are.
    """
    chosen = [store.subscription(name) for name in names] or store.subscriptions()
    disabled = [sub for sub in chosen if not sub.enabled]
    if names or len(disabled) == len(chosen):
        _refuse(disabled)


def check_end(store: StateStore, names: Collection[str], served: Collection[str], reporter: Reporter) -> None:
    """Check at the end of a bounded run that no subscription was left out unexpectedly.

    Without names, some may be disabled on purpose while others are served, but not by an error.

    :param served: names of subscriptions that reached the goal.
    :raises StateForbids: a disabled subscription was named, or was disabled by an error, or none was served.
    """
    left = [
        sub
        for sub in store.subscriptions()
        if not sub.enabled and sub.name not in served and (not names or sub.name in names)
    ]
    missed = [sub for sub in left if names or not served or _by_error(store, sub)]
    for sub in left:
        if sub not in missed:
            reporter.warning(f'subscription "{sub.name}" was not served, because it is disabled', hint=_hint([sub]))
    _refuse(missed)


def _by_error(store: StateStore, sub: Subscription) -> bool:
    """Return whether disable_on_error disabled the subscription."""
    switched = (row for row in store.journal_rows(sub.subid) if row.action in ("enable", "disable"))
    newest = next(switched, None)
    return newest is not None and newest.detail.get("because") == "error"


def _refuse(disabled: Sequence[Subscription]) -> None:
    if not disabled:
        return
    subject = "subscription" if len(disabled) == 1 else "subscriptions"
    verb = "is" if len(disabled) == 1 else "are"
    raise StateForbids(f"{subject} {some([sub.name for sub in disabled])} {verb} disabled", hint=_hint(disabled))


def _hint(disabled: Sequence[Subscription]) -> str:
    first = "Enable it first:" if len(disabled) == 1 else "Enable them first:"
    return "\n".join([first, *(f"pgsub enable {word(sub.name)}" for sub in disabled)])
