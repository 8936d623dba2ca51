"""Which target table a remote relation's rows go to, remembered for the connection. Mirrors relation.c's hash."""

from __future__ import annotations

import psycopg

from pgsub.errors import ProtocolViolation, SchemaFault
from pgsub.protocol.messages import Relation
from pgsub.target.relation import RelationMap, describe, map_relation, missing
from pgsub.target.statements import Statement


class RelationCache:
    """Remote relations as the stream described them, and their maps to target tables.

    :param connection: a target session; used only between statements of the pipeline.
    :param subid: the subscription, for contexts of errors.
    :param replica: whether session_replication_role = replica is in effect there.
    """

    def __init__(self, connection: psycopg.Connection, subid: int, *, replica: bool) -> None:
        self._connection = connection
        self.subid = subid
        self._replica = replica
        self._remote: dict[int, Relation] = {}
        self._maps: dict[int, RelationMap] = {}
        self.statements: dict[tuple[int, bytes, bytes], Statement] = {}

    def learn(self, relation: Relation) -> None:
        """A Relation message: forget the old map and what was prepared for it."""
        if self._remote.get(relation.relid) == relation:
            return
        self._remote[relation.relid] = relation
        self._forget(relation.relid)

    def _forget(self, relid: int) -> None:
        self._maps.pop(relid, None)
        for key in [k for k in self.statements if k[0] == relid]:
            del self.statements[key]

    def remote(self, relid: int) -> Relation:
        """:raises ProtocolViolation: no Relation message came for it."""
        try:
            return self._remote[relid]
        except KeyError:
            raise ProtocolViolation(f"no relation map entry for remote relation ID {relid}") from None

    def described(self, relid: int) -> Relation | None:
        """What the stream said of it so far."""
        return self._remote.get(relid)

    def known(self, relid: int) -> RelationMap | None:
        """The map, if it was made before: making one needs the session."""
        return self._maps.get(relid)

    def make(self, relid: int, target_oid: int) -> RelationMap:
        """Look the target table up and pair the columns.

        :param target_oid: what the subscription recorded: a table dropped and made again is another table.
        :raises SchemaFault: missing, replaced, or unfit.
        """
        remote = self.remote(relid)
        target = describe(self._connection, remote.namespace, remote.name, replica=self._replica)
        if target is None:
            raise missing(remote.namespace, remote.name)
        if target.oid != target_oid:
            raise SchemaFault(
                f'logical replication target relation "{remote.namespace}.{remote.name}" was dropped and created again',
                detail=f"The subscription knows OID {target_oid}, the table now has OID {target.oid}.",
                hint="Refresh the subscription: the new table is copied then.\npgsub refresh NAME",
            )
        made = self._maps[relid] = map_relation(remote, target)
        return made

    def snapshot(self) -> dict[int, Relation]:
        """Remote relations as of now: a batch that is replayed starts from these."""
        return dict(self._remote)

    def restore(self, snapshot: dict[int, Relation]) -> None:
        """Back to a snapshot, with everything about the target looked up anew (any error may come from its DDL)."""
        self._remote = dict(snapshot)
        self._maps.clear()
        self.statements.clear()
