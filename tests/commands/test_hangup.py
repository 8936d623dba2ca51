"""SIGHUP: a terminal that is closed ends a launcher, log rotation does not, and nohup is respected."""

from __future__ import annotations

import io
import os
import signal
import sys

import pytest

from pgsub.cli.operate.run import PAGE
from pgsub.commands.serve.run import stopping_by_signal


class Quiet:
    """A reporter that says nothing."""

    def notice(self, message: str, hint: str | None = None) -> None:
        """Say nothing."""


class Terminal(io.StringIO):
    """Standard error on a terminal."""

    def isatty(self) -> bool:
        """It is one."""
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_a_hangup_stops_a_launcher_of_a_terminal_only_however_often_it_comes(monkeypatch, terminal):
    monkeypatch.setattr(sys, "stderr", Terminal() if terminal else io.StringIO())
    before = signal.getsignal(signal.SIGHUP)
    with stopping_by_signal(Quiet()) as stop:
        for _ in range(2):  # shell and terminal both send it
            os.kill(os.getpid(), signal.SIGHUP)
        assert stop.is_set() is terminal
    assert signal.getsignal(signal.SIGHUP) is before


def test_a_launcher_under_nohup_goes_on_ignoring_hangups(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopping_by_signal(Quiet()) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.is_set()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_manual_names_every_signal_that_a_launcher_handles():
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    with stopping_by_signal(Quiet()):
        handled = [number for number in before if signal.getsignal(number) is not before[number]]
    assert handled
    assert [one for one in handled if signal.Signals(one).name not in PAGE.description] == []
