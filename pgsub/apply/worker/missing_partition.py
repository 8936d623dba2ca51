"""Completes the error of a missing target table that is a partition on the publisher.

A Relation message does not say so. A plain table made of its columns would take the rows, but queries of the
partitioned table would not see them.
"""

from __future__ import annotations

import contextlib
import re
from typing import NamedTuple

from pgsub.common import quoting
from pgsub.common.errors import SchemaFault
from pgsub.common.query import row
from pgsub.common.quoting import word
from pgsub.common.subscription import Subscription
from pgsub.protocol.messages import Relation
from pgsub.publisher import connect as publisher
from pgsub.publisher.server_errors import translating
from pgsub.target.catalog import ddl_hints
from pgsub.target.session import connect as target
from pgsub.target.session import ledger_guard
from pgsub.target.session.connect import must_use_password

_PARTITION = """
SELECT n.nspname::text, p.relname::text, pg_catalog.pg_get_expr(c.relpartbound, c.oid)
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_inherits i ON i.inhrelid = c.oid
  JOIN pg_catalog.pg_class p ON p.oid = i.inhparent JOIN pg_catalog.pg_namespace n ON n.oid = p.relnamespace
 WHERE c.oid = %s::oid AND c.relispartition
"""
_PARENT = """
SELECT c.relkind = 'p',
       EXISTS (SELECT FROM pg_catalog.pg_index x WHERE x.indrelid = c.oid AND x.indisprimary),
       EXISTS (SELECT FROM pgsub.subscription_rel r WHERE r.subid = %s AND r.srrelid IN (
               SELECT a.relid FROM pg_catalog.pg_partition_ancestors(c.oid) a
                UNION SELECT t.relid FROM pg_catalog.pg_partition_tree(c.oid) t))
  FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = %s AND c.relname = %s
"""
_VALUE = r"(?:B?'(?:[^'\\\n]|''|\\[^'\n])*'|[0-9.]+(?:e[-+]?[0-9]+)?|MINVALUE|MAXVALUE|NULL|true|false)"
_LIST = rf"\({_VALUE}(?:, {_VALUE})*\)"
#: A bound as get_rule_expr (ruleutils.c) writes it. The publisher chooses the text, and users paste the statement. So
#: only literals that end at the same place under either standard_conforming_strings are accepted.
_BOUND = re.compile(
    rf"DEFAULT|FOR VALUES (?:IN {_LIST}|FROM {_LIST} TO {_LIST}|WITH \(modulus [0-9]+, remainder [0-9]+\))"
)


_STRANGE = (
    ". The table of this name on the target is partitioned, but neither it nor any partition of it is subscribed: see"
    " first that it is the same table."
)


class _Partition(NamedTuple):
    """The parent and bound of a partition on the publisher."""

    schema: str
    parent: str
    bound: str

    @property
    def of(self) -> str:
        return quoting.name(self.schema, self.parent)


def complete(sub: Subscription, fault: SchemaFault) -> None:
    """Complete the error of a missing target table if it is a partition on the publisher.

    :raises PgsubError: a server cannot be queried; the given error is unchanged.
    """
    remote, fault.absent = fault.absent, None
    if not isinstance(remote, Relation):
        return
    with contextlib.closing(target.open_session(sub, f"pgsub {sub.subid} partition 0")) as session:
        ledger_guard.check(session)
        place = _place(sub, remote.relid, must=must_use_password(session, sub))
        if place is None:
            return
        found: tuple[bool, bool, bool] | None = row(session, _PARENT, (sub.subid, place.schema, place.parent))
    _tell(sub, fault, remote, place, found)


def is_bound(text: str) -> bool:
    """Return whether a text is the bound of a partition and nothing else."""
    return _BOUND.fullmatch(text) is not None


def _place(sub: Subscription, relid: int, *, must: bool) -> _Partition | None:
    connection = publisher.connect(sub.connection, application_name=sub.name, must_use_password=must)
    with contextlib.closing(connection), translating(connection, "fetch partition info from publisher"):
        found = connection.execute(_PARTITION.encode(), (relid,)).fetchone()
    return None if found is None else _Partition(*found)


def _tell(
    sub: Subscription, fault: SchemaFault, remote: Relation, place: _Partition, found: tuple[bool, bool, bool] | None
) -> None:
    fault.detail = f"On the publisher it is a partition of {place.of}"
    if found is None or not found[0]:
        what = "does not exist on the target" if found is None else "is not partitioned on the target"
        fault.detail += (
            f", which {what}. Created as the hint says, it is a table by itself: queries of {place.of} do not see its"
            " rows."
        )
        return
    fault.detail += "." if found[2] else _STRANGE
    again = f"pgsub refresh {word(sub.name)}"
    if not is_bound(place.bound):
        fault.hint = f"Create it as such on the target, then refresh the subscription:\n{again}"
        return
    key = [] if found[1] else ddl_hints.published_key(remote)
    fault.hint = ddl_hints.hint(ddl_hints.create_partition(remote, place.schema, place.parent, place.bound, key), again)
