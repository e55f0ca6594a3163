"""Checks of a cluster: questions, and rules that turn what was read into cluster_verdicts. Pure.

Each check has one question and one remedy. It yields findings; without one it is passed. A check
with an input that could not be read is unknown, and an unknown check is not passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from batonmq.admin import _cluster_findings
from batonmq.admin._cluster_findings import CLOCK_SKEW_MS_MAX
from batonmq.admin.cluster_state import CheckFinding, CheckLevel, ClusterState


@dataclass(frozen=True, slots=True)
class ClusterCheck:
    """One check.

    Attributes:
        question: What is asked; the answer yes passes the check.
        remedy: What to do if it finds something.
        inputs: Fields of `ClusterState` that it needs.
        find: Yields the findings.
    """

    name: str
    question: str
    remedy: str
    inputs: tuple[str, ...]
    find: Callable[[ClusterState], Iterable[CheckFinding]]


@dataclass(frozen=True, slots=True)
class CheckVerdict:
    """Result of one check; `remedy` is empty if it found nothing."""

    name: str
    question: str
    level: CheckLevel
    findings: tuple[str, ...]
    remedy: str


def cluster_verdicts(state: ClusterState) -> tuple[CheckVerdict, ...]:
    """Return the verdict of each check, in the order of `CHECKS`."""
    return tuple(_verdict(check, state) for check in CHECKS)


def _verdict(check: ClusterCheck, state: ClusterState) -> CheckVerdict:
    unread = [f"{name}: {state.unread[name]}" for name in check.inputs if name in state.unread]
    findings = list(check.find(state))
    levels = {one.level for one in findings}
    if CheckLevel.FAILED in levels:
        level = CheckLevel.FAILED
    elif unread or CheckLevel.UNKNOWN in levels:
        level = CheckLevel.UNKNOWN
    else:
        level = CheckLevel.WARNING if levels else CheckLevel.OK
    texts = (*(one.text for one in findings), *unread)
    return CheckVerdict(check.name, check.question, level, texts, check.remedy if texts else "")


CHECKS: tuple[ClusterCheck, ...] = (
    ClusterCheck(
        "services",
        "Does every service and replica set have a leader?",
        "Start the missing processes; see their logs. For a set whose in-sync nodes are lost for "
        "good: baton cluster elect.",
        ("nodes",),
        _cluster_findings.find_services,
    ),
    ClusterCheck(
        "health",
        "Is every registered process healthy?",
        "See the log of the process; restart it if it does not recover.",
        ("health",),
        _cluster_findings.find_health,
    ),
    ClusterCheck(
        "answers",
        "Does every node tell its state?",
        "Run the check with the role admin on the cluster, from a machine that reaches the nodes; "
        "upgrade nodes of an earlier version.",
        ("nodes",),
        _cluster_findings.find_answers,
    ),
    ClusterCheck(
        "versions",
        "Are all nodes of one version?",
        "Finish the rolling upgrade: the CHANGELOG says in which order.",
        ("nodes",),
        _cluster_findings.find_versions,
    ),
    ClusterCheck(
        "contracts",
        "Does each node work with the versions of all others?",
        "Upgrade the older node; a step of more than one version may need one in between. See "
        "docs/how-to/rolling-upgrade.md.",
        ("nodes",),
        _cluster_findings.find_contracts,
    ),
    ClusterCheck(
        "clocks",
        f"Do the clocks of all nodes agree to {CLOCK_SKEW_MS_MAX} ms?",
        "Run NTP or chrony on the machine; retention and schedules use its wall clock.",
        ("nodes",),
        _cluster_findings.find_clocks,
    ),
    ClusterCheck(
        "descriptors",
        "Does every process have file descriptors left?",
        "Raise the limit of open files: LimitNOFILE= of systemd, or ulimit -Hn.",
        ("nodes",),
        _cluster_findings.find_descriptors,
    ),
    ClusterCheck(
        "disks",
        "Are the disks of storage below their watermarks?",
        "Lower the retention of large topics (baton topic stats), or add space or a broker.",
        ("disks",),
        _cluster_findings.find_disks,
    ),
    ClusterCheck(
        "disk-growth",
        "Do the disks last for a day at the present rate?",
        "Find the topic that grows: baton topic stats. Lower its retention, or add a broker.",
        ("disks",),
        _cluster_findings.find_disk_growth,
    ),
    ClusterCheck(
        "damage",
        "Is every stored batch readable?",
        "Run baton fsck on the node; a follower repairs itself from its leader.",
        ("disks",),
        _cluster_findings.find_damage,
    ),
    ClusterCheck(
        "certificates",
        "Are all certificates valid for 14 days?",
        "Replace the files; services use them at the next handshake, without a restart.",
        ("nodes",),
        _cluster_findings.find_certificates,
    ),
    ClusterCheck(
        "etcd-alarms",
        "Is etcd without alarms?",
        "NOSPACE: compact and defragment etcd, then disarm the alarm. CORRUPT: replace the member.",
        ("nodes",),
        _cluster_findings.find_etcd_alarms,
    ),
    ClusterCheck(
        "etcd-size",
        "Is the database of etcd well below its quota of 2 GiB?",
        "Compact and defragment etcd, or raise --quota-backend-bytes.",
        ("nodes",),
        _cluster_findings.find_etcd_size,
    ),
    ClusterCheck(
        "in-sync",
        "Is every replica in sync?",
        "See the log of the follower and its disk; baton cluster replication shows the lag.",
        ("copies",),
        _cluster_findings.find_in_sync,
    ),
    ClusterCheck(
        "replicas-up",
        "Is every configured replica registered?",
        "Start the process, or replace its machine.",
        ("copies",),
        _cluster_findings.find_replicas_up,
    ),
    ClusterCheck(
        "redundancy",
        "Does every service survive the loss of a node?",
        "Run several instances of each service; copies of data: BATON_STORAGE_REPLICAS.",
        ("nodes",),
        _cluster_findings.find_redundancy,
    ),
    ClusterCheck(
        "leader-balance",
        "Are storage leaders spread evenly over the hosts?",
        "Spread them: baton cluster spread-leaders --dry-run, then without --dry-run.",
        ("copies",),
        _cluster_findings.find_leader_balance,
    ),
    ClusterCheck(
        "drained-nodes",
        "Is no node drained for more than an hour?",
        "End the maintenance: baton cluster undrain NODE. Until then its set has one successor "
        "less.",
        ("nodes",),
        _cluster_findings.find_drained,
    ),
    ClusterCheck(
        "topic-balance",
        "Are the queues of each topic spread evenly over the brokers?",
        "Move queues: baton topic move TOPIC --spread --dry-run, then without --dry-run.",
        ("topics",),
        _cluster_findings.find_topic_balance,
    ),
    ClusterCheck(
        "topic-brokers",
        "Is every broker that has queues of a topic registered?",
        "Start the broker. If it is lost for good, restore its topics from a backup.",
        ("topics",),
        _cluster_findings.find_topic_brokers,
    ),
    ClusterCheck(
        "access",
        "Do all nodes check permissions?",
        "Set BATON_<SERVICE>_ACCESS=true on the named nodes and restart them.",
        ("nodes",),
        _cluster_findings.find_access,
    ),
    ClusterCheck(
        "quotas",
        "Is the traffic of every identity limited?",
        "Set limits for all identities: baton quota set '*'. Quotas need access control.",
        ("quotas",),
        _cluster_findings.find_quotas,
    ),
    ClusterCheck(
        "credentials",
        "Are all tokens and access keys valid for 7 days?",
        "Issue a new one and revoke the old one: baton access token create, baton access key.",
        ("identities",),
        _cluster_findings.find_credentials,
    ),
    ClusterCheck(
        "gateway-keys",
        "Can every gateway check every access key?",
        "Give all gateways and nameservers the same sealing key file; rotate keys that are sealed "
        "with an earlier one.",
        ("identities", "nodes"),
        _cluster_findings.find_gateway_keys,
    ),
    ClusterCheck(
        "groups-stuck",
        "Does every group make progress?",
        "See why, queue by queue, with the remedy: baton group why-stuck GROUP.",
        ("lags",),
        _cluster_findings.find_groups_stuck,
    ),
    ClusterCheck(
        "groups-paused",
        "Is no group paused?",
        "Resume it if the reason is gone: baton group resume.",
        ("groups",),
        _cluster_findings.find_groups_paused,
    ),
    ClusterCheck(
        "subscriptions",
        "Do all members of a group subscribe to the same?",
        "Deploy one version of the consumer; see baton group describe.",
        ("groups",),
        _cluster_findings.find_subscriptions,
    ),
    ClusterCheck(
        "transactions",
        "Has every transaction ended within an hour?",
        "See why it is open: baton transaction list. Start its producer.",
        ("transactions",),
        _cluster_findings.find_transactions,
    ),
    ClusterCheck(
        "dead-letters",
        "Are there no dead letters?",
        "Look at them and send them again: baton dlq list, baton dlq redrive.",
        ("dead_letters",),
        _cluster_findings.find_dead_letters,
    ),
    ClusterCheck(
        "config-drift",
        "Do all nodes of a service have the same settings?",
        "See the values side by side: baton cluster config --diff.",
        ("nodes",),
        _cluster_findings.find_config_drift,
    ),
)
"""All checks, in the order in which an operator should look at them."""
