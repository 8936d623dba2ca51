"""The program on a terminal of its own, as a person at it sees and types."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import patience
import pexpect


def terminal(
    words: Sequence[str],
    environment: Mapping[str, str],
    columns: int = 80,
    *,
    lines: int = 40,
    folder: Path | None = None,
) -> pexpect.spawn:
    """Start Python on a terminal; what is expected of it is waited for as patiently as everything else.

    :param words: arguments of the interpreter: ``-m pgsub status``.
    :param folder: where it is started, the tests' by default.
    """
    return pexpect.spawn(
        sys.executable,
        list(words),
        env=dict(environment),
        encoding="utf-8",
        dimensions=(lines, columns),
        timeout=patience.SECONDS,
        cwd=folder,
    )
