"""When a worker starts again, however often it failed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pgsub.common.errors import ApplyError, Fenced, PublisherUnavailable, UsageError
from pgsub.launcher import retry as retry_module
from pgsub.launcher.retry import COPY_BACKOFF_MAX, RETRY_SECONDS, Retry, interval

_NOW = 1000.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time stands still."""
    monkeypatch.setattr(retry_module, "time", SimpleNamespace(monotonic=lambda: _NOW))


def _wait(retry: Retry) -> float:
    return retry.not_before - _NOW


def test_a_copy_that_fails_on_data_waits_longer_and_longer_up_to_five_minutes():
    retry = Retry()
    waits = []
    for _ in range(10):
        retry.failed(ApplyError("duplicate key"), growing=True)
        waits.append(_wait(retry))
    assert waits[0] == RETRY_SECONDS
    assert waits == sorted(waits)
    assert waits[-1] == COPY_BACKOFF_MAX


@pytest.mark.parametrize("before", [ApplyError("duplicate key"), PublisherUnavailable("no answer")])
def test_after_thousands_of_failures_a_copy_is_still_tried_again(before):
    retry = Retry()
    for _ in range(3000):
        retry.failed(before, growing=True)
    retry.failed(ApplyError("duplicate key"), growing=True)
    assert 0 < _wait(retry) <= COPY_BACKOFF_MAX


def test_an_outage_of_the_publisher_does_not_lengthen_the_wait_after_a_fault_of_the_data():
    retry = Retry()
    for _ in range(20):
        retry.failed(PublisherUnavailable("no answer"), growing=True)
        assert _wait(retry) <= RETRY_SECONDS
    retry.failed(ApplyError("duplicate key"), growing=True)
    assert _wait(retry) <= RETRY_SECONDS


@pytest.mark.long
def test_the_target_says_how_long_to_wait_as_for_its_own_subscriber(own_pair, monkeypatch):
    monkeypatch.delenv("PGSUB_RETRY_SECONDS", raising=False)
    pair = own_pair(target={"wal_retrieve_retry_interval": "300ms"})
    assert interval(pair.subdb.connection) == 0.3
    assert interval(pair.pubdb.connection) == RETRY_SECONDS
    monkeypatch.setenv("PGSUB_RETRY_SECONDS", "0.7")
    assert interval(pair.subdb.connection) == 0.7
    for text in ("soon", "0", "nan", "1e9"):
        monkeypatch.setenv("PGSUB_RETRY_SECONDS", text)
        with pytest.raises(UsageError, match="invalid value for PGSUB_RETRY_SECONDS"):
            interval(pair.subdb.connection)


def test_workers_that_fence_each_other_again_and_again_come_apart():
    waits = []
    for _ in range(20):
        retry = Retry()
        for _ in range(6):
            retry.failed(Fenced("another took over"))
        waits.append(_wait(retry))
    assert max(waits) <= RETRY_SECONDS and len({round(wait, 3) for wait in waits}) > 10


def test_a_worker_that_was_fenced_starts_again_at_once():
    retry = Retry()
    retry.failed(Fenced("another took over"))
    assert _wait(retry) < RETRY_SECONDS
    retry.succeeded()
    assert retry.due() and retry.error is None
