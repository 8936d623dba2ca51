"""The rules of the hand-over between tablesync and apply, in every interleaving with crashes."""

from __future__ import annotations

import pytest
from models.handover_model import Failure, Handover, Rules
from models.model_explorer import explore
from thorough import only_thorough, thorough

#: What the program does, with every freedom that it takes. Nothing of the program is part of a model, so the other
#: designs, and those that are wrong, are only explored again where a model is worked on (``make thorough``).
SOUND: dict[str, Rules] = {
    "the sync worker claims before it copies, with every freedom": Rules(
        claims_before_the_copy=True,
        claims=True,
        keepalives_move_remote_lsn=True,
        ready_by_received_position=True,
        sync_may_fail_for_good=True,
    ),
    "a copy in chunks that broke off is resumed": Rules(resumes_copies=True, claims=True),
}
OTHERS: dict[str, Rules] = {
    "the sync worker waits until apply is behind it": Rules(),
    "claims, keepalives move remote_lsn, r follows the received position": Rules(
        claims=True, keepalives_move_remote_lsn=True, ready_by_received_position=True
    ),
    "keepalives move remote_lsn": Rules(keepalives_move_remote_lsn=True),
    "r follows the received position": Rules(ready_by_received_position=True),
    "keepalives move remote_lsn and r follows the received position": Rules(
        keepalives_move_remote_lsn=True, ready_by_received_position=True
    ),
    "the sync worker claims, apply may take the claim away": Rules(claims=True),
    "the sync worker claims and may fail for good": Rules(claims=True, sync_may_fail_for_good=True),
    "the sync worker claims before it copies": Rules(claims_before_the_copy=True),
    "the sync worker claims before it copies and again if that claim was taken away": Rules(
        claims_before_the_copy=True, claims=True
    ),
    "the sync worker goes on beyond its claim and hands over where it is": Rules(
        sync_stops_at_the_claim=False, claims=True
    ),
    "r at once is made good by srsublsn that counts in r": Rules(ready_waits_for_srsublsn=False),
    "a copy in chunks that broke off is resumed, with every freedom": Rules(
        resumes_copies=True, claims=True, keepalives_move_remote_lsn=True, ready_by_received_position=True
    ),
    "srsublsn that is forgotten in r is made good by a late r": Rules(srsublsn_counts_in_ready=False),
    "srsublsn that is forgotten in r, with every freedom": Rules(
        srsublsn_counts_in_ready=False, claims=True, keepalives_move_remote_lsn=True, ready_by_received_position=True
    ),
}


SOUND.update(thorough(OTHERS.items()))


@pytest.mark.long
@pytest.mark.parametrize("rules", SOUND.values(), ids=SOUND.keys())
def test_nothing_is_lost_doubled_or_stuck_when(rules: Rules) -> None:
    found = explore(Handover(rules))
    assert found.failure is None, found.trace
    assert found.good_ends > 0
    assert found.stranded == 0


BROKEN: dict[str, tuple[Rules, Failure]] = {
    "a transaction that finishes exactly at srsublsn is left out": (
        Rules(finish_lsn_equal_to_srsublsn_is_applied=False),
        Failure.LOST,
    ),
    "a transaction that finishes exactly at srsublsn is left out and keepalives move remote_lsn": (
        Rules(finish_lsn_equal_to_srsublsn_is_applied=False, keepalives_move_remote_lsn=True),
        Failure.LOST,
    ),
    "a transaction that finishes exactly at a claim is left out": (
        Rules(finish_lsn_equal_to_srsublsn_is_applied=False, claims=True),
        Failure.LOST,
    ),
    "apply reads the table states before it has the lock": (
        Rules(states_are_read_under_the_lock=False),
        Failure.LOST,
    ),
    "apply reads the table states before it has the lock and the sync worker claims": (
        Rules(states_are_read_under_the_lock=False, claims=True),
        Failure.LOST,
    ),
    "a filtered transaction is forgotten without moving remote_lsn": (
        Rules(filtered_transactions_move_remote_lsn=False),
        Failure.LOST,
    ),
    "the sync worker reads remote_lsn without the lock": (
        Rules(sync_looks_under_the_lock=False),
        Failure.LOST,
    ),
    "the sync worker claims without the lock": (
        Rules(sync_looks_under_the_lock=False, claims=True),
        Failure.LOST,
    ),
    "r comes at once and srsublsn is forgotten in it": (
        Rules(ready_waits_for_srsublsn=False, srsublsn_counts_in_ready=False),
        Failure.DOUBLED,
    ),
    "apply does not wait at a claim": (
        Rules(apply_waits_at_the_claim=False, claims=True),
        Failure.LOST,
    ),
    "apply does not wait at a claim from before the copy": (
        Rules(apply_waits_at_the_claim=False, claims_before_the_copy=True),
        Failure.LOST,
    ),
    "what was claimed before its copy changes hands at the claim": (
        Rules(hands_over_where_it_is=False, claims_before_the_copy=True),
        Failure.DOUBLED,
    ),
    "the sync worker goes on beyond its claim and hands over at it": (
        Rules(sync_stops_at_the_claim=False, claims=True, hands_over_where_it_is=False),
        Failure.DOUBLED,
    ),
}
#: Of a copy that is resumed; few states each.
RESUMED: dict[str, tuple[Rules, Failure]] = {
    "what was brought before is kept as it was": (
        Rules(resumes_copies=True, compares_what_was_brought=False),
        Failure.DOUBLED,
    ),
    "a chunk commits without its record": (
        Rules(resumes_copies=True, a_chunk_commits_with_its_record=False),
        Failure.DOUBLED,
    ),
    "a task of an older attempt goes on": (
        Rules(resumes_copies=True, ends_older_tasks=False),
        Failure.DOUBLED,
    ),
    "a resumed copy hands over from its first slot": (
        Rules(resumes_copies=True, begins_at_the_new_slot=False),
        Failure.DOUBLED,
    ),
}


@only_thorough
@pytest.mark.parametrize(("rules", "failure"), BROKEN.values(), ids=BROKEN.keys())
def test_it_is_found_out_when(rules: Rules, failure: Failure) -> None:
    found = explore(Handover(rules))
    assert found.failure is failure
    assert found.trace


@pytest.mark.parametrize(("rules", "failure"), RESUMED.values(), ids=RESUMED.keys())
def test_of_a_copy_that_is_resumed_it_is_found_out_when(rules: Rules, failure: Failure) -> None:
    found = explore(Handover(rules))
    assert found.failure is failure
    assert found.trace


@only_thorough
def test_a_claim_that_nobody_takes_away_strands_apply_when_the_sync_worker_fails_for_good() -> None:
    found = explore(Handover(Rules(claims=True, sync_may_fail_for_good=True, apply_takes_a_claim_away=False)))
    assert found.failure is None
    assert found.good_ends > 0
    assert found.stranded > 0


@only_thorough
def test_a_claim_that_nobody_takes_away_strands_nobody_while_the_sync_worker_comes_back() -> None:
    found = explore(Handover(Rules(claims=True, apply_takes_a_claim_away=False)))
    assert found.failure is None
    assert found.stranded == 0
