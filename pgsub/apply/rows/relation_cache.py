"""Relation cache: the remote relations of a connection and their target tables. Mirrors relation.c's hash.

As in logicalrep_rel_open, a remote name is looked up on the target after each Relation message, and the state of the
oid found decides. So a table that was renamed on both sides remains the same table.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

import psycopg

from pgsub.apply.stream.transactions import RemoteTransaction
from pgsub.common import conflict_rules, quoting
from pgsub.common.conflict_rules import Rule, RuleSet
from pgsub.common.errors import ApplyError, ProtocolViolation, SchemaFault, one_line
from pgsub.common.subscription import Subscription
from pgsub.protocol.decoder import MAX_RELATIONS, decode_change
from pgsub.protocol.messages import Message, Relation, TypeName
from pgsub.target.catalog import ddl_hints, ddl_watch
from pgsub.target.catalog.relation import LEDGER, describe
from pgsub.target.catalog.relation_map import RelationMap, map_relation, missing
from pgsub.target.catalog.table_names import find_oids, renamed
from pgsub.target.session import roles
from pgsub.target.sql.statement_builder import Statement

Name = tuple[str, str]
#: Seconds that DDL on the target may go unnoticed, with up to CHECKED_TABLES tables in use; proportionally more with
#: more. A check costs the target 20 to 60 microseconds per table, so at most some two percent of the time.
CHECK_SECONDS = 1.0
CHECKED_TABLES = 500
_DESCRIBING = frozenset(b"RY")
NEVER = 0  #: InvalidOid: result for any relation of the ledger's schema


class RelationCache:
    """Remote relations as described by the stream, and their maps to target tables.

    :param connection: a target session, used only between statements of the pipeline.
    :param replica: session_replication_role = replica is in effect there.
    :param tracked: the target shows who wrote a row: this subscription's changes carry its origins, and the target
        tracks the origins of commits.
    :param compared: rows are those that a comparison has found, which reads no columns that only the target has.
    """

    def __init__(
        self,
        connection: psycopg.Connection,
        sub: Subscription,
        *,
        replica: bool,
        tracked: bool = False,
        compared: bool = False,
    ) -> None:
        self.connection = connection
        self._sub = sub
        self.subid, self.subname = sub.subid, sub.name
        self.replica = replica
        self._tracked = tracked
        self._compared = compared
        self._remote: dict[int, Relation] = {}
        self._maps: dict[int, RelationMap] = {}
        self._oids: dict[Name, int] = {}
        self._types: dict[int, TypeName] = {}
        self._prints: dict[int, ddl_watch.DefinitionVersion] = {}  #: of the mapped tables, read before their maps
        self._checked_at = 0.0
        self.rules = RuleSet(sub.on_conflict)
        self.statements: dict[tuple[int, bytes, bytes], Statement] = {}

    def limit_rules(self, limited: Iterable[Rule]) -> None:
        """Set the conflict rules with a limit. Discard all maps if other conflicts are now decided by a rule."""
        before, self.rules = self.rules, RuleSet(self.rules.lasting, limited)
        if not self.rules.decides_alike(before):
            self._maps.clear()
            self.statements.clear()

    def rule(self, relation: RelationMap, conflict_type: str) -> Rule | None:
        """Find the rule that now decides a conflict type on a table."""
        return self.rules.find(relation.target.schema, relation.target.name, conflict_type)

    def learn(self, message: Message) -> None:
        """Process a Relation message, which replaces the map, or a Type message, which only hints need."""
        if isinstance(message, TypeName):
            self._types[message.oid] = message
            if len(self._types) > MAX_RELATIONS:  # mostly of dropped tables; at worst, a hint lacks a name
                del self._types[next(iter(self._types))]
        elif isinstance(message, Relation):
            self._oids.pop(local_name(message), None)
            if self._remote.get(message.relid) != message:
                self._remote[message.relid] = message
                self._forget(message.relid)

    def learn_from(self, transaction: RemoteTransaction) -> None:
        """Learn the descriptions that hold after a transaction."""
        for relation in transaction.leaves:
            self.learn(relation)

    def learn_all(self, transaction: RemoteTransaction) -> None:
        """Learn the descriptions in a transaction that is not applied, because they are not sent again."""
        for payload in transaction.payloads():
            if payload[0] in _DESCRIBING:
                self.learn(decode_change(payload, transaction.in_stream))
        self.learn_from(transaction)

    def _forget(self, relid: int) -> None:
        self._maps.pop(relid, None)
        for key in [k for k in self.statements if k[0] == relid]:
            del self.statements[key]

    def remote(self, relid: int) -> Relation:
        """Return the remote relation.

        :raises ProtocolViolation: no Relation message was received for it.
        """
        try:
            return self._remote[relid]
        except KeyError:
            raise ProtocolViolation(f"no relation map entry for remote relation ID {relid}") from None

    def described(self, relid: int) -> Relation | None:
        """Return the newest description of a relation, None if there is none."""
        return self._remote.get(relid)

    def oid(self, relid: int) -> int | None:
        """Return the oid of the target table if it is cached; a lookup would need the session."""
        known = self._maps.get(relid)
        return known.target.oid if known is not None else self._oids.get(local_name(self.remote(relid)))

    def find(self, relid: int) -> int:
        """Look up the oid of the target table, subscribed or not.

        :raises SchemaFault: there is no table of that name.
        """
        remote = self.remote(relid)
        name = local_name(remote)
        if not self.oids([name]):
            raise self._missing(remote)
        return self._oids[name]

    def _missing(self, remote: Relation) -> SchemaFault:
        schema, name = local_name(remote)
        now = renamed(self.connection, self._sub.subid, schema, name)
        if now is not None:
            statements = [quoting.statement(one) for one in ddl_hints.rename(now, (schema, name))]
            return missing(
                schema,
                name,
                f'The subscribed table of that name is "{one_line(".".join(now))}" now. Give it back the name until'
                f" apply has passed what was sent under it; apply continues by itself:\n{'; '.join(statements)};",
            )
        types = ddl_hints.column_types(self.connection, remote.columns, self._types)
        table = ddl_hints.create_table(remote, schema, types)
        fault = missing(schema, name, ddl_hints.hint(table, f"pgsub refresh {quoting.word(self._sub.name)}"))
        fault.absent = remote
        return fault

    def oids(self, names: Collection[Name]) -> set[int]:
        """Find the oids of the target tables with these names; look up those that are not cached."""
        for name in names:
            if name[0] == LEDGER:
                self._oids[name] = NEVER
        wanted = [name for name in names if name not in self._oids]
        if wanted:
            self._oids.update(find_oids(self.connection, wanted))
        return {self._oids[name] for name in names if name in self._oids}

    def forget_names(self) -> None:
        """Forget the oids of names, because the subscription or the target was changed."""
        self._oids.clear()

    def notice_ddl(self) -> None:
        """Forget the maps of tables that were altered on the target; checks every CHECK_SECONDS.

        For example, an INSERT that fires a new trigger must not be part of a set. Clients get no invalidation messages.
        """
        now = time.monotonic()
        if not self._maps or now < self._checked_at + CHECK_SECONDS * max(1.0, len(self._maps) / CHECKED_TABLES):
            return
        self._checked_at = now
        oids = {one.target.oid for one in self._maps.values()}
        found = ddl_watch.definition_versions(self.connection, oids)
        for relid, one in list(self._maps.items()):
            oid = one.target.oid
            if found.get(oid) is None or found[oid] != self._prints.get(oid):
                self._oids.pop(local_name(one.remote), None)
                self._forget(relid)

    def known(self, relid: int) -> RelationMap | None:
        """Return the map if it is cached; making one needs the session."""
        return self._maps.get(relid)

    def make(self, relid: int, target_oid: int) -> RelationMap:
        """Look up the target table and map the columns.

        :param target_oid: oid recorded by the subscription; a re-created table has another one.
        :raises SchemaFault: the table is missing, replaced or does not match.
        :raises PermissionMissing: no role may make its changes: see roles.py.
        """
        remote = self.remote(relid)
        schema, name = local_name(remote)
        self._prints.update(ddl_watch.definition_versions(self.connection, [target_oid]))
        target = describe(self.connection, schema, name, replica=self.replica)
        if target is None:
            raise self._missing(remote)
        if target.oid != target_oid:
            raise ddl_hints.replaced(self.connection, self.subname, (schema, name), target_oid, target.oid)
        target = replace(roles.with_role(target, self._sub), origins_of=self._sub.subid if self._tracked else 0)
        types = ddl_hints.column_types(self.connection, remote.columns, self._types)
        self._check_rules(conflict_rules.of_table(self._sub.on_conflict, schema, name))
        made = replace(map_relation(remote, target, types), rules=self.rules.of_table(schema, name))
        # guard: an adoption deletes a row whatever a column has that only the target has
        if self._compared:
            made = replace(made, local_only=())
        self._maps[relid] = made
        return made

    def _check_rules(self, rules: Iterable[tuple[str, str]]) -> None:
        """Check that commit times and origins are still tracked; otherwise rules would silently have no effect."""
        asking = conflict_rules.needing_times([f"{kind}={resolution}" for kind, resolution in rules])
        if asking and not self._tracked:
            taken_back = f"{asking[0].partition('=')[0]}=default"
            raise ApplyError(
                f'conflict rule "{asking[0]}" needs track_commit_timestamp and replication origins on the target',
                detail="The target no longer records who wrote a row last.",
                hint="Switch track_commit_timestamp on and restart the target, or take the rule back:\n"
                f"pgsub alter {quoting.word(self._sub.name)} --on-conflict {quoting.word(taken_back)}",
                sqlstate="55000",
            )

    def snapshot(self) -> dict[int, Relation]:
        """Return a copy of the remote relations, from which a batch can be replayed."""
        return dict(self._remote)

    def follow(self, remote: Mapping[int, Relation]) -> None:
        """Learn the relations of another session; keep the maps of those with equal descriptions."""
        for relid, relation in remote.items():
            if self._remote.get(relid) != relation:
                self.learn(relation)

    def restore(self, snapshot: dict[int, Relation]) -> None:
        """Restore a snapshot and forget everything about the target, because its DDL may have caused the error."""
        self._remote = dict(snapshot)
        self._maps.clear()
        self._prints.clear()
        self._oids.clear()
        self.statements.clear()


def local_name(relation: Relation) -> Name:
    """Return schema and name of the target table; the protocol omits pg_catalog."""
    return relation.namespace or "pg_catalog", relation.name
