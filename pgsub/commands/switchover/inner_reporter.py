"""The reporter of commands inside a switchover: their warnings are said, the rest is the switchover's to say."""

from __future__ import annotations

from collections.abc import Collection

from pgsub.commands.reporter import CallbackReporter, Reporter
from pgsub.commands.switchover.obstacles.obstacle import in_their_words


class InnerReporter(CallbackReporter):
    """Reporter for a command inside this one: passes warnings on, and drops notices, records and progress.

    :param backward: the command is about the way back, which calls the target the publisher: its words are exchanged.
    :param said: messages that were said before, and are not said again.
    """

    def __init__(self, reporter: Reporter, *, backward: bool = False, said: Collection[str] = ()) -> None:
        super().__init__()
        self._reporter = reporter
        self._backward = backward
        self._said = said

    def warning(self, message: str, detail: str | None = None, hint: str | None = None) -> None:
        """Pass a warning on."""
        if self._backward:
            message, detail, hint = in_their_words(message, detail, hint)
        if message not in self._said:
            self._reporter.warning(message, detail, hint)
