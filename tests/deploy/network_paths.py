"""Connections that the network policies of rendered manifests allow.

The rules of Kubernetes: a pod that no policy selects for a direction allows every connection in
this direction. A pod that policies select allows what any rule of any of these policies allows. A
connection needs the egress of the caller and the ingress of the callee.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address, ip_network

from tools.containers.pods import Resource

Port = tuple[int, str]
Connection = tuple[str, str, int]
"""Caller, callee and port."""
_OUTSIDE = "203.0.113.9"


@dataclass(frozen=True, slots=True)
class NetworkPeer:
    """Either end of a connection.

    Attributes:
        namespace: None for an address outside the cluster.
        ports: Ports at which it listens, with protocols.
    """

    name: str
    namespace: str | None
    labels: Mapping[str, str]
    ports: tuple[Port, ...] = ()


def workloads(resources: Iterable[Resource]) -> Iterator[NetworkPeer]:
    """Yield one pod of each workload; its replicas are alike."""
    for resource in resources:
        if resource["kind"] not in ("StatefulSet", "Deployment", "Job"):
            continue
        template = resource["spec"]["template"]
        metadata, labels = resource["metadata"], template["metadata"]["labels"]
        ports = [
            (port["containerPort"], port.get("protocol", "TCP"))
            for container in template["spec"]["containers"]
            for port in container.get("ports", ())
        ]
        yield NetworkPeer(
            labels["app.kubernetes.io/name"],
            metadata["namespace"],
            labels,
            tuple(ports),
        )


def allowed_connections(
    resources: Iterable[Resource], callers: Iterable[NetworkPeer], callees: Iterable[NetworkPeer]
) -> set[Connection]:
    """Return every connection that is allowed."""
    policies = [one for one in resources if one["kind"] == "NetworkPolicy"]
    callee_list = list(callees)
    return {
        (caller.name, callee.name, port[0])
        for caller in callers
        for callee in callee_list
        for port in callee.ports
        if _allows(policies, "Egress", caller, callee, port)
        and _allows(policies, "Ingress", callee, caller, port)
    }


def _allows(
    policies: Iterable[Resource], direction: str, at: NetworkPeer, other: NetworkPeer, port: Port
) -> bool:
    specs = [
        policy["spec"]
        for policy in policies
        if policy["metadata"]["namespace"] == at.namespace
        and direction in policy["spec"]["policyTypes"]
        and _selects(policy["spec"]["podSelector"], at.labels)
    ]
    peers = "to" if direction == "Egress" else "from"
    return not specs or any(
        _has_port(rule, port) and _has_peer(rule.get(peers, ()), other, at)
        for spec in specs
        for rule in spec.get(direction.lower(), ())
    )


def _has_port(rule: Resource, port: Port) -> bool:
    ports = [(one["port"], one.get("protocol", "TCP")) for one in rule.get("ports", ())]
    return not ports or port in ports


def _has_peer(peers: Iterable[Resource], other: NetworkPeer, at: NetworkPeer) -> bool:
    allowed = list(peers)
    return not allowed or any(_is(peer, other, at) for peer in allowed)


def _is(peer: Resource, other: NetworkPeer, at: NetworkPeer) -> bool:
    if other.namespace is None or "ipBlock" in peer:
        # A block has addresses outside of the cluster; addresses of pods change.
        inside = other.namespace is not None or "ipBlock" not in peer
        return not inside and ip_address(_OUTSIDE) in ip_network(peer["ipBlock"]["cidr"])
    if "namespaceSelector" in peer:
        named = {"kubernetes.io/metadata.name": other.namespace}
        near = _selects(peer["namespaceSelector"], named)
    else:
        near = other.namespace == at.namespace
    return near and _selects(peer.get("podSelector", {}), other.labels)


def _selects(selector: Resource, labels: Mapping[str, str]) -> bool:
    if any(one["operator"] != "In" for one in selector.get("matchExpressions", ())):
        raise NotImplementedError(selector)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", ())
    )
