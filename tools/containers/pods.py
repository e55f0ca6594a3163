"""Reads the pods of the manifests in deploy/k8s, to run them without Kubernetes.

Rendered with `kubectl kustomize`; the pods of every StatefulSet, Job and Deployment, with their
environments resolved as the kubelet would, names, volumes, and the restrictions they run under.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

REPO = Path(__file__).resolve().parents[2]
K8S = REPO / "deploy" / "k8s"
Resource = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod with its only container.

    Attributes:
        service: Component of the manifest, such as "storage".
        names: Additional host names of the pod.
        probes: startup, readiness, liveness: port and service name of the gRPC probe.
        volumes: Paths that outlive the container.
        secrets: Secrets by mount path.
        scratch: Paths of temporary volumes.
    """

    name: str
    service: str
    image: str
    command: tuple[str, ...]
    env: Mapping[str, str]
    names: tuple[str, ...]
    probes: Mapping[str, tuple[int, str]]
    volumes: tuple[str, ...]
    secrets: Mapping[str, str]
    scratch: tuple[str, ...]
    user: str
    memory: str
    grace_s: int


def render(folder: Path) -> list[Resource]:
    """Return the resources of a kustomization.

    Raises:
        FileNotFoundError: There is no kubectl.
        subprocess.CalledProcessError: kubectl failed; `stderr` has the reason.
    """
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)], check=True, capture_output=True, text=True
    )
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def pods(resources: Iterable[Resource]) -> list[Pod]:
    """Return all pods of the StatefulSets."""
    found = list(resources)
    services = [r for r in found if r["kind"] == "Service"]
    return [
        _pod(one, index, _configs(found), tuple(_names(one, index, services)))
        for one in found
        if one["kind"] == "StatefulSet"
        for index in range(one["spec"]["replicas"])
    ]


def jobs(resources: Iterable[Resource]) -> dict[str, Pod]:
    """Return the pod of each Job by the Job's name; it has no service."""
    return _pods_by_owner(resources, "Job")


def deployments(resources: Iterable[Resource]) -> dict[str, Pod]:
    """Return the pod of each Deployment by the Deployment's name."""
    return _pods_by_owner(resources, "Deployment")


def _pods_by_owner(resources: Iterable[Resource], kind: str) -> dict[str, Pod]:
    found = list(resources)
    return {
        one["metadata"]["name"]: _pod(one, None, _configs(found), ())
        for one in found
        if one["kind"] == kind
    }


def _configs(resources: Iterable[Resource]) -> dict[str, Mapping[str, str]]:
    return {r["metadata"]["name"]: r["data"] for r in resources if r["kind"] == "ConfigMap"}


def _pod(
    owner: Resource,
    index: int | None,
    configs: Mapping[str, Mapping[str, str]],
    names: tuple[str, ...],
) -> Pod:
    template = owner["spec"]["template"]
    (container,) = template["spec"]["containers"]
    name = owner["metadata"]["name"] + ("" if index is None else f"-{index}")
    fields = {
        "metadata.name": name,
        "metadata.namespace": owner["metadata"]["namespace"],
        "metadata.labels['apps.kubernetes.io/pod-index']": str(index),
    }
    env = _environment(container, configs, fields)
    kept = {v["metadata"]["name"] for v in owner["spec"].get("volumeClaimTemplates", ())}
    secrets = {
        volume["name"]: volume["secret"]["secretName"]
        for volume in template["spec"].get("volumes", ())
        if "secret" in volume
    }
    mounts = [(m["name"], m["mountPath"]) for m in container["volumeMounts"]]
    security = template["spec"]["securityContext"]
    words = (*container.get("command", ()), *container.get("args", ()))
    return Pod(
        name=name,
        service=template["metadata"]["labels"]["app.kubernetes.io/name"],
        image=container["image"],
        command=tuple(_expanded(word, env) for word in words),
        env=env,
        names=names,
        probes=dict(_probes(container)),
        volumes=tuple(path for volume, path in mounts if volume in kept),
        secrets={path: secrets[volume] for volume, path in mounts if volume in secrets},
        scratch=tuple(path for volume, path in mounts if volume not in {*kept, *secrets}),
        user=f"{security['runAsUser']}:{security['runAsGroup']}",
        memory=container["resources"]["limits"]["memory"],
        grace_s=template["spec"]["terminationGracePeriodSeconds"],
    )


def _environment(
    container: Resource, configs: Mapping[str, Mapping[str, str]], fields: Mapping[str, str]
) -> dict[str, str]:
    env: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        env.update(configs[source["configMapRef"]["name"]])
    for one in container.get("env", ()):
        if "value" in one:
            env[one["name"]] = _expanded(one["value"], env)
        elif "fieldRef" in one["valueFrom"]:
            env[one["name"]] = fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            wanted = one["valueFrom"]["configMapKeyRef"]
            env[one["name"]] = configs[wanted["name"]][wanted["key"]]
    return env


def _expanded(text: str, env: Mapping[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda match: env.get(match[1], match[0]), text)


def _names(stateful: Resource, index: int, services: Iterable[Resource]) -> Iterator[str]:
    """Yield the pod's name in its governing service, and the names of its other services."""
    labels = stateful["spec"]["template"]["metadata"]["labels"]
    namespace = stateful["metadata"]["namespace"]
    for service in services:
        called = service["metadata"]["name"]
        if called == stateful["spec"]["serviceName"]:
            called = f"{stateful['metadata']['name']}-{index}.{called}"
        elif not service["spec"]["selector"].items() <= labels.items():
            continue
        yield from (called, f"{called}.{namespace}", f"{called}.{namespace}.svc")


def _probes(container: Resource) -> Iterator[tuple[str, tuple[int, str]]]:
    for kind in ("startup", "readiness", "liveness"):
        probe = container.get(f"{kind}Probe", {})
        if "grpc" in probe:
            yield kind, (probe["grpc"]["port"], probe["grpc"]["service"])
