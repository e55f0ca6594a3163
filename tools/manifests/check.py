"""Renders and validates the kustomizations of deploy/k8s and the Helm chart of deploy/helm.

`python -m tools.manifests.check` (the verb `make k8s`) renders every overlay, and the base with
every valid combination of components. It validates the resources strictly against the schemas of
Kubernetes, and custom resources against those of their operators. The chart must render the same
resources, in each case of `tools.manifests.chart`. A missing kubectl or helm is named, and what
needs it is skipped; with `--required` a missing kubectl is an error.
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
from tools.manifests.chart import (
    ChartCase,
    cases,
    differences,
    examples,
    find_helm,
    lint,
    render_chart,
)
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
"""No option changes its pods, so it is combined with none of the options and with all."""
GATEWAY = ("gateway", "gateway-autoscaling")
"""Of the options only `small` changes its pods, so it is combined like `OWN_ETCD`."""
CLIENTS = ("console", "scaler")
"""No option changes their pods either."""
OPTIONS = ("ha", "outside", "small", "demo", "monitoring", "spark")


def combinations() -> Iterator[tuple[str, ...]]:
    """Yield the valid combinations: one kind of security, one etcd, and any of the options."""
    for security in SECURITY:
        for count in range(len(OPTIONS) + 1):
            for options in itertools.combinations(OPTIONS, count):
                grants = ("demo-access",) if {"demo", "access"} <= {*options, *security} else ()
                extreme = options in ((), OPTIONS)
                for etcd in (*ETCD, OWN_ETCD) if extreme else ETCD:
                    yield (*options, *grants, *etcd, *security)
                    if extreme:
                        yield (*GATEWAY, *CLIENTS, *options, *grants, *etcd, *security)


def render(folder: Path) -> list[Resource]:
    """Return the resources of a kustomization.

    Raises:
        ValueError: kubectl fails, or warns.
    """
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)], check=False, capture_output=True, text=True
    )
    if done.returncode or done.stderr.strip():
        raise ValueError(f"{folder}: {done.stderr.strip()}")
    return [one for one in yaml.load_all(done.stdout, yaml.CSafeLoader) if one]


def render_combination(components: Sequence[str]) -> list[Resource]:
    """Return the resources of the base with these components.

    Raises:
        ValueError: kubectl fails, or warns.
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
    """Validates resources; a resource that is in several renderings is validated once."""

    def __init__(self) -> None:
        self._known: dict[str, list[str]] = {}

    def problems(self, resources: Iterable[Resource]) -> list[str]:
        """Return the violations of the schemas and of our rules for pods."""
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
    """Yield violations of rules for pods that no schema has.

    The transformers of the base do not change the pods of components.
    """
    template = one.get("spec", {}).get("template")
    if not template:
        return
    if template["metadata"].get("labels", {}).get("app.kubernetes.io/part-of") != "batonmq":
        yield "pods without the label that network policies and scrapes select"
    for container in template["spec"]["containers"]:
        image = container["image"]
        if ":" not in image.rpartition("/")[2].partition("@")[0]:
            yield f"image without a version: {image}"
        elif "batonmq/" not in image and "@sha256:" not in image:
            yield f"image of others without a digest: {image}"


def check_kustomizations(checker: ManifestChecker) -> list[str]:
    """Render and validate every overlay and combination; return what is wrong."""
    wrong = []
    for overlay in OVERLAYS:
        resources = render(K8S / overlay)
        wrong += [f"{overlay}: {why}" for why in checker.problems(resources)]
        print(f"{overlay}: {len(resources)} resources")
    every = list(combinations())
    with ThreadPoolExecutor() as pool:
        for components, resources in zip(every, pool.map(render_combination, every), strict=True):
            wrong += [f"{'+'.join(components)}: {why}" for why in checker.problems(resources)]
    print(f"{len(every)} combinations of components rendered and validated, strictly")
    return wrong


def render_same(case: ChartCase) -> list[Resource]:
    """Return the resources of the overlay or of the components of a case.

    Raises:
        ValueError: kubectl fails, or warns.
    """
    if isinstance(case.same, str):
        return render(K8S / case.same)
    return render_combination(case.same)


def check_chart(checker: ManifestChecker) -> list[str]:
    """Lint, render, validate and compare every case of the chart; return what is wrong."""

    def problems(case: ChartCase) -> list[str]:
        resources = render_chart(case.values)
        found = [*differences(resources, render_same(case)), *checker.problems(resources)]
        return [f"chart, {case.name}: {why}" for why in found]

    for example in examples():
        lint(example.values)
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(problems, [*cases(), *examples()]))
    print(f"{len(found)} cases of the chart rendered, validated, and the same as kustomize")
    return list(itertools.chain.from_iterable(found))


def main() -> int:
    """Render and validate everything; return the exit status."""
    found = {"kubectl": shutil.which("kubectl"), "helm": find_helm()}
    absent = [name for name, path in found.items() if path is None]
    for name in absent:
        remedy = ": make helm builds it with Go" if name == "helm" else ""
        print(f"k8s: SKIPPED what needs {name}, which was not found{remedy}", file=sys.stderr)
    if "kubectl" in absent and "--required" in sys.argv:
        return 1
    checker, wrong = ManifestChecker(), []
    if "kubectl" not in absent:
        wrong += check_kustomizations(checker)
        if "helm" not in absent:
            wrong += check_chart(checker)
    for why in wrong:
        print(why, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
