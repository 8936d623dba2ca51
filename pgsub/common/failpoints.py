"""Named failpoints: inert unless ``PGSUB_FAILPOINTS`` is set.

``PGSUB_FAILPOINTS="apply.before_commit=kill;copy.middle=sleep:5@2"`` makes a crash deterministic: the action runs when
the named point is reached (``@n``: only the n-th time in this process). Actions: ``kill`` (SIGKILL to this process),
``kill:PIDFILE`` (SIGKILL to the process whose PID is in that file), ``sleep:SECONDS``, ``pause:FILE`` (wait until FILE
exists), ``stop`` (SIGSTOP to this process), ``error`` (raise), ``error:SQLSTATE``, ``memory`` (raise MemoryError),
``die`` (end the thread by an exception that no error handler catches). An action fires once per process. With
``PGSUB_FAILPOINTS_DIR`` it fires only once in total: a file named after the point marks it as reached. So a restarted
worker passes, and a test can check that the point was reached. A test that creates the file first arms the point by
removing it.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from pgsub.common.errors import InternalError, TargetUnavailable

#: Names after the dot, by the prefix before it.
_POINTS = {
    "apply": (
        "after_two_phase before_target_commit after_target_commit after_reported_lsn after_feedback batch_open "
        "commit_reply_lost stream_open before_prepare after_prepare before_finish_prepared after_finish_prepared "
        "skipped released before_barrier_reached unit_executed unit_reply_lost conflict_decided"
    ),
    "mirror": "before_state_db before_events",
    "copy": "middle before_commit after_commit",
    "adopt": "compared before_commit after_commit",
    "resume": "compared removed before_commit after_commit",
    "sync": (
        "before_slot after_slot after_f before_s after_claim after_s before_slot_drop before_separation "
        "after_separation"
    ),
    "create": "after_ledger after_slot",
    "reconcile": "journalled begun fenced rolled_back dropped created moved",
    "refresh": "after_fence after_release before_commit after_commit",
    "alter": "after_ledger after_definition after_slot",
    "drop": "after_slots after_ledger",
    "rebuild": "after_ledger after_definition",
    "skip": "before_ledger after_ledger",
    "advance": "before_ledger after_ledger after_origin",
    "replay": "journalled taken before_commit committed",
    "point": "barrier_put standing taken",
    "verify": "at_point ranges_compared table_compared",
    "repair": "journalled standing taken before_commit committed",
    "sequence": "before_setval before_commit",
    "switchover": (
        "planned named created prepared fenced sessions_ended drained sequences recorded advanced given taken promoted "
        "disabled enabled done kept_out releasing declined dropped back_dropped"
    ),
    "state": "write",
    "launcher": "turn",
    "thread": (
        "apply_receiver barrier parallel_worker pause_limit janitor job log jvm_end jvm_watch notice "
        "publisher_state heartbeats recorder runner sequences signs slot_creation slot_watch spark_start standby_names "
        "sync target_wait verify wait writer"
    ),
}
#: All points, so that a test can check that each was reached.
POINTS = tuple(f"{part}.{name}" for part, names in _POINTS.items() for name in names.split())

_counts: dict[str, int] = {}


def point(name: str) -> None:
    """Run the action that is set for a failpoint, if any.

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
    elif verb == "memory":
        raise MemoryError
    elif verb == "die":
        raise SystemExit(f"failpoint {name}")
    else:
        raise InternalError(f'unknown failpoint action "{action}"')


def _is_child(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
    except ChildProcessError:
        return False
