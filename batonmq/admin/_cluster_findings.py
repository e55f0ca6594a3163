"""Rules of the checks of a cluster: each yields what is wrong. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from batonmq._common.contract import CONTRACT, CONTRACT_MIN
from batonmq._common.health import SERVING
from batonmq._core.names import is_system_topic
from batonmq.admin.cluster_state import CheckFinding, CheckLevel, ClusterState
from batonmq.admin.node_state import NodeReport
from batonmq.admin.quotas import DEFAULT_IDENTITY
from batonmq.admin.setting_drift import config_drift

SERVICES = ("lockmgr", "nameserver", "offsets", "storage")
CLOCK_SKEW_MS_MAX = 500
DESCRIPTORS_USED_MAX = 0.8
DESCRIPTORS_WANTED = 65_536
DISK_FULL_IN_S_MIN = 24 * 3_600
CERTIFICATE_MS_MIN = 14 * 86_400_000
CREDENTIAL_MS_MIN = 7 * 86_400_000
ETCD_BYTES_MAX = 1_600 * 1024 * 1024
"""etcd accepts no writes beyond its quota, 2 GiB by default."""
TRANSACTION_AGE_MS_MAX = 3_600_000
DRAINED_MS_MAX = 3_600_000


def _failed(text: str) -> CheckFinding:
    return CheckFinding(CheckLevel.FAILED, text)


def _warning(text: str) -> CheckFinding:
    return CheckFinding(CheckLevel.WARNING, text)


def find_services(state: ClusterState) -> Iterator[CheckFinding]:
    """Yield services and replica sets without a leader."""
    led = {(r.node.service, r.node.replica_set) for r in state.nodes if r.node.leader}
    sets = {
        (r.node.service, r.node.replica_set)
        for r in state.nodes
        if r.node.service in ("offsets", "storage")
    }
    services = {service for service, _ in led}
    yield from (_failed(f"{one} has no leader") for one in SERVICES if one not in services)
    for service, name in sorted(sets - led):
        if service in services:
            yield _failed(f"{service} {name} has no leader")


def find_drained(state: ClusterState) -> Iterator[CheckFinding]:
    """Yield nodes that are drained for long; failed if their set has no leader."""
    led = {(r.node.service, r.node.replica_set) for r in state.nodes if r.node.leader}
    for one in state.drained:
        drained_ms = state.now_unix_ms - one.unix_ms
        text = f"{one.service}/{one.node_id} is drained for {drained_ms // 60_000} min, by {one.by}"
        if (one.service, one.replica_set) not in led:
            yield _failed(f"{text}, and {one.replica_set} has no leader")
        elif drained_ms > DRAINED_MS_MAX:
            yield _warning(text)


def find_health(state: ClusterState) -> Iterator[CheckFinding]:
    """Yield processes that are not healthy."""
    for (service, node_id), status in sorted(state.health.items()):
        if status != SERVING:
            yield _failed(f"{service}/{node_id} is {status}")


def find_answers(state: ClusterState) -> Iterator[CheckFinding]:
    """Yield nodes that do not tell their state."""
    for one in state.nodes:
        if one.problem:
            yield CheckFinding(
                CheckLevel.UNKNOWN, f"{one.name} does not tell its state: {one.problem}"
            )
        elif one.state is None:
            yield _warning(f"{one.name} is of an earlier version, which does not tell its state")


def find_versions(state: ClusterState) -> Iterator[CheckFinding]:
    """Yield the versions, if there are several."""
    by_version: dict[str, list[str]] = defaultdict(list)
    for one in state.nodes:
        if not one.problem:
            by_version[one.state.version if one.state else "earlier"].append(one.name)
    if len(by_version) > 1:
        for version, names in sorted(by_version.items()):
            yield _warning(f"version {version or 'unknown'}: {', '.join(sorted(names))}")


def find_contracts(state: ClusterState) -> Iterator[CheckFinding]:
    """Yield nodes that other nodes, or this command, don't work with."""
    nodes = {f"{one.node.service}/{one.node.node_id}": one.node for one in state.nodes}
    for name, node in sorted(nodes.items()):
        refusing = [other for other, one in nodes.items() if one.contract_min > node.contract]
        refusing += ["this command"] if node.contract < CONTRACT_MIN else []
        if refusing:
            yield _failed(
                f"{name} has contract {node.contract or '0 (none registered)'}, too old for "
                f"{', '.join(sorted(refusing))}"
            )
        if node.contract_min > CONTRACT:
            yield _failed(
                f"{name} works with contract {node.contract_min} or later, and this command has "
                f"{CONTRACT}"
            )


def find_clocks(state: ClusterState) -> Iterator[CheckFinding]:
    """Yield clocks that differ from that of this machine."""
    for name, one in state.states:
        if abs(one.clock_skew_ms) > CLOCK_SKEW_MS_MAX:
            side = "ahead of" if one.clock_skew_ms > 0 else "behind"
            yield _failed(
                f"the clock of {name} is {abs(one.clock_skew_ms)} ms {side} that of this machine"
            )


def find_descriptors(state: ClusterState) -> Iterator[CheckFinding]:
    """Yield processes with few descriptors left, or a low limit."""
    for name, one in state.states:
        limit = one.descriptors_max
        if limit and one.open_descriptors > limit * DESCRIPTORS_USED_MAX:
            yield _failed(f"{name} has {one.open_descriptors} of {limit} descriptors open")
        elif limit < DESCRIPTORS_WANTED:
            yield _warning(f"{name} may open {limit} descriptors, less than {DESCRIPTORS_WANTED}")


def find_disks(state: ClusterState) -> Iterator[CheckFinding]:
    """Yield disks above a watermark."""
    for node_id, disk in sorted(state.disks.items()):
        text = f"the disk of storage/{node_id} is {disk.used_percent:.0f} % full ({disk.state})"
        if disk.state in ("clean_forcibly", "full"):
            yield _failed(text)
        elif disk.state != "ok":
            yield _warning(text)


def find_disk_growth(state: ClusterState) -> Iterator[CheckFinding]:
    """Yield disks that fill soon."""
    for node_id, disk in sorted(state.disks.items()):
        if 0 < disk.seconds_until_full < DISK_FULL_IN_S_MIN:
            hours = disk.seconds_until_full / 3_600
            yield _failed(f"the disk of storage/{node_id} is full in {hours:.1f} h at this rate")


def find_damage(state: ClusterState) -> Iterator[CheckFinding]:
    """Yield nodes with damaged batches."""
    for node_id, disk in sorted(state.disks.items()):
        if disk.damaged_batch_count:
            yield _failed(f"storage/{node_id} found {disk.damaged_batch_count} damaged batches")


def find_certificates(state: ClusterState) -> Iterator[CheckFinding]:
    """Yield certificates that expire soon."""
    for name, one in state.states:
        for certificate, expire_unix_ms in sorted(one.certificates.items()):
            what = f"the certificate {certificate} of {name}"
            if expire_unix_ms is None:
                yield _failed(f"the expiry of {what} can't be read")
            elif expire_unix_ms - state.now_unix_ms < CERTIFICATE_MS_MIN:
                days = (expire_unix_ms - state.now_unix_ms) / 86_400_000
                yield _failed(f"{what} expires in {days:.1f} days")


def find_etcd_alarms(state: ClusterState) -> Iterator[CheckFinding]:
    """Yield the alarms of etcd."""
    yield from (_failed(f"etcd has the alarm {alarm}") for alarm in state.etcd_alarms)


def find_etcd_size(state: ClusterState) -> Iterator[CheckFinding]:
    """Yield a large database of etcd."""
    if state.etcd_db_bytes > ETCD_BYTES_MAX:
        yield _warning(f"the database of etcd has {state.etcd_db_bytes >> 20} MiB")


def find_in_sync(state: ClusterState) -> Iterator[CheckFinding]:
    """Yield replicas that are not in sync."""
    for (service, node_id), copy in sorted(state.copies.items()):
        if copy.problem:
            yield _failed(f"{service}/{node_id} can't follow its leader: {copy.problem}")
        elif not copy.in_sync:
            yield _failed(f"{service}/{node_id} of {copy.replica_set} is not in sync")


def find_replicas_up(state: ClusterState) -> Iterator[CheckFinding]:
    """Yield configured replicas that are not registered."""
    up = {(one.node.service, one.node.node_id) for one in state.nodes}
    yield from (_failed(f"{s}/{n} is not registered") for s, n in sorted(state.copies.keys() - up))


def find_redundancy(state: ClusterState) -> Iterator[CheckFinding]:
    """Yield services and replica sets of one node."""
    sizes = Counter(
        (r.node.service, r.node.replica_set if r.node.service in ("offsets", "storage") else "")
        for r in state.nodes
    )
    for (service, name), size in sorted(sizes.items()):
        if size == 1 and service in SERVICES:
            yield _warning(f"{service}{f' {name}' if name else ''} has one node")


def find_leader_balance(state: ClusterState) -> Iterator[CheckFinding]:
    """Count the storage leaders of each host, if brokers have several nodes on several hosts."""
    hosts: Counter[str] = Counter()
    replicated = {name for (service, name) in state.copies if service == "storage"}
    for one in state.nodes:
        if one.node.service == "storage" and one.node.node_id in replicated:
            hosts[one.node.address.rpartition(":")[0]] += one.node.leader
    if hosts and max(hosts.values()) - min(hosts.values()) > 1:
        counts = ", ".join(f"{host} {count}" for host, count in sorted(hosts.items()))
        yield _warning(f"storage leaders by host: {counts}")


def find_topic_balance(state: ClusterState) -> Iterator[CheckFinding]:
    """Yield topics with uneven queues; those of compacted topics can't be moved."""
    brokers = {r.node.replica_set for r in state.nodes if r.node.service == "storage"}
    brokers -= {one.broker for one in state.removals}
    for topic in state.topics:
        if is_system_topic(topic.name) or topic.compaction is not None:
            continue
        counts = {broker: topic.writable_counts.get(broker, 0) for broker in brokers}
        if counts and max(counts.values()) - min(counts.values()) > 1:
            text = ", ".join(f"{broker} {count}" for broker, count in sorted(counts.items()))
            yield _warning(f"queues of topic {topic.name} by broker: {text}")


def find_topic_brokers(state: ClusterState) -> Iterator[CheckFinding]:
    """Yield brokers with queues that are not registered."""
    brokers = {r.node.replica_set for r in state.nodes if r.node.service == "storage"}
    gone: dict[str, list[str]] = defaultdict(list)
    for topic in state.topics:
        for broker in topic.queue_counts.keys() - brokers:
            gone[broker].append(topic.name)
    for broker, names in sorted(gone.items()):
        yield _failed(f"broker {broker} is not registered, and has queues of {_names(names)}")


def find_access(state: ClusterState) -> Iterator[CheckFinding]:
    """Yield nodes that do not check permissions."""
    by_state: dict[bool, list[str]] = defaultdict(list)
    for name, one in state.states:
        by_state[one.access_on].append(name)
    if by_state[False] and by_state[True]:
        yield _failed(f"access control is off on {', '.join(sorted(by_state[False]))}")
    elif by_state[False]:
        yield _warning("access control is off on all nodes")


def find_quotas(state: ClusterState) -> Iterator[CheckFinding]:
    """Yield quotas without effect, and a missing default."""
    on = {one.access_on for _, one in state.states}
    if state.quotas and on == {False}:
        yield _failed("quotas are set, and have no effect: access control is off")
    if on == {True} and all(one.identity != DEFAULT_IDENTITY for one in state.quotas):
        yield _warning("identities without quotas of their own have no limit: * has no quota")


def find_credentials(state: ClusterState) -> Iterator[CheckFinding]:
    """Yield tokens and access keys that expire soon."""
    for one in state.identities:
        for kind, name, expire_unix_ms in (
            *(("token", token.token_id, token.expire_unix_ms) for token in one.tokens),
            *(("access key", key.access_key, key.expire_unix_ms) for key in one.access_keys),
        ):
            left_ms = expire_unix_ms - state.now_unix_ms
            if expire_unix_ms and left_ms < CREDENTIAL_MS_MIN:
                when = "has expired" if left_ms < 0 else f"expires in {left_ms / 86_400_000:.1f} d"
                yield _warning(f"{kind} {name} of {one.identity} {when}")


def find_gateway_keys(state: ClusterState) -> Iterator[CheckFinding]:
    """Yield access keys that a gateway may not be able to check."""
    sealed = Counter(key.sealed_by for one in state.identities for key in one.access_keys)
    if len(sealed) > 1:
        counts = ", ".join(f"{name}: {count}" for name, count in sorted(sealed.items()))
        yield _warning(f"access keys are sealed with {len(sealed)} keys ({counts})")
    for one in state.nodes:
        if one.node.service == "gateway" and sealed and not _value(one, "sealing_key_file"):
            yield _failed(f"{one.name} has no sealing key, so it can't check any access key")


def _value(report: NodeReport, name: str) -> str:
    return next((one.value for one in report.settings if one.name == name), "")


def find_groups_stuck(state: ClusterState) -> Iterator[CheckFinding]:
    """Yield groups that are stuck."""
    for lag in state.lags:
        if lag.stuck and lag.verdict != "PAUSED":
            yield _failed(f"group {lag.group} is stuck ({lag.verdict}): {lag.message}")


def find_groups_paused(state: ClusterState) -> Iterator[CheckFinding]:
    """Yield groups that are paused."""
    for group in state.groups:
        if group.pause is not None:
            yield _warning(f"group {group.name} is paused by {group.pause.by}")


def find_subscriptions(state: ClusterState) -> Iterator[CheckFinding]:
    """Yield members with another subscription than their group."""
    for group in state.groups:
        differing = [member.client_id for member in group.members if member.differs]
        if differing:
            yield _failed(f"members of {group.name} subscribe to something else: {differing[0]}")


def find_transactions(state: ClusterState) -> Iterator[CheckFinding]:
    """Yield transactions that are open for long."""
    for one in state.transactions:
        age_ms = state.now_unix_ms - one.begin_unix_ms
        if one.begin_unix_ms and age_ms > TRANSACTION_AGE_MS_MAX:
            hours = age_ms / 3_600_000
            yield _failed(f"transaction {one.transaction_id} is open for {hours:.1f} h")


def find_dead_letters(state: ClusterState) -> Iterator[CheckFinding]:
    """Yield groups with dead letters."""
    for one in state.dead_letters:
        if waiting := one.count - one.redriven_count:
            yield _warning(f"group {one.group} has {waiting} dead letters")


def find_config_drift(state: ClusterState) -> Iterator[CheckFinding]:
    """Yield settings that differ between nodes of a service."""
    for drift in config_drift(state.nodes):
        by_value: dict[str, list[str]] = defaultdict(list)
        for node_id, value in drift.values.items():
            by_value[value].append(node_id)
        text = "; ".join(f"{value or '(empty)'} on {_names(n)}" for value, n in by_value.items())
        yield _warning(f"{drift.scope}: {drift.variable}: {text}")


def _names(names: Iterable[str]) -> str:
    """Return up to three names, and how many more there are."""
    chosen = sorted(names)
    more = f" and {len(chosen) - 3} more" if len(chosen) > 3 else ""
    return ", ".join(chosen[:3]) + more
