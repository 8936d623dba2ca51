"""Switches off one guard after another in a copy of the sources and expects the tests to notice each.

Run by ``make sabotage``. A guard is a text that stands exactly once in a module; its replacement takes the guard
away. A mutant that survives, a guard that moved, and tests that could not run at all make the run fail.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Guard:
    """One guard: where it stands, what takes it away, and which tests must go red then."""

    name: str
    module: str
    edits: tuple[tuple[str, str], ...]  #: (what stands there, what takes its place)
    tests: tuple[str, ...]


SETS = ("tests/apply/test_sets.py",)

GUARDS = (
    Guard(
        "covered is strictly less",
        "pgsub/protocol/lsn.py",
        (("return finish_lsn < position", "return finish_lsn <= position"),),
        ("tests/protocol/test_lsn.py", "tests/guards"),
    ),
    Guard(
        "table states are read after the lock, by version",
        "pgsub/apply/worker/worker.py",
        (("if self._streams.progress.states_version != self._version:", "if self._version < 0:"),),
        ("tests/guards",),
    ),
    Guard(
        "a filtered transaction moves the ledger",
        "pgsub/apply/worker/committer.py",
        (
            (
                "        self._moved(self._ending.commit(self.remote_lsn, batch.last))\n",
                "        if self._executor.changes == 0:\n"
                '            self._session.connection.execute("ROLLBACK")\n'
                "            return len(batch)\n"
                "        self._moved(self._ending.commit(self.remote_lsn, batch.last))\n",
            ),
        ),
        ("tests/guards",),
    ),
    Guard(
        "compare-and-set of the progress row",
        "pgsub/target/ledger/progress.py",
        (
            ("if self.remote_lsn != expected:", "if False:"),
            (
                " AND remote_lsn = $6 AND EXISTS (",
                " AND $6::pg_lsn IS NOT NULL AND EXISTS (",
            ),
        ),
        ("tests/guards",),
    ),
    Guard(
        "a compare-and-set that hits nothing keeps the COMMIT behind it from being run",
        "pgsub/target/ledger/progress.py",
        (
            (
                "SELECT a.place, 1 / (SELECT",
                "SELECT a.place, (SELECT",
            ),
        ),
        ("tests/target/test_progress.py",),
    ),
    Guard(
        "an epoch is claimed once",
        "pgsub/target/ledger/progress.py",
        (("AND token = %s AND claimed_by IS NULL RETURNING true", "AND token = %s RETURNING true"),),
        ("tests/guards",),
    ),
    Guard(
        "a take-over evicts older sessions",
        "pgsub/target/ledger/workers.py",
        (("    evict(connection, subid, roles)\n", ""),),
        ("tests/guards",),
    ),
    Guard(
        "record before report",
        "pgsub/apply/worker/loop.py",
        (("        self._progress.report(position)\n", ""),),
        ("tests/guards",),
    ),
    Guard(
        "state changes are durable",
        "pgsub/target/session/transactions.py",
        (
            (
                '        connection.execute("SET LOCAL synchronous_commit = on")\n        yield connection\n',
                "        yield connection\n",
            ),
        ),
        ("tests/guards",),
    ),
    Guard(
        "apply waits at a claimed table",
        "pgsub/apply/worker/worker.py",
        (("            if self._waiting_for:\n                return number\n", ""),),
        ("tests/guards",),
    ),
    Guard(
        "s only where apply has not passed the sync worker",
        "pgsub/target/ledger/states.py",
        (("ready = apply_lsn <= sync_lsn if handover is None else", "ready = True if handover is None else"),),
        ("tests/guards",),
    ),
    Guard(
        "apply keeps off what is claimed before its copy",
        "pgsub/apply/worker/worker.py",
        (('if s.srsubstate in "df" and s.handover_lsn', 'if s.srsubstate == "f" and s.handover_lsn'),),
        ("tests/tablesync/test_groups.py",),
    ),
    Guard(
        "a shared slot is dropped by the last table that names it",
        "pgsub/tablesync/sync_slots.py",
        (("        if naming and not naming - set(relids):\n", "        if naming:\n"),),
        ("tests/tablesync/test_groups.py",),
    ),
    Guard(
        "nobody streams a shared slot",
        "pgsub/tablesync/coordinator.py",
        (
            (
                "            if state.sync_slot != own:\n",
                "            own = state.sync_slot or own\n            if False:\n",
            ),
        ),
        ("tests/tablesync/test_groups.py",),
    ),
    Guard(
        "a copy that the publisher broke off fails",
        "pgsub/tablesync/copy/passthrough.py",
        (
            (
                "        if self._answer.failure is not None:\n            raise SourceError(self._answer.failure)\n",
                "",
            ),
        ),
        ("tests/tablesync/test_pump.py",),
    ),
    Guard(
        "a message of the publisher is only taken where it has its place",
        "pgsub/tablesync/copy/copy_out.py",
        (
            (
                "        if stage is None:\n            raise self._unexpected(kind)\n",
                "        stage = stage or self.stage\n",
            ),
        ),
        ("tests/tablesync/test_hostile.py",),
    ),
    Guard(
        "a length that no server sends is refused",
        "pgsub/protocol/frames.py",
        (("    if not 0 <= length - _LENGTH_BYTES <= MAX_MESSAGE_BYTES:\n        raise _impossible(length)\n", ""),),
        ("tests/publisher/test_hostile.py", "tests/tablesync/test_hostile.py"),
    ),
    Guard(
        "a chunk is copied once",
        "pgsub/target/ledger/chunks.py",
        (("{_KEY} AND xid IS NULL FOR UPDATE SKIP LOCKED", "{_KEY} FOR UPDATE SKIP LOCKED"),),
        ("tests/tablesync/test_copy.py", "tests/tablesync/test_faults.py"),
    ),
    Guard(
        "a refresh changes tables under the fence of their workers",
        "pgsub/target/ledger/subscription_tables.py",
        (("    for claim in wanted.claims:\n        workers.fence(connection, claim)\n", ""),),
        ("tests/target/test_membership.py",),
    ),
    Guard(
        "a table that names a slot is not forgotten",
        "pgsub/target/ledger/subscription_tables.py",
        (("if any(slot is not None and relid in wanted.drop", "if any(slot is None and relid < 0"),),
        ("tests/target/test_membership.py",),
    ),
    Guard(
        "a table that loses its sync slot is copied anew",
        "pgsub/commands/refresh/table_changes.py",
        (("        subscription_tables.reset_to_datasync(session, removed)\n", ""),),
        ("tests/faults/test_kill_refresh.py",),
    ),
    Guard(
        "a slot made too late is dropped by its maker",
        "pgsub/tablesync/coordinator.py",
        (("                sync_slots.drop_unnamed(session, self._sub, slot, list(found))\n", ""),),
        ("tests/faults/test_kill_refresh.py",),
    ),
    Guard(
        "two_phase is enabled once every table is ready",
        "pgsub/target/ledger/two_phase.py",
        (("if now == PENDING and row is not None and row[0]:", "if now == PENDING:"),),
        ("tests/target/test_two_phase.py",),
    ),
    Guard(
        "a slot becomes two-phase behind every table",
        "pgsub/target/ledger/two_phase.py",
        (("WHERE r.subid = p.subid))::text", "WHERE r.subid = 0))::text"),),
        ("tests/apply/test_two_phase_start.py",),
    ),
    Guard(
        "what was prepared before two_phase is not covered by a hand-over",
        "pgsub/apply/stream/transactions.py",
        (("return self.finish_lsn if self.kind is Kind.COMMIT else MAX_LSN", "return self.finish_lsn"),),
        ("tests/apply/test_two_phase_start.py",),
    ),
    Guard(
        "a slot goes back to one phase before the ledger says so",
        "pgsub/commands/alter/two_phase.py",
        (
            (
                '    failpoints.point("alter.after_slot")\n    two_phase.disable(session, sub.subid)\n',
                '    failpoints.point("alter.after_slot")\n',
            ),
            (
                "    if state == two_phase.ENABLED and",
                "    two_phase.disable(session, sub.subid)\n    if state == two_phase.ENABLED and",
            ),
        ),
        ("tests/faults/test_kill_two_phase_commands.py",),
    ),
    Guard(
        "two_phase is not ended while something is prepared",
        "pgsub/target/ledger/two_phase.py",
        (("    if gids:\n", "    if False:\n"),),
        ("tests/target/test_two_phase.py",),
    ),
    Guard(
        "a dropped subscription leaves nothing prepared",
        "pgsub/commands/subscription/drop.py",
        (("    _roll_back(session, prepared, reporter)\n", ""),),
        ("tests/commands/test_two_phase.py::test_drop_rolls_back_what_is_prepared_names_it_and_leaves_that_of_others",),
    ),
    Guard(
        "a worker's publisher asks for the password that is required",
        "pgsub/publisher/connect.py",
        (("    if must_use_password and not connection.pgconn.used_password:\n", "    if False:\n"),),
        ("tests/commands/test_password_required.py",),
    ),
    Guard(
        "a table to copy comes before two_phase or not at all",
        "pgsub/target/ledger/subscription_tables.py",
        (("    if wanted.copies:\n        two_phase.refuse_copy(connection, subid)\n", ""),),
        ("tests/target/test_two_phase.py",),
    ),
    Guard(
        "chunks of a rewritten table are not mixed",
        "pgsub/tablesync/copy/task.py",
        (("        check_not_rewritten(self._source, *_source_of(piece))\n", ""),),
        ("tests/tablesync/test_rows.py",),
    ),
    Guard(
        "a failed copy removes only its own rows",
        "pgsub/tablesync/copy/cleanup.py",
        (("DELETE FROM {} WHERE xmin::text = ANY ({})", "DELETE FROM {} WHERE xmin::text = ANY ({}) OR true"),),
        ("tests/tablesync/test_rows.py",),
    ),
    Guard(
        "rows of a failed copy that were changed here are told",
        "pgsub/tablesync/copy/cleanup.py",
        (("if (removed != expected or streamed) and not _is_empty(connection, target):", "if False:"),),
        ("tests/tablesync/test_faults.py",),
    ),
    Guard(
        "chunks only into a table that is empty",
        "pgsub/tablesync/copy/preparation.py",
        (("if reason is None and not plan.empty_under_lock(session, relation):", "if False:"),),
        ("tests/tablesync/test_rows.py",),
    ),
    Guard(
        "patience: the publisher hears of a worker unasked",
        "pgsub/apply/stream/receiver.py",
        (("float(wal_sender_timeout or 0) / _ANSWERS", "0.0"),),
        ("tests/apply/test_patience.py",),
    ),
    Guard(
        "patience: a silent publisher is given up",
        "pgsub/apply/stream/receiver.py",
        (("elif clock - last_heard > self._timeout:", "elif clock < 0:"),),
        ("tests/apply/test_patience.py",),
    ),
    Guard(
        "patience: a publisher that sends slowly is not silent",
        "pgsub/apply/stream/receiver.py",
        (("if burst or heard or full:", "if burst or full:"),),
        ("tests/apply/test_patience.py",),
    ),
    Guard(
        "patience: synchronous_standby_names is looked at again",
        "pgsub/apply/stream/synchronous_standby.py",
        (("self._waits = named(connection)", "named(connection)"),),
        ("tests/apply/test_patience.py",),
    ),
    Guard(
        "fast stop: a publisher that asks is told of WAL without a transaction",
        "pgsub/apply/worker/loop.py",
        (("return self._asked or clock >=", "return clock >="),),
        ("tests/faults/test_fast_stop.py::test_a_fast_stop_ends_once_everything_is_applied_and_confirmed",),
    ),
    Guard(
        "fast stop: who stands still does not keep the publisher",
        "pgsub/apply/stream/publisher_shutdown.py",
        (("asks = clock - self._asked <=", "asks = clock <= 0 and clock - self._asked <="),),
        ("tests/faults/test_fast_stop.py::test_a_fast_stop_ends_where_apply_stands_still",),
    ),
    Guard(
        "fast stop: a publisher whose requests are not read is asked otherwise",
        "pgsub/apply/stream/publisher_shutdown.py",
        (("return asks or (unread and self._refuses(clock))", "return asks"),),
        ("tests/faults/test_fast_stop.py::test_a_fast_stop_ends_where_apply_stands_still",),
    ),
    Guard(
        "fast stop: a copy of the slot confirms what it has received",
        "pgsub/apply/preview/slot_reader.py",
        (("standby_status(received, received, received,", "standby_status(received, self._start, received,"),),
        ("tests/faults/test_fast_stop.py::test_a_fast_stop_ends_once_everything_is_applied_and_confirmed",),
    ),
    Guard(
        "replay_lsn waits for the log of conflicts",
        "pgsub/apply/worker/loop.py",
        (("return self._unmirrored.passed if self._committer.recorded else self.position", "return self.position"),),
        ("tests/launcher/test_mirror.py",),
    ),
    Guard(
        "memory: missing rows do not pile up",
        "pgsub/apply/execute/executor.py",
        (("if len(self._rows.records) >= RECORDS and self._spill is not None:", "if self._spill is None:"),),
        ("tests/apply/test_memory.py::test_very_many_rows_that_are_missing",),
    ),
    Guard(
        "memory: values on their way to the target are bounded",
        "pgsub/target/sql/pipeline.py",
        ((" or self._unread_bytes >= WINDOW_BYTES:", ":"),),
        ("tests/apply/test_memory.py::test_updates_of_large_values",),
    ),
    Guard(
        "memory: prepared statements are bounded",
        "pgsub/target/sql/pipeline.py",
        (("while self._cost > PREPARED and self._prepared:", "while self._cost < 0:"),),
        ("tests/target/test_statements.py",),
    ),
    Guard(
        "records inside a prepared transaction hold feedback back",
        "pgsub/apply/commit/two_phase.py",
        (("            self._ending.recorded = True\n", ""),),
        (
            "tests/apply/test_two_phase.py::test_feedback_waits_for_all_rows_that_were_missing_in_a_prepared_transaction",
        ),
    ),
    Guard(
        "values are read under settings of our own",
        "pgsub/target/session/connect.py",
        (('    "array_nulls": "on",\n', ""),),
        ("tests/apply/test_types.py",),
    ),
    Guard(
        "a table goes by the oid of whatever bears its name",
        "pgsub/apply/worker/worker.py",
        (("        state = self._states.get(oid) or self._names", "        state = self._names"),),
        ("tests/apply/test_names.py",),
    ),
    Guard(
        "another table that got a subscribed one's name is refused",
        "pgsub/apply/worker/worker.py",
        (
            (
                "        state = self._states.get(oid) or self._names.get(local_name(relation))\n",
                "        state = self._states.get(oid)\n",
            ),
        ),
        ("tests/apply/test_names.py",),
    ),
    Guard(
        "names are verified before the commit",
        "pgsub/apply/execute/executor.py",
        (("            self._admission.refuse_replaced()\n", ""),),
        ("tests/apply/test_names.py",),
    ),
    Guard(
        "changes are made as the owner of each table",
        "pgsub/apply/rows/writer.py",
        (("        if role == self._role:\n            return\n", "        return\n"),),
        ("tests/apply/test_roles.py",),
    ),
    Guard(
        "the ledger is written by the session's own role",
        "pgsub/apply/rows/writer.py",
        (
            (
                "        self.flush()\n        self._become(None)\n        self._pipeline.sync()\n",
                "        self.flush()\n        self._pipeline.sync()\n",
            ),
        ),
        ("tests/apply/test_roles.py",),
    ),
    Guard(
        "row-level security of the acting role is refused",
        "pgsub/target/session/roles.py",
        (
            (
                "    if target.owner_row_security if role is not None else target.row_security:",
                "    if target.row_security:",
            ),
        ),
        ("tests/apply/test_roles.py",),
    ),
    Guard(
        "a row that a trigger keeps is not missing",
        "pgsub/target/sql/statements.py",
        (("    if not target.fires:\n        return text\n", "    return text\n"),),
        ("tests/apply/test_constraints.py",),
    ),
    Guard(
        "rows are found by their index however small the table was",
        "pgsub/apply/rows/session.py",
        (('        connection.execute("SET enable_seqscan = off")\n', ""),),
        ("tests/apply/test_rows.py",),
    ),
    Guard(
        "early work is committed only by the states it was decided with",
        "pgsub/apply/worker/committer.py",
        (("changed = session.progress.states_version != applier.version", "changed = applier.version is None"),),
        ("tests/apply/test_parallel.py",),
    ),
    Guard(
        "an applier gives way to whoever waits for it",
        "pgsub/apply/parallel/worker.py",
        (("        if row is not None and row[0]:\n", "        if row is None:\n"),),
        ("tests/apply/test_parallel.py",),
    ),
    Guard(
        "what an applier holds is prepared once",
        "pgsub/apply/worker/committer.py",
        (("once, applier = applier, None", "once = applier"),),
        ("tests/apply/test_parallel_faults.py",),
    ),
    Guard(
        "what is missing among equal rows is looked for again",
        "pgsub/apply/parallel/worker.py",
        (('raise GivesUp("a row that was looked for by all', 'str("a row that was looked for by all'),),
        ("tests/apply/test_parallel_faults.py",),
    ),
    Guard(
        "a prepared transaction that is streamed again ends with its COMMIT PREPARED",
        "pgsub/apply/stream/assembler.py",
        (("                self._discard(xid)\n", ""),),
        ("tests/apply/test_parallel_faults.py",),
    ),
    Guard(
        "nothing is applied early without the origin that the rest has",
        "pgsub/apply/worker/start.py",
        (("    session = _session(spec, must=tagged)\n", "    session = _session(spec)\n"),),
        ("tests/apply/test_parallel_faults.py",),
    ),
    Guard(
        "a further session is opened only under the claim",
        "pgsub/apply/worker/start.py",
        (("        session.progress.control()\n    except", "        pass\n    except"),),
        ("tests/apply/test_parallel_faults.py",),
    ),
    Guard(
        "what psycopg deallocated is prepared again before a fault is named",
        "pgsub/apply/worker/committer.py",
        (("        self._executor.forget()\n", ""),),
        ("tests/apply/test_schema_faults.py",),
    ),
    Guard(
        "the backend of a lost session is ended",
        "pgsub/apply/parallel/worker.py",
        (("            if before:\n", "            if before is None:\n"),),
        ("tests/apply/test_parallel_faults.py",),
    ),
    Guard(
        "savepoints are rolled back only where nothing else goes with them",
        "pgsub/apply/execute/savepoints.py",
        (("if not level.changed <= self._aborted:", "if not level.changed:"),),
        ("tests/apply/test_savepoints.py",),
    ),
    Guard(
        "what was received before a block is committed before its changes are applied",
        "pgsub/apply/parallel/leader.py",
        (("            self._before_block()\n", "            pass\n"),),
        ("tests/apply/test_parallel.py",),
    ),
    Guard(
        "a prepared transaction leaves a marker",
        "pgsub/apply/commit/two_phase.py",
        (("        self._transactions.mark(session.connection, gid)\n", ""),),
        ("tests/apply/test_two_phase.py",),
    ),
    Guard(
        "a PREPARE is covered by no position",
        "pgsub/apply/worker/loop.py",
        (
            (
                "elif transaction.kind is not Kind.PREPARE and covered(",
                "elif covered(",
            ),
        ),
        ("tests/apply/test_two_phase.py",),
    ),
    Guard(
        "the list of prepared transactions and the progress move together",
        "pgsub/apply/commit/two_phase.py",
        (("            self._transactions.unlist(gid)\n", ""),),
        ("tests/apply/test_two_phase.py",),
    ),
    Guard(
        "messages of no transaction are recorded before the ledger passes them",
        "pgsub/apply/worker/loop.py",
        (
            (
                "            self._committer.record_emitted()  # the ledger will stand behind them\n",
                "            pass\n",
            ),
        ),
        ("tests/apply/test_messages.py",),
    ),
    Guard(
        "messages of a prepared transaction are part of it",
        "pgsub/apply/commit/two_phase.py",
        (("        ending.record(messages)", "        self._ending.record(messages[:0])"),),
        ("tests/apply/test_messages.py",),
    ),
    Guard(
        "messages of subtransactions that were rolled back are left out",
        "pgsub/apply/stream/spool.py",
        (("                elif not inside or code != _MESSAGE:\n", "                else:\n"),),
        ("tests/apply/test_messages.py",),
    ),
    Guard(
        "messages and conflicts hold feedback back until they are logged",
        "pgsub/apply/worker/feedback_gate.py",
        (("if self._mark is not None and first > self._mark[0]:", "if self._mark is not None:"),),
        ("tests/apply/test_messages.py",),
    ),
    Guard(
        "an update that changes a key is no part of a set",
        "pgsub/apply/sets/compaction.py",
        (("    if not messages.keeps_keys():\n", "    if False:\n"),),
        SETS,
    ),
    Guard(
        "a row deleted and inserted again is replaced",
        "pgsub/apply/sets/compaction.py",
        (
            (
                "updates = self._updates((first == _UPDATE) & ~died)",
                "updates = self._updates(~new & (last != _DELETE))",
            ),
            (
                "inserts = self._inserts((last != _DELETE) & (new | died))",
                "inserts = self._inserts((last != _DELETE) & new)",
            ),
            ("self._found(~new & died)", "self._found(~new & (last == _DELETE))"),
        ),
        SETS,
    ),
    Guard(
        "what a set inserts and deletes must be absent",
        "pgsub/apply/sets/writer.py",
        (('self._send(one, "present", one.absent, 0)', "pass"),),
        SETS,
    ),
    Guard(
        "a set's deletes must find their rows",
        "pgsub/apply/sets/writer.py",
        (("if count != expected and self._deviation is None:", 'if verb == "update" and count != expected:'),),
        SETS,
    ),
    Guard(
        "a set's updates must find their rows",
        "pgsub/apply/sets/writer.py",
        (("if count != expected and self._deviation is None:", 'if verb != "update" and count != expected:'),),
        SETS,
    ),
    Guard(
        "keys of one hash are compared",
        "pgsub/apply/sets/keys.py",
        (("if not self.ordered and same.any():", "if False:"),),
        SETS,
    ),
    Guard(
        "a key's length counts",
        "pgsub/apply/sets/keys.py",
        (
            ("            codes = mix(codes, lengths.astype(np.uint64))\n", ""),
            ("if (lengths != second", "if 0 * (lengths != second"),
        ),
        SETS,
    ),
    Guard(
        "a value carried forward is of the row that lives",
        "pgsub/apply/sets/compaction.py",
        (("np.where(newest >= self._row[at], newest, at)", "np.where(newest >= 0, newest, at)"),),
        SETS,
    ),
    Guard(
        "a domain is no cast from text",
        "pgsub/target/catalog/relation.py",
        (("own.typtype <> 'd' AND (own.oid IN", "(own.oid IN"),),
        SETS,
    ),
    Guard(
        "casts are without a modifier",
        "pgsub/target/catalog/relation.py",
        (
            (
                "pg_catalog.format_type(a.atttypid, -1), k.typarray",
                "pg_catalog.format_type(a.atttypid, a.atttypmod), k.typarray",
            ),
        ),
        SETS,
    ),
    Guard(
        "a transaction is skipped by its own finish LSN only",
        "pgsub/apply/skip/skip.py",
        (("if last.finish_lsn not in skip.lsns or not last.relids():", "if not last.relids():"),),
        ("tests/apply/test_skip.py",),
    ),
    Guard(
        "the transaction behind a skip is not taken with it",
        "pgsub/apply/skip/skip.py",
        (("if (not skip.waits or transaction.finish_lsn >= skip.lsn) and transaction.relids():", "if False:"),),
        ("tests/apply/test_skip.py",),
    ),
    Guard(
        "what an applier did is not committed while something is to be skipped",
        "pgsub/apply/worker/committer.py",
        (("            if changed or session.progress.skips:\n", "            if changed:\n"),),
        ("tests/apply/test_skip.py",),
    ),
    Guard(
        "what depends on a row that was left out is left out",
        "pgsub/apply/skip/partial_skip.py",
        (("        if self._depends(payload):\n", "        if False:\n"),),
        ("tests/apply/test_skip.py",),
    ),
    Guard(
        "rows that met something together come again, fewer at a time",
        "pgsub/apply/resolve/resolver.py",
        (
            (
                "                self._together = max(1, len(part) // 4)\n                continue\n",
                "                pass\n",
            ),
        ),
        ("tests/apply/test_rules.py::test_rules_hold_in_a_batch_that_went_as_sets_at_first",),
    ),
    Guard(
        "a row that a trigger met elsewhere is for no rule",
        "pgsub/apply/resolve/resolver.py",
        ((" or (where is not None and at != where):", ":"),),
        (
            "tests/apply/test_rules.py"
            "::test_a_row_that_a_trigger_writes_elsewhere_is_no_conflict_of_the_table_with_the_rule",
        ),
    ),
    Guard(
        "a row in the way is removed as it was looked at",
        "pgsub/apply/resolve/conflicting_rows.py",
        (("                    raise Moved\n", "                    pass\n"),),
        ("tests/apply/test_rules.py::test_a_row_that_others_change_between_the_look_and_the_lock_is_looked_at_again",),
    ),
    Guard(
        "what a rule skips is kept by the commit that passes it",
        "pgsub/apply/commit/ledger_commit.py",
        (("        if keep:\n            self.keep(records)\n", ""),),
        ("tests/apply/test_rules.py::test_what_a_rule_skipped_can_be_replayed_once_nothing_is_in_its_way",),
    ),
    Guard(
        "sets check two unique indexes of no table whose conflicts have rules",
        "pgsub/apply/sets/eligibility.py",
        (("    if relation.rules and target.several_unique:\n", "    if False:\n"),),
        (
            "tests/apply/test_rules.py"
            "::test_a_collision_that_the_same_batch_takes_back_meets_its_rule_however_many_changes_wait",
        ),
    ),
    Guard(
        "what the subscription wrote itself is older than the remote change",
        "pgsub/apply/resolve/policy.py",
        ((" and not own(hit, subid)), default", "), default"),),
        ("tests/apply/test_resolution.py",),
    ),
    Guard(
        "a row is not in its own way",
        "pgsub/target/sql/conflict_search_sql.py",
        (
            (
                '" AND (tableoid, ctid) IS DISTINCT FROM (pgsub_remote.pgsub_tableoid, pgsub_remote.pgsub_ctid)"\n',
                '""\n',
            ),
        ),
        ("tests/apply/test_rules.py::test_update_exists_by_each_rule", "tests/apply/test_hits.py"),
    ),
    Guard(
        "what the transaction had removed before is not in the way",
        "pgsub/apply/conflicts/report.py",
        (('later = found.indexes[found.indexes.index(record.index_name or "") :]', "later = found.indexes"),),
        ("tests/apply/test_hits.py",),
    ),
    Guard(
        "a rule with a limit ends with its rows",
        "pgsub/apply/resolve/rules.py",
        (("            self._relations.rules.use(resolved.rule)\n", "            pass\n"),),
        ("tests/apply/test_limited_rules.py",),
    ),
    Guard(
        "what a rule with a limit left out is counted off by the same commit",
        "pgsub/apply/commit/ledger_commit.py",
        (("        self._count_off()\n", ""),),
        ("tests/apply/test_limited_rules.py",),
    ),
    Guard(
        "an LSN to skip is the finish LSN of a transaction to come",
        "pgsub/commands/skip/skip_lsn.py",
        (("        raise preview.refused(sub, lsn, located, reading.flush_lsn)\n", "        return\n"),),
        (
            "tests/commands/test_skip_preview.py"
            "::test_begin_end_and_neighbouring_lsns_name_the_transaction_that_was_meant",
        ),
    ),
    Guard(
        "a letter is applied once",
        "pgsub/target/ledger/skipped_changes.py",
        (
            (
                "    waiting = [row for row in rows if row[5] is None]\n",
                "    waiting = list(rows)\n",
            ),
            (" AND replayed_at IS NULL RETURNING id)", " RETURNING id)"),
        ),
        ("tests/commands/test_replay.py::test_the_change_of_a_conflict_is_applied_once",),
    ),
    Guard(
        "a replay that misses a row changes nothing",
        "pgsub/apply/skip/replay.py",
        (("        if isinstance(one, MissingRow):\n", "        if False:\n"),),
        ("tests/commands/test_replay.py::test_a_whole_transaction_is_applied_in_its_order_or_not_at_all",),
    ),
    Guard(
        "no rule leaves out what is replayed",
        "pgsub/apply/skip/replay.py",
        (("target_session(replace(sub, on_conflict=()),", "target_session(replace(sub),"),),
        ("tests/commands/test_replay.py::test_no_rule_leaves_out_once_more_what_is_replayed",),
    ),
    Guard(
        "what a copy brought is not replayed",
        "pgsub/apply/skip/replay.py",
        (("        if copied and not self.of_sync:\n", "        if False:\n"),),
        ("tests/commands/test_replay.py::test_what_cannot_be_replayed_is_told_why",),
    ),
    Guard(
        "a row is looked up by what the modifier of its column makes of a value",
        "pgsub/target/catalog/modifier.py",
        (("    if column.typmod < 0:\n        return False\n", "    return False\n"),),
        ("tests/apply/test_modifiers.py",),
    ),
    Guard(
        "a row that goes to another partition is inserted there, not updated",
        "pgsub/apply/rows/writer.py",
        (('place.relation.target.relkind != "p" or not place.relation.target.fires', "True"),),
        ("tests/apply/test_partitions.py",),
    ),
    Guard(
        "nothing is written untagged where somebody tells rows by their origin",
        "pgsub/target/session/origins.py",
        (("        if must or spare or needed(connection, sub):\n", "        if must or spare:\n"),),
        ("tests/apply/test_origins.py",),
    ),
    Guard(
        "a table that somebody locks leaves those that are copied with it",
        "pgsub/tablesync/copy/task.py",
        (("            self._session.execute(PATIENCE)\n", "            pass\n"),),
        ("tests/tablesync/test_groups.py::test_a_table_that_somebody_locks_leaves_the_others_and_waits_by_itself",),
    ),
    Guard(
        "what the publisher has rolled back is left out where it stops apply",
        "pgsub/apply/worker/worker.py",
        (("            left_out = rolled_back.leaves_out(spec.subscription, error)\n", "            pass\n"),),
        ("tests/apply/test_two_phase.py",),
    ),
    Guard(
        "newer changes wait behind those that are kept",
        "pgsub/apply/worker/worker.py",
        (
            (
                "            self._keeps |= held_tables.with_changes(connection, self._subid, released)\n",
                "            pass\n",
            ),
        ),
        ("tests/apply/test_held.py",),
    ),
    Guard(
        "kept changes go with the commit that applies them",
        "pgsub/apply/worker/held_release.py",
        (
            (
                "        if not held_tables.remove(self._session.connection, self._subid, gone):\n",
                "        if gone is None:\n",
            ),
        ),
        ("tests/apply/test_held.py",),
    ),
    Guard(
        "a table stays held while something is prepared that may have kept its changes",
        "pgsub/target/ledger/held_tables.py",
        (("p.prepare_lsn < t.drained_lsn)", "p.prepare_lsn < '0/0')"),),
        ("tests/apply/test_held.py::test_what_a_prepared_transaction_keeps_is_decided_with_it",),
    ),
    Guard(
        "kept changes are made by the description that they came with",
        "pgsub/apply/worker/held_release.py",
        (("payloads += [described] if described != before else []", "payloads += [described] if not before else []"),),
        ("tests/apply/test_held.py",),
    ),
    Guard(
        "what a trigger of a copied table met is no conflict of the copy",
        "pgsub/target/catalog/unique_indexes.py",
        (("    if table is None or (table.oid,) not in", "    if table is None or () in"),),
        ("tests/tablesync/test_clash.py",),
    ),
    Guard(
        "a look after a copy changes nothing",
        "pgsub/tablesync/copy/conflict.py",
        (('            self._session.execute("ROLLBACK")\n', '            self._session.execute("COMMIT")\n'),),
        ("tests/tablesync/test_clash.py::test_rows_of_the_publisher_that_meet_each_other_are_recorded_by_their_key",),
    ),
    Guard(
        "an origin is not advanced over the end of what is prepared",
        "pgsub/commands/skip/origin_advance.py",
        (("        if header.xid in prepared:\n            raise", "        if False:\n            raise"),),
        ("tests/commands/test_origin_advance.py",),
    ),
    Guard(
        "a hand-over that was claimed is given back by an advance",
        "pgsub/target/ledger/advance.py",
        (("SET handover_lsn = NULL WHERE", "SET handover_lsn = handover_lsn WHERE"),),
        ("tests/commands/test_origin_advance.py",),
    ),
    Guard(
        "relations that a trigger joins stay in order",
        "pgsub/apply/sets/eligibility.py",
        (("    if relation.target.fires:\n", "    if False:\n"),),
        SETS,
    ),
    Guard(
        "DDL on the target is noticed",
        "pgsub/apply/execute/executor.py",
        (("        self._relations.notice_ddl()\n", ""),),
        SETS,
    ),
    Guard(
        "a table is what it was before it was read",
        "pgsub/target/catalog/ddl_watch.py",
        (("ON i.inhparent = m.oid\n", "ON i.inhparent = m.oid AND false\n"),),
        SETS,
    ),
    Guard(
        "sets that deviate are not tried again at once",
        "pgsub/apply/sets/writer.py",
        (("if self._avoided.get(relation.target.oid, 0.0) > time.monotonic():", "if False:"),),
        SETS,
    ),
)


def main() -> int:
    """:return: 0 if every guard was missed by the tests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="guards whose name contains this")
    parser.add_argument("--verbose", action="store_true", help="show the output of the tests")
    options = parser.parse_args()
    chosen = [g for g in GUARDS if not options.only or options.only in g.name]
    survivors = []
    for guard in chosen:
        began = time.monotonic()
        verdict = attempt(guard, verbose=options.verbose)
        print(f"{guard.name:55s} {verdict:30s} {time.monotonic() - began:5.0f} s", flush=True)
        if verdict != "noticed":
            survivors.append(guard.name)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} guards: the suite goes red without them")
    return 1 if survivors or not chosen else 0


def attempt(guard: Guard, *, verbose: bool) -> str:
    """Run the guard's tests without the guard.

    :return: ``noticed``, or what is wrong.
    """
    with tempfile.TemporaryDirectory(prefix="pgsub-sabotage-") as folder:
        copy = Path(folder)
        for name in ("pgsub", "tests", "completions", "man"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "CHANGELOG.md"):
            shutil.copy(ROOT / name, copy / name)
        module = copy / guard.module
        source = module.read_text()
        for old, new in guard.edits:
            if source.count(old) != 1:
                return "GUARD NOT FOUND"
            source = source.replace(old, new)
        module.write_text(source)
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *guard.tests],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": folder},
            capture_output=not verbose,
            text=True,
            timeout=600,
        )
    return {0: "SURVIVED", 1: "noticed"}.get(run.returncode, f"TESTS DID NOT RUN ({run.returncode})")


if __name__ == "__main__":
    sys.exit(main())
