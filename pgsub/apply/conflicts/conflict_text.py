"""Formats conflicts and rows as the target's server does. Mirrors errdetail_apply_conflict (conflict.c).

Servers before 18 have no texts for conflicts, so those of 18 are used. From 19 on the rows follow the description.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import psycopg
from psycopg import pq
from psycopg.adapt import Transformer

from pgsub.protocol.messages import Tuple
from pgsub.protocol.reader import BINARY, UNCHANGED
from pgsub.target.catalog.relation import TargetColumn
from pgsub.target.catalog.relation_map import RelationMap
from pgsub.target.sql.conflict_search import ConflictingRow

#: A row by the target's columns, with values as the server shows them, None for NULL.
Row = Mapping[str, str | None]

#: Bytes of a value in a message, as the server truncates it, and characters of one in a record.
SHOWN, KEPT = 64, 4096
_REWORDED = 190000  #: the first version with rows after the description, and LSNs with eight digits after the slash
_LOADERS = Transformer()
_TEXTS = (25, 1042, 1043)  #: text, char, varchar: both forms are the text
_LONG = (17, *_TEXTS)  #: with bytea: a prefix of the sent value is a prefix of its text
_CHAR = 18  #: "char", a byte that need not be a character
_JSON = {114: 0, 3802: 1}  #: json and jsonb, with the number of leading bytes that are not text


def lsn(position: int, version: int) -> str:
    """Format an LSN as a server of that version does in messages."""
    low = position & 0xFFFFFFFF
    return f"{position >> 32:X}/{low:08X}" if version >= _REWORDED else f"{position >> 32:X}/{low:X}"


def unique(version: int, hits: Sequence[ConflictingRow], remote: Row, identity: str | None) -> str:
    """Format DETAIL of insert_exists, update_exists and multiple_unique_conflicts.

    :param hits: the conflicting rows, one per index.
    :param remote: the row that would result.
    :param identity: description of the search for the row to be updated.
    """
    searched = [*_remote(remote), *([identity] if identity else [])]
    found = [(_exists(hit), [*([f"key {hit.key}"] if hit.key else []), *_local(version, hit)]) for hit in hits]
    if version >= _REWORDED:
        lines = [_detail(version, text, parts) for text, parts in found]
        return "\n".join([_detail(version, "Could not apply remote change", searched), *lines])
    return "\n".join(_detail(version, text, [*parts, *searched]) for text, parts in found)


def missing(version: int, message_type: str, remote: Row | None, identity: str) -> str:
    """Format DETAIL of update_missing and delete_missing.

    :param message_type: UPDATE or DELETE.
    """
    verb = "updated" if message_type == "UPDATE" else "deleted"
    return _detail(version, f"Could not find the row to be {verb}", [*_remote(remote), identity])


def origin_differs(version: int, message_type: str, hit: ConflictingRow, remote: Row | None, identity: str) -> str:
    """Format DETAIL of update_origin_differs and delete_origin_differs.

    :param hit: the existing row and its writer.
    """
    by = {None: "locally", "": "by a non-existent origin"}.get(hit.origin, f'by a different origin "{hit.origin}"')
    verb = "Updating" if message_type == "UPDATE" else "Deleting"
    text = f"{verb} the row that was modified {by} in transaction {hit.xid} at {hit.commit_ts}"
    return _detail(version, text, [*_local(version, hit), *_remote(remote), identity])


def key_exists(index: str | None) -> str:
    """Format the beginning of a DETAIL about a key that another row has."""
    return f'Key already exists in unique index "{index}"'


def _exists(hit: ConflictingRow) -> str:
    text = key_exists(hit.index)
    if hit.xid is None:
        return text  # the row is gone, or this transaction wrote it
    if hit.commit_ts is None:
        return f"{text}, modified in transaction {hit.xid}"
    by = {None: "locally", "": "by a non-existent origin"}.get(hit.origin, f'by origin "{hit.origin}"')
    return f"{text}, modified {by} in transaction {hit.xid} at {hit.commit_ts}"


def _local(version: int, hit: ConflictingRow) -> list[str]:
    words = "local row" if version >= _REWORDED else "existing local row"
    return [f"{words} {row(hit.row)}"] if hit.row is not None else []


def _remote(remote: Row | None) -> list[str]:
    return [f"remote row {row(remote)}"] if remote is not None else []


def _detail(version: int, text: str, parts: Sequence[str]) -> str:
    """Format a description with the rows after it, or in a sentence of their own."""
    if version >= _REWORDED:
        return f"{text}: {', '.join(parts)}." if parts else f"{text}."
    rows = "; ".join(parts)
    return f"{text}.\n{rows[:1].upper()}{rows[1:]}."


def row(values: Row) -> str:
    """Format all values of a row (ExecBuildSlotValueDescription)."""
    return f"({', '.join(map(_clipped, values.values()))})"


def key(names: Iterable[str], values: Iterable[str | None]) -> str:
    """Format the columns of a key and their values, without truncation (BuildIndexValueDescription).

    :param names: quoted as SQL.
    """
    return f"({', '.join(names)})=({', '.join('null' if v is None else v for v in values)})"


def identity(relation: RelationMap, searched: Tuple) -> str:
    """Format the replica identity by which a row was searched, or the whole row."""
    if full(relation):
        return f"replica identity full {row(remote_row(relation, searched))}"
    return f"replica identity {identity_key(relation, searched)}"


def identity_key(relation: RelationMap, searched: Tuple) -> str:
    """Format the columns by which a row is searched. Long values are truncated; no index may limit them."""
    leaf = relation.target.leaf_key
    columns = [(relation.columns[i], i) for i in relation.lookup]
    columns = [one for one in columns if leaf is None or one[0].name in leaf.columns]  # the server uses their index
    names = [column.quoted or column.name for column, _ in columns]
    return key(names, [kept(value(searched, i, column)) for column, i in columns])


def full(relation: RelationMap) -> bool:
    """Return whether rows are found by all columns; a partitioned table may have its key in the partitions only."""
    return not relation.by_identity and not (relation.target.relkind == "p" and relation.remote.replica_identity != "f")


def remote_row(relation: RelationMap, values: Tuple) -> dict[str, str | None]:
    """Return a remote row by the target's columns, in their order; values that were not sent are NULL."""
    sent = {column.name: i for i, column in enumerate(relation.columns)}
    found: dict[str, str | None] = {}
    for column in relation.target.columns:
        if column.virtual:
            found[column.name] = "virtual"  # as the server shows it
        else:
            found[column.name] = value(values, sent[column.name], column) if column.name in sent else None
    return found


def ordered(relation: RelationMap, sent: Row, names: Sequence[str]) -> dict[str, str | None]:
    """Return a remote row from :func:`sent_row`, in the order of a partition's columns."""
    virtual = {column.name for column in relation.target.columns if column.virtual}
    return {name: "virtual" if name in virtual else sent.get(name) for name in names}


def sent_row(relation: RelationMap, values: Tuple) -> dict[str, str | None]:
    """Return the values that the publisher sent, for records. Unsent values are left out, because they are not NULL."""
    return {
        column.name: kept(value(values, i, column))
        for i, column in enumerate(relation.columns)
        if values.kinds[i] != UNCHANGED
    }


def kept(text: str | None) -> str | None:
    """Truncate a value for a record."""
    return text if text is None or len(text) <= KEPT else text[:KEPT] + "..."


def local_conflicts(hits: Sequence[ConflictingRow]) -> list[dict[str, Any]]:
    """Return the conflicting rows for a record; without key columns if a value of the key is truncated."""
    found = []
    for hit in hits:
        row = None if hit.row is None else kept_row(hit.row)
        whole = all((row or {}).get(name) == (hit.row or {}).get(name) for name in hit.key_columns or ())
        found.append({**hit.as_record(), "row": row, "key_columns": hit.key_columns if whole else None})
    return found


def kept_row(row: Row) -> dict[str, str | None]:
    """Truncate the values of a row for a record."""
    return {name: kept(text) for name, text in row.items()}


def value(values: Tuple, position: int, column: TargetColumn) -> str | None:
    """Format a value as text.

    :param position: position of the remote column.
    """
    raw = values.values[position]
    if raw is None:
        return None
    binary = values.kinds[position] == BINARY
    if not binary or column.type_oid in _LONG:
        raw = raw[: 4 * (KEPT + 1)]  # no more is ever shown, and a value may have a gigabyte
    return of_binary(raw, column.type_oid) if binary else raw.decode("utf-8", "replace")


def of_binary(raw: bytes, oid: int) -> str:
    """Return the output of the type's output function if psycopg knows the type, else the bytes."""
    # guard: a long text in binary form is no row of bytes
    if oid in _TEXTS:
        return raw.decode("utf-8", "replace")
    if oid in _JSON:
        return raw[_JSON[oid] :].decode("utf-8", "replace")
    if oid == _CHAR:  # like charout (char.c)
        return "".join(chr(byte) if byte < 0x80 else f"\\{byte:o}" for byte in raw if byte)
    try:
        loaded = _LOADERS.get_loader(oid, pq.Format.BINARY).load(raw)
        if isinstance(loaded, bool):
            return "t" if loaded else "f"
        if isinstance(loaded, str):
            return loaded
        if isinstance(loaded, bytes | memoryview):
            return "\\x" + bytes(loaded).hex()
        dumped = _LOADERS.get_dumper(loaded, psycopg.adapt.PyFormat.TEXT).dump(loaded)
        return bytes(dumped or b"").decode("utf-8", "replace")
    except (psycopg.Error, ValueError, TypeError, OverflowError, AttributeError):
        return "\\x" + raw.hex()


def _clipped(text: str | None) -> str:
    if text is None:
        return "null"
    raw = text.encode("utf-8", "replace")
    return text if len(raw) <= SHOWN else raw[:SHOWN].decode("utf-8", "ignore") + "..."
