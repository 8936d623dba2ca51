"""Locks of the state folder: one holder, named in messages, never left behind."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from pgsub.catalog.locks import Lock, launcher_lock, lock_held, subscription_lock

HOLDER = """
import pathlib, sys
from pgsub.catalog.locks import subscription_lock
lock = subscription_lock(pathlib.Path(sys.argv[1]), 5)
print(lock.acquire(), flush=True)
sys.stdin.readline()
"""


def test_one_holder_at_a_time_and_the_next_one_after_it(folder: Path) -> None:
    first, second = subscription_lock(folder, 5), subscription_lock(folder, 5)
    assert first.acquire() and first.acquire()
    assert not second.acquire()
    first.release()
    first.release()
    assert second.acquire()
    assert not first.acquire()


def test_locks_of_two_subscriptions_and_of_the_launcher_are_three(folder: Path) -> None:
    locks = [launcher_lock(folder), subscription_lock(folder, 5), subscription_lock(folder, 7)]
    assert all(lock.acquire() for lock in locks)


def test_the_holder_is_named_and_looking_takes_nothing(folder: Path, start: Callable) -> None:
    lock = subscription_lock(folder, 5)
    assert lock.holder() is None
    assert not lock.path.exists()
    holder = start(HOLDER, folder)
    assert holder.stdout.readline() == "True\n"
    assert str(lock.holder()).startswith(f"pid {holder.pid} on host ")
    error = lock_held(lock, 'subscription "orders"')
    assert error.exit_code == 9
    assert error.message == 'subscription "orders" is in use by another process'
    assert f"pid {holder.pid} on host" in str(error.detail)
    assert not lock.acquire()


def test_a_lock_frees_itself_when_its_holder_is_killed(folder: Path, start: Callable) -> None:
    lock = subscription_lock(folder, 5)
    for _ in range(2):
        holder = start(HOLDER, folder)
        assert holder.stdout.readline() == "True\n"
        assert not lock.acquire()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert lock.holder() is None
        assert lock.acquire()
        lock.release()
    assert "freed in the meantime" in str(lock_held(lock, "x").detail)


def test_a_lock_is_not_inherited_by_child_processes(folder: Path, start: Callable) -> None:
    lock = subscription_lock(folder, 5)
    assert lock.acquire()
    child = start("import sys; print(1, flush=True); sys.stdin.readline()")
    child.stdout.readline()
    lock.release()
    assert subscription_lock(folder, 5).acquire()


def test_a_lock_whose_file_was_removed_is_no_lock_on_the_new_file(folder: Path) -> None:
    first, second = subscription_lock(folder, 5), subscription_lock(folder, 5)
    assert first.acquire()
    first.release(unlink=True)
    assert not first.path.exists()
    assert second.acquire()
    assert not first.acquire()


@pytest.mark.parametrize(("text", "shown"), [(b"", "an unknown process"), (b"\x1b[31mred\nx", "[31mred")])
def test_a_lock_file_is_shown_without_control_characters(folder: Path, text: bytes, shown: str) -> None:
    lock = launcher_lock(folder)
    assert lock.acquire()
    lock.path.write_bytes(text)
    assert Lock(lock.path).holder() == shown
