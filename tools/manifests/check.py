"""The kustomizations of deploy/k8s: which there are, what they render to, what is wrong with that.

`python -m tools.manifests.check` (the verb `make k8s`) renders every overlay, and the base with
every combination of components that can stand together, validates each against the schemas of
Kubernetes, strictly, and custom resources against those of their operators. Without kubectl it says
so, and with `--required` that is a failure.
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

import kubernetes_validate
import yaml

from tools.containers.pods import K8S, Resource
from tools.manifests.custom_resources import DEFINED, custom_problems

OVERLAYS = (
    "overlays/kind",
    "overlays/kind-secure",
    "overlays/minikube",
    "overlays/minikube-secure",
    "overlays/prod",
    "jobs",
    "jobs-secure",
)
SECURITY = (("insecure",), ("tls",), ("tls", "tls-cert-manager", "access"))
ETCD = (("etcd",), ("etcd-tls",))
OWN_ETCD = ("etcd", "etcd-own-tls", "etcd-tls")
"""It has its pods to itself: none of the options, or all, is enough."""
OPTIONS = ("ha", "outside", "small", "demo", "monitoring", "spark")


def combinations() -> Iterator[tuple[str, ...]]:
    """Components that go together: one way of security, one etcd, and any of the others."""
    for security in SECURITY:
        for count in range(len(OPTIONS) + 1):
            for options in itertools.combinations(OPTIONS, count):
                grants = ("demo-access",) if {"demo", "access"} <= {*options, *security} else ()
                own = (OWN_ETCD,) if options in ((), OPTIONS) else ()
                # What is small, or comes from outside, is so whether brokers have replicas or not.
                for etcd in (*ETCD, *own):
                    yield (*options, *grants, *etcd, *security)


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


class ManifestChecker:
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
    name = f"{one['kind']}/{one['metadata']['name']}"
    if one["apiVersion"] in DEFINED:
        return [f"{name}: {why}" for why in custom_problems(one)]
    try:
        kubernetes_validate.validate(dict(one), "1.37", strict=True)
    except (
        kubernetes_validate.ValidationError,
        kubernetes_validate.SchemaNotFoundError,
    ) as error:
        return [f"{name}: {error}"]
    return [f"{name}: {why}" for why in _pod_problems(one)]


def _pod_problems(one: Resource) -> Iterator[str]:
    """What a schema does not ask of pods: the base's transformers do not reach a component's."""
    template = one.get("spec", {}).get("template")
    if not template:
        return
    if template["metadata"].get("labels", {}).get("app.kubernetes.io/part-of") != "batonmq":
        yield "pods without the label that network policies and scrapes look for"
    for container in template["spec"]["containers"]:
        if ":" not in container["image"].rpartition("/")[2]:
            yield f"an image without a version: {container['image']}"


def main() -> int:
    """Render and validate everything; the exit status."""
    if shutil.which("kubectl") is None:
        print("k8s skipped: there is no kubectl to render the manifests", file=sys.stderr)
        return 1 if "--required" in sys.argv else 0
    judge, wrong = ManifestChecker(), []
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
