"""SQLSTATEs by what pgsub does about them."""

from __future__ import annotations

_TRANSIENT = frozenset({"57P01", "57P02", "57P03", "57P05", "25P03", "25006", "40001", "40P01", "55P03"})


def is_transient(sqlstate: str | None) -> bool:
    """Return whether an SQLSTATE is one that a retry mends: the closed list of design section 6.

    :param sqlstate: five characters, or None (the connection was lost without a message: transient).
    """
    if sqlstate is None:
        return True
    if sqlstate == "08P01":
        return False
    return sqlstate in _TRANSIENT or sqlstate[:2] in ("08", "53")


def is_unreachable(sqlstate: str | None) -> bool:
    """Return whether a transient error means that a server cannot be reached: no transaction is to blame."""
    return sqlstate is None or sqlstate[:2] in ("08", "57")
