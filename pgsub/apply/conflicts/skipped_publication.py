"""The notice of a publisher that decoded changes while a publication did not exist.

From PostgreSQL 18 on, a walsender continues without the publication, and only warns (LoadPublications, pgoutput.c).
What it has left out is not sent later, even if the publication exists again by now. The notice takes the way of
conflicts: the launcher logs it before feedback passes it.
"""

from __future__ import annotations

from typing import NamedTuple


class SkippedPublication(NamedTuple):
    """Changes were decoded without a publication. The publisher's words are not trusted, so nothing of them is kept."""

    def body(self, _subid: int) -> dict[str, object]:
        """Return the notice as JSON for the ledger."""
        return {"kind": "skipped_publication"}
