"""Goal: each check of a cluster finds what it is for, says so with its values, and names a remedy;
on a cluster in order no check finds anything, and an input that could not be read is never passed.

Method: the rules get a state in order, changed in one place for each check.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from batonmq._common.contract import CONTRACT, CONTRACT_MIN
from batonmq.admin._cluster_findings import ETCD_BYTES_MAX
from batonmq.admin.access import IdentityGrants, IssuedAccessKey, IssuedToken
from batonmq.admin.cluster_checks import CHECKS, CheckVerdict, cluster_verdicts
from batonmq.admin.cluster_state import BrokerDisk, CheckLevel, ClusterState
from batonmq.admin.dead_letters import DeadLetterSummary
from batonmq.admin.effective_settings import NodeSetting
from batonmq.admin.group_lag import GroupLag
from batonmq.admin.group_reports import Group, Member, Pause
from batonmq.admin.node_state import NodeReport, ProcessState, clock_skew_ms
from batonmq.admin.quotas import IdentityQuota, QuotaLimits
from batonmq.admin.replication import Replica
from batonmq.admin.reports import Compaction, DrainedNode, Node, Topic
from batonmq.admin.setting_drift import config_drift, masked_settings
from batonmq.admin.transactions import TransactionDetail

NOW = 1_800_000_000_000
DAY = 86_400_000
STATE = ProcessState("1.0", 0, 100, 65_536, True, {"service": NOW + 90 * DAY})


def setting(name: str, value: str, default: str = "") -> NodeSetting:
    return NodeSetting(name, f"BATON_X_{name.upper()}", "text", default, "", "It is.", value, "env")


def report(
    service: str, number: int, *, leader: bool, replica_set: str = "", **state: Any
) -> NodeReport:
    node_id = f"{service}-{number}"
    node = Node(
        service,
        node_id,
        replica_set or node_id,
        f"host-{number}:1",
        f"host-{number}:2",
        NOW,
        1,
        leader,
    )
    node = replace(node, contract=CONTRACT, contract_min=CONTRACT_MIN)
    settings = (setting("node_id", node_id), setting("flush", "sync"))
    return NodeReport(node, settings, replace(STATE, **state), "")


def in_order() -> ClusterState:
    """Return a cluster of two nodes of each service, on two hosts, without any finding."""
    nodes = [
        report(service, number, leader=number == 0, replica_set=name)
        for service, name in (
            ("lockmgr", ""),
            ("nameserver", ""),
            ("offsets", "offsets"),
            ("storage", "a"),
        )
        for number in (0, 1)
    ]
    return ClusterState(
        now_unix_ms=NOW,
        nodes=tuple(nodes),
        health={(one.node.service, one.node.node_id): "SERVING" for one in nodes},
        copies={
            (one.node.service, one.node.node_id): copy(one)
            for one in nodes
            if one.node.service in ("offsets", "storage")
        },
        disks={f"storage-{number}": BrokerDisk("ok", 50.0, 0, 0) for number in (0, 1)},
        topics=(topic("orders", {"a": 4}),),
        groups=(group("g"),),
        lags=(GroupLag("g", 4, 0, 0, 0, 0, "IDLE", "", ""),),
        quotas=(IdentityQuota("*", QuotaLimits(topics=9)),),
    )


def copy(one: NodeReport, **changes: Any) -> Replica:
    node = one.node
    made = Replica(
        node.service, node.replica_set, node.node_id, 1, node.leader, True, 9, 0, None, ""
    )
    return replace(made, **changes)


def topic(name: str, counts: dict[str, int]) -> Topic:
    return Topic(name, 1, NOW, counts, "read_write", counts)


def group(name: str, **changes: Any) -> Group:
    made = Group(
        name=name,
        generation=1,
        members=(),
        subscriptions=(),
        subscription_generation=1,
        model="clustering",
        consume_from="last",
        order="none",
        policy="reject",
        ownership="on",
        strategy="sticky",
        assignments=(),
        staged=None,
        pause=None,
    )
    return replace(made, **changes)


def with_node(state: ClusterState, name: str, **changes: Any) -> ClusterState:
    """Return the cluster with other values of one node's process."""
    nodes = []
    for one in state.nodes:
        changed = one
        if one.name == name:
            assert one.state is not None
            changed = replace(one, state=replace(one.state, **changes))
        nodes.append(changed)
    return replace(state, nodes=tuple(nodes))


def with_report(cluster: ClusterState, name: str, **changes: Any) -> ClusterState:
    nodes = tuple(replace(one, **changes) if one.name == name else one for one in cluster.nodes)
    return replace(cluster, nodes=nodes)


def with_disk(state: ClusterState, disk: BrokerDisk) -> ClusterState:
    return replace(state, disks={**state.disks, "storage-1": disk})


def with_contract(state: ClusterState, name: str, **contract: Any) -> ClusterState:
    (node,) = [one.node for one in state.nodes if one.name == name]
    return with_report(state, name, node=replace(node, **contract))


def without(state: ClusterState, *names: str) -> ClusterState:
    return replace(state, nodes=tuple(one for one in state.nodes if one.name not in names))


def everywhere(state: ClusterState, **changes: Any) -> ClusterState:
    for one in state.nodes:
        state = with_node(state, one.name, **changes)
    return state


def issued(**changes: Any) -> tuple[IdentityGrants, ...]:
    return (
        IdentityGrants(
            "app",
            (),
            (IssuedToken("t1", NOW, "root", changes.get("token", 0)),),
            tuple(
                IssuedAccessKey(f"k{seal}", NOW, "root", sealed_by=seal)
                for seal in changes.get("seals", ())
            ),
        ),
    )


def at_host(one: NodeReport, number: int) -> NodeReport:
    return replace(one, node=replace(one.node, address=f"host-{number}:1"))


S = in_order()
LEADERS_TOGETHER = replace(
    S,
    nodes=(
        *(one for one in S.nodes if one.node.service != "storage"),
        *(
            at_host(report("storage", n, leader=n % 2 == 0, replica_set=f"b{n // 2}"), n % 2)
            for n in range(6)
        ),
    ),
    copies={("storage", f"storage-{number}"): copy(S.nodes[0]) for number in range(6)},
)

BROKEN: dict[str, tuple[ClusterState, CheckLevel, str]] = {
    "services": (without(S, "lockmgr/lockmgr-0"), CheckLevel.FAILED, "lockmgr has no leader"),
    "health": (
        replace(S, health={**S.health, ("offsets", "offsets-1"): "UNREACHABLE"}),
        CheckLevel.FAILED,
        "offsets/offsets-1 is UNREACHABLE",
    ),
    "answers": (
        with_report(S, "storage/storage-1", state=None, settings=(), problem="DENIED: no"),
        CheckLevel.UNKNOWN,
        "storage/storage-1 does not tell its state: DENIED: no",
    ),
    "versions": (
        with_node(S, "storage/storage-1", version="0.9"),
        CheckLevel.WARNING,
        "version 0.9: storage/storage-1",
    ),
    "contracts": (
        with_contract(S, "storage/storage-1", contract=5, contract_min=3),
        CheckLevel.FAILED,
        f"lockmgr/lockmgr-0 has contract {CONTRACT}, too old for storage/storage-1",
    ),
    "clocks": (
        with_node(S, "storage/storage-1", clock_skew_ms=-2_000),
        CheckLevel.FAILED,
        "the clock of storage/storage-1 is 2000 ms behind that of this machine",
    ),
    "descriptors": (
        with_node(S, "storage/storage-1", open_descriptors=60_000),
        CheckLevel.FAILED,
        "storage/storage-1 has 60000 of 65536 descriptors open",
    ),
    "disks": (
        with_disk(S, BrokerDisk("full", 99.0, 0, 0)),
        CheckLevel.FAILED,
        "the disk of storage/storage-1 is 99 % full (full)",
    ),
    "disk-growth": (
        with_disk(S, BrokerDisk("ok", 60.0, 7_200, 0)),
        CheckLevel.FAILED,
        "the disk of storage/storage-1 is full in 2.0 h at this rate",
    ),
    "damage": (
        with_disk(S, BrokerDisk("ok", 60.0, 0, 3)),
        CheckLevel.FAILED,
        "storage/storage-1 found 3 damaged batches",
    ),
    "certificates": (
        with_node(S, "offsets/offsets-0", certificates={"service": NOW + 3 * DAY}),
        CheckLevel.FAILED,
        "the certificate service of offsets/offsets-0 expires in 3.0 days",
    ),
    "etcd-alarms": (
        replace(S, etcd_alarms=("NOSPACE",)),
        CheckLevel.FAILED,
        "etcd has the alarm NOSPACE",
    ),
    "etcd-size": (
        replace(S, etcd_db_bytes=ETCD_BYTES_MAX + 1),
        CheckLevel.WARNING,
        "the database of etcd has 1600 MiB",
    ),
    "in-sync": (
        replace(
            S,
            copies={**S.copies, ("storage", "storage-1"): copy(S.nodes[-1], in_sync=False)},
        ),
        CheckLevel.FAILED,
        "storage/storage-1 of a is not in sync",
    ),
    "replicas-up": (
        without(S, "storage/storage-1"),
        CheckLevel.FAILED,
        "storage/storage-1 is not registered",
    ),
    "redundancy": (
        without(S, "nameserver/nameserver-1"),
        CheckLevel.WARNING,
        "nameserver has one node",
    ),
    "leader-balance": (
        LEADERS_TOGETHER,
        CheckLevel.WARNING,
        "storage leaders by host: host-0 3, host-1 0",
    ),
    "drained-nodes": (
        replace(S, drained=(DrainedNode("storage", "storage-1", "a", NOW - 7_200_000, "ann"),)),
        CheckLevel.WARNING,
        "storage/storage-1 is drained for 120 min, by ann",
    ),
    "topic-balance": (
        replace(
            S,
            nodes=(*S.nodes, report("storage", 2, leader=True, replica_set="b")),
        ),
        CheckLevel.WARNING,
        "queues of topic orders by broker: a 4, b 0",
    ),
    "topic-brokers": (
        replace(S, topics=(topic("orders", {"a": 4, "z": 4}),)),
        CheckLevel.FAILED,
        "broker z is not registered, and has queues of orders",
    ),
    "access": (
        with_node(S, "lockmgr/lockmgr-1", access_on=False),
        CheckLevel.FAILED,
        "access control is off on lockmgr/lockmgr-1",
    ),
    "quotas": (
        everywhere(S, access_on=False),
        CheckLevel.FAILED,
        "quotas are set, and have no effect: access control is off",
    ),
    "credentials": (
        replace(S, identities=issued(token=NOW + DAY)),
        CheckLevel.WARNING,
        "token t1 of app expires in 1.0 d",
    ),
    "gateway-keys": (
        replace(S, identities=issued(seals=("aa", "bb"))),
        CheckLevel.WARNING,
        "access keys are sealed with 2 keys (aa: 1, bb: 1)",
    ),
    "groups-stuck": (
        replace(S, lags=(GroupLag("g", 4, 1, 7, 900, 0, "HEAD_OF_LINE", "it waits", ""),)),
        CheckLevel.FAILED,
        "group g is stuck (HEAD_OF_LINE): it waits",
    ),
    "groups-paused": (
        replace(S, groups=(group("g", pause=Pause("ann", "flood", NOW)),)),
        CheckLevel.WARNING,
        "group g is paused by ann",
    ),
    "subscriptions": (
        replace(S, groups=(group("g", members=(Member("c1", 1, "h", NOW, differs=True),)),)),
        CheckLevel.FAILED,
        "members of g subscribe to something else: c1",
    ),
    "transactions": (
        replace(
            S,
            transactions=(TransactionDetail("a-1", "p", None, (), NOW - 7_200_000, 9, NOW, 0, ""),),
        ),
        CheckLevel.FAILED,
        "transaction a-1 is open for 2.0 h",
    ),
    "dead-letters": (
        replace(S, dead_letters=(DeadLetterSummary("g", 5, 2, NOW, NOW),)),
        CheckLevel.WARNING,
        "group g has 3 dead letters",
    ),
    "config-drift": (
        with_report(S, "storage/storage-1", settings=(setting("flush", "async"),)),
        CheckLevel.WARNING,
        "storage: BATON_X_FLUSH: sync on storage-0; async on storage-1",
    ),
}


def verdict(state: ClusterState, name: str) -> CheckVerdict:
    return next(one for one in cluster_verdicts(state) if one.name == name)


def test_cluster_in_order_passes_every_check() -> None:
    assert [
        one for one in cluster_verdicts(S) if one.findings or one.level is not CheckLevel.OK
    ] == []


def test_every_check_has_a_scene() -> None:
    assert [one.name for one in CHECKS] == list(BROKEN)


@pytest.mark.parametrize("name", BROKEN)
def test_check_finds_what_it_is_for(name: str) -> None:
    state, level, text = BROKEN[name]
    found = verdict(state, name)
    assert found.level is level
    assert text in found.findings
    assert found.remedy


@pytest.mark.parametrize("name", [one.name for one in CHECKS])
def test_check_whose_input_could_not_be_read_is_not_passed(name: str) -> None:
    (check,) = (one for one in CHECKS if one.name == name)
    unread = replace(S, unread={check.inputs[0]: "UNREACHABLE: no answer"})
    found = verdict(unread, name)
    assert found.level is CheckLevel.UNKNOWN
    assert not found.level.passed
    assert found.findings == (f"{check.inputs[0]}: UNREACHABLE: no answer",)


def test_gateway_without_sealing_key_fails_if_there_are_access_keys() -> None:
    state = replace(S, nodes=(*S.nodes, report("gateway", 0, leader=False)))
    assert verdict(state, "gateway-keys").level is CheckLevel.OK
    keyed = replace(state, identities=issued(seals=("aa",)))
    assert verdict(keyed, "gateway-keys").level is CheckLevel.FAILED


def test_certificate_that_cannot_be_read_fails() -> None:
    state = with_node(S, "offsets/offsets-0", certificates={"service": None})
    assert verdict(state, "certificates").level is CheckLevel.FAILED


@pytest.mark.parametrize(("there", "skew"), [(90, -10), (100, 0), (105, 0), (110, 0), (125, 15)])
def test_clock_skew_is_the_least_that_the_call_proves(there: int, skew: int) -> None:
    assert clock_skew_ms(there, (100, 110)) == skew


def test_drift_leaves_out_names_and_secrets_and_compares_sets_apart() -> None:
    def of(node: NodeReport, *settings: NodeSetting) -> NodeReport:
        return replace(node, settings=settings)

    first, second, other = (
        report("storage", number, leader=True, replica_set=name)
        for number, name in enumerate(("a", "a", "b"))
    )
    reports = (
        of(first, setting("data_dir", "/1"), setting("replicas", "x"), setting("pw", "(masked)")),
        of(second, setting("data_dir", "/2"), setting("replicas", "x"), setting("pw", "(masked)")),
        of(other, setting("data_dir", "/3"), setting("replicas", "y"), setting("pw", "(masked)")),
    )
    assert config_drift(reports) == ()
    assert masked_settings(reports) == ("BATON_X_PW",)
    differing = (*reports[:1], of(second, setting("replicas", "z")), reports[2])
    (drift,) = config_drift(differing)
    assert (drift.scope, drift.values) == ("storage/a", {"storage-0": "x", "storage-1": "z"})


def test_setting_of_one_version_only_drifts_unless_it_has_its_default() -> None:
    old, new = (report("offsets", number, leader=True, replica_set="o") for number in (0, 1))
    known = replace(new, settings=(*new.settings, setting("span", "4", default="4")))
    assert config_drift((old, known)) == ()
    changed = replace(new, settings=(*new.settings, setting("span", "5", default="4")))
    (drift,) = config_drift((old, changed))
    assert drift.values == {"offsets-0": "(not known to this version)", "offsets-1": "5"}


def test_drained_node_is_a_finding_at_once_if_its_set_has_no_leader() -> None:
    drained = DrainedNode("storage", "storage-1", "a", NOW - 1, "ann")
    assert verdict(replace(S, drained=(drained,)), "drained-nodes").level is CheckLevel.OK
    without_leader = without(replace(S, drained=(drained,)), "storage/storage-0")
    found = verdict(without_leader, "drained-nodes")
    assert found.level is CheckLevel.FAILED
    assert "a has no leader" in found.findings[0]


def test_node_before_contracts_works_with_this_version_and_not_with_every_later_one() -> None:
    earlier = with_contract(S, "storage/storage-1", contract=0, contract_min=0)
    assert verdict(earlier, "contracts").level is CheckLevel.OK
    later = with_contract(earlier, "lockmgr/lockmgr-0", contract=2, contract_min=1)
    (found,) = verdict(later, "contracts").findings
    assert (
        found == "storage/storage-1 has contract 0 (none registered), too old for lockmgr/lockmgr-0"
    )


def test_node_that_is_too_new_for_the_command_is_named() -> None:
    found = verdict(with_contract(S, "storage/storage-1", contract=9, contract_min=8), "contracts")
    text = f"storage/storage-1 works with contract 8 or later, and this command has {CONTRACT}"
    assert text in found.findings


def test_uneven_topic_is_told_only_if_its_queues_can_be_moved() -> None:
    nodes = (*S.nodes, report("storage", 2, leader=True, replica_set="b"))
    uneven = topic("orders", {"a": 4})
    compacted = replace(uneven, name="prices", compaction=Compaction())
    checked = cluster_verdicts(replace(S, nodes=nodes, topics=(uneven, compacted)))
    (found,) = [one for one in checked if one.name == "topic-balance"]
    assert found.findings == ("queues of topic orders by broker: a 4, b 0",)
    assert found.remedy.startswith("Move queues: baton topic move TOPIC --spread")
