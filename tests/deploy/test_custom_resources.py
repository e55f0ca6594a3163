"""The resources for the operators of Prometheus and of certificates match their schemas.

Goal: a misspelt field, an invalid value and an unknown kind are found.
Method: the committed resources have no problem; each planted error is found.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tools.containers.pods import K8S
from tools.manifests.custom_resources import DEFINED, custom_problems


def committed() -> Iterator[Any]:
    for path in sorted((K8S / "components").rglob("*.yaml")):
        for one in yaml.safe_load_all(path.read_text()):
            if isinstance(one, dict) and one.get("apiVersion") in DEFINED:
                yield one


RESOURCES = {f"{one['kind']}-{one['metadata']['name']}": one for one in committed()}


def test_every_used_kind_has_a_schema() -> None:
    kinds = {one["kind"] for one in RESOURCES.values()}
    assert kinds == {"Certificate", "Issuer", "PodMonitor", "PrometheusRule", "ServiceMonitor"}


@pytest.mark.parametrize("name", RESOURCES)
def test_resource_matches_its_schema(name: str) -> None:
    assert list(custom_problems(RESOURCES[name])) == []


@pytest.mark.parametrize(
    ("name", "place", "value", "problem"),
    [
        (
            "Certificate-storage",
            ("dnsNmaes",),
            ["x"],
            "spec.dnsNmaes: ['x'] is unknown or has the wrong type",
        ),
        ("Certificate-storage", ("privateKey", "algorithm"), "ROT13", "spec.privateKey.algorithm"),
        (
            "Certificate-storage",
            ("privateKey", "size"),
            "256",
            "spec.privateKey.size: '256' is unknown or has the wrong type",
        ),
        ("Certificate-storage", ("issuerRef",), {}, "spec.issuerRef.name: Field required"),
        (
            "PodMonitor-batonmq",
            ("podMetricsEndpoints", 0, "interval"),
            "15 s",
            "String should match",
        ),
        (
            "PrometheusRule-batonmq",
            ("groups", 0, "rules", 0, "lables"),
            {"severity": "warning"},
            "spec.groups.0.rules.0.lables",
        ),
    ],
)
def test_invalid_resource_is_found(
    name: str, place: tuple[str | int, ...], value: object, problem: str
) -> None:
    resource = copy.deepcopy(RESOURCES[name])
    parent = resource["spec"]
    for step in place[:-1]:
        parent = parent[step]
    parent[place[-1]] = value
    (found_problem,) = custom_problems(resource)
    assert problem in found_problem


def test_unknown_kind_is_found() -> None:
    one = {"apiVersion": "cert-manager.io/v1", "kind": "Certficate", "metadata": {"name": "x"}}
    assert list(custom_problems(one)) == ["the kind is unknown"]
