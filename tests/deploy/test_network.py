"""Goal: every overlay allows exactly the connections in the table of docs/how-to/deploy.md.

Method: the rendered network policies are evaluated for every pair of a workload, a client,
Prometheus and strangers (tests/deploy/network_paths.py), and compared with the table.
"""

from __future__ import annotations

import re

import pytest

from tests.deploy.network_paths import Connection, NetworkPeer, allowed_connections, workloads
from tests.deploy.test_manifests import OPTIONAL, SETTINGS, kubectl
from tools.containers.pods import K8S, REPO, Resource
from tools.manifests.check import render, render_combination

OURS = "baton"
CLIENT = NetworkPeer("a client", "shop", {"batonmq/client": "true"})
PROMETHEUS = NetworkPeer("Prometheus", "monitoring", {})
KEDA = NetworkPeer("KEDA", "keda", {})
DNS = NetworkPeer("DNS", "kube-system", {"k8s-app": "kube-dns"}, ((53, "UDP"), (53, "TCP")))
STRANGERS = (
    NetworkPeer("any address", "shop", {"app.kubernetes.io/name": "storage"}),
    NetworkPeer("any address", OURS, {}),
    NetworkPeer("any address", None, {}),
)
ETCD_ELSEWHERE = NetworkPeer("etcd", None, {}, ((2379, "TCP"), (2380, "TCP")))
CLIENTS = {"demo", "traffic", "spark", "console"}
_ROW = re.compile(r"^\| (.+?)(?:, with `(.+)`)? \| (.+) \|$", re.MULTILINE)
_CALLEE = re.compile(r"`([\w-]+):(\d+)`")


def expected(resources: list[Resource], components: set[str]) -> set[Connection]:
    """Return the connections in the table of the page whose ends exist."""
    page = (REPO / "docs" / "how-to" / "deploy.md").read_text()
    table = page.partition("**Network policies**")[2].partition("**Rights.**")[0]
    present = {one.name for one in workloads(resources)}
    strangers = {"a client", "Prometheus", "KEDA", "any address"}
    groups = {
        "a client": {"a client", *CLIENTS & present},
        "a remote client": {"a client"},
        "any address": strangers,
    }
    connections = {(name, "DNS", 53) for name in present}
    for caller_cell, component, callee_cell in _ROW.findall(table):
        if component and component not in components:
            continue
        callers = groups.get(caller_cell, {caller_cell.strip("`")}) & {*present, *strangers}
        connections |= {
            (caller, name, int(port))
            for caller in callers
            for name, port in _CALLEE.findall(callee_cell)
            if name in present or (name, caller in present) == ("etcd", True)
        }
    return connections


def measured(resources: list[Resource]) -> set[Connection]:
    """Return the connections that the policies allow."""
    inside = list(workloads(resources))
    callees = [*inside, DNS]
    if all(one.name != "etcd" for one in inside):
        callees.append(ETCD_ELSEWHERE)
    strangers = (CLIENT, PROMETHEUS, KEDA, *STRANGERS)
    return allowed_connections(resources, inside, callees) | allowed_connections(
        resources, strangers, inside
    )


@kubectl
@pytest.mark.parametrize(
    ("overlay", "components"),
    [
        ("kind", {"outside"}),
        ("kind-secure", {"outside"}),
        ("minikube", {"outside"}),
        ("minikube-secure", {"outside"}),
        ("prod", {"monitoring"}),
    ],
)
def test_allowed_connections_of_an_overlay_are_those_of_the_table(
    overlay: str, components: set[str]
) -> None:
    resources = render(K8S / "overlays" / overlay)
    assert {one.name for one in workloads(resources)} >= set(SETTINGS) - OPTIONAL
    assert measured(resources) == expected(resources, components)


@kubectl
def test_allowed_connections_of_all_components_are_those_of_the_table() -> None:
    components = (
        "gateway",
        "console",
        "scaler",
        "ha",
        "outside",
        "demo",
        "monitoring",
        "spark",
        "etcd",
        "tls",
    )
    resources = render_combination(components)
    assert {one.name for one in workloads(resources)} == {*SETTINGS, *CLIENTS, "scaler", "etcd"}
    assert measured(resources) == expected(resources, set(components))


@kubectl
@pytest.mark.parametrize("component", ["gateway", "console", "scaler", "spark", "demo"])
def test_component_has_its_connections_without_the_others(component: str) -> None:
    """Policies add up, so those of one component could hide that another has too few."""
    resources = render_combination((component, "etcd", "insecure"))
    assert measured(resources) == expected(resources, {component})


@kubectl
def test_missing_and_superfluous_rules_are_found() -> None:
    resources = render(K8S / "overlays" / "prod")
    before = measured(resources)
    policies = {one["metadata"]["name"]: one for one in resources if one["kind"] == "NetworkPolicy"}
    egress = policies["storage"]["spec"]["egress"]
    gone = next(rule for rule in egress if rule["ports"] == [{"port": 10912}])
    egress.remove(gone)
    assert before - measured(resources) == {("storage", "offsets", 10912)}
    policies["lockmgr"]["spec"]["ingress"].append({"ports": [{"port": 10913}]})
    assert measured(resources) - before == {
        ("any address", "lockmgr", 10913),
        ("Prometheus", "lockmgr", 10913),
        ("KEDA", "lockmgr", 10913),
    }
