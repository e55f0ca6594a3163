"""The kustomizations of deploy/k8s: which there are, what they render to, what is wrong with that.

`python -m tests.deploy.manifests` (the verb `make k8s`) renders every overlay, and the base with
every combination of components that can stand together, validates each against the schemas of
Kubernetes, strictly, and custom resources structurally.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

from tests.containers.pods import K8S, Resource

OVERLAYS = ("overlays/kind", "overlays/minikube", "overlays/prod", "jobs")
SECURITY = (("insecure",), ("tls",), ("tls", "tls-cert-manager"))
ETCD = (("etcd",), ("etcd-tls",))
OPTIONS = ("ha", "outside", "small", "demo", "monitoring", "spark")
_CUSTOM = {
    "monitoring.coreos.com/v1": {
        "ServiceMonitor": ("selector", "endpoints"),
        "PodMonitor": ("selector", "podMetricsEndpoints"),
        "PrometheusRule": ("groups",),
    },
    "cert-manager.io/v1": {"Certificate": ("secretName", "issuerRef"), "Issuer": ()},
}
"""Kinds no package here brings a schema of, and what their `spec` has to have."""


def combinations() -> Iterator[tuple[str, ...]]:
    """Components that go together: one way of security, one etcd, and any of the others."""
    for security, etcd in itertools.product(SECURITY, ETCD):
        for count in range(len(OPTIONS) + 1):
            for options in itertools.combinations(OPTIONS, count):
                # What is small, or comes from outside, is so whether brokers have replicas or not.
                yield (*options, *etcd, *security)


def render(folder: Path) -> list[Resource]:
    """What a kustomization makes.

    Raises:
        ValueError: kubectl refuses, or warns.
    """
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)], check=False, capture_output=True, text=True
    )
    if done.returncode or done.stderr.strip():
        raise ValueError(f"{folder}: {done.stderr.strip()}")
    return [one for one in yaml.load_all(done.stdout, yaml.CSafeLoader) if one]


def render_combination(components: Sequence[str]) -> list[Resource]:
    """The base with components.

    Raises:
        ValueError: kubectl refuses, or warns.
    """
    with tempfile.TemporaryDirectory(dir=K8S / "overlays", prefix=".combined-") as folder:
        kustomization = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "namespace": "baton",
            "resources": ["../../base"],
            "components": [f"../../components/{name}" for name in components],
        }
        (Path(folder) / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
        return render(Path(folder))


class Judge:
    """Knows what is wrong with resources; looks at each once, in however many renderings it is."""

    def __init__(self) -> None:
        self._known: dict[str, list[str]] = {}

    def problems(self, resources: Iterable[Resource]) -> list[str]:
        """What is wrong with them, by their schemas."""
        found = []
        for one in resources:
            key = json.dumps(one, sort_keys=True)
            if key not in self._known:
                self._known[key] = _problems(one)
            found += self._known[key]
        return found


def _problems(one: Resource) -> list[str]:
    name, custom = f"{one['kind']}/{one['metadata']['name']}", _CUSTOM.get(one["apiVersion"])
    if custom is not None:
        return [f"{name}: {why}" for why in _custom_problems(one, custom)]
    try:
        kubernetes_validate.validate(dict(one), "1.37", strict=True)
    except (
        kubernetes_validate.ValidationError,
        kubernetes_validate.SchemaNotFoundError,
    ) as error:
        return [f"{name}: {error}"]
    return []


def _custom_problems(one: Resource, custom: dict[str, tuple[str, ...]]) -> Iterator[str]:
    needed = custom.get(one["kind"])
    if needed is None:
        yield "a kind that is not known"
        return
    spec: dict[str, Any] = one.get("spec", {})
    yield from (f"spec.{name} is missing" for name in needed if not spec.get(name))
    if one["kind"] == "PrometheusRule":
        for rule in (rule for group in spec.get("groups", ()) for rule in group["rules"]):
            if ("alert" in rule) == ("record" in rule) or not rule.get("expr"):
                yield f"rule without a name or expr: {rule}"


def main() -> int:
    """Render and validate everything; the exit status."""
    if shutil.which("kubectl") is None:
        print("k8s skipped: there is no kubectl to render the manifests")
        return 0
    judge, wrong = Judge(), []
    for overlay in OVERLAYS:
        resources = render(K8S / overlay)
        wrong += [f"{overlay}: {why}" for why in judge.problems(resources)]
        print(f"{overlay}: {len(resources)} resources")
    every = list(combinations())
    with ThreadPoolExecutor() as pool:
        for components, resources in zip(every, pool.map(render_combination, every), strict=True):
            wrong += [f"{'+'.join(components)}: {why}" for why in judge.problems(resources)]
    print(f"{len(every)} combinations of components rendered and validated, strictly")
    for why in wrong:
        print(why, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
