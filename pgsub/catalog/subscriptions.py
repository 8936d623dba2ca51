"""pg_subscription: definitions of subscriptions.

Mirrors ``catalog/pg_subscription.c`` and the catalog part of ``commands/subscriptioncmds.c``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from pgsub.catalog.codec import BOOL, INT, LSN, NAMES, SESSIONS, TEXT, Kind, choice, decoded, optional
from pgsub.catalog.database import Database
from pgsub.catalog.times import utc_now
from pgsub.common.errors import InternalError, SubscriptionExists, SubscriptionNotFound
from pgsub.common.subscription import SECRETS, Subscription

#: For each field of Subscription: the column of pg_subscription and how it is stored.
_COLUMNS: dict[str, tuple[str, Kind]] = {
    "subid": ("oid", INT),
    "name": ("subname", TEXT),
    "connection": ("subconninfo", TEXT),
    "target": ("pgsub_target", TEXT),
    "publications": ("subpublications", NAMES),
    "slot_name": ("subslotname", optional(TEXT)),
    "enabled": ("subenabled", BOOL),
    "binary": ("subbinary", BOOL),
    "streaming": ("substream", choice(off="f", on="t", parallel="p")),
    "synchronous_commit": ("subsynccommit", TEXT),
    "wal_receiver_timeout": ("subwalrcvtimeout", TEXT),
    "two_phase": ("subtwophasestate", choice("d", "p", "e")),
    "disable_on_error": ("subdisableonerr", BOOL),
    "password_required": ("subpasswordrequired", BOOL),
    "run_as_owner": ("subrunasowner", BOOL),
    "origin": ("suborigin", choice("any", "none")),
    "failover": ("subfailover", BOOL),
    "apply_mode": ("pgsub_apply_mode", choice("batched", "transactional")),
    "copy_atomic": ("pgsub_copy_atomic", BOOL),
    "skip_lsn": ("subskiplsn", LSN),
    "owner": ("pgsub_owner_name", TEXT),
    "dboid": ("subdbid", INT),
    "max_sync_workers": ("pgsub_max_sync_workers", INT),
    "copy_workers": ("pgsub_copy_workers", INT),
    "max_parallel_apply_workers": ("pgsub_max_parallel_apply_workers", INT),
    "unavailable": ("pgsub_unavailable", NAMES),
    "password_enforced": ("pgsub_password_enforced", BOOL),
    "messages": ("pgsub_messages", BOOL),
    "skips": ("pgsub_skips", NAMES),
    "on_conflict": ("pgsub_on_conflict", NAMES),
    "sequences": ("pgsub_sequences", BOOL),
    "moves": ("pgsub_moves", INT),
    "generation": ("pgsub_generation", INT),
    "unrefreshed": ("pgsub_unrefreshed", BOOL),
    "recorded": ("pgsub_recorded", INT),
    "table_set": ("pgsub_table_set", INT),
    "apply_workers": ("pgsub_apply_workers", SESSIONS),
    "way_back_of": ("pgsub_way_back_of", optional(INT)),
}
#: Fields that the ledger's copy of a definition leaves out: they may contain secrets, or the ledger has them elsewhere,
#: or they are read from the target.
_NOT_COPIED = {
    *("subid", "name", "connection", "target", "slot_name", "two_phase", "skip_lsn", "skips"),
    *("owner", "dboid", "unavailable", "moves", "recorded", "table_set"),
}
#: Changes of these fields restart no worker, as in maybe_reread_subscription().
_NOT_OPTIONS = {"enabled", "skip_lsn", "skips", "two_phase", "unrefreshed", "table_set"}
_KNOWN_SINCE = "(SELECT min(at) FROM pgsub_journal j WHERE j.subid = pg_subscription.oid)"
_SELECT = f"SELECT {', '.join(column for column, _ in _COLUMNS.values())}, {_KNOWN_SINCE} FROM pg_subscription"
_KEYWORD = re.compile(r"(\w+)\s*=\s*(?:'(?:[^'\\]|\\.)*'|(?:[^\s'\\]|\\.)*)", re.DOTALL)
_URI_SECRET = re.compile(r"postgres(?:ql)?://(?:[^/?@]*:[^/?@]+@|.*[?&](?:" + "|".join(sorted(SECRETS)) + ")=)")


class SubscriptionCatalog:
    """The part of the state store with subscriptions."""

    _database: Database

    def subscriptions(self) -> list[Subscription]:
        """Return all subscriptions by name."""
        return [_decode(values) for values in self._database.rows(f"{_SELECT} ORDER BY subname")]

    def subscription(self, name: str) -> Subscription:
        """Return one subscription (``get_subscription_oid``).

        :raises SubscriptionNotFound: no subscription has this name.
        """
        found = self.find(name)
        if found is None:
            raise SubscriptionNotFound(f'subscription "{name}" does not exist', hint=self._others(name))
        return found

    def find(self, name: str) -> Subscription | None:
        """Return one subscription, or None."""
        found = self._database.rows(f"{_SELECT} WHERE subname = ?", (TEXT.encode(name),))
        return _decode(found[0]) if found else None

    def way_back_of(self, subid: int) -> Subscription | None:
        """Return the reverse subscription of a subscription, whatever its name is, None if there is none."""
        return next((one for one in self.subscriptions() if one.way_back_of == subid), None)

    def _others(self, name: str) -> str:
        """Suggest the subscription that may be meant by an unknown name."""
        rows = self._database.rows("SELECT subname FROM pg_subscription ORDER BY subname")
        names = [str(subname) for (subname,) in rows]
        if not names:
            folder = self._database.path.parent
            return (
                f"There is none in {folder}; --state-dir or PGSUB_STATE_DIR names another state folder, and"
                " run --from-target recreates one that is lost."
            )
        meant = difflib.get_close_matches(name, names, 1)
        said = f'Did you mean "{meant[0]}"?' if meant else "See which exist."
        return f"{said}\npgsub status"

    def subscription_by_id(self, subid: int) -> Subscription | None:
        """Return one subscription, or None (``GetSubscription`` with missing_ok)."""
        found = self._database.rows(f"{_SELECT} WHERE oid = ?", (subid,))
        return _decode(found[0]) if found else None

    def way_there(self, way_back: Subscription) -> Subscription | None:
        """Return the subscription whose switchover made a way back.

        It is None for a subscription that is no way back, and once the switchover has dropped the other one.
        """
        return None if way_back.way_back_of is None else self.subscription_by_id(way_back.way_back_of)

    def add_subscription(self, subscription: Subscription) -> None:
        """Register a subscription with counters at 0.

        :param subscription: its connection strings must not contain passwords.
        :raises SubscriptionExists: the name is taken.
        """
        values = _encode({field: getattr(subscription, field) for field in _COLUMNS})
        values["pgsub_options_changed_at"] = utc_now()
        sql = f"INSERT INTO pg_subscription ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})"
        with self._database.transaction():
            self._refuse_name(subscription.name)
            self._database.run(sql, *values.values())
            self._database.run("INSERT INTO pgsub_stats (subid) VALUES (?)", subscription.subid)

    def remove_subscription(self, subid: int) -> None:
        """Remove a subscription and its rows, except conflicts and journal. A repetition does nothing."""
        with self._database.transaction():
            self._database.run("DELETE FROM pg_subscription WHERE oid = ?", subid)

    def alter(self, subid: int, **fields: Any) -> None:
        """Change a subscription. Writes nothing if no value differs.

        :param fields: fields of :class:`~pgsub.common.subscription.Subscription` with their new values.
        :raises SubscriptionNotFound: the subscription was dropped.
        :raises SubscriptionExists: a new name is taken.
        """
        if not fields.keys() <= _COLUMNS.keys():
            raise InternalError(f"no such fields of a subscription: {sorted(fields.keys() - _COLUMNS.keys())}")
        with self._database.transaction():
            self.require(subid)
            present = self.subscription_by_id(subid)
            changes = {field: value for field, value in fields.items() if getattr(present, field) != value}
            if not changes:
                return
            if "name" in changes:
                self._refuse_name(changes["name"])
            values = _encode(changes)
            if changes.keys() - _NOT_OPTIONS:
                values["pgsub_options_changed_at"] = utc_now()
            columns = ", ".join(f"{column} = ?" for column in values)
            self._database.run(f"UPDATE pg_subscription SET {columns} WHERE oid = ?", *values.values(), subid)

    def note_recorded(self, subid: int, number: int, table_set: int) -> None:
        """Note the number of the ledger's next copy of a definition. Does nothing if the subscription was dropped.

        :param table_set: number of the ledger's set of tables.
        """
        with self._database.transaction():
            numbers = "pgsub_recorded = ?, pgsub_table_set = max(pgsub_table_set, ?)"
            self._database.run(f"UPDATE pg_subscription SET {numbers} WHERE oid = ?", number, table_set, subid)

    def require(self, subid: int) -> None:
        """Raise an error if a subscription was dropped. Inside a transaction it then stays until the end.

        :raises SubscriptionNotFound: the server's error.
        """
        if not self._database.rows("SELECT 1 FROM pg_subscription WHERE oid = ?", (subid,)):
            raise SubscriptionNotFound(f"subscription with OID {subid} does not exist")

    def _refuse_name(self, name: str) -> None:
        if self._database.rows("SELECT 1 FROM pg_subscription WHERE subname = ?", (TEXT.encode(name),)):
            raise SubscriptionExists(f'subscription "{name}" already exists')


def options(subscription: Subscription) -> dict[str, Any]:
    """Return the options of a definition for the ledger, by field, without connection strings."""
    return {field: getattr(subscription, field) for field in _COLUMNS if field not in _NOT_COPIED}


def restored(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of a definition from the result of :func:`options`. Missing fields have defaults.

    :raises ValueError: a value is invalid, or there is no publication.
    """
    if not isinstance(found, Mapping):
        raise ValueError("no object")
    fields = {}
    for field in _COLUMNS.keys() & found.keys() - _NOT_COPIED:
        kind = _COLUMNS[field][1]
        given = tuple(found[field]) if isinstance(found[field], list) else found[field]
        try:
            fields[field] = kind.decode(kind.encode(given))
        except (ValueError, TypeError, AttributeError):
            fields[field] = None
        if fields[field] != given or type(fields[field]) is not type(given):
            raise ValueError(f"{field}: {found[field]!r:.80}")
    if not fields.get("publications"):
        raise ValueError("publications: none")
    return fields


def _decode(values: tuple[Any, ...]) -> Subscription:
    *columns, known_since = values
    pairs = zip(_COLUMNS.items(), columns, strict=True)
    fields = {field: decoded(kind, "pg_subscription", column, value) for (field, (column, kind)), value in pairs}
    return Subscription(**fields, known_since=known_since)


def _encode(fields: dict[str, Any]) -> dict[str, Any]:
    for field in fields.keys() & {"connection", "target"}:
        if names_secret(fields[field]):
            raise InternalError(f"the {field} of a subscription must not hold a password")
    return {_COLUMNS[field][0]: _COLUMNS[field][1].encode(value) for field, value in fields.items()}


def names_secret(conninfo: str) -> bool:
    """Return whether a connection string contains a password. This is the last check before it is stored."""
    if "://" in conninfo.partition("=")[0]:
        return _URI_SECRET.match(conninfo) is not None
    return any(keyword in SECRETS for keyword in _KEYWORD.findall(conninfo))
