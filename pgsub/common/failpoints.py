"""Named failpoints: inert unless ``PGSUB_FAILPOINTS`` is set.

``PGSUB_FAILPOINTS="apply.before_commit=kill;copy.middle=sleep:5@2"`` makes a crash deterministic: the action runs
when the named point is reached (``@n``: only the n-th time in this process). Actions: ``kill`` (SIGKILL to this
process), ``kill:PIDFILE`` (SIGKILL to the process whose pid that file holds), ``sleep:SECONDS``,
``pause:FILE`` (wait until FILE exists), ``stop`` (SIGSTOP to this process), ``error`` (raise), ``error:SQLSTATE``,
``die`` (end the thread by what no handler of errors catches).
An action fires once per process and, with ``PGSUB_FAILPOINTS_DIR``, once for all: a file named after the point marks
it as reached, so a restarted worker passes, and a test can assert that the point was really hit. A test that makes
that file beforehand arms the point at the moment it removes it.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from pgsub.common.errors import InternalError, TargetUnavailable

#: Every point, so that a test can ask whether each was reached.
POINTS = (
    "apply.after_two_phase",
    "apply.before_target_commit",
    "apply.after_target_commit",
    "apply.after_reported_lsn",
    "apply.after_feedback",
    "apply.batch_open",
    "apply.commit_reply_lost",
    "apply.stream_open",
    "apply.before_prepare",
    "apply.after_prepare",
    "apply.before_finish_prepared",
    "apply.after_finish_prepared",
    "apply.skipped",
    "apply.released",
    "mirror.before_state_db",
    "mirror.before_events",
    "copy.middle",
    "copy.before_commit",
    "copy.after_commit",
    "sync.before_slot",
    "sync.after_slot",
    "sync.after_f",
    "sync.before_s",
    "sync.after_claim",
    "sync.after_s",
    "sync.before_slot_drop",
    "sync.before_separation",
    "sync.after_separation",
    "create.after_ledger",
    "create.after_slot",
    "refresh.after_fence",
    "refresh.after_release",
    "refresh.before_commit",
    "refresh.after_commit",
    "alter.after_ledger",
    "alter.after_definition",
    "alter.after_slot",
    "drop.after_slots",
    "skip.before_ledger",
    "skip.after_ledger",
    "advance.before_ledger",
    "advance.after_ledger",
    "advance.after_origin",
    "replay.journalled",
    "replay.taken",
    "replay.before_commit",
    "replay.committed",
    "state.write",
    "thread.apply_receiver",
    "thread.parallel_worker",
    "thread.janitor",
    "thread.job",
    "thread.log",
    "thread.jvm_end",
    "thread.notice",
    "thread.publisher_state",
    "thread.heartbeats",
    "thread.recorder",
    "thread.runner",
    "thread.slot_creation",
    "thread.slot_watch",
    "thread.spark_start",
    "thread.standby_names",
    "thread.sync",
    "thread.wait",
)

_counts: dict[str, int] = {}


def point(name: str) -> None:
    """Run the action set for ``name``, if any.

    :param name: one of :data:`POINTS`.
    """
    setting = os.environ.get("PGSUB_FAILPOINTS")
    if not setting:
        return
    assert name in POINTS, name
    for item in setting.split(";"):
        where, _, action = item.partition("=")
        if where.strip() == name and _due(name, action):
            _act(name, action.partition("@")[0].strip())


def _due(name: str, action: str) -> bool:
    _counts[name] = count = _counts.get(name, 0) + 1
    nth = action.partition("@")[2]
    folder = os.environ.get("PGSUB_FAILPOINTS_DIR")
    if (nth or not folder) and count != int(nth or 1):
        return False
    if not folder:
        return True
    try:
        os.close(os.open(Path(folder) / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True


def _act(name: str, action: str) -> None:
    verb, _, argument = action.partition(":")
    if verb == "kill":
        pid = int(Path(argument).read_text()) if argument else os.getpid()
        outlives = _is_child(pid)
        os.kill(pid, signal.SIGKILL)
        if not outlives:
            time.sleep(60)  # our own end follows from the other's; nothing after this point may run
    elif verb == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif verb == "sleep":
        time.sleep(float(argument))
    elif verb == "pause":
        while not Path(argument).exists():
            time.sleep(0.02)
    elif verb == "error":
        raise TargetUnavailable(f"failpoint {name}", sqlstate=argument or "57P01")
    elif verb == "die":
        raise SystemExit(f"failpoint {name}")
    else:
        raise InternalError(f'unknown failpoint action "{action}"')


def _is_child(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
    except ChildProcessError:
        return False
