"""Write the PrometheusRule of deploy/k8s from the rules in deploy/prometheus.

Run `python -m tools.manifests.prometheus_rules`.
"""

from __future__ import annotations

from pathlib import Path

import yaml

REPO = Path(__file__).resolve().parents[2]
RULES = REPO / "deploy" / "k8s" / "components" / "monitoring" / "rules.yaml"
_HEAD = "# Written by `python -m tools.manifests.prometheus_rules` from deploy/prometheus.\n"


def rendered() -> str:
    """Return the resource with every group of rules in deploy/prometheus."""
    groups = []
    for path in sorted((REPO / "deploy" / "prometheus").glob("*.yaml")):
        groups += (yaml.safe_load(path.read_text()) or {}).get("groups", [])
    resource = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "batonmq"},
        "spec": {"groups": groups},
    }
    return _HEAD + yaml.safe_dump(resource, sort_keys=False, width=120, allow_unicode=True)


if __name__ == "__main__":
    RULES.write_text(rendered())
