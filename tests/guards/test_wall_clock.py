"""No decision depends on the wall clock, which may be set back or forward while a subscription runs."""

from __future__ import annotations

import ast
import re

import sources

_WALL = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}

#: Modules that read it, and why a jump does no harm.
READ = {
    "apply/stream/receiver.py": "send times of feedback, and how far the publisher is behind its own clock",
    "catalog/locks.py": "how long ago a launcher gave a sign of life, which is shown; the next one corrects it",
    "catalog/times.py": "times that are shown, and the lag, never below 0",
    "cli/output/reporting.py": "times in the log",
    "common/worker_heartbeat.py": "the number with which a worker begins; at worst a chunk's bytes are not shown",
    "spark/jvm/class_archive.py": "the age of files of a cache",
    "spark/jvm/folders.py": "the age of what a start that was killed has left",
}


def _reads(tree: ast.Module) -> bool:
    calls = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(ast.unparse(call) in _WALL for call in calls if isinstance(call, ast.Attribute))


def test_the_wall_clock_is_read_only_where_a_jump_does_no_harm() -> None:
    words = "|".join(re.escape(call) for call in _WALL)
    assert {name for name, tree in sources.trees(words) if _reads(tree)} == READ.keys()
