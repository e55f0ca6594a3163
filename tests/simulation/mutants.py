"""Mutants of the protocol: each one leaves out one rule.

A mutant replaces a method of a real class during a test. The names in brackets are those of
protocol section 17. A simulator that misses a mutant would also miss a bug of that kind.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from batonmq_server.testing.memory_network import Faults
from tests.simulation import (
    broken_clients,
    broken_identities,
    broken_lockmgr,
    broken_offsets,
    broken_producers,
)
from tests.simulation import broken_group_moves as broken_moves
from tests.simulation import broken_offsets_replicas as broken_replicas
from tests.simulation import broken_services as broken_serving
from tests.simulation import broken_storage_replicas as broken_stores
from tests.simulation.options import RunOptions

Break = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mutant.

    Attributes:
        name: The rule that is left out.
        break_it: Applies the mutant; undone with the monkeypatch.
        options: Kind of run that can reveal it.
        rules: The properties that it breaks; which one is found first depends on the run.
        first_run: Number of the run to begin with. If a mutant is found late, that is the run in
            which it was found: a search through those before it would take a minute each time.
    """

    name: str
    break_it: Break
    options: RunOptions
    rules: tuple[str, ...]
    first_run: int = 0


CALM = RunOptions(steps=30)
CRASHES = RunOptions(steps=40, kills=6, pauses=4, slow_handlers=0.05)
ZOMBIES = RunOptions(steps=40, pauses=8, kills=2, pause_ms_max=40_000, slow_handlers=0.1)
SLOW_ZOMBIES = replace(ZOMBIES, steps=60, queues=2, parallel=1, slow_handlers=0.4)
SLOW = RunOptions(steps=40, joins=6, leaves=6, slow_handlers=0.2)
LOSSY = replace(SLOW, faults=Faults(loss=0.08), slow_handlers=0.5, joins=8, leaves=8, steps=80)
OLD_PULLS = RunOptions(
    steps=80, queues=8, consumers=4, service_pauses=8, forces=12, pause_ms_max=4_000,
    faults=Faults(duplicate=0.5, slow=0.1, slow_ms_max=3_000), commit_on_pull=False,
)  # fmt: skip
DEAF = RunOptions(steps=60, deaf=12, pause_ms_max=40_000)
CROWDED = RunOptions(
    steps=60, queues=6, consumers=4, joins=8, leaves=4, deaf=10, pause_ms_max=30_000
)
CROWDED_AND_LATE = replace(
    CROWDED, steps=160, queues=16, joins=12, deaf=24, faults=Faults(slow=0.5, slow_ms_max=1_800)
)
LATE = RunOptions(
    steps=100, queues=6, consumers=4, joins=12, leaves=12, resets=4,
    faults=Faults(duplicate=0.8, slow=0.1, slow_ms_max=3_000),
)  # fmt: skip
UNDERWAY = RunOptions(
    steps=120, queues=8, consumers=6, faults=Faults(loss=0.03, duplicate=0.3, slow=0.05), joins=2,
    leaves=6, pauses=4, service_pauses=3, pause_ms_max=4_000,
)  # fmt: skip
FAILING = RunOptions(steps=40, fails=0.5, faults=Faults(loss=0.05))
FAILOVER = RunOptions(steps=40, service_kills=8, service_pauses=4, joins=6, leaves=2)
FRAMES_OF_TWO_EPOCHS = RunOptions(
    steps=160, service_kills=40, consumers=1, queues=6, joins=0, leaves=0, commit_on_pull=False,
    faults=Faults(slow=0.5, slow_ms_max=2_000),
)  # fmt: skip
LATE_FRAMES = replace(FRAMES_OF_TWO_EPOCHS, faults=Faults(slow=0.3, slow_ms_max=3_000))
HANGING = RunOptions(
    steps=120, queues=1, consumers=2, slow_handlers=0.6, forces=4, leaves=4, joins=4
)  # fmt: skip
HOT = RunOptions(
    steps=120, queues=1, consumers=2, joins=1, leaves=1,
    faults=Faults(duplicate=0.8, slow=0.2, slow_ms_max=5_000),
)  # fmt: skip
HOT_WITH_ACKS = replace(HOT, buffer=4)
HOT_WITHOUT_ACKS = replace(HOT, commit_on_pull=False)
RESETS = RunOptions(steps=60, resets=10, faults=Faults(slow=0.05, duplicate=0.3), slow_handlers=0.1)
FORCES = RunOptions(steps=60, forces=10, slow_handlers=0.1)
ROLLING = RunOptions(
    steps=60, queues=6, consumers=4, policy="STAGED_LATEST", switches=8, joins=2, leaves=2,
    service_pauses=2, pause_ms_max=4_000, faults=Faults(slow=0.1, delay_ms_max=150),
)  # fmt: skip
UNINFORMED = RunOptions(
    steps=120, queues=8, consumers=5, policy="STAGED_LATEST", switches=10, joins=2, leaves=2,
    deaf=20, pause_ms_max=8_000, slow_handlers=0.2, faults=Faults(delay_ms_max=50),
)  # fmt: skip
PAUSES = RunOptions(steps=80, group_pauses=6, deaf=12, pause_ms_max=40_000)
REPLICATED = RunOptions(steps=40, replicated=True, leader_faults=6, splits=4, service_kills=4)
DEPOSED = RunOptions(
    steps=60, replicated=True, leader_faults=10, pause_ms_max=8_000, faults=Faults(delay_ms_max=80)
)
SPLIT = RunOptions(
    steps=60, replicated=True, leader_faults=8, splits=12, service_kills=4, pause_ms_max=8_000,
)  # fmt: skip
EMPTY = RunOptions(steps=60, replicated=True, leader_faults=8, lost_disks=8, service_kills=4)
BUSY = RunOptions(
    steps=80, queues=8, consumers=4, replicated=True, leader_faults=20, joins=12, leaves=8,
    pause_ms_max=8_000, faults=Faults(delay_ms_max=300),
)  # fmt: skip
BEHIND = RunOptions(
    steps=80, queues=8, consumers=4, replicated=True, kept_bytes_max=500, leader_faults=12,
    splits=20, joins=8, leaves=8, pause_ms_max=4_000, faults=Faults(delay_ms_max=150),
)  # fmt: skip
STORES = RunOptions(steps=40, stores=3, leader_faults=6, splits=4, service_kills=4)
TWO_STEPS = RunOptions(
    steps=40, replicated=True, min_in_sync=2, two_steps=6, leader_faults=2
)  # fmt: skip
ENDED_LEASES = RunOptions(steps=40, replicated=True, ended_leases=8, joins=6)
DRAINS = RunOptions(steps=40, replicated=True, drains=8, leader_faults=2)
LONE_DRAINS = RunOptions(steps=40, stores=3, lone_drains=8)
STORES_TWO_STEPS = RunOptions(steps=40, stores=3, min_in_sync=2, two_steps=6, leader_faults=2)
STORES_SPLIT = RunOptions(
    steps=60, stores=3, leader_faults=12, splits=12, pause_ms_max=8_000,
    faults=Faults(delay_ms_max=300),
)  # fmt: skip
STORES_CUT_OFF = RunOptions(
    steps=120, stores=3, strandings=8, joins=1, leaves=1, pause_ms_max=60_000
)  # fmt: skip
MOVES = RunOptions(steps=50, moves=12, faults=Faults(slow=0.05, duplicate=0.3, delay_ms_max=80))
TO_AND_FRO = RunOptions(
    steps=60, moves=60, consumers=2, queues=2,
    faults=Faults(slow=0.3, duplicate=0.8, slow_ms_max=5_000),
)  # fmt: skip
LATE_MOVES = replace(
    TO_AND_FRO, steps=200, queues=4, faults=Faults(slow=0.1, duplicate=0.8, slow_ms_max=8_000)
)
OLD_CALLS = RunOptions(
    steps=80, queues=6, service_kills=16, joins=2, leaves=2,
    faults=Faults(slow=0.15, slow_ms_max=3_000, duplicate=0.3, delay_ms_max=150),
)  # fmt: skip
RIDING = RunOptions(
    steps=120, queues=1, consumers=2, buffer=4, joins=4, leaves=4, forces=10,
    faults=Faults(duplicate=0.8, slow=0.2, slow_ms_max=5_000),
)  # fmt: skip
SWITCHING = RunOptions(steps=10, switches_identities=True)
INTRUDED = RunOptions(steps=40, intrusions=8)
STOLEN = RunOptions(steps=60, thefts=12, identities=True, slow_handlers=0.1)
OUTAGE = RunOptions(steps=20, joins=4, leaves=2, outage_ms=14_000, slow_handlers=0.3)
HANGING_OUTAGE = RunOptions(
    steps=30, queues=6, consumers=4, joins=4, leaves=2, outage_ms=14_000, slow_handlers=0.5,
    slow_handler_s=30.0,
)  # fmt: skip
FAILING_OUTAGE = replace(HANGING_OUTAGE, slow_handler_s=6.0, fails=0.5)
FORGED = RunOptions(steps=60, forgeries=8, faults=Faults(loss=0.02, duplicate=0.1))
KEYS = RunOptions(steps=60, queues=2, forces=8, slow_handlers=0.2, by_key=True, fails=0.2)
KEYS_RESET = replace(KEYS, forces=0, resets=8)
KEYS_MOVING = replace(KEYS, forces=0, joins=8, leaves=8)

MUTANTS = (
    Mutant("skip the fence", broken_lockmgr.skip_fence, CALM, ("V1", "V2")),
    Mutant(
        "fence unconditionally",
        broken_offsets.unconditional_fence,
        DEAF,
        ("section 4", "V6"),
    ),
    Mutant(
        "fence without its offset",
        broken_offsets.fence_without_its_offset,
        CROWDED_AND_LATE,
        ("section 7",),
        first_run=88,
    ),
    Mutant("grant before it is persisted", broken_lockmgr.grant_before_persist, CALM, ("V11",)),
    Mutant("answer before it is durable", broken_offsets.answer_before_durable, CALM, ("V8", "V9")),
    Mutant(
        "stored token on renewal",
        broken_lockmgr.stored_token_on_renewal,
        CRASHES,
        ("V11", "V7", "V3"),
    ),
    Mutant("commit without token", broken_offsets.commit_without_token, ZOMBIES, ("V3",)),
    Mutant("pull without token", broken_offsets.pull_without_token, OLD_PULLS, ("V3",)),
    Mutant(
        "no deadline", broken_clients.no_deadline, SLOW_ZOMBIES, ("V3", "V6", "V7"), first_run=5
    ),
    Mutant("close without draining", broken_clients.close_without_draining, SLOW, ("V6", "V7")),
    Mutant("close not frozen", broken_clients.close_not_frozen, LOSSY, ("V6", "V7")),
    Mutant(
        "token dropped at the deadline",
        broken_clients.token_dropped_at_the_deadline,
        OUTAGE,
        ("L4",),
    ),
    Mutant(
        "late close without unfinished",
        broken_clients.late_close_without_unfinished,
        HANGING_OUTAGE,
        ("V6", "V7"),
    ),
    Mutant(
        "same holder without flags",
        broken_offsets.same_holder_without_flags,
        FAILING_OUTAGE,
        ("V7",),
    ),
    Mutant("count per contender", broken_lockmgr.count_per_contender, CROWDED, ("section 7",)),
    Mutant(
        "forget the table", broken_lockmgr.forget_the_table, FAILOVER, ("section 7", "section 12")
    ),
    Mutant("record after sending", broken_serving.record_after_sending, CALM, ("V8",)),
    Mutant(
        "a stream outlives its token",
        broken_serving.stream_outlives_its_token,
        FORCES,
        ("V3", "V6", "V7", "V8"),
    ),
    Mutant(
        "acks confirmed without a record",
        broken_serving.acks_confirmed_without_a_record,
        HOT_WITH_ACKS,
        ("V9",),
    ),
    Mutant(
        "credit of an earlier delivery",
        broken_serving.credit_of_an_earlier_delivery,
        HANGING,
        ("span",),
    ),
    Mutant(
        "credit for acks that do not travel",
        broken_clients.credit_for_acks_that_do_not_travel,
        HOT_WITHOUT_ACKS,
        ("span",),
    ),
    Mutant(
        "a gap after a dropped frame",
        broken_clients.gap_after_a_dropped_frame,
        FRAMES_OF_TWO_EPOCHS,
        ("V1", "V4", "L1", "L2"),
        first_run=3,
    ),
    Mutant("record in memory", broken_offsets.record_in_memory, CALM, ("V8",)),
    Mutant("renew while taken", broken_lockmgr.renew_while_taken, UNDERWAY, ("section 5",)),
    Mutant("old request", broken_lockmgr.old_request, LATE, ("story 8",), first_run=16),
    Mutant(
        "position of any epoch",
        broken_offsets.position_of_any_epoch,
        OLD_CALLS,
        ("V7", "V8"),
        first_run=11,
    ),
    Mutant(
        "position below recorded", broken_offsets.position_below_recorded, OLD_CALLS, ("V7", "V8")
    ),
    Mutant(
        "answer of an older epoch",
        broken_clients.answer_of_an_older_epoch,
        LATE_FRAMES,
        ("V6", "V7", "V8"),
    ),
    Mutant("advance not in flight", broken_offsets.advance_not_in_flight, FORCES, ("V8", "V7")),
    Mutant(
        "position below an advance",
        broken_offsets.position_below_an_advance,
        OLD_CALLS,
        ("V7", "V8"),
    ),
    Mutant("settle any advance", broken_offsets.settle_any_advance, HOT, ("V7", "V8")),
    Mutant(
        "settle at the last record",
        broken_serving.settle_at_the_last_record,
        HOT,
        ("V7", "V8"),
        first_run=3,
    ),
    Mutant(
        "deliver after the settlement",
        broken_serving.deliver_after_the_settlement,
        HOT,
        ("V7", "V8"),
    ),
    Mutant("idle untested", broken_offsets.idle_untested, ZOMBIES, ("section 4", "V6")),
    Mutant("maybe-seen forgotten", broken_offsets.maybe_seen_forgotten, ZOMBIES, ("V7",)),
    Mutant("acked ranges forgotten", broken_offsets.acked_ranges_forgotten, ZOMBIES, ("V9",)),
    Mutant("commit what is received", broken_clients.commit_all_received, CALM, ("V4",)),
    Mutant(
        "ack without sending back", broken_clients.ack_without_sending_back, FAILING, ("V4", "L2")
    ),
    Mutant("ids of their own", broken_clients.ids_of_their_own, FAILING, ("V4", "T5")),
    Mutant("reset without epoch", broken_offsets.reset_no_epoch, RESETS, ("V4", "V8")),
    Mutant(
        "reset without resume check",
        broken_offsets.reset_no_resume_check,
        RESETS,
        ("V4", "V5", "V9", "section 13"),
    ),
    Mutant(
        "handlers outlive a reset",
        broken_clients.handlers_outlive_a_reset,
        RESETS,
        ("section 13",),
    ),
    Mutant("key freed at a new grant", broken_clients.key_freed_at_a_new_grant, KEYS, ("K1", "K2")),
    Mutant("key freed by a failure", broken_clients.key_freed_by_a_failure, KEYS, ("K1", "K2")),
    Mutant("key kept at a reset", broken_clients.key_kept_at_a_reset, KEYS_RESET, ("V9", "L2")),
    Mutant(
        "retry after a revocation",
        broken_clients.retry_after_a_revocation,
        KEYS_MOVING,
        ("V4", "K2", "L2"),
    ),
    Mutant("force without flags", broken_offsets.force_without_flags, FORCES, ("V7",), first_run=5),
    Mutant(
        "riding acks of an old token", broken_offsets.riding_acks_without_token, RIDING, ("V3",)
    ),
    Mutant(
        "delivery of any generation",
        broken_offsets.delivery_of_any_generation,
        UNINFORMED,
        ("section 14",),
        first_run=6,
    ),
    Mutant(
        "grant unassigned", broken_lockmgr.grant_unassigned, INTRUDED, ("section 7",), first_run=38
    ),
    Mutant("grant without gate", broken_lockmgr.grant_without_gate, ROLLING, ("section 14",)),
    Mutant("flip with owners", broken_serving.flip_with_owners, ROLLING, ("section 14",)),
    Mutant(
        "ack before replicate", broken_replicas.ack_before_replicate, REPLICATED, ("section 12",)
    ),
    Mutant("elect out of sync", broken_replicas.elect_out_of_sync, SPLIT, ("section 12", "V9")),
    Mutant(
        "elect a lost disk",
        broken_replicas.elect_a_lost_disk,
        EMPTY,
        ("section 12", "V9"),
    ),
    Mutant(
        "answer without lease", broken_replicas.answer_without_lease, DEPOSED, ("section 8", "L2")
    ),
    Mutant(
        "histories without epochs",
        broken_replicas.histories_without_epochs,
        BUSY,
        ("section 12",),
    ),
    Mutant("adopt a lower version", broken_replicas.adopt_a_lower_version, SPLIT, ("section 12",)),
    Mutant(
        "shrink before etcd knows",
        broken_replicas.shrink_before_etcd_knows,
        SPLIT,
        ("section 12",),
    ),
    Mutant(
        "shrink below the minimum",
        broken_replicas.shrink_below_the_minimum,
        TWO_STEPS,
        ("section 12",),
    ),
    Mutant(
        "shrink while cut off",
        broken_replicas.shrink_while_cut_off,
        replace(TWO_STEPS, min_in_sync=1),
        ("section 12",),
        first_run=5,
    ),
    Mutant(
        "stay although cut off",
        broken_replicas.stay_although_cut_off,
        TWO_STEPS,
        ("section 12",),
        first_run=36,
    ),
    Mutant(
        "storage stays although cut off",
        broken_replicas.stay_although_cut_off,
        STORES_TWO_STEPS,
        ("section 12",),
    ),
    Mutant(
        "ignore an ended lease",
        broken_replicas.ignore_an_ended_lease,
        ENDED_LEASES,
        ("section 8", "section 12", "L2"),
    ),
    Mutant("elect a drained node", broken_replicas.elect_a_drained_node, DRAINS, ("drain",)),
    Mutant("hand over to no node", broken_replicas.hand_over_to_no_node, LONE_DRAINS, ("drain",)),
    Mutant("miss a drain", broken_replicas.miss_a_drain, LONE_DRAINS, ("drain",)),
    Mutant(
        "let in too early", broken_replicas.let_in_too_early, BEHIND, ("section 12",), first_run=18
    ),
    Mutant(
        "ack a message before it is replicated",
        broken_stores.ack_before_replicate,
        STORES,
        ("receipts", "section 12"),
    ),
    Mutant(
        "elect a log out of sync",
        broken_replicas.elect_out_of_sync,
        STORES_SPLIT,
        ("section 12",),
    ),
    Mutant(
        "compare positions only",
        broken_stores.compare_positions_only,
        STORES_SPLIT,
        ("section 12",),
    ),
    Mutant(
        "keep the longer log",
        broken_stores.keep_the_longer_log,
        STORES_SPLIT,
        ("section 12", "V4"),
        first_run=3,
    ),
    Mutant(
        "show what is not confirmed",
        broken_stores.show_what_is_not_confirmed,
        STORES,
        ("section 12",),
    ),
    Mutant("replicated alone", broken_stores.replicated_alone, STORES, ("receipts",)),
    Mutant(
        "deliver everywhere",
        broken_stores.deliver_everywhere,
        replace(STORES, fails=0.5),
        ("section 8", "T5"),
    ),
    Mutant(
        "take an empty copy for whole",
        broken_stores.take_an_empty_copy_for_whole,
        replace(STORES, lost_disks=8),
        ("section 12",),
    ),
    Mutant(
        "forget the producers",
        broken_stores.forget_the_producers,
        replace(STORES_SPLIT, faults=Faults(loss=0.05, delay_ms_max=80)),
        ("T5", "order"),
    ),
    Mutant(
        "answer for storage without lease",
        broken_stores.answer_without_lease,
        STORES_SPLIT,
        ("section 8",),
    ),
    Mutant(
        "wait at a cut-off node",
        broken_stores.wait_at_a_cut_off_node,
        STORES_CUT_OFF,
        ("readers",),
        first_run=3,
    ),
    Mutant(
        "adopt a group without seal",
        broken_moves.adopt_without_seal,
        MOVES,
        ("V1", "V3", "V5", "V7", "V8", "V9", "section 5"),
    ),
    Mutant(
        "serve a group after its seal",
        broken_moves.serve_after_seal,
        MOVES,
        ("V1", "V3", "V5", "V7", "V9", "section 5", "L2"),
    ),
    Mutant(
        "seal by a lower move",
        broken_moves.seal_by_a_lower_move,
        LATE_MOVES,
        ("V1", "V2", "V3", "V5", "V7", "V9", "section 5", "L2"),
        first_run=2,
    ),
    Mutant(
        "adopt a lower move",
        broken_moves.adopt_a_lower_move,
        TO_AND_FRO,
        ("V1", "V3", "V5", "V7", "V9", "section 5", "L2"),
    ),
    Mutant(
        "receipt for other content",
        broken_producers.receipt_for_other_content,
        FORGED,
        ("P1",),
    ),
    Mutant(
        "producer ids without owner",
        broken_producers.ids_without_owner,
        replace(FORGED, identities=True),
        ("P2", "P1"),
    ),
    Mutant(
        "token of every identity",
        broken_identities.token_of_every_identity,
        STOLEN,
        ("identity", "V4", "V9"),
    ),
    Mutant(
        "unknown owner matches no owner",
        broken_identities.unknown_owner_matches_no_owner,
        SWITCHING,
        ("L4", "unexpected"),
    ),
    Mutant(
        "incarnation of every identity",
        broken_identities.incarnation_of_every_identity,
        STOLEN,
        ("identity",),
    ),
    Mutant(
        "keep the keys of former members",
        broken_serving.keep_keys_of_former_members,
        CALM,
        ("record",),
    ),
    Mutant(
        "write new keys of a group only",
        broken_serving.write_new_keys_only,
        CALM,
        ("record",),
    ),
    Mutant(
        "pause known now and then",
        broken_serving.pause_known_now_and_then,
        PAUSES,
        ("pause",),
    ),
)
