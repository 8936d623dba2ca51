"""Which publishers the sync suite runs against: a version that was left out is counted, and in CI is a failure."""

from __future__ import annotations

import pytest
import servers
from fix_servers import other_servers


@pytest.mark.parametrize("version", servers.VERSIONS)
def test_the_sync_suite_also_runs_against_this_publisher(version: str) -> None:
    if version not in other_servers():
        said = f"no PostgreSQL {version} in PGSUB_TEST_BINDIRS; tests/servers.py says why it could not be fetched"
        pytest.fail(said) if servers.in_ci() and version not in servers.UNPINNED else pytest.skip(said)


def test_the_servers_of_the_other_versions_are_those_versions() -> None:
    assert all(13 < int(version) < 100 for version in other_servers())
