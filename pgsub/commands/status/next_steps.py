"""The runbook: an operator's next steps for the present state of a subscription, with actual names and positions.

Mirrors the runbook of the server's documentation (logical replication, conflicts), in which users must search the log
for the LSN. Nothing is changed and no server is asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from psycopg import sql

from pgsub.catalog.rows import ConflictRow, ErrorRow
from pgsub.catalog.times import readable
from pgsub.commands.status import blocked_state
from pgsub.commands.status.subscription_status import Row, SubscriptionStatus, error_class
from pgsub.common import quoting
from pgsub.common.errors import ApplyError, PermissionMissing
from pgsub.common.quoting import named, word
from pgsub.launcher.error_handling import APPLY, PUBLICATIONS, SLOT, sync_name
from pgsub.protocol.lsn import covered, format_lsn, parse_lsn

#: The holder of a lock (pgsub.launcher.mirror.lock_waits). It precedes all text that others choose.
_PID = re.compile(r"a lock that PID ([0-9]+) holds")
_ON_PUBLISHER = "a lock of the publisher that PID "
_PREPARED = "a lock that a prepared transaction holds"
#: The publisher's status of a transaction, which changes send without the upper half of its ID.
STATUS_OF_XID = (
    "SELECT pg_xact_status((pg_snapshot_xmax(pg_current_snapshot())::text::bigint >> 32 << 32 | {xid})::text::xid8),"
    " (SELECT gid FROM pg_prepared_xacts WHERE transaction = {xid}::text::xid);"
)
_STANDBY_SLOTS = (
    "SELECT current_setting('synchronized_standby_slots'), slot_name, active, wal_status, restart_lsn"
    " FROM pg_replication_slots WHERE slot_type = 'physical';"
)
_GIDS = "SELECT gid, prepared, owner FROM pg_prepared_xacts WHERE database = current_database();"
_WAITING = (
    "SELECT pid, wait_event, pg_blocking_pids(pid), query FROM pg_stat_activity"
    " WHERE application_name LIKE 'pgsub %' AND (wait_event_type = 'Lock' OR wait_event = 'SyncRep');"
)


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the remedy, with lines to paste: shell commands, or SQL, for the target if the text names no other."""

    text: str
    commands: tuple[str, ...] = ()
    statements: tuple[str, ...] = ()


def runbook(one: SubscriptionStatus) -> list[Step]:
    """Return the steps for the present state in order, none if nothing is wrong."""
    if one.lost:
        return [*_leading_back(one), *_broken(one, one.broken)]
    steps = [*_leading_back(one), *(step for row in one.errors for step in _error(one, row))]
    if one.switchover is not None:
        steps.append(Step("A switchover is under way: see where it stands, and what can be done.", (one.switchover,)))
        return [*steps, *_resume(one)]
    if one.state != "disabled":
        return [*steps, *_resume(one)]
    # A refresh is refused while the subscription is disabled.
    later = [step for step in steps if any(line.startswith("pgsub refresh ") for line in step.commands)]
    cause = " once the cause is gone" if one.errors else ""
    enable = Step(f"Let the subscription continue{cause}.", (f"pgsub enable {word(one.definition.name)}",))
    return [*(step for step in steps if step not in later), enable, *later, *_resume(one)]


def _leading_back(one: SubscriptionStatus) -> Iterator[Step]:
    """Yield the step for a way back that stops: a server that was restored may have lost the switchover."""
    sub = one.definition
    stopped = one.lost or any(row.worker == APPLY and not row.conflict for row in one.errors)
    if sub.way_back_of is None or one.switchover is not None or not stopped:
        return
    text = "The subscription leads back from a switchover: see first whether one of the servers has lost that."
    yield Step(text, (f"{sub.switchover} --status",))


def _resume(one: SubscriptionStatus) -> Iterator[Step]:
    name = word(one.definition.name)
    if not one.relations and one.state != "disabled":
        published = ", ".join(f'"{publication}"' for publication in one.definition.publications)
        yield Step(f"No table is subscribed: check on the publisher that {published} exists and publishes a table.")
        yield Step("Then subscribe to its tables.", (f"pgsub refresh {name}",))
    if one.state == "waiting" and one.task is not None:
        yield from _waiting(one, one.task)
    if one.waits is not None and one.waits["for"]:
        yield from _held_up("Apply", one.waits)
    for row in one.table_waits:
        yield from _held_up(f"The synchronization of {row['schemaname']}.{row['relname']}", row)
    if not (one.served or one.launched) and (one.errors or one.state == "stopped"):
        yield Step("Start pgsub run, unless it runs elsewhere.", (f"pgsub run {name}",))
    if one.errors:
        yield Step("Check that it catches up.", (f"pgsub wait {name} --for caught-up --timeout 1m",))


def _waiting(one: SubscriptionStatus, task: Row) -> Iterator[Step]:
    said = f"The subscription waits for {task['waits_for']}, since {readable(task['silent_since'])}."
    no_slot = task["waits_for"].startswith("a free task slot")
    if one.unheard is not None:
        yield Step(f"{said} The status shown here is older.")
        yield Step("See whether that process is stopped (T).", (f"ps -o pid,stat,etime,args -p {one.unheard}",))
        text = "See whether the target answers, and which sessions those of pgsub wait for there."
        standby = "SyncRep is a standby that does not confirm commits (synchronous_standby_names)."
        yield Step(f"{text} {standby}", statements=(_WAITING,))
    elif task["next"] and task["next"].startswith("kill "):
        yield Step(f"{said} That process is not one of pgsub run: end it, and start both again.", (task["next"],))
    elif task["next"] and task["next"].startswith("pgsub run"):
        yield Step(f"{said} End pgsub run, and start it again with more task slots.", (task["next"],))
    elif task["next"] and not task["next"].startswith("pgsub "):
        yield Step(f"{said} Start a Spark worker that has free cores.", (task["next"],))
    elif task["stage"] in ("claimed", "alive") and not no_slot:
        yield Step(
            f"{said} It is taken over automatically; check that this happens.",
            (f"pgsub status {word(one.definition.name)} --watch",),
        )
    elif task["ui"]:
        yield Step(f"{said} Give Spark more executors or cores; {task['ui']} shows what it has.")
    else:  # pgsub run's own Spark, which has enough slots
        yield Step(f"{said} It starts by itself, later where the machine is overloaded.")
        yield Step("If it does not, end pgsub run and start it again.", (f"pgsub run {word(one.definition.name)}",))


def _held_up(who: str, waits: Row) -> Iterator[Step]:
    """Yield the steps for a worker that waits on the target, and continues by itself afterwards."""
    yield Step(f"{who} waits since {readable(waits['since'])} for {waits['for']}.")
    holder = _PID.match(waits["for"])
    if holder is not None:
        pid = int(holder[1])
        text = "Let that session end its transaction, or end the session on the target; pgsub continues by itself."
        yield Step(text, statements=(f"SELECT pg_terminate_backend({pid});",))
    elif waits["for"].startswith(_ON_PUBLISHER):
        yield Step("Let that session end its transaction, or end it on the publisher; pgsub continues by itself.")
    elif blocked_state.for_standby(waits):
        yield Step(
            "The publisher sends only what these standbys have. Start the standby again; or, if it is gone for good,"
            " remove its slot from that setting of the publisher, and reload its configuration. See on the publisher"
            " which slots it waits for; pgsub continues by itself.",
            statements=(_STANDBY_SLOTS,),
        )
    elif (own := blocked_state.own_prepared(waits)) is not None:
        yield from _own_prepared(*own)
    elif waits["for"].startswith(_PREPARED):
        yield Step("See which transactions are prepared on the target, and who is to end them.", statements=(_GIDS,))


def _own_prepared(gid: str, xid: int) -> Iterator[Step]:
    """Yield the steps that end a prepared transaction as the publisher did: apply later finds it done."""
    yield Step(
        "The end of that transaction comes behind the change that waits for it, so apply cannot reach it. See on the"
        " publisher whether the transaction is still in progress, committed or aborted. If it is in progress, commit it"
        " there, or roll it back.",
        statements=(STATUS_OF_XID.format(xid=xid),),
    )
    name = quoting.literal(gid)
    yield Step(
        "If it was committed there, commit it on the target; apply continues by itself.",
        statements=(f"COMMIT PREPARED {name};",),
    )
    yield Step("If it was aborted there, roll it back on the target.", statements=(f"ROLLBACK PREPARED {name};",))


def _broken(one: SubscriptionStatus, row: ErrorRow | None) -> Iterator[Step]:
    name = word(one.definition.name)
    said = row.message if row is not None else "the slot has lost WAL that was not received yet"
    yield Step(f"Retrying does not resolve this: {said}.")
    command = f"pgsub reconcile {name}"
    hint = named(row.hint, one.definition.name) if row is not None else None
    if hint is None or command in hint:
        force = " --force" if hint is not None and f"{command} --force" in hint else ""  # the slot is there
        yield Step("See what a new slot would change.", (f"{command}{force} --dry-run",))
    if hint is not None:
        yield from _hinted(hint)
    else:
        yield Step("Create another slot: every table is compared, and only rows that differ are sent.", (command,))


def _error(one: SubscriptionStatus, row: ErrorRow) -> Iterator[Step]:
    cls, table, name = error_class(row), _synchronizing(one, row), word(one.definition.name)
    if row.worker == PUBLICATIONS:
        yield from _publications(one, row)
        return
    if row.worker == SLOT:
        yield Step(f"{row.message}. {row.detail or ''}".rstrip())
        yield from _hinted(row.hint) if row.hint else ()
        return
    times = f", {row.attempts} times since {readable(row.first_at)}" if row.attempts > 1 else f" at {readable(row.at)}"
    said = f"{_who(row, table)} stopped{times}: {row.message}."
    if row.worker == APPLY and row.conflict:
        yield from _conflict(one, row, said)
        return
    yield Step(f"{said} {row.detail}" if row.detail else said)
    if row.hint:
        yield from _hinted(row.hint)
    if issubclass(cls, PermissionMissing):
        yield Step("See what else the roles lack, on this and all other tables.", (f"pgsub refresh {name} --dry-run",))
    if table is not None and row.sqlstate == "23505":
        yield from _copied(one, row, table)
    if row.relation and any(" ADD COLUMN " in line for line in (row.hint or "").split("\n")):
        again = (f"pgsub refresh {name} --resync {word(row.relation)}",)
        yield Step("Rows from before have no values in the new column: copy the table again where they matter.", again)
    if row.worker == APPLY and issubclass(cls, ApplyError | PermissionMissing):
        if not row.hint:
            cause = "a row, a constraint, a trigger, a missing partition"
            yield Step(f"Change on the target what makes it fail: {cause}{_goes_on(one)}")
        if row.finish_lsn and issubclass(cls, ApplyError):  # a missing GRANT is no reason to lose data
            yield from _skip(one, row.finish_lsn, "cannot be applied")
        yield from _hold(one, row)


def _publications(one: SubscriptionStatus, row: ErrorRow) -> Iterator[Step]:
    name = word(one.definition.name)
    yield Step(f"Since {readable(row.first_at)}: {row.message}. {row.detail or ''}".rstrip())
    if not one.relations:
        text = "Create it on the publisher; or, if its name is mistyped, name another, whose tables are copied."
        yield Step(text, (f"pgsub alter {name} --set-publication NAME",))
        return
    yield Step("Create it again on the publisher, or remove it from the subscription (pgsub alter).")
    repair = (f"pgsub verify {name} --repair",)
    yield Step("Then compare the tables, and repair what was not sent.", repair)


def _who(row: ErrorRow, table: Row | None) -> str:
    if row.worker == APPLY:
        return "Apply"
    return f"The copy of {table['schemaname']}.{table['relname']}" if table is not None else f"The {row.worker}"


def _goes_on(one: SubscriptionStatus) -> str:
    return "." if one.state == "disabled" else "; apply continues by itself within 5 s."


def _synchronizing(one: SubscriptionStatus, row: ErrorRow) -> Row | None:
    """Return the table whose synchronization failed, None if the error is another one."""
    return next((table for table in one.relations if row.worker == sync_name(table["srrelid"])), None)


def _copied(one: SubscriptionStatus, row: ErrorRow, table: Row) -> Iterator[Step]:
    """Yield the steps for a target row that is in the way of a copy, which is all or nothing."""
    names = table["schemaname"], table["relname"]
    found = next((c for c in one.stopped_by if c.worker == row.worker), None)
    statements = tuple(_statements(found)) if found is not None else ()
    when = "once the subscription is enabled" if one.state == "disabled" else "by itself"
    if statements:
        text = f"Change or remove the row on the target, if it is wrong there; the copy is tried again {when}."
        yield Step(text, statements=statements)
    again = f"pgsub refresh {word(one.definition.name)} --resync {word('.'.join(names))}"
    text = "Or, if the table has the publisher's rows already, compare it; rows that the publisher lacks are deleted."
    yield Step(text, (f"{again} --adopt",))
    yield Step("Or empty the table on the target and copy it again.", (again,))


def _hinted(hint: str) -> Iterator[Step]:
    """Yield an error's hint as steps: text, and the lines to paste below it, for the target or the shell."""
    text, *lines = hint.split("\n")
    pasted: list[str] = []
    for line in lines:
        # guard: a sentence between two commands begins a step, because it may say that the second replaces the first
        if pasted and not _pasted(line):
            yield from _steps(text, pasted)
            text, pasted = line, []
        elif _pasted(line):
            pasted.append(line)
        else:
            text += f" {line}"
    yield from _steps(text, pasted)


def _steps(text: str, pasted: Sequence[str]) -> Iterator[Step]:
    statements = tuple(line for line in pasted if not line.startswith("pgsub "))
    commands = tuple(line for line in pasted if line.startswith("pgsub "))
    if not (statements and commands):
        yield Step(text, commands, statements)
        return
    yield Step(text, statements=statements)
    yield Step("After that:", commands)


def _pasted(line: str) -> bool:
    return line.startswith("pgsub ") or line.endswith(";")


def _conflict(one: SubscriptionStatus, row: ErrorRow, said: str) -> Iterator[Step]:
    name = word(one.definition.name)
    yield Step(said)
    found = next((c for c in one.stopped_by if c.finish_lsn == row.finish_lsn), None)
    if found is not None:
        yield Step("Compare the publisher's row with the target's.", (f"pgsub conflicts show {name} {found.id}",))
        text = f"Change or remove the row on the target, if it is wrong there{_goes_on(one)}"
        if found.identical:
            text += " It is equal to the row that the publisher sends: removing it loses nothing."
        yield Step(text, statements=tuple(_statements(found)))
        if found.identical:
            rule = word(f"{found.schemaname}.{found.relname}:identical=keep_local")
            yield Step(
                "Or ignore rows of this table that the target already has.",
                (f"pgsub alter {name} --on-conflict {rule}",),
            )
    if row.finish_lsn:
        yield from _skip(one, row.finish_lsn, "conflict")
    yield from _hold(one, row)


def _skip(one: SubscriptionStatus, finish_lsn: int, why: str) -> Iterator[Step]:
    name, lsn = word(one.definition.name), format_lsn(finish_lsn)
    applied = (one.origin or {}).get("remote_lsn")
    if applied is None or not covered(finish_lsn, parse_lsn(applied)):  # otherwise only held changes are left
        previews = tuple(f"pgsub skip-lsn {name} {lsn}{rows} --preview" for rows in (" --rows conflicting", ""))
        yield Step("Or see what would be lost by skipping rows of this transaction, or all of it.", previews)
    yield Step(
        f"Skip only those of its rows that {why}, or all of it. What is skipped is kept on the target, and"
        " pgsub conflicts replay can apply it later.",
        (f"pgsub skip-lsn {name} {lsn} --rows conflicting", f"pgsub skip-lsn {name} {lsn}"),
    )


def _hold(one: SubscriptionStatus, row: ErrorRow) -> Iterator[Step]:
    if row.relation is not None:
        yield Step(
            "Or let the other tables continue meanwhile: the changes of this one are kept on the target until it is"
            " released.",
            (f"pgsub alter {word(one.definition.name)} --hold {word(row.relation)}",),
        )


def _statements(row: ConflictRow) -> Iterator[str]:
    """Yield a DELETE for each row in the way whose record names key columns that identify it.

    The text of a key is not used: it contains values that others chose, and a partial index does not identify a row.
    """
    named = []
    for local in row.local_conflicts or ():
        found, columns = local.get("row"), local.get("key_columns")
        if not found or not columns or found in named:
            continue  # one row can conflict in several indexes
        if any(found.get(column) is None for column in columns):
            continue
        named.append(found)
        yield _delete(row.schemaname or "", row.relname or "", {column: found[column] for column in columns})


def _delete(schema: str, name: str, key: dict[str, str]) -> str:
    conditions = [sql.SQL("{} = {}").format(sql.Identifier(c), sql.Literal(value)) for c, value in key.items()]
    text = sql.SQL("DELETE FROM {} WHERE {};").format(sql.Identifier(schema, name), sql.SQL(" AND ").join(conditions))
    return quoting.statement(text)
