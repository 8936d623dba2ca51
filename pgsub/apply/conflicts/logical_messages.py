"""Messages of pg_logical_emit_message() on their way to the log. Mirrors pgoutput_message (pgoutput.c).

The server's own subscriber never requests them. Like conflicts, they go through the ledger's event table to the
launcher, which logs them before feedback passes them.
"""

from __future__ import annotations

import codecs
from typing import NamedTuple

from pgsub.protocol.lsn import format_lsn
from pgsub.protocol.messages import LogicalMessage

_SHOWN = 64  #: bytes of prefix and content in the log, as for a value in a conflict


class LoggedMessage(NamedTuple):
    """A message in the form for the log. The message itself is not kept: a transaction may have a million of them.

    :ivar prefix: truncated, like ``content``, which is text if it is UTF-8, else hexadecimal.
    :ivar lsn: its position in the publisher's WAL.
    :ivar xid: its top-level transaction, None if it is not transactional.
    """

    prefix: str
    content: str
    lsn: int
    xid: int | None

    @classmethod
    def of(cls, message: LogicalMessage, xid: int | None) -> LoggedMessage:
        """Truncate a message for the log."""
        return cls(_shown(message.prefix.encode()), _shown(message.content), message.lsn, xid)

    def body(self, _subid: int) -> dict[str, object]:
        """Return the message as JSON for the ledger."""
        return {
            "kind": "message",
            "prefix": self.prefix,
            "content": self.content,
            "lsn": format_lsn(self.lsn),
            "transactional": self.xid is not None,
            "xid": self.xid,
        }


def _shown(raw: bytes) -> str:
    """Truncate a text and add its length; JSON cannot hold NUL."""
    start = raw[:_SHOWN]
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(start, final=len(raw) <= _SHOWN)
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        text = "\\x" + start.hex()
    return text if len(raw) <= _SHOWN else f"{text}... ({len(raw)} bytes)"
