"""A soak of twenty seconds: random transactions, bursts and troubles, with the server's own subscriber beside pgsub.

``make soak`` takes minutes and watches how lag vanishes too.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from soak_course import Soak
from thorough import only_thorough

_MINUTES = float(os.environ.get("PGSUB_SOAK_MINUTES", "0.33"))


@only_thorough
@pytest.mark.timeout(240 + 180 * _MINUTES)
def test_kills_restarts_and_bursts_leave_both_subscribers_equal_to_the_publisher_and_nothing_behind(
    tmp_path: Path,
) -> None:
    with Soak(tmp_path, seed=2, burst=2_000) as soak:
        soak.work(_MINUTES)
        assert soak.wrong == []
        assert soak.bursts and soak.transactions and soak.ground.run.done["insert"], soak.document()
