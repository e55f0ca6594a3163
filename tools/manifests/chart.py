"""The Helm chart of deploy/helm/batonmq: rendered, and compared with the kustomizations.

The kustomizations of deploy/k8s are the truth. For every case the chart must render the same
resources as the base with the matching components, field by field. What may differ is listed here:
the labels of Helm, the checksum that restarts pods, and whether a setting reaches the container
from a ConfigMap or directly.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from tools.containers.pods import REPO, Resource

CHART = REPO / "deploy" / "helm" / "batonmq"
EXAMPLES = CHART / "examples"
KUBERNETES = "1.37"
HELM_LABELS = {
    "app.kubernetes.io/instance",
    "app.kubernetes.io/managed-by",
    "app.kubernetes.io/part-of",
    "helm.sh/chart",
}
"""Labels of resources that may differ. `part-of` is compared in pods, where it selects."""
CHECKSUM = "checksum/settings"
_LINK = re.compile(r"^.*found symbolic link in path: .*\n", re.MULTILINE)
_REFERENCE = re.compile(r"\$\((\w+)\)")
_ENDPOINTS = ["etcd-0.etcd:2379", "etcd-1.etcd:2379", "etcd-2.etcd:2379"]

SECURITY: Mapping[tuple[str, ...], Mapping[str, Any]] = {
    ("insecure",): {"mode": "insecure"},
    ("tls",): {"mode": "tls", "certManager": False},
    ("tls", "access"): {"mode": "access", "certManager": False},
    ("tls", "tls-cert-manager", "access"): {"mode": "access"},
}
ETCD: Mapping[tuple[str, ...], Mapping[str, Any]] = {
    ("etcd",): {},
    ("etcd-tls",): {"inside": False, "tls": True, "endpoints": _ENDPOINTS},
    ("etcd", "etcd-own-tls", "etcd-tls"): {"tls": True},
}
OPTIONS: Mapping[tuple[str, ...], Mapping[str, Any]] = {
    ("gateway",): {"gateway": {"enabled": True}},
    ("gateway", "gateway-autoscaling"): {
        "gateway": {"enabled": True, "autoscaling": {"enabled": True}}
    },
    ("console",): {"console": {"enabled": True}},
    ("scaler",): {"scaler": {"enabled": True}},
    ("monitoring",): {"monitoring": {"enabled": True}},
    ("spark",): {"spark": {"enabled": True}},
    ("ha",): {"ha": True},
}

_SAME_AS_EXAMPLES: Mapping[str, str | tuple[str, ...]] = {
    "kind.yaml": ("etcd", "insecure", "small"),
    "prod.yaml": "overlays/prod",
}


@dataclass(frozen=True, slots=True)
class ChartCase:
    """Values of the chart, and the overlay or the components that render the same."""

    name: str
    values: Mapping[str, Any] = field(hash=False)
    same: str | tuple[str, ...]


def cases() -> Iterator[ChartCase]:
    """Yield every security with every etcd, without options and with all, and each option alone."""
    alone = list(OPTIONS)
    together = tuple(dict.fromkeys(itertools.chain.from_iterable(alone)))
    for security, etcd in itertools.product(SECURITY, ETCD):
        yield _case((), etcd, security)
        yield _case(alone[1:], etcd, security, together)
    for option in alone:
        yield _case([option], ("etcd",), ("insecure",))


def _case(
    options: Sequence[tuple[str, ...]],
    etcd: tuple[str, ...],
    security: tuple[str, ...],
    components: tuple[str, ...] | None = None,
) -> ChartCase:
    values: dict[str, Any] = {"ha": False, "security": SECURITY[security], "etcd": ETCD[etcd]}
    for option in options:
        values |= OPTIONS[option]
    names = components or tuple(itertools.chain.from_iterable(options))
    same = (*names, *etcd, *security)
    return ChartCase("+".join(same), values, same)


def examples() -> Iterator[ChartCase]:
    """Yield the files of values in the folder of the chart."""
    for name, same in _SAME_AS_EXAMPLES.items():
        yield ChartCase(name, yaml.safe_load((EXAMPLES / name).read_text()), same)


def find_helm() -> str | None:
    """Return the path of helm: on PATH, or where `make helm` builds it."""
    built = REPO / "build" / "helm" / "helm"
    return shutil.which("helm") or (str(built) if built.is_file() else None)


def render_chart(values: Mapping[str, Any], namespace: str = "baton") -> list[Resource]:
    """Return the resources of the chart with these values.

    Raises:
        ValueError: helm fails, or warns; the message is that of helm.
    """
    text = _helm(
        ["template", "batonmq", "--namespace", namespace, "--values", "-"], json.dumps(values)
    )
    return [one for one in yaml.load_all(text, yaml.CSafeLoader) if one]


def lint(values: Mapping[str, Any]) -> None:
    """Check the chart by the rules of `helm lint`.

    Raises:
        ValueError: A rule is violated.
    """
    _helm(["lint", "--strict", "--quiet", "--values", "-"], json.dumps(values))


def _helm(arguments: Sequence[str], given: str) -> str:
    helm = find_helm()
    if helm is None:
        raise ValueError("helm was not found: make helm")
    verb, *others = arguments
    names = [name for name in others[:1] if not name.startswith("-")]
    done = subprocess.run(
        [helm, verb, *names, str(CHART), "--kube-version", KUBERNETES, *others[len(names) :]],
        check=False, capture_output=True, text=True, input=given,
    )  # fmt: skip
    warnings = _LINK.sub("", done.stderr).strip()
    if done.returncode or warnings:
        raise ValueError(f"helm {verb}: {warnings or done.stdout}")
    return done.stdout


def differences(chart: Iterable[Resource], kustomization: Iterable[Resource]) -> Iterator[str]:
    """Yield every field in which the resources of the chart differ from the kustomization."""
    ours, theirs = _comparable(chart), _comparable(kustomization)
    for name in sorted(ours.keys() ^ theirs.keys()):
        yield f"{name}: only in {'the chart' if name in ours else 'the kustomization'}"
    for name in sorted(ours.keys() & theirs.keys()):
        yield from _differing(ours[name], theirs[name], name)


def _differing(ours: Any, theirs: Any, place: str) -> Iterator[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in sorted(ours.keys() | theirs.keys()):
            yield from _differing(ours.get(name), theirs.get(name), f"{place}.{name}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for number, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            yield from _differing(our, their, f"{place}.{number}")
    elif ours != theirs:
        yield f"{place}: {ours!r} in the chart, {theirs!r} in the kustomization"


def _comparable(resources: Iterable[Resource]) -> dict[str, Any]:
    """Return the resources by kind and name, without what may differ."""
    found = [one for one in resources if one["kind"] != "Namespace"]  # Helm's option makes it.
    configs = {one["metadata"]["name"]: one["data"] for one in found if one["kind"] == "ConfigMap"}
    read: set[str] = set()
    result = {}
    for one in found:
        copy = json.loads(json.dumps(one))
        metadata = copy["metadata"]
        labels = metadata.get("labels", {})
        metadata["labels"] = {k: v for k, v in labels.items() if k not in HELM_LABELS}
        template = copy.get("spec", {}).get("template")
        if template:
            annotations = template["metadata"].get("annotations", {})
            annotations.pop(CHECKSUM, None)
            template["metadata"]["annotations"] = annotations
            for container in template["spec"]["containers"]:
                container["env"] = _environment(container, configs, read)
                container.pop("envFrom", None)
            _sort(template["spec"])
        if one["kind"] == "Service":
            copy["spec"]["ports"].sort(key=_by_name)
        result[f"{one['kind']}/{metadata['name']}"] = copy
    return {name: one for name, one in result.items() if name not in read}


def _environment(
    container: Mapping[str, Any], configs: Mapping[str, Mapping[str, str]], read: set[str]
) -> dict[str, Any]:
    """Return the variables of a container with their values or sources, as the kubelet has them.

    A reference stays as it is if its variable is defined before; `read` gets the ConfigMaps.
    """
    variables: dict[str, Any] = {}
    for source in container.get("envFrom", ()):
        name = source["configMapRef"]["name"]
        read.add(f"ConfigMap/{name}")
        variables |= configs[name]
    for one in container.get("env", ()):
        key = one.get("valueFrom", {}).get("configMapKeyRef")
        if key:
            read.add(f"ConfigMap/{key['name']}")
            value = configs[key["name"]][key["key"]]
        else:
            value = one.get("value", one.get("valueFrom"))
        if isinstance(value, str):
            for reference in _REFERENCE.findall(value):
                if reference not in variables:
                    value = value.replace(f"$({reference})", f"undefined {reference}")
        variables[one["name"]] = value
    return variables


def _sort(pod: dict[str, Any]) -> None:
    """Sort lists of named items, whose order means nothing."""
    if "volumes" in pod:
        pod["volumes"].sort(key=_by_name)
    for container in pod["containers"]:
        for key in ("volumeMounts", "ports"):
            container.get(key, []).sort(key=_by_name)


def _by_name(item: Mapping[str, Any]) -> str:
    return str(item["name"])
