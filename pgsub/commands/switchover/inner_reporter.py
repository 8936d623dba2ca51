"""The reporter of commands inside a switchover: it passes on warnings, and drops the rest."""

from __future__ import annotations

from collections.abc import Collection

from pgsub.commands.reporter import CallbackReporter, Reporter
from pgsub.commands.switchover.obstacles.obstacle import in_their_words


class InnerReporter(CallbackReporter):
    """The reporter for a command inside a switchover. It passes on warnings, and drops notices, records and progress.

    :param backward: whether the command concerns the reverse subscription, so that publisher and target are exchanged.
    :param said: messages that were already reported, and are dropped.
    """

    def __init__(self, reporter: Reporter, *, backward: bool = False, said: Collection[str] = ()) -> None:
        super().__init__()
        self._reporter = reporter
        self._backward = backward
        self._said = said

    def warning(self, message: str, detail: str | None = None, hint: str | None = None) -> None:
        """Pass on a warning."""
        if self._backward:
            message, detail, hint = in_their_words(message, detail, hint)
        if message not in self._said:
            self._reporter.warning(message, detail, hint)
