"""Metrics of all subscriptions as OpenMetrics families, from the state store only.

Names follow the conventions of Prometheus: base units, ``_total`` for counters, one unit per family. Mirrors the
metrics that postgres_exporter makes of ``pg_replication_slots`` and ``pg_stat_subscription``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from pgsub import __version__
from pgsub.catalog.locks import troubles
from pgsub.catalog.rows import SlotRow
from pgsub.commands.status.status import status
from pgsub.commands.status.subscription_status import Row, SubscriptionStatus
from pgsub.commands.status.wal_removal_forecast import lost_in
from pgsub.common.text import line
from pgsub.protocol.lsn import lsn_or_none

STATES = ("running", "waiting", "stopped", "disabled", "error", "blocked")
#: Labels after the subscription's name, and a value.
Sample = tuple[tuple[str, ...], float | None]
Samples = Callable[[SubscriptionStatus], Iterable[Sample]]


def registry(folder: Path) -> CollectorRegistry:
    """Return a registry that reads the state store for each collection."""
    made = CollectorRegistry(auto_describe=False)
    made.register(_StateStore(folder))
    return made


class _StateStore(Collector):
    """The state store as a source of metrics."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterator[Metric]:
        """Yield all families from one snapshot of the store."""
        yield from families(status(self._folder), troubles(self._folder))


def families(found: Iterable[SubscriptionStatus], unwritten: Iterable[str] = ()) -> Iterator[Metric]:
    """Yield the families of subscriptions.

    :param unwritten: what launchers currently cannot write.
    """
    shown = list(found)
    yield _info()
    yield GaugeMetricFamily(
        "pgsub_not_written", "1 if a pgsub run cannot write its state store or its log.", float(any(unwritten))
    )
    for name, help_text, labels, samples in _FAMILIES:
        cls = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family = cls(name, help_text, labels=["subscription", *labels])
        for one in shown:
            for values, number in samples(one):
                if number is not None:
                    family.add_metric([line(label) for label in (one.definition.name, *values)], float(number))
        yield family


def _info() -> Metric:
    family = GaugeMetricFamily("pgsub_build_info", "Version of pgsub.", labels=["version"])
    family.add_metric([__version__], 1)
    return family


def _one(value: Callable[[SubscriptionStatus], float | None]) -> Samples:
    return lambda one: [((), value(one))]


def _slot_now(one: SubscriptionStatus) -> Row:
    """Return the slot as recently seen, empty if it has not been seen for a while."""
    slot = one.slot or {}
    return slot if one.served and slot.get("taken_at") and one.slot_as_of is None else {}


def _slot(column: str) -> Samples:
    return _one(lambda one: _slot_now(one).get(column))


def _received(one: SubscriptionStatus) -> int | None:
    apply: Row = next((row for row in one.workers if row["worker_type"] == "apply"), {})
    return lsn_or_none(apply.get("received_lsn"))


def _behind(one: SubscriptionStatus) -> int | None:
    ends, applied = lsn_or_none(_slot_now(one).get("current_lsn")), lsn_or_none(one.applied_lsn)
    return None if ends is None or applied is None else max(ends - applied, 0)


def _lost_in(one: SubscriptionStatus) -> int | None:
    slot = _slot_now(one)
    known = {name: slot.get(name) for name in ("safe_wal_size", "wal_bytes_per_second")}
    return lost_in(SlotRow("", **known))


def _states(one: SubscriptionStatus) -> Iterator[Sample]:
    yield from (((state,), float(one.state == state)) for state in STATES)


def _tables(one: SubscriptionStatus) -> Iterator[Sample]:
    counts = Counter(row["srsubstate"] for row in one.relations)
    yield from (((state,), counts[state]) for state in "idfsr")


def _conflicts(one: SubscriptionStatus) -> Iterator[Sample]:
    prefix = "confl_"
    yield from (((n.removeprefix(prefix),), v) for n, v in (one.stats or {}).items() if n.startswith(prefix))


def _errors(one: SubscriptionStatus) -> Iterator[Sample]:
    stats = one.stats or {}
    yield ("apply",), stats.get("apply_error_count")
    yield ("sequence synchronization",), stats.get("sync_seq_error_count")
    yield ("table synchronization",), stats.get("sync_table_error_count")


def _of_tables(rows: str, column: str) -> Samples:
    def samples(one: SubscriptionStatus) -> Iterator[Sample]:
        found: Iterable[Mapping[str, Any]] = getattr(one, rows)
        yield from (((row["schemaname"], row["relname"]), row[column]) for row in found)

    return samples


def _copy_sizes(one: SubscriptionStatus) -> Iterator[Sample]:
    sizes = _of_tables("copies", "bytes_total")(one)
    yield from ((labels, size or None) for labels, size in sizes)  # 0 stands for unknown


def _skipped(one: SubscriptionStatus) -> Iterator[Sample]:
    kept = one.skipped or {}
    yield from (((what,), kept.get(f"{what}_changes", 0)) for what in ("waiting", "replayed"))


_TABLE = ("schema", "relation")
_FAMILIES: tuple[tuple[str, str, tuple[str, ...], Samples], ...] = (
    ("pgsub_subscription_state", "1 for the state of the subscription, 0 for the others.", ("state",), _states),
    ("pgsub_subscription_served", "1 if a living pgsub run serves it.", (), _one(lambda one: one.served)),
    ("pgsub_tables", "Tables by srsubstate.", ("state",), _tables),
    ("pgsub_apply_lag_seconds", "Age of the oldest change that is not applied.", (), _one(lambda one: one.lag)),
    ("pgsub_apply_lag_bytes", "WAL of the publisher that is not applied.", (), _one(_behind)),
    (
        "pgsub_apply_silent_seconds",
        "Seconds for which apply has been silent, or has waited for a standby of the publisher.",
        (),
        _one(lambda one: one.waits["seconds"] if one.waits else 0),
    ),
    (
        "pgsub_table_waiting_seconds",
        "Seconds that the synchronization of a table has waited for a lock.",
        _TABLE,
        _of_tables("table_waits", "seconds"),
    ),
    ("pgsub_received_lsn_bytes", "Position received, as a number of bytes.", (), _one(_received)),
    ("pgsub_applied_lsn_bytes", "Position applied.", (), _one(lambda one: lsn_or_none(one.applied_lsn))),
    ("pgsub_slot_active", "1 if the slot is in use.", (), _slot("active")),
    ("pgsub_slot_lost", "1 if replication cannot continue.", (), _one(lambda one: one.lost)),
    ("pgsub_slot_retained_bytes", "WAL that the publisher keeps for the slot.", (), _slot("retained_bytes")),
    ("pgsub_slot_safe_wal_bytes", "WAL that can be written before the slot is lost.", (), _slot("safe_wal_size")),
    ("pgsub_slot_lost_in_seconds", "Time until that at the present rate.", (), _one(_lost_in)),
    ("pgsub_waiting_transactions", "Transactions behind a failing one.", (), _slot("waiting_transactions")),
    ("pgsub_worker_errors", "Workers with an error at present.", (), _one(lambda one: len(one.errors))),
    ("pgsub_errors_total", "Errors of workers.", ("worker",), _errors),
    ("pgsub_conflicts_total", "Conflicts by type.", ("type",), _conflicts),
    (
        "pgsub_set_fallbacks_total",
        "Batches that were replayed row by row.",
        (),
        _one(lambda one: (one.stats or {}).get("set_fallbacks")),
    ),
    ("pgsub_prepared_transactions", "Prepared transactions not decided yet.", (), _one(lambda one: len(one.prepared))),
    ("pgsub_held_changes", "Changes kept of a held table.", _TABLE, _of_tables("held", "kept_changes")),
    ("pgsub_held_bytes", "Bytes kept of a held table.", _TABLE, _of_tables("held", "kept_bytes")),
    ("pgsub_skipped_changes", "Skipped changes kept on the target.", ("state",), _skipped),
    (
        "pgsub_sequence_ahead",
        "Values that a sequence of the target is ahead of the publisher; negative where it is behind.",
        _TABLE,
        _of_tables("sequences", "ahead"),
    ),
    ("pgsub_copy_bytes", "Bytes copied of a table.", _TABLE, _of_tables("copies", "bytes_processed")),
    ("pgsub_copy_size_bytes", "Estimated bytes of a copied table.", _TABLE, _copy_sizes),
)
