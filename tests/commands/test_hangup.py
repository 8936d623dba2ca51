"""Signals that stop a launcher whatever it does; SIGHUP of a terminal only, and nohup is respected."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any

import pytest

from pgsub.cli.operate.run import PAGE
from pgsub.commands.serve.run import stopping_by_signal
from pgsub.commands.signals import undone_by_signals


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


def _hung_up_while_undoing(first: int, undone: list[int]) -> None:
    """Shell and terminal both send it, and logind behind SIGTERM: once more while what was begun is undone."""
    with undone_by_signals():
        try:
            os.kill(os.getpid(), first)
        finally:
            os.kill(os.getpid(), signal.SIGHUP)
            undone.append(first)


@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_a_hangup_undoes_what_a_command_has_begun_and_does_not_break_off_that(first):
    received: list[int] = []
    undone: list[int] = []
    numbers = (signal.SIGHUP, signal.SIGTERM)
    before = [signal.signal(one, lambda number, frame: received.append(number)) for one in numbers]
    try:
        with pytest.raises(KeyboardInterrupt):
            _hung_up_while_undoing(first, undone)
        assert undone == [first]
        assert received == [one for one in (first, signal.SIGHUP) if one != signal.SIGINT]  # of these it dies then
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with undone_by_signals():  # nohup
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        for number, handler in zip(numbers, before):
            signal.signal(number, handler)


class AtInstruction:
    """A trace function that sends SIGTERM at one instruction of what :mod:`threading` does.

    :param number: of the instruction.
    :ivar sent: whether there was one.
    """

    def __init__(self, number: int) -> None:
        self._left = number
        self.sent = False

    def __call__(self, frame: FrameType, event: str, arg: object) -> Any:
        """Follow a frame."""
        if frame.f_code.co_filename != threading.__file__ or self.sent:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and (left := self._left) >= 0:
            self._left -= 1
            if not left:
                self.sent = True
                signal.raise_signal(signal.SIGTERM)
        return self


@pytest.mark.timeout(60)
def test_a_signal_at_any_instruction_of_a_wait_stops_a_launcher():
    """The thread that runs the handler may hold the lock of what it waits for at that moment."""
    number, before = 0, sys.gettrace()
    while True:
        with stopping_by_signal(Quiet()) as stop:
            tracing = AtInstruction(number)
            sys._getframe().f_trace_opcodes = True  # Python 3.12.1 heeds none that is first set later
            sys.settrace(tracing)
            try:
                stop.wait(0.001)
            finally:
                sys.settrace(before)
            if not tracing.sent:
                break
            assert stop.is_set(), number
        number += 1
    assert number > 50


def test_the_manual_names_every_signal_that_a_launcher_handles():
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    with stopping_by_signal(Quiet()):
        handled = [number for number in before if signal.getsignal(number) is not before[number]]
    assert handled
    assert [one for one in handled if signal.Signals(one).name not in PAGE.description] == []
