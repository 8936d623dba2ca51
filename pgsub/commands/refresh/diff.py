"""Plans a refresh of the set of tables: compares publications and ledger, and changes nothing.

Mirrors the first half of AlterSubscription_refresh, and fetch_table_list.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg

from pgsub.commands.preflight import adoption, revoked_privileges, tables
from pgsub.commands.preflight.findings import Preflight
from pgsub.commands.refresh.given_table_names import named
from pgsub.common.errors import StateForbids
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.publisher import connect as publisher
from pgsub.publisher import publication
from pgsub.publisher.current_wal_lsn import check_replayed
from pgsub.target.catalog.table_names import find_oids
from pgsub.target.ledger import publisher_record, subscriptions, two_phase_state
from pgsub.target.ledger.subscriptions import RelationState
from pgsub.target.ledger.tables import held_tables
from pgsub.target.ledger.tables.subscription_tables import Renamed
from pgsub.target.session import connect as target
from pgsub.target.session import origins
from pgsub.target.sql import resync_truncate
from pgsub.target.sql.resync_truncate import TruncatedTable


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps of a refresh. The tables of ``found`` are those of ``add``."""

    sub: Subscription
    found: Preflight = field(default_factory=Preflight)
    add: tuple[RelationState, ...] = ()
    drop: tuple[RelationState, ...] = ()
    rename: tuple[Renamed, ...] = ()
    again: tuple[RelationState, ...] = ()
    emptied: tuple[TruncatedTable, ...] = ()
    adopt: bool = False  #: compare existing rows instead of emptying tables
    pending: tuple[RelationState, ...] = ()  #: subscribed before, not synchronized yet
    discarded: tuple[tuple[str, int], ...] = ()  #: held tables of ``again``, each with its number of kept changes
    keep: int = 0  #: maximum number of replaced or deleted rows to keep, for each table of ``again``

    @property
    def unsynchronized(self) -> list[int]:
        """OIDs of tables to wait for: they will be copied, or their earlier copy has not ended."""
        copied = [r.srrelid for r in (*self.add, *self.again) if r.srsubstate == "i" or r in self.again]
        return [*copied, *(r.srrelid for r in self.pending)]

    @property
    def changes(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.add or self.drop or self.rename or self.again)

    def document(self) -> dict[str, Any]:
        """Return the plan's part of ``--dry-run --json``."""
        return {
            **self.found.document(),
            "removed": [_name(one) for one in self.drop],
            "renamed": [_name(one) for one in self.rename],
            "emptied": [] if self.adopt else [_name(one) for one in self.again],
            "adopted": [_name(one) for one in self.again] if self.adopt else [],
        }

    def summary(self) -> str:
        """Format the plan in one line: ``2 tables added, 1 removed``."""
        again = "to be compared" if self.adopt else "to be copied again"
        counts = {"added": self.add, "removed": self.drop, "renamed": self.rename, again: self.again}
        said = [f"{len(tables)} {word}" for word, tables in counts.items() if tables]
        return f"tables: {', '.join(said)}" if said else "no change of tables"


def _name(one: RelationState | Renamed) -> dict[str, str]:
    return {"schemaname": one.schemaname, "relname": one.relname}


def plan(
    session: psycopg.Connection,
    source: publisher.Connection,
    sub: Subscription,
    *,
    copy_data: bool,
    resync: Sequence[str] = (),
    adopt: bool = False,
    everything: bool = False,
    keep: int = 0,
    named: Collection[str] | None = None,
) -> Plan:
    """Compare the publications with the ledger. Nothing is changed.

    :param sub: the subscription with its new publications.
    :param resync: qualified names of tables to copy again.
    :param adopt: whether to compare existing rows instead of replacing them.
    :param everything: whether to copy or compare all remaining tables, regardless of ``resync``.
    :param keep: with ``adopt``, the maximum number of replaced or deleted rows to keep for each table.
    :param named: the publications that the command names, None for all of the subscription.
    :raises TargetSchemaError: a published table has no target.
    :raises StateForbids: a table cannot be copied again, or cannot be removed; or the publisher is a standby that lags.
    :raises PermissionMissing: a privilege for the copy is missing.
    """
    if not everything:  # reconcile checks this by itself
        check_replayed(source, publisher_record.furthest(session, sub.subid))
    published = publication.published_tables(source, sub.publications)
    names = [(t.schema, t.name) for t in published]
    oids = find_oids(session, names)
    present = {rel.srrelid: rel for rel in subscriptions.relations(session, sub.subid)}
    known = {name for name in names if oids.get(name) in present}
    found = tables.check_tables(source, session, sub, copy_data=copy_data, adopt=adopt, known=known, named=named)
    kept = {oids[name]: name for name in known}
    recorded = {oid: rel.recorded or (rel.schemaname, rel.relname) for oid, rel in present.items()}
    drop = tuple(rel for oid, rel in present.items() if oid not in kept)
    held = {one.srrelid: one.changes for one in held_tables.overview(session, sub.subid)}
    _refuse_kept(held, sub, drop)
    again = _again(session, resync, present, drop)
    if everything:
        again = tuple(present[oid] for oid in sorted(kept))
    emptied = () if adopt else tuple(_emptied(session, sub, again))
    revoked_privileges.check_copied(source, session, sub, again, adoption.MODE if adopt else "atomic")
    if adopt:
        found.warnings += adoption.check_again(source, session, sub, again)
    found.two_phase = two_phase_state.state(session, sub.subid)
    return Plan(
        sub,
        found,
        tuple(table.relation("i" if copy_data else "r", adopt=adopt, keep=keep) for table in found.tables),
        drop,
        tuple(Renamed(oid, *n) for oid, n in kept.items() if n != recorded[oid]),
        again,
        emptied,
        adopt,
        tuple(rel for rel in present.values() if rel.srsubstate != "r" and rel not in (*drop, *again)),
        tuple((f"{rel.schemaname}.{rel.relname}", held[rel.srrelid]) for rel in again if rel.srrelid in held),
        keep,
    )


def _refuse_kept(kept: Mapping[int, int], sub: Subscription, drop: Sequence[RelationState]) -> None:
    """Refuse to remove a table whose kept changes are not applied.

    :raises StateForbids: a table has such changes.
    """
    for one in drop:
        if kept.get(one.srrelid):
            table = f"{one.schemaname}.{one.relname}"
            raise StateForbids(
                f'table "{table}" cannot be removed from the subscription while changes of it are kept',
                detail=f"It is held, and {kept[one.srrelid]} of its changes are not applied yet.",
                hint=f"Release it and try again when they are:\npgsub alter {word(sub.name)} --release {word(table)}\n"
                f"To give them up, on the target:\nDELETE FROM pgsub.held_change WHERE subid = {sub.subid}"
                f" AND srrelid = {one.srrelid};",
                sqlstate="55000",
            )


def _emptied(session: psycopg.Connection, sub: Subscription, again: Sequence[RelationState]) -> list[TruncatedTable]:
    if not again:
        return []
    tagged = origins.attach(session, sub) is not None
    relids = [rel.srrelid for rel in again]
    return resync_truncate.inspect(session, sub.subid, relids, replica=target.is_replica(session), tagged=tagged)


def _again(
    session: psycopg.Connection, names: Sequence[str], present: dict[int, RelationState], drop: Sequence[RelationState]
) -> tuple[RelationState, ...]:
    chosen = {}
    for name in names:
        relation = named(session, name, list(present.values()))
        if relation in drop:
            raise StateForbids(
                f'table "{name}" is no longer published',
                hint="A refresh without --resync removes it from the subscription.",
            )
        chosen[relation.srrelid] = relation
    return tuple(chosen[oid] for oid in sorted(chosen))
