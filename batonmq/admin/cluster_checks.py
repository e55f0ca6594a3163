"""Checks of a cluster: questions, and rules that turn what was read into verdicts. Pure.

Each check has one question and one remedy. It yields findings; without one it is passed. A check
with an input that could not be read is unknown, and an unknown check is not passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from batonmq.admin import cluster_findings
from batonmq.admin.cluster_findings import CLOCK_SKEW_MS_MAX
from batonmq.admin.cluster_state import ClusterState, Finding, Level


@dataclass(frozen=True, slots=True)
class Check:
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
    find: Callable[[ClusterState], Iterable[Finding]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one check; `remedy` is empty if it found nothing."""

    name: str
    question: str
    level: Level
    findings: tuple[str, ...]
    remedy: str


def verdicts(state: ClusterState) -> tuple[Verdict, ...]:
    """Return the verdict of each check, in the order of `CHECKS`."""
    return tuple(_verdict(check, state) for check in CHECKS)


def _verdict(check: Check, state: ClusterState) -> Verdict:
    unread = [f"{name}: {state.unread[name]}" for name in check.inputs if name in state.unread]
    findings = list(check.find(state))
    levels = {one.level for one in findings}
    if Level.FAILED in levels:
        level = Level.FAILED
    elif unread or Level.UNKNOWN in levels:
        level = Level.UNKNOWN
    else:
        level = Level.WARNING if levels else Level.OK
    texts = (*(one.text for one in findings), *unread)
    return Verdict(check.name, check.question, level, texts, check.remedy if texts else "")


CHECKS: tuple[Check, ...] = (
    Check(
        "services",
        "Does every service and replica set have a leader?",
        "Start the missing processes; see their logs. For a set whose in-sync nodes are lost for "
        "good: baton cluster elect.",
        ("nodes",),
        cluster_findings.find_services,
    ),
    Check(
        "health",
        "Is every registered process healthy?",
        "See the log of the process; restart it if it does not recover.",
        ("health",),
        cluster_findings.find_health,
    ),
    Check(
        "answers",
        "Does every node tell its state?",
        "Run the check with the role admin on the cluster, from a machine that reaches the nodes; "
        "upgrade nodes of an earlier version.",
        ("nodes",),
        cluster_findings.find_answers,
    ),
    Check(
        "versions",
        "Are all nodes of one version?",
        "Finish the rolling upgrade: docs/how-to/operator-tasks.md.",
        ("nodes",),
        cluster_findings.find_versions,
    ),
    Check(
        "clocks",
        f"Do the clocks of all nodes agree to {CLOCK_SKEW_MS_MAX} ms?",
        "Run NTP or chrony on the machine; retention and schedules use its wall clock.",
        ("nodes",),
        cluster_findings.find_clocks,
    ),
    Check(
        "descriptors",
        "Does every process have file descriptors left?",
        "Raise the limit of open files: LimitNOFILE= of systemd, or ulimit -Hn.",
        ("nodes",),
        cluster_findings.find_descriptors,
    ),
    Check(
        "disks",
        "Are the disks of storage below their watermarks?",
        "Lower the retention of large topics (baton topic stats), or add space or a broker.",
        ("disks",),
        cluster_findings.find_disks,
    ),
    Check(
        "disk-growth",
        "Do the disks last for a day at the present rate?",
        "Find the topic that grows: baton topic stats. Lower its retention, or add a broker.",
        ("disks",),
        cluster_findings.find_disk_growth,
    ),
    Check(
        "damage",
        "Is every stored batch readable?",
        "Run baton fsck on the node; a follower repairs itself from its leader.",
        ("disks",),
        cluster_findings.find_damage,
    ),
    Check(
        "certificates",
        "Are all certificates valid for 14 days?",
        "Replace the files; services use them at the next handshake, without a restart.",
        ("nodes",),
        cluster_findings.find_certificates,
    ),
    Check(
        "etcd-alarms",
        "Is etcd without alarms?",
        "NOSPACE: compact and defragment etcd, then disarm the alarm. CORRUPT: replace the member.",
        ("nodes",),
        cluster_findings.find_etcd_alarms,
    ),
    Check(
        "etcd-size",
        "Is the database of etcd well below its quota of 2 GiB?",
        "Compact and defragment etcd, or raise --quota-backend-bytes.",
        ("nodes",),
        cluster_findings.find_etcd_size,
    ),
    Check(
        "in-sync",
        "Is every replica in sync?",
        "See the log of the follower and its disk; baton cluster replication shows the lag.",
        ("copies",),
        cluster_findings.find_in_sync,
    ),
    Check(
        "replicas-up",
        "Is every configured replica registered?",
        "Start the process, or replace its machine.",
        ("copies",),
        cluster_findings.find_replicas_up,
    ),
    Check(
        "redundancy",
        "Does every service survive the loss of a node?",
        "Run several instances of each service; copies of data: BATON_STORAGE_REPLICAS.",
        ("nodes",),
        cluster_findings.find_redundancy,
    ),
    Check(
        "leader-balance",
        "Are storage leaders spread evenly over the hosts?",
        "Restart a leader on the host with most; a follower takes over within a second.",
        ("copies",),
        cluster_findings.find_leader_balance,
    ),
    Check(
        "topic-balance",
        "Are the queues of each topic spread evenly over the brokers?",
        "Move queues to the brokers with fewer: baton topic move.",
        ("topics",),
        cluster_findings.find_topic_balance,
    ),
    Check(
        "topic-brokers",
        "Is every broker that has queues of a topic registered?",
        "Start the broker. If it is lost for good, restore its topics from a backup.",
        ("topics",),
        cluster_findings.find_topic_brokers,
    ),
    Check(
        "access",
        "Do all nodes check permissions?",
        "Set BATON_<SERVICE>_ACCESS=true on the named nodes and restart them.",
        ("nodes",),
        cluster_findings.find_access,
    ),
    Check(
        "quotas",
        "Is the traffic of every identity limited?",
        "Set limits for all identities: baton quota set '*'. Quotas need access control.",
        ("quotas",),
        cluster_findings.find_quotas,
    ),
    Check(
        "credentials",
        "Are all tokens and access keys valid for 7 days?",
        "Issue a new one and revoke the old one: baton access token create, baton access key.",
        ("identities",),
        cluster_findings.find_credentials,
    ),
    Check(
        "gateway-keys",
        "Can every gateway check every access key?",
        "Give all gateways and nameservers the same sealing key file; rotate keys that are sealed "
        "with an earlier one.",
        ("identities", "nodes"),
        cluster_findings.find_gateway_keys,
    ),
    Check(
        "groups-stuck",
        "Does every group make progress?",
        "See why, queue by queue, with the remedy: baton group why-stuck.",
        ("lags",),
        cluster_findings.find_groups_stuck,
    ),
    Check(
        "groups-paused",
        "Is no group paused?",
        "Resume it if the reason is gone: baton group resume.",
        ("groups",),
        cluster_findings.find_groups_paused,
    ),
    Check(
        "subscriptions",
        "Do all members of a group subscribe to the same?",
        "Deploy one version of the consumer; see baton group describe.",
        ("groups",),
        cluster_findings.find_subscriptions,
    ),
    Check(
        "transactions",
        "Has every transaction ended within an hour?",
        "See why it is open: baton transaction list. Start its producer.",
        ("transactions",),
        cluster_findings.find_transactions,
    ),
    Check(
        "dead-letters",
        "Are there no dead letters?",
        "Look at them and send them again: baton dlq list, baton dlq redrive.",
        ("dead_letters",),
        cluster_findings.find_dead_letters,
    ),
    Check(
        "config-drift",
        "Do all nodes of a service have the same settings?",
        "See the values side by side: baton cluster config --diff.",
        ("nodes",),
        cluster_findings.find_config_drift,
    ),
)
"""All checks, in the order in which an operator should look at them."""
