"""Removes one guard of a promise after another, in a copy of the sources, and expects its tests to fail.

Run by ``make sabotage``. A comment marks each guard where it stands, above its statement: ``# guard: PROMISE``. Without
the guard an ``if`` never holds, a comparison that is returned holds at its edge too, and any other statement is gone.
``# guard: PROMISE, always`` makes an ``if`` hold always, ``# guard: PROMISE, without "TEXT"`` removes only this text.
Guards of one promise are taken away together. :data:`PROMISES` names the tests, wherever they are.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import sources

MARK = re.compile(r"^ *# guard: (?P<promise>.+?)(?:, (?P<always>always)|, without \"(?P<text>.+)\")?$")
#: A mutant that ends so proves nothing.
BROKEN = re.compile(r"^E +(\w+\.)*(NameError|UnboundLocalError|SyntaxError|IndentationError)\b", re.MULTILINE)
EDGES = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")}
Edit = tuple[int, int, str]

#: promise: the tests that fail without its guard
PROMISES: dict[str, tuple[str, ...]] = {
    "a row with the key of its partition is changed": (
        "test_where_only_the_partitions_have_the_key_a_conflicting_row_keeps_columns_of_the_target",
    ),
    "a statement about a table leaves its inheritance children alone": (
        "test_the_children_of_a_table_whose_interrupted_copy_is_removed_keep_their_rows",
    ),
    "what a user has interrupted does not go on, because a server is away": (
        "test_who_interrupts_it_while_a_server_is_away_reads_what_is_left_and_it_does_not_go_on",
    ),
    "who interrupts the attempts reads what is left to do": (
        "test_who_interrupts_it_while_a_server_is_away_reads_what_is_left_and_it_does_not_go_on",
    ),
    "a sentence between two commands begins a step, because it may say that the second replaces the first": (
        "test_alternatives_of_a_hint_are_steps_of_their_own",
    ),
    "a subscription without one of its publications is not reported as caught up": (
        "test_a_subscription_without_one_of_its_publications_is_not_caught_up",
    ),
    "a silent launcher is noticed under any host name": (
        "test_a_launcher_that_is_silent_is_noticed_though_its_host_has_another_name_now",
    ),
    "a command for the wrong direction does not report that everything is as it was before": (
        "test_a_command_for_the_wrong_direction_does_not_report_that_everything_is_as_it_was",
    ),
    "a publisher stays closed to clients only if that is told": (
        "test_a_state_folder_from_before_a_switchover_that_is_under_way_lets_clients_write_on_the_publisher_again",
    ),
    "a subscription of a switchover that is under way is not dropped because a server is gone": (
        "test_a_subscription_of_a_switchover_is_not_dropped_because_its_target_is_away",
    ),
    "a table that the publisher does not publish any more is not left behind": (
        "test_what_is_planted_is_found_and_what_is_to_be_pasted_removes_it",
    ),
    "the right to write is not given while the publisher does not send the changes of a table": (
        "test_a_table_that_is_published_no_more_in_the_pause_leaves_everything_as_it_was",
    ),
    "nobody is told to make a subscription again that a switchover has ended": (
        "test_a_state_folder_from_before_a_switchover_is_not_told_to_make_the_subscription_again",
    ),
    "what apply waits for is shown though no heartbeat of it arrives": (
        "test_what_apply_waits_for_is_shown_though_no_heartbeat_of_it_arrives",
    ),
    "workers are heard after their target went back in time": (
        "test_what_a_worker_has_heard_is_shown_after_the_target_went_back_in_time",
    ),
    "a way back that is disabled later does not count as part of a switchover": (
        "test_a_way_back_that_somebody_has_disabled_since_is_not_enabled_by_the_next_run",
    ),
    "a publisher that has lost its ledger in a switchover is not a dead end": (
        "test_a_publisher_that_loses_its_ledger_before_the_right_is_taken_leaves_everything_as_it_was",
    ),
    "a told statement runs in a session that is read-only": (
        "test_a_publisher_that_loses_its_ledger_before_the_right_is_taken_leaves_everything_as_it_was",
    ),
    "a server that is read-only for clients is connected to though the connection string asks for read-write": (
        "test_a_server_that_is_read_only_for_clients_is_written_to_though_read_write_is_asked_for",
        "test_a_server_that_accepts_writes_is_asked_only_whether_it_is_the_primary",
    ),
    "rows are found by the key of the partitions only if all have the same": (
        "test_partitions_without_the_same_key_are_searched_for_whole_rows",
        "test_a_partition_without_the_key_that_is_attached_later_is_searched_for_whole_rows",
    ),
    "a row is found by the key of the partitions in its own partition": (
        "test_a_whole_row_is_found_by_the_key_that_all_partitions_have",
    ),
    "a subscription is not running while a table has lost its slot": (
        "test_a_subscription_of_which_a_table_has_lost_its_slot_is_not_running",
    ),
    "a table whose slot is lost is told while apply goes on": (
        "test_the_lost_slot_of_a_table_is_told_before_its_worker_needs_it_and_until_it_has_another",
    ),
    "the lost slot of a table is not taken for the main one": (
        "test_the_lost_slot_of_a_table_does_not_make_up_for_a_missing_main_slot",
    ),
    "no slot of a table is made or taken for dropped on a standby that answers for its primary": (
        "test_no_slot_of_a_table_is_made_or_taken_for_dropped_on_a_standby_that_answers_for_its_primary",
    ),
    "a standby without the slot is no lost slot": ("test_a_standby_that_lacks_the_slot_does_not_show_that_it_is_lost",),
    "a standby that lags is no publisher that went back in time": (
        "test_a_standby_that_lags_is_waited_for_and_no_publisher_that_went_back_in_time",
    ),
    "the target is not made equal to a standby that lags": (
        "test_the_target_is_not_made_equal_to_a_standby_that_lags_behind_it",
        "test_no_table_is_removed_because_a_standby_has_not_replayed_its_publication",
    ),
    "a job is submitted though somebody has removed old files from Spark's local folder": (
        "test_jobs_go_on_though_the_files_of_spark_were_cleaned_up",
    ),
    "the folder of a Spark that runs is not removed": (
        "test_a_start_removes_the_folders_of_those_that_were_killed_and_of_no_other",
    ),
    "a search that locks no partition does not show that none takes the row": (
        "test_a_row_that_no_row_of_the_target_can_be_is_missing",
    ),
    "a lock on a partition holds up no missing row of another one": (
        "test_a_lock_on_a_partition_holds_up_no_missing_row_of_another_one",
    ),
    "a partition that somebody has locked is not waited for": (
        "test_partitions_that_somebody_keeps_locked_are_not_waited_for_to_name_one",
    ),
    "no Spark starts in a folder that another start removes": (
        "test_no_folder_is_used_that_another_start_removes_before_it_is_locked",
    ),
    "Spark is started again after somebody has removed its local folder": (
        "test_spark_starts_again_after_somebody_removed_its_local_folder",
    ),
    "the files of jobs are not written where others could exchange them": (
        "test_the_files_of_jobs_are_not_written_where_another_user_could_exchange_them",
    ),
    "rows are found as the key's index compares them": ("test_rows_are_found_by_the_operators_of_the_keys_index",),
    "rows are found again whatever the settings of the target make of their keys": (
        "test_rows_whose_key_has_another_text_by_the_settings_of_the_target_are_repaired",
    ),
    "a row whose key has another text is changed and not deleted": (
        "test_a_row_whose_key_has_another_text_becomes_the_remote_one",
    ),
    "a row that another session updates while its change waits is a conflict": (
        "test_the_newer_of_two_writes_wins_though_the_older_one_waits_for_it",
    ),
    "a row that came while its deletion waited does not count as deleted": (
        "test_a_change_finds_the_row_that_a_local_transaction_put_in_the_place_of_its_own",
        "test_of_equal_rows_a_change_finds_the_one_that_a_local_transaction_left",
    ),
    "a row that was not deleted, though it was there, is searched again": (
        "test_a_role_that_may_delete_but_not_update_rows_deletes_those_that_came_while_it_waited",
    ),
    "rows that others change again and again stop no subscription": (
        "test_rows_that_others_change_again_and_again_are_a_reason_to_try_again_and_no_conflict",
    ),
    "a row that changes after its conflict was decided is searched and decided again": (
        "test_a_row_that_a_local_transaction_changes_after_its_conflict_was_decided_is_decided_again",
    ),
    "a row that came while its deletion waited is deleted also by a role that may not lock it": (
        "test_a_role_that_may_delete_but_not_update_rows_deletes_those_that_came_while_it_waited_once_more",
    ),
    "a row that moved to another partition while its change waited is searched again": (
        "test_a_row_that_a_local_transaction_moves_to_another_partition_and_back_while_its_change_waits_is_found",
        "test_a_row_that_moved_to_another_partition_and_no_longer_has_its_key_is_missing",
    ),
    "a row that came while its change waited is a conflict without a rule, too": (
        "test_a_conflict_without_a_rule_is_recorded_though_it_appears_only_while_its_change_waits",
    ),
    "a row that another session inserts while its change waits is a conflict": (
        "test_a_row_that_a_local_transaction_writes_while_its_change_waits_stays_if_the_rule_says_so",
    ),
    "a position does not cover a transaction that finishes at it": (
        "test_a_position_does_not_cover_a_transaction_that_finishes_at_it",
    ),
    "a lock on a partition holds up no change of another partition": (
        "test_a_lock_on_a_partition_holds_up_no_change_of_another_one",
    ),
    "a reload of the publisher's configuration gives no key another text": (
        "test_a_reload_of_the_publisher_gives_no_value_another_text_in_a_session_that_is_open",
        "test_a_key_has_one_text_in_a_change_set_though_the_publishers_configuration_is_reloaded",
    ),
    "the ledger moves only from where the worker left it": (
        "test_apply_restarts_its_streams_where_the_ledger_moved_without_it",
    ),
    "a unit that is executed early finds the rows as the publisher found them": (
        "test_a_row_that_is_changed_before_it_came_is_not_taken_for_missing",
    ),
    "a session that holds locks waits for its turn where the target detects deadlocks": (
        "test_a_unit_whose_lock_is_waited_for_while_it_waits_for_its_turn_does_not_wait_for_ever",
    ),
    "a ledger of an untrusted owner is not read": (
        "test_a_ledger_that_somebody_planted_on_the_target_is_not_even_read",
        "test_a_ledger_that_somebody_planted_on_the_publisher_is_not_even_read",
    ),
    "nothing of a database is used that took the name of the subscription's": (
        "test_a_database_that_took_the_name_of_the_targets_gets_no_change_and_runs_no_code",
    ),
    "what a restored target has lost is not reported as reached": (
        "test_what_a_restored_target_has_lost_is_not_reported_as_reached",
    ),
    "apply that waits for a transaction that the subscription has prepared is blocked": (
        "test_apply_that_waits_for_what_the_subscription_itself_has_prepared_is_blocked",
    ),
    "an emptied state store is not mistaken for a new one": (
        "test_an_empty_file_is_refused_and_kept_and_not_taken_for_a_new_store",
        "test_a_launcher_knows_what_it_serves_though_its_store_became_empty",
    ),
    "kept changes are applied only to subscribed tables": (
        "test_what_others_wrote_into_the_ledger_as_kept_is_made_in_no_table_that_takes_no_changes",
    ),
    "what was kept for a dropped table is not made in one that took its name": (
        "test_what_was_kept_for_a_dropped_table_is_not_made_in_the_table_that_took_its_name",
    ),
    "a lock that another role holds does not block a unit": (
        "test_a_stranger_who_takes_the_lock_of_a_turn_does_not_stop_apply",
    ),
    "a unit commits only under the table states it was decided with": (
        "test_units_that_were_decided_by_older_table_states_are_decided_again",
    ),
    "sessions that all wait for a lock give no sign of life": (
        "test_a_lock_that_several_sessions_wait_for_is_shown_with_its_holder_and_is_no_sign_of_life",
    ),
    "further sessions are kept only while they increase throughput": (
        "test_where_several_sessions_do_not_pay_they_are_tried_less_and_less_often",
        "test_a_target_that_does_no_more_at_once_keeps_the_sessions_that_it_gained_by",
    ),
    "a row is not deleted and inserted again where an update suffices": (
        "test_a_row_whose_identity_column_stays_as_it_is_is_not_deleted",
    ),
    "actions of foreign keys keep their order among the changes of other tables": (
        "test_a_foreign_key_that_is_enforced_acts_in_its_place_among_the_changes",
    ),
    "a row whose partition is detached is not missing": (
        "test_a_row_whose_partition_is_detached_stops_apply_and_is_not_missing",
    ),
    "a row that was inserted while its change waited is not reported missing": (
        "test_a_row_that_somebody_puts_in_the_place_of_another_meanwhile_is_not_missing",
        "test_of_equal_rows_the_other_is_taken_where_somebody_deletes_the_one",
    ),
    "a part waits for the latest part that any of its transactions depends on": (
        "test_a_part_waits_for_what_any_of_its_transactions_depends_on",
    ),
    "a slot that another consumer uses is not dropped": (
        "test_a_slot_that_was_made_again_by_another_hand_is_replaced_unless_it_is_in_use",
    ),
    "a text that begins like bytes is compared": (
        "test_a_record_explains_a_row_only_while_the_publisher_has_it_as_recorded",
    ),
    "binary values of a record are read as the target reads them": (
        "test_binary_values_of_skipped_and_held_changes_explain_differences",
    ),
    "a long text in binary form is no row of bytes": (
        "test_a_long_text_in_binary_form_is_shown_as_text_wherever_it_is_cut",
    ),
    "a row in the way is deleted though a foreign key changes it meanwhile": (
        "test_of_several_rows_in_the_way_a_foreign_key_may_change_one_while_another_is_deleted",
    ),
    "a row that a foreign key changes while others are deleted becomes the remote one": (
        "test_a_foreign_key_that_acts_while_rows_are_deleted_takes_nothing_of_the_remote_row",
    ),
    "a standby without the slot does not show that the slot is gone": (
        "test_a_standby_that_answers_for_its_primary_is_no_reason_to_leave_the_slot_there",
    ),
    "a snapshot is read only if the session that made it is still there": (
        "test_a_snapshot_of_another_session_that_has_the_name_is_not_read",
        "test_a_snapshot_that_got_a_name_again_after_a_crash_is_not_read_for_the_one_before",
    ),
    "a slot moves only together with every table that needs it": (
        "test_a_table_of_a_group_catches_up_alone_without_moving_the_slot_of_the_others",
    ),
    "no change is made in a table that was taken from the stream it shares": (
        "test_a_table_that_is_taken_from_a_group_gets_no_more_changes_from_its_stream",
    ),
    "a shared slot moves only while it is the slot of all its tables": (
        "test_a_position_of_several_tables_is_reported_only_under_the_claims_of_all",
    ),
    "an epoch is claimed only once": ("test_a_second_run_of_a_task_is_rejected",),
    "a take-over ends older sessions": ("test_a_zombie_with_an_open_transaction_cannot_commit_after_a_take_over",),
    "a position is recorded before it is reported": ("test_a_position_is_in_the_ledger_before_the_publisher_gets_it",),
    "state changes are durable": ("test_a_committed_s_survives_a_crash_of_the_target_with_asynchronous_commit",),
    "a heartbeat counts only once": ("test_a_heartbeat_that_somebody_recorded_and_repeats_is_no_sign_of_life",),
    "conflicts are logged before feedback": (
        "test_whoever_waits_for_replay_lsn_finds_the_conflict_in_the_log_and_in_state_db",
    ),
    "the apply position does not pass what state.db shows": (
        "test_whoever_waits_for_replay_lsn_finds_remote_lsn_in_state_db",
    ),
    "feedback does not pass a change of two_phase that is not shown": (
        "test_whoever_waits_for_replay_lsn_finds_two_phase_enabled_in_the_log_and_in_state_db",
    ),
    "a slot with a gap is not followed": (
        "test_a_slot_that_was_made_again_under_its_name_is_not_followed_over_the_gap",
    ),
    "a spool file that was removed or changed is not read": (
        "test_a_spool_file_that_was_removed_or_changed_is_not_read",
        "test_a_file_that_is_removed_under_a_streamed_transaction_makes_it_come_again_whole",
    ),
    "a rolled-back subtransaction leaves nothing": ("test_aborted_subtransactions_leave_nothing",),
    "a restored publisher is rejected": ("test_a_publisher_that_is_not_the_one_recorded_is_diagnosed",),
    "a publisher whose files were put back is not followed over the gap": (
        "test_its_changes_are_not_followed_over_the_gap",
        "test_a_transaction_that_the_wal_does_not_have_stops_apply_with_what_to_do",
    ),
    "a timeline that branched off before a position of the subscription is rejected": (
        "test_a_standby_that_lagged_is_not_gone_over_to_whoever_of_the_workers_comes_first",
        "test_a_table_that_was_caught_up_with_where_a_standby_lags_keeps_apply_from_going_over_to_it",
    ),
    "what was reported before is named again only when the stream has come that far": (
        "test_the_first_feedback_names_nothing_that_is_still_to_be_applied",
    ),
    "a timeline is recorded before a position of it": (
        "test_a_standby_that_had_everything_is_gone_over_to_whoever_of_the_workers_comes_first",
    ),
    "no worker continues on an abandoned timeline": (
        "test_a_timeline_is_recorded_only_while_no_other_worker_was_started",
    ),
    "a slot is created only on the publisher": ("test_no_row_of_another_publisher_is_copied_and_no_slot_made_there",),
    "a session with the wrong server is not used": (
        "test_a_copy_whose_address_leads_elsewhere_meanwhile_reads_nothing_there",
        "test_a_slot_is_not_taken_for_dropped_on_another_server",
    ),
    "a slot is created again only by the attempt that will stream it": (
        "test_a_take_over_waits_while_an_attempt_creates_the_slot_of_its_table",
    ),
    "a silent publisher is disconnected": ("test_a_publisher_that_vanished_without_a_word_is_given_up",),
    "changes are decided by the current table states": (
        "test_a_table_state_that_changes_while_apply_waits_for_its_lock_decides_the_change",
    ),
    "apply waits at a table that a sync worker has claimed": (
        "test_apply_waits_at_a_claimed_table_and_withdraws_the_claim_after_a_while",
    ),
    "a table is handed over only at a position that apply has not passed": (
        "test_a_table_is_not_handed_over_behind_apply",
    ),
    "nothing beyond a barrier is committed": ("test_what_a_barrier_does_not_cover_waits_until_it_is_released",),
    "apply does not wait at a barrier forever": ("test_apply_goes_on_by_itself_when_nobody_releases_it",),
    "a phase follows only a phase that allows it": ("test_what_was_given_is_not_given_or_released_again",),
    "the right to write is not given while changes still arrive": (
        "test_a_session_that_sets_itself_writable_is_found_out",
    ),
    "a session that is starting counts as one that began before": (
        "test_a_session_that_is_just_starting_does_not_slip_through_a_fence",
    ),
    "a silent walsender is not mistaken for an idle one": (
        "test_a_walsender_that_says_nothing_while_its_wal_goes_on_is_a_lag",
    ),
    "partitions read through their table are locked before they are checked for a rewrite": (
        "test_a_partition_that_is_being_emptied_is_not_read_through_its_table_as_an_empty_one",
    ),
    "a launcher that waits for the target gives no sign of life": (
        "test_while_nothing_goes_on_the_status_is_not_green",
    ),
    "a killed creation is recognized by its note where the host has another name": (
        "test_a_create_that_was_killed_is_undone_by_the_next_one_of_the_name_on_a_host_of_any_name",
    ),
    "an adoption does not overwrite what only the target of a lost switchover has": (
        "test_a_target_that_loses_the_switchover_after_its_end_is_left",
    ),
    "a ledger that somebody planted is not read": (
        "test_a_ledger_that_comes_behind_the_check_of_a_session_is_not_read",
        "test_a_planted_ledger_of_a_publisher_is_not_read",
    ),
    "nobody is told to remove what a switchover that is under way has made": (
        "test_a_switchover_that_is_under_way_is_not_rehearsed_and_nothing_of_it_is_an_obstacle",
    ),
    "a state folder from before the end of a switchover does not say that it leads back": (
        "test_a_state_folder_from_the_middle_of_a_switchover_that_has_ended_does_not_say_that_it_leads_back",
    ),
    "nobody else gives code to Spark's JVM": ("test_no_native_code_is_loaded_from_a_folder_in_which_others_write",),
    "no table is copied before the slot is there": ("test_a_slot_that_is_made_after_create_said_not_to",),
    "a slot is not begun with behind a table that has been copied": (
        "test_a_slot_that_is_made_after_a_table_was_synchronized_is_refused",
    ),
    "no ledger is no ledger that may be read": (
        "test_a_ledger_that_comes_behind_the_check_of_a_session_on_the_target_is_not_read",
    ),
    "no command reads a ledger that comes behind its check": (
        "test_a_ledger_that_comes_behind_the_check_of_a_session_on_the_target_is_not_read",
    ),
    "a ledger names no slot of others": (
        "test_a_drop_that_keeps_slots_names_those_of_tables_that_nothing_knows_any_more",
    ),
    "no owner of a table words the GRANT that somebody is told to run": (
        "test_a_missing_privilege_names_the_statement_to_paste",
    ),
    "no owner of a table of the target words a GRANT": ("test_code_of_a_table_does_not_word_a_statement_to_paste",),
    "publications do not change before their changes are applied": (
        "test_a_table_that_moves_to_another_publication_loses_no_change",
    ),
    "a target that is older than the state store is not taken for a newer one": (
        "test_a_target_that_is_older_than_the_state_store_is_not_taken_for_a_newer_one",
    ),
    "a slot that the ledger has as that of another subscription is not dropped": (
        "test_a_target_that_is_older_than_the_state_store_is_not_taken_for_a_newer_one",
    ),
    "a way back gets nothing that the other direction applied before it began": (
        "test_a_way_back_whose_slot_goes_back_in_a_crash_brings_nothing_back",
    ),
    "rows that an unpublished TRUNCATE left are not repaired": (
        "test_what_an_unpublished_truncate_leaves_is_told_apart_and_stays",
    ),
    "a subscription that a switchover has ended is not rebuilt before it is dropped": (
        "test_the_way_back_is_rebuilt_where_the_state_folder_is_lost_after_clients_write_on_the_target",
    ),
    "a publication that was just made and added is not said to have been missing": (
        "test_a_publication_that_is_made_and_then_added_is_not_said_to_have_been_missing",
    ),
    "a publication that is dropped and made again is told": (
        "test_a_publication_that_is_dropped_and_made_again_before_anybody_looks_is_told",
    ),
    "a state folder that was moved away gets no sign of life": (
        "test_a_state_folder_that_was_moved_away_gets_no_sign_of_life",
    ),
    "a lack of resources is not reported as a bug": ("test_what_the_machine_lacks_is_no_bug_and_is_tried_again",),
    "a lack of resources does not end a launcher": ("test_a_launcher_without_memory_goes_on_once_it_has_some",),
    "the wait for a thread to start is limited": ("test_a_thread_that_never_begins_is_not_waited_for_for_ever",),
    "failed attempts to accept a connection are spaced out": (
        "test_metrics_without_a_file_descriptor_wait_without_a_spin",
    ),
    "a target does not release a publisher that gave the right to write to another target": (
        "test_a_target_does_not_let_clients_write_on_a_publisher_that_gave_the_right_to_another_one",
    ),
    "a database takes part in one switchover at a time": (
        "test_a_database_takes_part_in_one_switchover_and_gives_the_right_once",
    ),
    "a database gives the right to write away only once": (
        "test_a_database_takes_part_in_one_switchover_and_gives_the_right_once",
    ),
    "the right to write is not given while apply leaves out a table": (
        "test_a_table_that_is_held_meanwhile_leaves_everything_as_it_was",
    ),
    "the winner of a conflict brings unchanged large values if the publisher sends them": (
        "test_two_databases_agree_about_a_large_value_that_the_winner_did_not_change_if_their_identity_is_full",
    ),
    "what was left out before the copy of a table explains no difference": (
        "test_what_was_left_out_before_a_table_was_copied_again_explains_no_difference",
    ),
    "of a skipped change and a conflict of a row, the later one decides": (
        "test_of_all_records_of_a_row_since_the_copy_of_its_table_the_last_decides",
    ),
    "a record of an earlier version of a row explains no difference": (
        "test_a_record_of_an_earlier_version_of_a_row_explains_no_difference",
        "test_a_record_explains_a_row_only_while_the_publisher_has_it_as_recorded",
    ),
    "a row with a known difference is not reported as equal": (
        "test_rows_that_differ_for_a_known_reason_are_switched_over_only_where_that_is_accepted",
    ),
    "the right to write is not given while skipped changes wait for replay": (
        "test_changes_that_are_skipped_meanwhile_leave_everything_as_it_was",
    ),
    "the pause does not begin while an obstacle remains": (
        "test_what_comes_into_the_way_after_it_was_looked_for_is_refused_before_the_pause",
    ),
    "the right to write is not given while the way back would omit or copy a table": (
        "test_a_way_back_that_would_copy_a_table_leaves_everything_as_it_was",
    ),
    "apply does not start where clients write since a switchover": ("test_apply_writes_only_where_clients_do_not",),
    "the way back does not start before clients have stopped writing": ("test_apply_writes_only_where_clients_do_not",),
    "no worker of the subscription commits once the way back replicates": (
        "test_no_subscription_of_a_switchover_is_enabled_at_the_wrong_time",
    ),
    "no statement to paste grants a role that has power over the server": (
        "test_what_gives_power_over_the_server_is_named_and_is_no_statement_to_paste",
    ),
    "no statement to paste alters a role that has power over the server": (
        "test_what_gives_power_over_the_server_is_named_and_is_no_statement_to_paste",
    ),
    "a fence command is not skipped": ("test_a_fence_that_is_a_command_is_not_left_out_by_the_next_run",),
    "a failure in the pause ends the pause": ("test_a_right_that_cannot_be_taken_in_time_is_given_back",),
    "a promote command is not skipped": (
        "test_a_command_that_leads_clients_to_the_target_is_not_left_out_by_the_next_run",
    ),
    "subscriptions of a switchover in progress are neither dropped nor renamed": (
        "test_neither_subscription_is_dropped_or_renamed_while_the_switchover_is_under_way",
    ),
    "a target that has lost changes since the right was given does not take it": (
        "test_a_target_that_lost_changes_since_the_right_was_given_does_not_take_it",
    ),
    "a publisher that has lost all of the switchover after its end is told": (
        "test_a_publisher_that_loses_all_of_the_switchover_after_its_end_is_told_and_not_changed",
    ),
    "clients do not write on a target that has lost the right while they may write on the publisher": (
        "test_a_target_that_loses_the_switchover_after_its_end_is_left",
    ),
    "a server that is not the target of the switchover is not changed by its abort": (
        "test_an_abort_changes_no_server_that_is_not_the_target",
    ),
    "the slot of a subscription that another state store serves is not said to be of no use": (
        "test_the_slot_of_a_subscription_of_another_state_store_is_not_told_to_be_dropped",
    ),
    "a rollback takes away no prepared statement of a pipeline": (
        "test_a_transaction_of_many_tables_reaches_partitions_in_which_a_trigger_fires",
    ),
    "a standby of the target is not taken for the target": (
        "test_a_standby_of_the_target_that_lags_does_not_show_that_the_target_has_lost_the_switchover",
    ),
    "a standby that has not been promoted does not show what its primary has lost": (
        "test_a_standby_of_the_target_that_lags_does_not_show_that_the_target_has_lost_the_switchover",
    ),
    "an adoption deletes a row whatever a column has that only the target has": (
        "test_an_adoption_of_a_table_without_a_key_deletes_rows_whatever_only_the_target_has_in_them",
    ),
    "a failure in the pause ends it although the target cannot be asked for its journal": (
        "test_a_target_that_dies_in_the_pause_and_stays_away_ends_it",
    ),
    "a whole old row leads to its partition": (
        "test_a_row_whose_partition_is_detached_is_not_missing_though_the_table_is_itself_a_partition",
    ),
    "runs of a switchover exclude each other": ("test_two_runs_at_once_are_one_too_many",),
    "a role that may not read the journal does not hide that a switchover is lost": (
        "test_a_role_that_may_not_read_the_journal_of_the_target_does_not_hide_that_it_is_lost",
    ),
    "a target that is back at a time before it took the right has lost the switchover": (
        "test_a_target_that_lost_the_switchover_after_it_had_taken_the_right_is_left",
        "test_a_target_that_loses_the_switchover_after_its_end_is_left",
    ),
    "a target that has lost the switchover does not overwrite the publisher": (
        "test_a_target_that_lost_the_switchover_after_it_had_taken_the_right_is_left",
        "test_a_target_that_loses_the_switchover_after_its_end_is_left",
    ),
    "a publisher that loses the right to write after the switchover is fenced again": (
        "test_a_publisher_that_loses_its_fence_after_the_switchover_is_fenced_again_and_made_equal",
    ),
    "the writes are not reported as moved while the publisher may have lost its fence": (
        "test_a_publisher_that_lost_its_fence_since_the_target_took_the_right_is_fenced_again_and_told",
    ),
    "what was taken is not released, even by a publisher that has lost the commit that gave it": (
        "test_a_publisher_that_loses_its_fence_under_the_run_that_took_the_right_is_fenced_again_and_told",
    ),
    "a publisher that waits for a standby is not taken for an idle one": (
        "test_a_standby_that_is_away_and_without_which_the_publisher_sends_nothing_is_told_with_its_slot",
    ),
    "the right to write is taken only after it was given": ("test_what_was_not_given_is_not_taken",),
    "a given right is released only after the taking side has declined it": (
        "test_what_was_given_is_released_only_by_a_target_that_has_not_taken_it",
    ),
    "the publisher's snapshot is taken at the barrier": ("test_a_snapshot_behind_the_barrier_is_not_taken",),
    "apply is stopped until the target's snapshot is taken": (
        "test_a_point_that_takes_longer_than_apply_stands_is_none",
    ),
    "rows that another subscription may have written are neither reported nor replaced": (
        "test_rows_that_another_subscription_brought_are_no_fault_and_not_replaced_but_missing_ones_are_brought",
    ),
    "rows of a subscription created after the comparison are neither replaced nor deleted": (
        "test_rows_of_a_subscription_that_is_made_while_a_repair_runs_are_not_deleted",
    ),
    "what differs only later may be on its way to the publisher": (
        "test_a_table_that_was_equal_at_first_is_not_repaired",
    ),
    "a row on its way to the publisher is not reported as a difference": (
        "test_a_row_on_its_way_to_the_publisher_is_not_taken_for_a_fault",
    ),
    "a switchover keeps the state store that can end it": (
        "test_a_subscription_that_is_switched_over_comes_into_no_other_state_store",
    ),
    "a way back that was disabled since is not enabled again": (
        "test_a_way_back_that_somebody_has_disabled_since_is_not_enabled_by_the_next_run",
    ),
    "rows are repaired only while apply is stopped at the point": (
        "test_a_repair_whose_barrier_is_gone_writes_nothing_of_that_point",
    ),
    "a row that the target holds in another form is not mistaken for a deleted one": (
        "test_rows_whose_key_the_target_has_in_another_form_are_found_again_on_the_publisher",
    ),
    "what an index does not find is not deleted": (
        "test_a_row_that_an_index_of_the_publisher_does_not_find_is_not_deleted_from_the_target",
    ),
    "what was not compared is not reported as equal": (
        "test_what_was_not_compared_is_never_called_equal",
        "test_a_named_table_that_still_synchronizes_is_no_proof",
    ),
    "a table rewritten during its comparison gets no verdict": (
        "test_a_table_that_is_emptied_or_rewritten_meanwhile_is_not_judged",
    ),
    "ranges of a table that was rewritten meanwhile are not remembered as equal": (
        "test_ranges_of_a_table_that_was_emptied_meanwhile_are_not_kept",
    ),
    "what was found equal of something else is not taken for this": (
        "test_what_has_changed_since_is_compared_from_the_beginning",
    ),
    "rows are not compared by hashes that the two servers compute differently": (
        "test_servers_that_hash_otherwise_are_not_compared",
    ),
    "only one session repairs the rows of an adopted table": ("test_only_one_session_brings_what_differs",),
    "rows of an interrupted copy that others have changed are not discarded": (
        "test_rows_that_were_changed_here_are_not_thrown_away",
    ),
    "row addresses are not used after the table was rewritten": (
        "test_addresses_of_a_table_that_was_rewritten_meanwhile_are_not_used",
    ),
    "the rows collected for one key are limited": ("test_rows_that_all_have_one_key_are_not_collected_without_end",),
    "only one session repairs a copied table": ("test_only_one_session_mends_what_a_copy_has_brought",),
    "rows copied with other columns are not kept": ("test_rows_that_were_copied_with_other_columns_are_copied_again",),
    "an empty publisher does not empty the target": ("test_a_publisher_without_rows_does_not_empty_the_target",),
    "a row is not deleted and inserted again where foreign keys would act": (
        "test_where_foreign_keys_fire_no_row_is_deleted_to_come_again",
    ),
    "rows of a subscription that came meanwhile are not deleted": (
        "test_a_subscription_that_came_meanwhile_keeps_its_rows",
    ),
    "a table is copied by the definition with which it was added": (
        "test_no_copy_starts_by_a_definition_that_has_changed_since",
    ),
    "a chunk is copied only once": ("test_a_large_table_is_copied_in_chunks",),
    "a failed copy removes only its own rows": (
        "test_rows_of_a_failed_attempt_go_although_local_writers_are_at_work_in_the_table",
    ),
    "a copy that the publisher terminates fails": ("test_an_error_of_the_publisher_fails_the_copy",),
    "a TLS session is used only with the OpenSSL that created it": (
        "test_where_the_program_brings_another_openssl_libpq_does_everything",
    ),
    "chunks of a rewritten table are not mixed": (
        "test_a_table_that_is_rewritten_between_its_chunks_is_copied_anew",
        "test_no_chunk_reads_another_column_of_the_publisher_by_the_name_of_the_first_chunks",
    ),
    "chunks are not stored in columns that got each other's names, or another type": (
        "test_no_chunk_fills_another_column_of_the_target_by_the_name_of_the_first_chunks",
        "test_no_chunk_fills_a_column_that_got_another_type_and_perhaps_other_values_meanwhile",
    ),
    "a table that loses its sync slot is copied again": (
        "test_a_refresh_killed_at_any_step_leaves_the_old_tables_or_the_new_and_no_unknown_slot",
    ),
    "two_phase is enabled once every table is ready": ("test_it_is_enabled_once_every_table_is_ready_and_not_before",),
    "two_phase is not disabled while something is prepared": ("test_it_is_not_disabled_while_something_is_prepared",),
    "a dropped subscription leaves nothing prepared": (
        "test_drop_rolls_back_what_is_prepared_names_it_and_leaves_that_of_others",
    ),
    "a prepared transaction leaves a marker": (
        "test_a_worker_that_ends_at_any_step_is_followed_by_one_that_finds_what_it_did",
    ),
    "no position covers a PREPARE": ("test_a_transaction_prepared_before_two_phase_was_enabled_comes_with_its_commit",),
    "work done early commits only under the table states it was decided with": (
        "test_a_table_that_comes_to_the_subscription_meanwhile_makes_it_decide_again",
    ),
    "a table is locked and its name verified before a statement names it": (
        "test_nothing_of_a_table_that_took_a_name_is_run",
        "test_nothing_of_a_table_that_took_a_name_between_two_chunks_is_run",
        "test_nothing_of_a_table_that_took_a_name_meanwhile_is_run",
    ),
    "the names of types and operators are verified before anything is planned with them": (
        "test_nothing_of_a_type_or_operator_that_took_a_name_is_run",
        "test_values_are_not_compared_by_a_type_that_took_a_name",
    ),
    "an operator that somebody made for the values' own type is not taken for that of the server": (
        "test_rows_are_found_by_the_operator_of_the_extension",
        "test_rows_in_the_way_are_found_by_the_operator_of_the_extension",
        "test_values_are_compared_by_the_operator_of_the_extension",
    ),
    "names are verified before the commit": (
        "test_a_subscribed_table_that_gets_the_name_of_one_left_alone_is_noticed_in_the_same_batch",
    ),
    "a server that answers is not reported as gone": ("test_a_server_that_answers_is_not_gone_even_if_it_refuses",),
    "a host that only starts up is not overlooked because another one of the connection string does not answer": (
        "test_a_server_that_starts_up_is_not_gone_though_no_host_after_it_answers",
    ),
    "a server that has the database under another name is not taken for another one": (
        "test_only_another_server_or_a_server_without_the_database_is_not_taken_for_the_one_that_is_gone",
    ),
    "a copy of a server that may have taken the right, as pg_upgrade makes one, is not taken for another one": (
        "test_only_another_server_or_a_server_without_the_database_is_not_taken_for_the_one_that_is_gone",
    ),
    "nobody is told to make a way back anew, because that deletes what only its target still has": (
        "test_where_another_server_has_the_place_of_the_target_clients_can_be_let_write_on_the_publisher",
    ),
    "a deviation before a full block is not attributed to the block": (
        "test_a_row_that_is_missing_before_the_first_full_block_is_recorded",
    ),
    "a table that is altered before apply has locked it is not changed by its old definition": (
        "test_a_change_that_waits_for_an_alter_table_is_made_by_the_new_definition",
        "test_a_table_that_is_altered_during_a_transaction_is_changed_by_its_new_definition",
        "test_a_table_whose_lock_a_subtransaction_gave_back_is_changed_by_its_new_definition",
    ),
    "a change by a unique key that finds several rows stops apply": ("test_a_key_that_several_rows_have_stops_apply",),
    "DDL on the target is detected": ("test_ddl_on_the_target_is_noticed_when_a_transaction_begins",),
    "a set whose rows are missing is applied row by row": ("test_a_set_that_misses_what_it_presupposes_says_so",),
    "rows that a set inserts must be absent": ("test_a_set_that_misses_what_it_presupposes_says_so",),
    "a transaction is skipped only by its own finish LSN": (
        "test_an_lsn_that_does_not_match_is_cleared_by_the_next_transaction_with_changes_and_loses_nothing",
    ),
    "changes that depend on a skipped row are skipped": (
        "test_only_the_rows_that_conflict_are_left_out_and_what_depends_on_them",
    ),
    "changes that a rule skips are kept": ("test_what_a_rule_skipped_can_be_replayed_once_nothing_is_in_its_way",),
    "a skipped change is replayed only once": ("test_the_change_of_a_conflict_is_applied_once",),
    "a skipped change that is older than the copy of its table is not replayed": (
        "test_what_was_skipped_before_its_table_was_copied_again_is_not_replayed_over_the_copy",
    ),
    "a replay that misses a row changes nothing": ("test_a_whole_transaction_is_applied_in_its_order_or_not_at_all",),
    "newer changes of a held table wait behind older ones": (
        "test_what_a_prepared_transaction_keeps_is_decided_with_it",
    ),
    "nothing beyond the bound of a run is applied or acknowledged": (
        "test_a_bounded_run_that_goes_on_with_a_release_acknowledges_nothing_beyond_its_bound",
    ),
    "nothing behind a batch that was given up is applied": (
        "test_what_was_given_up_before_a_stream_block_is_not_passed_by_the_rest_of_the_burst",
    ),
    "a table is not released while a transaction prepared before may keep changes of it": (
        "test_a_table_is_not_released_for_good_before_what_was_prepared_meanwhile_is_decided",
    ),
    "held changes are deleted in the commit that applies them": (
        "test_a_release_that_is_cut_off_anywhere_loses_nothing_and_does_nothing_twice",
    ),
    "nothing is written without an origin where others rely on it": (
        "test_apply_does_not_go_on_untagged_where_somebody_tells_its_rows_by_their_origin",
    ),
    "changes are made as the owner of each table": ("test_changes_are_made_as_the_owner_of_each_table",),
    "the ledger is written by the session's own role": ("test_changes_are_made_as_the_owner_of_each_table",),
    "the target names no sequence of an unpublished table to be read": (
        "test_a_sequence_of_a_table_that_is_not_published_is_not_read_because_the_target_names_it",
    ),
    "no value is read on the publisher as a type of its users": (
        "test_the_owner_of_a_type_of_the_publisher_runs_nothing_when_a_copy_meets_a_row",
    ),
    "the publisher alone does not decide which sequences of the target are set": (
        "test_a_publisher_does_not_move_a_sequence_that_no_subscribed_table_of_the_target_uses",
    ),
    "a sequence that was set back is not set to a value read before": (
        "test_a_sequence_that_a_command_sets_back_meanwhile_is_not_set_to_what_was_read_before",
    ),
    "only values of the publisher are used": ("test_values_of_a_server_that_is_not_the_publisher_are_not_taken",),
    "a required password is enforced": (
        "test_workers_go_on_with_a_password_and_end_where_the_publisher_asks_for_none_any_more",
    ),
    "a ledger with foreign code is rejected": ("test_what_an_earlier_owner_attached_to_the_ledger_is_found",),
    "a message out of order is not passed on": (
        "test_a_message_of_any_other_kind_than_may_come_now_is_a_protocol_violation",
    ),
    "an outdated state store serves nothing": (
        "test_a_live_launcher_keeps_its_subscription_and_one_that_was_moved_is_served_nowhere_else",
    ),
    "nothing is streamed to a target that has lost a change of its tables": (
        "test_a_target_that_lost_a_change_of_its_tables_gets_nothing_until_they_follow_again",
    ),
    "nothing is streamed by publications that the tables do not follow yet": (
        "test_an_alter_that_was_killed_between_definition_and_tables_lets_nothing_pass",
    ),
    "Spark starts for a user without an entry in the user database": (
        "test_spark_runs_for_a_user_without_an_entry_in_the_user_database",
    ),
    "a limit of processes that leaves little room is named": (
        "test_a_limit_of_processes_that_spark_reaches_is_named",
        "test_a_limit_of_a_control_group_or_of_one_above_it_is_named",
    ),
    "a state store from before a change is refused": (
        "test_a_state_store_from_before_a_change_is_refused_and_brings_no_option_back",
    ),
    "a state store that is older than its subscription does nothing to it": (
        "test_a_state_store_that_is_older_than_its_subscription_drops_no_slot_of_the_present_one",
    ),
    "an outdated state store drops nothing": (
        "test_a_live_launcher_keeps_its_subscription_and_one_that_was_moved_is_served_nowhere_else",
    ),
    "an outdated state store drops no slot of a target that is declared gone": (
        "test_a_live_launcher_keeps_its_subscription_and_one_that_was_moved_is_served_nowhere_else",
    ),
    "a subscription with a held table is not reported as caught up": (
        "test_a_subscription_with_a_held_table_is_not_caught_up_before_it_is_released",
    ),
    "apply does not start while its slot is replaced": (
        "test_apply_does_not_go_on_from_half_a_slot_of_a_publisher_that_was_restored",
    ),
    "a reconciliation that changed nothing stops nothing": (
        "test_a_command_that_ends_while_the_primary_restarts_leaves_the_subscription_as_it_was",
    ),
    "the ledger records a new slot before the old one is touched": (
        "test_apply_does_not_go_on_from_half_a_slot_of_a_publisher_that_was_restored",
    ),
    "tables are not compared with another publisher": ("test_another_publisher_is_not_what_tables_are_compared_with",),
    "a table whose rows refer to each other is not adopted in part": (
        "test_a_table_whose_rows_refer_to_each_other_is_not_begun_where_that_is_checked",
    ),
    "a slot that only the command names is not dropped": (
        "test_a_slot_that_another_subscription_left_idle_is_not_taken_for_its_name",
    ),
    "a slot that was made since it was looked for is not dropped": (
        "test_a_slot_that_somebody_makes_in_the_meantime_is_left_to_him",
    ),
    "a slot that was not created is not taken for the subscription's": (
        "test_a_slot_that_was_not_created_in_time_is_nobodys_and_left_to_who_makes_it_then",
    ),
    "a slot of another kind or database is not dropped": (
        "test_a_slot_that_cannot_be_the_subscriptions_stays_and_the_hint_drops_the_rest",
    ),
    "a slot that was made after the subscription's was dropped stays": (
        "test_a_slot_that_somebody_made_after_a_killed_drop_is_left_to_him",
    ),
    "a slot that an interrupted creation never asked for stays": (
        "test_a_slot_that_somebody_made_after_a_killed_create_is_left_to_him",
        "test_an_undo_drops_no_slot_that_was_made_before_its_own_was_asked_for",
    ),
    "a slot of another consumer is not dropped": ("test_a_slot_of_somebody_else_is_not_dropped",),
    "a connection is not changed to a server with another history": (
        "test_a_standby_that_takes_the_place_of_the_publisher_has_all_that_was_applied",
    ),
    "nothing is rebuilt under a running launcher": (
        "test_a_live_launcher_keeps_its_subscription_and_one_that_was_moved_is_served_nowhere_else",
    ),
}


def mutants() -> dict[str, dict[str, str]]:
    """Return the modules without the guard of each promise, by their path in the package.

    :raises ValueError: no statement follows a mark, or its text does not occur exactly once.
    """
    found: dict[str, dict[str, list[Edit]]] = {}
    for module, source in sources.modules().items():
        for promise, edit in edits(source) if "# guard: " in source else ():
            found.setdefault(promise, {}).setdefault(module, []).append(edit)
    return {
        promise: {module: applied(sources.modules()[module], some) for module, some in files.items()}
        for promise, files in found.items()
    }


def applied(source: str, some: list[Edit]) -> str:
    """Return a module with these edits made."""
    for begin, end, text in sorted(some, reverse=True):
        source = source[:begin] + text + source[end:]
    return source


def edits(source: str) -> Iterator[tuple[str, Edit]]:
    """Yield the promises that are marked in a module, each with the edit that removes its guard."""
    lines = source.splitlines(keepends=True)
    starts = [sum(map(len, lines[:number])) for number in range(len(lines) + 1)]
    statements = {node.lineno: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)}
    for number, line in enumerate(lines, 1):
        mark = MARK.match(line)
        if mark is None:
            continue
        node = statements.get(number + 1)
        if node is None:
            raise ValueError(f"no statement follows the mark: {line.strip()}")
        yield mark["promise"], without(source, node, mark, starts)


def without(source: str, node: ast.stmt, mark: re.Match[str], starts: list[int]) -> Edit:
    """Return the edit that removes one guard.

    :raises ValueError: the text of a mark does not occur exactly once in its statement.
    """

    def place(line: int, column: int) -> int:
        begin = starts[line - 1]  # columns are bytes
        return begin + len(source[begin : starts[line]].encode()[:column].decode())

    def span(part: ast.expr | ast.stmt) -> tuple[int, int]:
        return place(part.lineno, part.col_offset), place(part.end_lineno or 0, part.end_col_offset or 0)

    begin, end = span(node)
    if mark["text"]:
        if source.count(mark["text"], begin, end) != 1:
            raise ValueError(f"text does not occur exactly once in the statement: {mark['text']}")
        at = source.index(mark["text"], begin, end)
        return at, at + len(mark["text"]), ""
    if isinstance(node, ast.If | ast.While):
        return *span(node.test), str(bool(mark["always"]))
    if isinstance(node, ast.Return) and isinstance(node.value, ast.Compare):
        old, new = EDGES[type(node.value.ops[0])]
        at = source.index(old, span(node.value.left)[1])
        return at, at + len(old), new
    return begin, end, "pass"


def where(test: str) -> str:
    """Return what pytest calls a test of this name, in whichever file it is.

    :raises ValueError: there is none, or several.
    """
    files = sources.tests().get(test, [])
    if len(files) != 1:
        raise ValueError(f"{len(files)} tests have the name {test}")
    return f"{files[0]}::{test}"


def main() -> int:
    """Run the tests of each promise without its guard.

    :return: 0 if some test noticed the absence of each.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="promises that contain this")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (2)")
    parser.add_argument("--verbose", action="store_true", help="show the output of the tests")
    options = parser.parse_args()
    chosen = {promise: files for promise, files in mutants().items() if options.only in promise}
    began = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as pool:
        verdicts = list(pool.map(lambda one: attempt(*one, verbose=options.verbose), chosen.items()))
    missed = verdicts.count("noticed")
    print(f"{missed} of {len(chosen)} guards: a test notices their absence; {time.monotonic() - began:.0f} s")
    return 0 if chosen and missed == len(chosen) else 1


def attempt(promise: str, files: dict[str, str], *, verbose: bool) -> str:
    """Run a promise's tests without its guard.

    :return: ``noticed``, or what is wrong.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pgsub-sabotage-") as folder:
        copy = Path(folder)
        for name in ("pgsub", "tests", "completions", "man"):
            shutil.copytree(sources.ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "CHANGELOG.md"):
            shutil.copy(sources.ROOT / name, copy / name)
        for module, source in files.items():
            (copy / "pgsub" / module).write_text(source)
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *map(where, PROMISES[promise])],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": folder, "PGSUB_TEST_PATIENCE": "60"},  # they are to fail
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )
    verdict = {0: "SURVIVED", 1: "noticed"}.get(run.returncode, f"TESTS DID NOT RUN ({run.returncode})")
    verdict = "BROKEN MUTANT" if BROKEN.search(run.stdout) else verdict
    print(f"{promise:65s} {verdict:20s} {time.monotonic() - began:4.0f} s", flush=True)
    if verbose or verdict != "noticed":
        print(run.stdout[-8000:])
    return verdict


if __name__ == "__main__":
    sys.exit(main())
