"""The Helm chart of deploy/helm/batonmq.

Goal: a user of the chart gets what a user of the kustomizations gets, and a wrong value is refused
in words before anything is installed.
Method: the chart is rendered by helm and compared with the kustomization, field by field; `make
k8s` does so for every case, this file for a few.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.test_manifests import kubectl
from tools.containers.pods import K8S, REPO, Resource
from tools.manifests import chart_schema, check
from tools.manifests.chart import (
    CHART,
    OPTIONS,
    ChartCase,
    cases,
    differences,
    examples,
    find_helm,
    lint,
    render_chart,
)
from tools.manifests.check import ManifestChecker, render_same

helm = pytest.mark.skipif(
    find_helm() is None, reason="NO HELM: the chart is not rendered: make helm"
)
NOT_OF_THE_CHART = {"demo", "demo-access", "outside", "small", "tls-clients"}
"""Trials on one machine; `tls-clients` is a part of `tls`."""
ALL = list(cases())
WHOLE = {name: {"enabled": True} for name in ("gateway", "console", "scaler", "spark")}
FEW = [
    ALL[1],
    ALL[2],
    next(one for one in ALL if {"tls-cert-manager", "etcd-own-tls"} <= {*one.same}),
]


def named(resources: list[Resource], kind: str, name: str) -> Resource:
    (found,) = (one for one in resources if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return found


@helm
@kubectl
@pytest.mark.parametrize("case", FEW, ids=lambda case: case.name)
def test_chart_renders_the_resources_of_the_components(case: ChartCase) -> None:
    assert list(differences(render_chart(case.values), render_same(case))) == []


@helm
@kubectl
@pytest.mark.parametrize("case", list(examples()), ids=lambda case: case.name)
def test_example_renders_what_its_overlay_renders(case: ChartCase) -> None:
    lint(case.values)
    assert list(differences(render_chart(case.values), render_same(case))) == []


@helm
def test_resources_of_the_chart_are_valid() -> None:
    assert ManifestChecker().problems(render_chart(ALL[2].values)) == []


def test_cases_have_every_component_that_is_not_for_trials() -> None:
    components = {path.name for path in (K8S / "components").iterdir()} - NOT_OF_THE_CHART
    assert len({one.name for one in ALL}) == len(ALL) >= 30
    assert {name for one in ALL for name in one.same} == components
    for option in OPTIONS:
        assert any(set(one.same) == {*option, "etcd", "insecure"} for one in ALL)


@helm
@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"storage": {"sise": 1}}, "at '/storage': additional properties 'sise' not allowed"),
        (
            {"storage": {"settings": {"BATON_STORAGE_SEGMENT_BYTE": "1"}}},
            "'BATON_STORAGE_SEGMENT_BYTE' not allowed",
        ),
        (
            {"storage": {"settings": {"BATON_STORAGE_PORT": "1"}}},
            "'BATON_STORAGE_PORT' not allowed",
        ),
        (
            {"offsets": {"settings": {"BATON_OFFSETS_LEADER_LEASE_MS": 5000}}},
            "'/offsets/settings/BATON_OFFSETS_LEADER_LEASE_MS': got number, want string",
        ),
        ({"security": {"mode": "mtls"}}, "must be one of 'insecure', 'tls', 'access'"),
        ({"security": {"admins": []}}, "at '/security/admins': minItems: got 0, want 1"),
        ({"etcd": {"inside": False}}, "etcd.endpoints is required if etcd.inside is false"),
        ({"etcd": {"endpoints": ["etcd:2379"]}}, "set etcd.inside to false, or remove"),
        (
            {"gateway": {"autoscaling": {"minReplicas": 9}}},
            "minReplicas is 9, which is more than maxReplicas, 8",
        ),
        (
            {"storage": {"resources": {"limits": {"memory": "1.5Gi"}}}},
            'is "1.5Gi", which is no whole number of Mi or Gi',
        ),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_wrong_value_is_refused_with_its_name(values: Mapping[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match="helm template") as refused:
        render_chart(values)
    assert why in str(refused.value)


def test_schema_has_the_settings_of_the_services() -> None:
    assert chart_schema.SCHEMA.read_text() == chart_schema.rendered(), (
        "python -m tools.manifests.chart_schema"
    )


@helm
def test_schema_refuses_each_setting_that_the_chart_sets_and_offers_the_others() -> None:
    """But for those that a user may set otherwise."""
    may_differ = {"LOG_FORMAT", "MEMORY_WINDOW_BYTES", "MIN_IN_SYNC", "CHANGES", "MASTER"}
    may_differ |= {"COMPACT_HOURS"}
    properties = chart_schema.schema()["properties"]
    offered = {
        name
        for part in properties.values()
        for name in part.get("properties", {}).get("settings", {}).get("properties", ())
    }
    resources = render_chart({**WHOLE, "etcd": {"tls": True}})
    insecure = render_chart({**WHOLE, "security": {"mode": "insecure"}})
    given: set[str] = set()
    for one in [*resources, *insecure]:
        if one["kind"] == "ConfigMap":
            given |= one["data"].keys()
        for container in (
            one.get("spec", {}).get("template", {}).get("spec", {}).get("containers", ())
        ):
            given |= {variable["name"] for variable in container.get("env", ())}
    given = {name for name in given if name.startswith("BATON_")}
    assert {name.split("_", 2)[2] for name in given & offered} == may_differ


def mounted_secrets(resources: list[Resource]) -> set[str]:
    """Return the names of the Secrets that pods mount."""
    return {
        volume["secret"]["secretName"]
        for one in resources
        if one["kind"] in ("StatefulSet", "Deployment")
        for volume in one["spec"]["template"]["spec"].get("volumes", ())
        if "secret" in volume
    }


@helm
def test_cert_manager_makes_every_certificate_that_a_pod_mounts() -> None:
    resources = render_chart(WHOLE)
    issued = {one["spec"]["secretName"] for one in resources if one["kind"] == "Certificate"}
    assert mounted_secrets(resources) - {"gateway-keys"} == issued - {"baton-root"}


@helm
def test_certificates_have_the_names_of_the_outside_addresses() -> None:
    resources = render_chart({**WHOLE, "security": {"dnsNames": ["*.mq.example.com"]}})
    given = {
        one["metadata"]["name"]
        for one in resources
        if one["kind"] == "Certificate" and "*.mq.example.com" in one["spec"].get("dnsNames", ())
    }
    assert given == {"storage", "offsets", "lockmgr", "nameserver", "gateway"}


@helm
def test_release_in_another_namespace_names_no_other() -> None:
    resources = render_chart(WHOLE, namespace="mq")
    assert {one["metadata"]["namespace"] for one in resources} == {"mq"}
    certificates = [one for one in resources if one["kind"] == "Certificate"]
    domains = [
        name for one in certificates for name in one["spec"].get("dnsNames", ()) if "." in name
    ]
    assert len(domains) == 11
    assert all(".mq" in name for name in domains)


@helm
def test_alert_on_pods_looks_at_the_namespace_of_the_release() -> None:
    resources = render_chart({"monitoring": {"enabled": True}}, namespace="mq")
    groups = named(resources, "PrometheusRule", "batonmq")["spec"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    (pods,) = [rule["expr"] for rule in rules if rule.get("alert") == "BatonPodsNotReady"]
    assert set(re.findall(r'namespace="(\w+)"', pods)) == {"mq"}


@helm
def test_names_that_look_like_numbers_stay_texts() -> None:
    values = {
        "cluster": "2026",
        "monitoring": {"enabled": True, "namespace": "1"},
        "scaler": {"enabled": True, "namespace": "2"},
    }
    assert ManifestChecker().problems(render_chart(values)) == []


@helm
@pytest.mark.parametrize(
    ("size", "quota"),
    [("2Gi", 1 << 30), ("512Mi", 256 << 20), ("100Gi", 8 << 30), ("4G", 1 << 30)],
)
def test_space_quota_of_etcd_is_half_of_its_volume(size: str, quota: int) -> None:
    etcd = named(render_chart({"etcd": {"volume": {"size": size}}}), "StatefulSet", "etcd")
    (container,) = etcd["spec"]["template"]["spec"]["containers"]
    assert f"--quota-backend-bytes={quota}" in container["args"]


@helm
def test_grace_period_grows_with_the_settings_that_it_covers_unless_it_is_set() -> None:
    gateway = {"DRAIN_TIMEOUT_MS": "60000", "SHUTDOWN_GRACE_MS": "10500"}
    resources = render_chart(
        {
            "storage": {"settings": {"BATON_STORAGE_SHUTDOWN_GRACE_MS": "120000"}},
            "offsets": {"settings": {"BATON_OFFSETS_SHUTDOWN_GRACE_MS": "1000"}},
            "lockmgr": {"terminationGracePeriodSeconds": 300},
            "gateway": {
                "enabled": True,
                "settings": {f"BATON_GATEWAY_{name}": value for name, value in gateway.items()},
            },
        }
    )
    seconds = {
        one["metadata"]["name"]: one["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        for one in resources
        if one["kind"] == "StatefulSet"
    }
    others = {"nameserver": 60, "etcd": 30}
    storage = {"storage-a": 170, "storage-b": 170}
    assert seconds == {**others, **storage, "offsets": 60, "lockmgr": 300, "gateway": 106}


@helm
def test_changed_setting_restarts_the_pods_of_its_service_only() -> None:
    settings = {"BATON_OFFSETS_LEADER_LEASE_MS": "6000"}
    before, after = render_chart({}), render_chart({"offsets": {"settings": settings}})
    changed = {
        one["metadata"]["name"]
        for one in before
        if one["kind"] == "StatefulSet"
        and one["spec"]["template"]
        != named(after, "StatefulSet", one["metadata"]["name"])["spec"]["template"]
    }
    assert changed == {"offsets"}


@helm
def test_new_version_of_the_chart_alone_restarts_no_pod() -> None:
    """Labels of Helm name the version, so they are not in pods."""
    for one in render_chart(WHOLE):
        if "template" in one.get("spec", {}):
            labels = one["spec"]["template"]["metadata"]["labels"]
            assert "helm.sh/chart" not in labels
        if one["kind"] == "StatefulSet":
            for claim in one["spec"].get("volumeClaimTemplates", ()):
                assert "helm.sh/chart" not in claim["metadata"]["labels"], "it can't be changed"


@helm
def test_every_difference_is_found() -> None:
    chart = render_chart({})
    assert list(differences(chart, chart)) == []

    def changed(change: Any) -> list[str]:
        other = copy.deepcopy(chart)
        change(other)
        return list(differences(chart, other))

    def pod(resources: list[Resource]) -> dict[str, Any]:
        template: dict[str, Any] = named(resources, "StatefulSet", "offsets")["spec"]["template"]
        return template

    def env(resources: list[Resource]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = pod(resources)["spec"]["containers"][0]["env"]
        return found

    (missing,) = changed(lambda other: other.remove(named(other, "PodDisruptionBudget", "offsets")))
    assert missing == "PodDisruptionBudget/offsets: only in the chart"
    (grace,) = changed(lambda other: pod(other)["spec"].update(terminationGracePeriodSeconds=30))
    assert "terminationGracePeriodSeconds: 60 in the chart, 30 in the kustomization" in grace
    (setting,) = changed(
        lambda other: named(other, "ConfigMap", "offsets")["data"].update(BATON_OFFSETS_PORT="1")
    )
    assert "BATON_OFFSETS_PORT: '10912' in the chart, '1'" in setting
    (label,) = changed(
        lambda other: pod(other)["metadata"]["labels"].pop("app.kubernetes.io/part-of")
    )
    assert "'batonmq' in the chart, None" in label
    order = changed(lambda other: env(other).reverse())
    assert any("undefined POD_NAME" in one for one in order), "a reference before its variable"


@pytest.mark.parametrize("required", [True, False])
def test_missing_helm_is_named_and_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], required: bool
) -> None:
    """No Debian package has it, and not each has a Go that can build it."""
    monkeypatch.setattr(check, "find_helm", lambda: None)
    monkeypatch.setattr(check, "check_kustomizations", lambda checker: [])
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(sys, "argv", ["check", *(["--required"] if required else [])])
    assert check.main() == 0
    assert "SKIPPED what needs helm, which was not found: make helm" in capsys.readouterr().err


def test_chart_has_the_version_of_the_project() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = (REPO / "pyproject.toml").read_text()
    assert f'version = "{chart["version"]}"' in project
    assert chart["appVersion"] == chart["version"]


def test_links_of_the_chart_lead_to_the_files_of_the_kustomizations() -> None:
    links = {path.name: path.resolve() for path in (CHART / "files").iterdir()}
    assert links == {
        "grafana": REPO / "deploy" / "grafana",
        "rules.yaml": K8S / "components" / "monitoring" / "rules.yaml",
    }


@helm
def test_setting_with_a_variable_of_the_pod_is_where_kubernetes_puts_it_in() -> None:
    outside = {
        "storage": "$(POD_NAME).mq.example.com:10911",
        "offsets": "offsets.example.com:3093$(POD_INDEX)",
    }
    values = {
        name: {"settings": {f"BATON_{name.upper()}_OUTSIDE_ADDRESS": text}}
        for name, text in outside.items()
    }
    resources = render_chart(values)
    for name, workload in (("storage", "storage-a"), ("offsets", "offsets")):
        setting = f"BATON_{name.upper()}_OUTSIDE_ADDRESS"
        pod = named(resources, "StatefulSet", workload)["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        variables = [one["name"] for one in container["env"]]
        given = {one["name"]: one.get("value") for one in container["env"]}
        used = "POD_NAME" if name == "storage" else "POD_INDEX"
        assert given[setting] == outside[name]
        assert variables.index(used) < variables.index(setting)
        assert setting not in named(resources, "ConfigMap", name)["data"]
    assert "POD_INDEX" not in str(named(resources, "StatefulSet", "storage-a"))


@helm
def test_environment_of_storage_can_come_from_a_secret() -> None:
    resources = render_chart({"storage": {"secretEnv": "object-store"}})
    for name, secrets in (("storage-a", ["object-store"]), ("offsets", [])):
        (container,) = named(resources, "StatefulSet", name)["spec"]["template"]["spec"][
            "containers"
        ]
        given = [one["secretRef"]["name"] for one in container["envFrom"] if "secretRef" in one]
        assert given == secrets


def notes_of(values: Mapping[str, Any], folder: Path) -> str:
    """Return the notes of the chart, which `helm template` leaves out: a template renders them."""
    chart = folder / "chart"
    shutil.copytree(CHART, chart, ignore=shutil.ignore_patterns("files"))
    (chart / "files").mkdir()
    (chart / "templates" / "NOTES.txt").rename(chart / "files" / "notes")
    for path in (chart / "templates").glob("*.yaml"):
        path.unlink()
    text = '{{ dict "notes" (tpl (.Files.Get "files/notes") .) | toYaml }}\n'
    (chart / "templates" / "notes.yaml").write_text(text)
    command = [str(find_helm()), "template", str(chart), "--namespace", "mq", "--values", "-"]
    done = subprocess.run(
        command, input=json.dumps(values), capture_output=True, text=True, check=True
    )
    return str(yaml.safe_load(done.stdout)["notes"])


@helm
def test_notes_make_the_secrets_that_pods_mount_and_none_of_an_administrator(
    tmp_path: Path,
) -> None:
    values = {
        **WHOLE,
        "security": {"certManager": False, "admins": ["alice"]},
        "etcd": {"tls": True},
    }
    notes = notes_of(values, tmp_path)
    (made,) = re.findall(r"make-ca\.sh build/tls (.*)", notes)
    (applied,) = re.findall(r"apply-secrets\.sh CONTEXT build/tls (.*)", notes)
    assert set(made.split()) == {"alice", "console", "spark"}
    assert set(applied.split()) == mounted_secrets(render_chart(values)) - {"gateway-keys"}
    assert "gateway-keys.sh CONTEXT" in notes
