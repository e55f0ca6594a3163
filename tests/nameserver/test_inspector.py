"""Inspection of queues, and the metrics and events of its results.

Goal: many queues cost few calls; a service that is down, silent or refuses is a reason and never an
error; histories are kept; metrics and events show the results of one inspection. Method: a real
inspector calls stand-ins of the other services over real gRPC; they count the calls.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from baton.common.v1 import error_pb2, queue_pb2
from baton.gateway.v1 import gateway_service_pb2 as gateway_pb
from baton.lockmgr.v1 import lockmgr_service_pb2 as lockmgr_pb
from baton.metrics.v1 import metrics_service_pb2 as metrics_pb
from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1.stored_node_pb2 import StoredNode
from batonmq._common.aio import STEP_ITEMS
from batonmq._common.rpc import error_to_pb
from batonmq._core.queues import QueueRef
from batonmq._telemetry.event_hub import EventHub
from batonmq.errors import (
    DataLoss,
    DataLossDetail,
    Held,
    NotLeader,
    NotServing,
    SubscriptionConflict,
)
from batonmq_server.nameserver import inspector, queue_monitor, queue_queries
from batonmq_server.nameserver.core.diagnosis import QueueDiagnosis, StuckReason
from batonmq_server.nameserver.core.groups import Group, Pause, StagedSubscription, Subscription
from batonmq_server.nameserver.inspector import (
    FRESH_MS,
    RECHECK_MS,
    InspectionTarget,
    evidence_of_group,
)
from batonmq_server.nameserver.metrics import LagMetrics
from batonmq_server.nameserver.queue_monitor import QueueMonitor
from batonmq_server.runtime.etcd.session import KeyValue
from batonmq_server.storage.tier_store import unreachable
from tests.nameserver.service_twins import TIMEOUT_S, Scene, open_scene, queue_to_pb


@pytest.fixture
async def services() -> AsyncIterator[Scene]:
    """A topic `t` with two queues on each of two brokers, 20 messages in each, a minute old."""
    async with open_scene() as services:
        services.topic("t", 2, batches=2)
        yield services


async def why(services: Scene, *groups: Group, patient: bool = False) -> list[QueueDiagnosis]:
    targets = [InspectionTarget(group, services.inspector.queues_of(group)) for group in groups]
    return await services.inspector.inspect(targets, patient=patient)


def reasons(diagnoses: Sequence[QueueDiagnosis]) -> list[StuckReason]:
    return [diagnosis.finding.reason for diagnosis in diagnoses]


# ---- number of calls


async def test_queues_without_lag_cost_one_call_per_service(services: Scene) -> None:
    group = services.group("g", "c1", "c2")
    services.progress(group, 20)
    diagnoses = await why(services, group)
    assert reasons(diagnoses) == [StuckReason.IDLE] * 4
    assert services.calls() == {"List": 1, "QueryGroup": 1, "QueryOffsets": 2}


async def test_many_groups_cost_one_list_and_one_call_per_broker(services: Scene) -> None:
    groups = [services.group(f"g{index}", "c1") for index in range(10)]
    for group in groups:
        services.progress(group, 20)
    assert reasons(await why(services, *groups)) == [StuckReason.IDLE] * 40
    assert services.calls() == {"List": 1, "QueryGroup": 10, "QueryOffsets": 2}


async def test_message_that_is_stuck_is_read_once(services: Scene) -> None:
    group = services.group("g", "c1")
    services.own(group, "c1", held_ms=60_000)
    services.progress(group, 13, unacked_count=1)
    first = await why(services, group)
    again = await why(services, group)
    assert reasons(first) == reasons(again) == [StuckReason.HEAD_OF_LINE] * 4
    assert services.calls() == {"List": 2, "QueryGroup": 2, "QueryOffsets": 4, "Read": 4}


async def test_recreated_topic_has_no_old_oldest_message(services: Scene) -> None:
    group = services.group("g", "c1")
    services.own(group, "c1")
    services.progress(group, 13, unacked_count=1)
    await why(services, group)
    services.catalog.topics["t"] = replace(services.catalog.topics["t"], topic_id=2)
    await why(services, group)
    assert services.calls()["Read"] == 8


async def test_locks_are_described_only_where_needed(services: Scene) -> None:
    group = services.group("g", "c1", "c2")
    services.own(group, "c1")
    services.progress(group, 13)
    services.lockmgr.entries[0].state = lockmgr_pb.LOCK_STATE_PENDING
    await why(services, group)
    assert services.calls()["Describe"] == 1


# ---- groups without a subscription


def without_subscription(services: Scene, committed_offset: int) -> Group:
    """Add a group that never had a member, with progress on `t`, as after a restore."""
    group = services.group("g")
    services.progress(group, committed_offset)
    bare = replace(group, terms=replace(group.terms, subscriptions=()))
    services.catalog.groups["g"] = bare
    return bare


async def test_group_that_never_had_a_member_is_inspected_where_it_has_progress(
    services: Scene,
) -> None:
    services.topic("u", 2, batches=2)
    group = without_subscription(services, 13)
    services.offsets.queues = [p for p in services.offsets.queues if p.queue.queue.topic == "t"]
    queues = await services.inspector.queues_to_inspect(group)
    diagnoses = await services.inspector.inspect([InspectionTarget(group, queues)], patient=False)
    assert {queue.topic for queue in queues} == {"t"}
    assert reasons(diagnoses) == [StuckReason.NO_MEMBER] * 4
    assert [d.evidence.lag_count for d in diagnoses] == [7] * 4


async def test_queues_of_a_group_without_a_subscription_are_not_guessed(services: Scene) -> None:
    group = without_subscription(services, 13)
    services.offsets.refusal = NotServing("offsets starts")
    with pytest.raises(NotServing):
        await services.inspector.queues_to_inspect(group)
    watch = Watch(services)
    await watch.monitor.inspect()
    assert watch.shown("baton_group_lag_messages") == {}
    services.offsets.refusal = None
    await watch.monitor.inspect()
    assert sum(watch.shown("baton_group_lag_messages").values()) == 28


# ---- findings


async def test_head_of_line_has_message_id_and_age(services: Scene) -> None:
    group = services.group("g", "c1")
    services.own(group, "c1")
    services.progress(group, 13, unacked_count=1)
    finding = (await why(services, group))[3].finding
    assert finding.values["message_id"] == "b-100a-3"
    assert finding.values["offset"] == 13
    age_ms = finding.values["age_ms"]
    assert isinstance(age_ms, int)
    assert 60_000 <= age_ms < 120_000


async def test_gateway_that_owns_a_stuck_queue_names_the_client_that_holds_its_message(
    services: Scene,
) -> None:
    group = services.group("g", "gateway-0-1")
    services.own(group, "gateway-0-1", held_ms=60_000)
    services.progress(group, 13, unacked_count=1)
    services.gateway.held = [
        gateway_pb.HeldMessage(
            queue=queue_pb2.QueueRef(topic="t", broker="b", queue_id=1),
            offset=13,
            state=gateway_pb.HELD_STATE_LEASED,
            attempt=3,
            client=gateway_pb.RemoteClient(
                client_id="shop@1", language="JAVA", version="5.2.0", host="shop-7"
            ),
            held_ms=18_000,
            lease_left_ms=12_000,
        )
    ]
    *others, held = await why(services, group)
    assert "b-100a-3" in held.finding.message
    assert (
        "has been at client shop@1 (JAVA 5.2.0 on shop-7) for 18 s, attempt 3; its lease expires "
        "in 12 s"
    ) in held.finding.message
    assert held.finding.values["remote_lease_left_ms"] == 12_000
    assert {one.finding.values["gateway"] for one in others} == {"gateway-0"}
    assert services.calls()["ListHeldMessages"] == 4, "one call for each stuck queue"


async def test_gateway_is_not_believed_about_queues_of_other_members(services: Scene) -> None:
    group = services.group("g", "gateway-0-2", "c1")
    services.own(group, "gateway-0-2", held_ms=60_000)
    services.progress(group, 13, unacked_count=1)
    found = await why(services, group)
    assert all("gateway" not in one.finding.values for one in found)
    services.lockmgr.entries.clear()
    services.own(group, "c1", held_ms=60_000)
    await why(services, group)
    assert services.calls()["ListHeldMessages"] == 4, "c1 is no gateway"


async def test_gateway_that_does_not_answer_hides_no_finding(services: Scene) -> None:
    group = services.group("g", "gateway-0-1")
    services.own(group, "gateway-0-1", held_ms=60_000)
    services.progress(group, 13, unacked_count=1)
    services.gateway.refusal = NotServing("it stops")
    assert reasons(await why(services, group)) == [StuckReason.HEAD_OF_LINE] * 4


async def test_messages_that_pass_no_filter_are_reported_as_filtered(services: Scene) -> None:
    group = services.group("g", "c1", expression="JFK")
    services.own(group, "c1")
    services.progress(group, 0)
    finding = (await why(services, group))[0].finding
    assert finding.reason is StuckReason.FILTERED
    assert finding.values == {"expression": "JFK", "scanned": 20}


async def test_queue_with_one_passing_message_is_not_filtered(services: Scene) -> None:
    services.brokers["a"].store("t", 0, "JFK", services.clock.unix_ms())
    group = services.group("g", "c1", expression="JFK")
    services.own(group, "c1")
    services.progress(group, 0)
    actual = reasons(await why(services, group))
    assert actual == [StuckReason.NOT_PULLING, *[StuckReason.FILTERED] * 3]


async def test_queue_that_was_not_acquired_shows_the_last_denial(services: Scene) -> None:
    group = services.group("g", "c1", consume_from="FIRST")
    for queue in services.inspector.queues_of(group):
        refusal = error_to_pb(Held("c0 owns it", facts={}))
        services.lockmgr.described[str(queue.queue_id)] = lockmgr_pb.DescribeResponse(
            entry=lockmgr_pb.LockEntry(queue=queue_to_pb("g", queue)),
            denials=[lockmgr_pb.Denial(client_id="c1", error=refusal)],
        )
    finding = (await why(services, group))[0].finding
    assert finding.reason is StuckReason.NOT_ACQUIRED
    assert finding.message.endswith("last denial: HELD: c0 owns it")


async def test_silent_owner_is_reported_with_the_rest_of_its_lease(services: Scene) -> None:
    group = services.group("g", "c1")
    services.own(group, "dead", lease_age_ms=20_000)
    services.progress(group, 13, unacked_count=2, idle_ms=20_000)
    for entry in services.lockmgr.entries:
        services.lockmgr.described[str(entry.queue.queue.queue_id)] = lockmgr_pb.DescribeResponse(
            entry=entry, lease_left_ms=10_000
        )
    finding = (await why(services, group))[0].finding
    assert finding.reason is StuckReason.OWNER_SILENT
    assert finding.values == {"owner": "dead", "lease_left_ms": 10_000}


async def test_different_token_is_checked_a_second_time(services: Scene) -> None:
    """The lock manager was queried before a grant, offsets after it."""
    group = services.group("g", "c1")
    services.own(group, "c1")
    services.progress(group, 13, unacked_count=1)
    for progress in services.offsets.queues:
        progress.token = 2
    diagnoses = await why(services, group)
    assert reasons(diagnoses) == [StuckReason.PHANTOM_TOKEN] * 4
    for entry in services.lockmgr.entries:
        granted = lockmgr_pb.LockEntry()
        granted.CopyFrom(entry)
        granted.token = 2
        services.lockmgr.described[str(entry.queue.queue.queue_id)] = lockmgr_pb.DescribeResponse(
            entry=granted
        )
    assert reasons(await why(services, group)) == [StuckReason.HEAD_OF_LINE] * 4


async def test_damage_is_reported_with_its_position(services: Scene) -> None:
    group = services.group("g", "c1")
    services.own(group, "c1")
    services.progress(group, 13)
    services.brokers["a"].damage = DataLoss(
        "checksum does not match", detail=DataLossDetail(position=4096)
    )
    diagnoses = await why(services, group)
    assert reasons(diagnoses) == [*[StuckReason.DATA_LOSS] * 2, *[StuckReason.NOT_PULLING] * 2]
    assert diagnoses[0].finding.values["position"] == "4096"


async def test_object_store_that_a_broker_cannot_read_is_reported(services: Scene) -> None:
    group = services.group("g", "c1")
    services.own(group, "c1")
    services.progress(group, 13)
    services.brokers["a"].damage = unreachable("parts/7", "connection refused")
    diagnoses = await why(services, group)
    reason = StuckReason.STORAGE_UNREACHABLE
    assert reasons(diagnoses) == [*[reason] * 2, *[StuckReason.NOT_PULLING] * 2]
    assert "failed with parts/7: connection refused" in diagnoses[0].finding.message
    assert "Restore the object store" in diagnoses[0].finding.remedy


async def test_refused_client_is_reported_with_its_subscription(services: Scene) -> None:
    services.topic("orders", 1, batches=1)
    group = services.group("g", "c1")
    group = services.with_assignment(
        replace(group, terms=replace(group.terms, subscriptions=(Subscription("t", "*"),)))
    )
    conflict = error_pb2.Error(
        reason=error_pb2.Reason.Value(f"REASON_{SubscriptionConflict.reason}"),
        differences=[
            error_pb2.SubscriptionDifference(
                topic="orders",
                setting="expression",
                newcomer_client_id="c2",
                newcomer_value="*",
                member_client_id="c1",
            )
        ],
    )
    services.refused.append(
        pb.RefusedClient(incarnation=queue_pb2.Incarnation(client_id="c2"), error=conflict)
    )
    target = InspectionTarget(group, tuple(services.inspector.queues_of_topic("orders")))
    diagnoses = await services.inspector.inspect([target], patient=False)
    assert reasons(diagnoses) == [StuckReason.REFUSED_SUBSCRIPTION] * 2
    assert diagnoses[0].finding.values == {
        "client_id": "c2",
        "member_client_id": "c1",
        "topic": "orders",
        "wants": "*",
        "has": "",
    }


async def test_broadcasting_group_costs_no_call_to_offsets(services: Scene) -> None:
    group = services.group("g", "c1", model="BROADCASTING")
    assert reasons(await why(services, group)) == [StuckReason.MOVING] * 4
    assert services.calls()["QueryGroup"] == 0


async def test_commit_during_an_inspection_is_not_reported_as_loss(services: Scene) -> None:
    group = services.group("g", "c1")

    def store_and_commit() -> None:
        for twin in services.brokers.values():
            for queue_id in (0, 1):
                twin.store("t", queue_id, "", services.clock.unix_ms())
        services.progress(group, 30)

    services.offsets.on_query = store_and_commit
    assert reasons(await why(services, group)) == [StuckReason.IDLE] * 4


# ---- services that do not answer


@pytest.mark.parametrize("mute", [True, False])
async def test_offsets_that_do_not_answer_are_the_reason(services: Scene, mute: bool) -> None:
    services.offsets.mute, services.offsets.refusal = mute, NotLeader("no leader", facts={})
    diagnoses = await why(services, services.group("g", "c1"))
    assert reasons(diagnoses) == [StuckReason.OFFSETS_UNREACHABLE] * 4
    error_text = "DEADLINE_EXCEEDED" if mute else "NOT_LEADER: no leader"
    assert error_text in str(diagnoses[0].finding.values["error"])


@pytest.mark.parametrize("mute", [True, False])
async def test_lock_manager_that_does_not_answer_is_the_reason(services: Scene, mute: bool) -> None:
    services.lockmgr.mute, services.lockmgr.refusal = mute, NotLeader("no leader", facts={})
    group = services.group("g", "c1")
    services.progress(group, 13)
    assert reasons(await why(services, group)) == [StuckReason.LOCKMGR_UNREACHABLE] * 4


async def test_broker_that_does_not_answer_is_the_reason_for_its_queues(services: Scene) -> None:
    services.brokers["b"].mute = True
    group = services.group("g", "c1")
    services.progress(group, 20)
    actual = reasons(await why(services, group))
    assert actual == [*[StuckReason.IDLE] * 2, *[StuckReason.STORAGE_UNREACHABLE] * 2]


async def test_broker_that_is_not_registered_is_the_reason_for_its_queues(services: Scene) -> None:
    topic = services.catalog.topics["t"]
    spread = (topic.spread[0], replace(topic.spread[1], broker="gone"))
    services.catalog.topics["t"] = replace(topic, spread=spread)
    group = services.group("g", "c1")
    services.progress(group, 20)
    diagnoses = await why(services, group)
    assert reasons(diagnoses) == [*[StuckReason.IDLE] * 2, *[StuckReason.STORAGE_UNREACHABLE] * 2]
    assert "not registered" in diagnoses[3].finding.message


async def test_inspection_of_silent_services_takes_few_deadlines(services: Scene) -> None:
    for twin in (services.lockmgr, services.offsets, *services.brokers.values()):
        twin.mute = True
    begin_ms = services.clock.monotonic_ms()
    diagnoses = await why(services, services.group("g", "c1"), patient=True)
    assert reasons(diagnoses) == [StuckReason.OFFSETS_UNREACHABLE] * 4
    assert services.clock.monotonic_ms() - begin_ms < 3 * TIMEOUT_S * 1000


# ---- whether a queue moves


async def test_queue_that_moves_between_two_inspections_is_moving(services: Scene) -> None:
    group = services.group("g", "c1")
    services.own(group, "c1")
    services.progress(group, 12, unacked_count=1)
    assert reasons(await why(services, group)) == [StuckReason.HEAD_OF_LINE] * 4
    services.progress(group, 13, unacked_count=1)
    diagnoses = await why(services, group)
    assert reasons(diagnoses) == [StuckReason.MOVING] * 4
    assert diagnoses[0].evidence.unmoved_ms == 0


async def test_patient_inspection_finds_a_queue_that_moves(services: Scene) -> None:
    group = services.group("g", "c1")
    services.own(group, "c1")
    services.progress(group, 10, unacked_count=1)
    committed = iter(range(11, 20))
    services.offsets.on_query = lambda: services.progress(group, next(committed), unacked_count=1)
    assert reasons(await why(services, group, patient=True)) == [StuckReason.MOVING] * 4
    assert services.calls()["QueryGroup"] == 2


async def test_recently_seen_queue_is_not_inspected_twice(services: Scene) -> None:
    group = services.group("g", "c1")
    services.own(group, "c1")
    services.progress(group, 13, unacked_count=1)
    await why(services, group, patient=True)
    before = services.calls()["QueryGroup"]
    diagnoses = await why(services, group, patient=True)
    assert services.calls()["QueryGroup"] == before + 1, "only the first inspection reads twice"
    assert reasons(diagnoses) == [StuckReason.HEAD_OF_LINE] * 4
    assert diagnoses[0].evidence.unmoved_ms >= RECHECK_MS


async def test_change_since_an_old_inspection_does_not_prove_that_a_queue_moves(
    services: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = services.group("g", "c1")
    services.own(group, "c1")
    services.progress(group, 12, unacked_count=1)
    await why(services, group)
    services.progress(group, 13, unacked_count=1)
    later_ms = services.clock.monotonic_ms() + FRESH_MS + 1
    monkeypatch.setattr(services.clock, "monotonic_ms", lambda: later_ms)
    assert reasons(await why(services, group, patient=True)) == [StuckReason.HEAD_OF_LINE] * 4
    assert services.calls()["QueryGroup"] == 3


async def test_message_with_a_future_store_time_does_not_stay_new(
    services: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    services.topic("t", 1, batches=1, age_ms=-3_600_000)
    group = services.group("g", "c1")
    services.own(group, "c1")
    services.progress(group, 5, unacked_count=1)
    assert reasons(await why(services, group)) == [StuckReason.MOVING] * 2
    later_ms = services.clock.monotonic_ms() + 20_000
    monkeypatch.setattr(services.clock, "monotonic_ms", lambda: later_ms)
    diagnoses = await why(services, group)
    assert reasons(diagnoses) == [StuckReason.HEAD_OF_LINE] * 2
    assert 20_000 <= diagnoses[0].evidence.lag_ms < 60_000


# ---- the state of a group


def test_paused_group_is_reported_with_operator_and_start() -> None:
    group = Group(name="g", pause=Pause("ops", "deploy", 1_000))
    state = evidence_of_group(group, (), 0, 5_000)
    assert state.paused is not None
    assert (state.paused.by, state.paused.reason, state.paused.since_ms) == ("ops", "deploy", 4_000)


def test_draining_group_is_reported_with_its_open_grants() -> None:
    staged = StagedSubscription((Subscription("t", "b"),), draining=True, since_unix_ms=1_000)
    change = evidence_of_group(Group(name="g", staged=staged), (), 3, 5_000).change
    assert change is not None
    assert (change.open_grants, change.since_ms) == (3, 4_000)
    waits = replace(staged, draining=False)
    assert evidence_of_group(Group(name="g", staged=waits), (), 3, 5_000).change is None


async def test_member_with_another_subscription_is_excluded_with_the_mismatch(
    services: Scene,
) -> None:
    group = services.group("g", "c1", "c2")
    member = replace(group.members[1], differs=True)
    staged = StagedSubscription((Subscription("t", "b"),), draining=False, since_unix_ms=0)
    group = replace(group, members=(group.members[0], member), staged=staged)
    (excluded,) = evidence_of_group(group, (), 0, 0).excluded
    assert (excluded.client_id, excluded.member_client_id, excluded.staged) == ("c2", "c1", True)
    assert [(m.topic, m.wants, m.has) for m in excluded.mismatches] == [("t", "b", "*")]


# ---- metrics and events


class Published(EventHub):
    """Records the reasons of published events."""

    def __init__(self, services: Scene) -> None:
        super().__init__("nameserver/n1", 1, services.clock)
        self.reasons: Counter[str] = Counter()

    def publish(self, event: metrics_pb.MetricEvent) -> None:
        super().publish(event)
        if event.HasField("stuck_changed"):
            self.reasons[event.stuck_changed.reason] += 1


class Watch:
    """The monitor of replica `n1`, its metrics, and its events."""

    def __init__(self, services: Scene) -> None:
        self.registry, self.hub = CollectorRegistry(), Published(services)
        self.monitor = QueueMonitor(
            services.catalog,
            services.inspector,
            LagMetrics(self.registry),
            self.hub,
            node_id="n1",
            interval_ms=15_000,
        )
        self._nodes = services.nodes.values
        self.register("n1")

    def register(self, node_id: str) -> None:
        node = StoredNode(service=pb.SERVICE_KIND_NAMESERVER, node_id=node_id)
        self._nodes[f"nameserver/{node_id}"] = KeyValue(node_id, node.SerializeToString(), 1, 1)

    def shown(self, name: str) -> dict[tuple[str, ...], float]:
        """Samples by the values of their labels."""
        return {
            tuple(sample.labels.values()): sample.value
            for metric in self.registry.collect()
            for sample in metric.samples
            if sample.name == name
        }


async def test_inspection_shows_lag_by_topic_and_each_stuck_queue(services: Scene) -> None:
    group = services.group("g", "c1")
    services.own(group, "c1")
    services.progress(group, 13, unacked_count=1)
    watch = Watch(services)
    await watch.monitor.inspect()
    assert watch.shown("baton_group_lag_messages") == {("g", "t"): 28}
    assert 60 <= watch.shown("baton_group_lag_seconds")["g", "t"] < 120
    series = watch.shown("baton_queue_stuck")
    assert series == {("g", "t", b, q, "HEAD_OF_LINE"): 1 for b in "ab" for q in "01"}
    assert watch.shown("baton_nameserver_inspections_total") == {(): 1}
    assert watch.hub.reasons == {"HEAD_OF_LINE": 4}


@pytest.mark.parametrize(
    ("owner", "step"),
    [
        (queue_queries, "_lock"),
        (queue_queries, "_progress"),
        (queue_queries, "_log"),
        (inspector, "QueueEvidence"),
        (inspector, "diagnose"),
        (LagMetrics, "_count_rewind"),
        (queue_monitor, "_stuck_event"),
    ],
)
async def test_inspection_of_many_queues_lets_other_tasks_run(
    services: Scene, monkeypatch: pytest.MonkeyPatch, owner: object, step: str
) -> None:
    services.topic("wide", 4 * STEP_ITEMS, batches=2)
    group = services.group("g", "c1")
    services.own(group, "c1")
    services.progress(group, 13, unacked_count=1)
    watch, turns = Watch(services), [0]
    real = getattr(owner, step)

    def counted(*args: Any, **fields: Any) -> object:
        turns[-1] += 1
        return real(*args, **fields)

    async def count_turns() -> None:
        while True:
            turns.append(0)
            await asyncio.sleep(0)

    monkeypatch.setattr(inspector, "RECHECK_MS", 0)
    monkeypatch.setattr(owner, step, counted)
    async with asyncio.TaskGroup() as tasks:
        ticking = tasks.create_task(count_turns())
        await watch.monitor.inspect()
        ticking.cancel()
    assert sum(turns) >= 8 * STEP_ITEMS
    assert max(turns) <= 2 * STEP_ITEMS  # the answers of two brokers may come together


async def test_queue_that_recovers_loses_its_series_and_is_published_once(services: Scene) -> None:
    group = services.group("g", "c1")
    services.own(group, "c1")
    services.progress(group, 13, unacked_count=1)
    watch = Watch(services)
    await watch.monitor.inspect()
    await watch.monitor.inspect()
    assert watch.hub.reasons == {"HEAD_OF_LINE": 4}
    services.progress(group, 20)
    await watch.monitor.inspect()
    await watch.monitor.inspect()
    assert watch.shown("baton_queue_stuck") == {}
    assert watch.shown("baton_group_lag_messages") == {("g", "t"): 0}
    assert watch.hub.reasons == {"HEAD_OF_LINE": 4, "IDLE": 4}


async def test_deleted_group_has_no_series(services: Scene) -> None:
    services.progress(services.group("g"), 13)
    watch = Watch(services)
    await watch.monitor.inspect()
    names = {sample.name for m in watch.registry.collect() for sample in m.samples}
    by_group = {name for name in names if "nameserver" not in name}
    assert len(by_group) > 8
    services.catalog.groups.clear()
    await watch.monitor.inspect()
    assert {name: watch.shown(name) for name in by_group if watch.shown(name)} == {}


async def test_inspection_shows_ready_and_in_flight_as_rocketmq_does(services: Scene) -> None:
    group = services.group("g", "c1", "c2")
    services.progress(group, 13, delivered_offset=18, unacked_count=4, acked_count=1)
    watch = Watch(services)
    await watch.monitor.inspect()
    assert watch.shown("rocketmq_consumer_ready_messages") == {("g", "t"): 4 * 2}
    assert watch.shown("rocketmq_consumer_inflight_messages") == {("g", "t"): 4 * 4}
    assert watch.shown("rocketmq_consumer_lag_messages") == {("g", "t"): 4 * 6}
    (seconds,) = watch.shown("baton_group_lag_seconds").values()
    assert watch.shown("rocketmq_consumer_lag_latency") == {("g", "t"): seconds * 1000}
    assert watch.shown("baton_group_members") == {("g",): 2}


async def test_message_that_may_not_exist_is_neither_in_flight_nor_blamed(
    services: Scene,
) -> None:
    """After a restart of offsets 16 messages may have been delivered; the queue has two more."""
    group = services.group("g", "c1", "c2")
    services.progress(group, 18, delivered_offset=34, unacked_count=16, unacked_count_min=0)
    watch = Watch(services)
    await watch.monitor.inspect()
    assert watch.shown("rocketmq_consumer_inflight_messages") == {("g", "t"): 0}
    assert watch.shown("rocketmq_consumer_ready_messages") == {("g", "t"): 4 * 2}
    assert watch.shown("rocketmq_consumer_lag_messages") == {("g", "t"): 4 * 2}
    assert StuckReason.HEAD_OF_LINE not in reasons(await why(services, group))


async def test_committed_offset_that_goes_back_is_counted_by_cause(
    services: Scene,
) -> None:
    group = services.group("g", "c1")
    watch = Watch(services)
    for committed_offset, reset_epoch in ((13, 0), (15, 0), (9, 1), (9, 1), (7, 1)):
        services.progress(group, committed_offset, reset_epoch=reset_epoch)
        await watch.monitor.inspect()
    rewinds = watch.shown("baton_group_offset_rewinds_total")
    assert rewinds == {("g", "t", "reset"): 4, ("g", "t", "unasked"): 4}


async def test_progress_is_compared_after_an_outage_of_offsets(
    services: Scene,
) -> None:
    services.progress(services.group("g", "c1"), 13)
    watch = Watch(services)
    await watch.monitor.inspect()
    services.offsets.refusal = NotLeader("not now")
    await watch.monitor.inspect()
    services.offsets.refusal = None
    services.progress(services.catalog.groups["g"], 12)
    await watch.monitor.inspect()
    assert watch.shown("baton_group_offset_rewinds_total")["g", "t", "unasked"] == 4


async def test_broadcasting_group_has_no_lag(services: Scene) -> None:
    services.group("g", "c1", model="BROADCASTING")
    watch = Watch(services)
    await watch.monitor.inspect()
    assert watch.shown("baton_group_lag_messages") == {}


async def test_only_the_replica_with_the_lowest_node_id_inspects(services: Scene) -> None:
    services.progress(services.group("g"), 13)
    watch = Watch(services)
    await watch.monitor.inspect()
    watch.register("n0")
    await watch.monitor.inspect()
    assert watch.shown("baton_queue_stuck") == watch.shown("baton_group_lag_messages") == {}
    assert watch.shown("baton_nameserver_inspections_total") == {(): 1}


async def test_queues_are_named_by_group_topic_broker_and_id(services: Scene) -> None:
    group = services.group("g", "c1")
    assert services.inspector.queues_of(group)[2:] == (QueueRef("t", "b", 0), QueueRef("t", "b", 1))
