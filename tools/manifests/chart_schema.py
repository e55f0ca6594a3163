"""Write the schema of the values of the Helm chart.

Run `python -m tools.manifests.chart_schema`. It lists every setting of every service, so that helm
refuses an unknown setting, and one that the chart itself sets.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from batonmq._process.config import Settings
from batonmq._process.settings_help import meanings
from batonmq_server.console.config import ConsoleSettings
from batonmq_server.scaler.config import ScalerSettings
from batonspark.settings import JobSettings
from tools.docs.tables import SETTINGS
from tools.manifests.chart import CHART

SCHEMA = CHART / "values.schema.json"
OF_THE_CHART = frozenset(
    (
        *("host", "port", "metrics_host", "metrics_port", "health_port", "data_dir", "config_file"),
        *("node_id", "advertise_address", "cluster", "broker", "replicas", "nameserver"),
        *("etcd", "etcd_cert_file", "etcd_key_file", "etcd_ca_file"),
        *("tls", "tls_cert_file", "tls_key_file", "tls_ca_file", "tls_port"),
        *("cert_file", "key_file", "ca_file", "insecure_network"),
        *("access", "access_admins", "sealing_key_file", "receipt_key_file"),
    )
)
"""Settings that the chart makes from other values."""
TEXT = {"type": "string", "minLength": 1}
NO_TEXT = {"const": ""}
YES_OR_NO = {"type": "boolean"}
NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"}
DNS_NAME = {"type": "string", "pattern": r"^(\*\.)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"}
QUANTITY = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$"}
POSITIVE = {"type": "integer", "minimum": 1}
TEXTS = {"type": "array", "items": TEXT}


def closed(properties: Mapping[str, Any], required: Iterable[str] = ()) -> dict[str, Any]:
    """Return the schema of an object without other fields."""
    found = {"type": "object", "additionalProperties": False, "properties": dict(properties)}
    return found | ({"required": list(required)} if required else {})


def settings_of(kind: type[Settings], service: str) -> dict[str, Any]:
    """Return the schema of the settings of a service."""
    told = meanings(kind)
    return closed(
        {
            f"BATON_{service.upper()}_{name.upper()}": {
                "type": "string",
                "description": " ".join(told[name].split()),
            }
            for name in sorted(kind.model_fields.keys() - OF_THE_CHART)
        }
    )


def pods(**others: Any) -> dict[str, Any]:
    """Return the schema of a kind of pods."""
    amounts = closed({"cpu": QUANTITY, "memory": QUANTITY})
    return closed(
        {
            "resources": closed({"requests": amounts, "limits": amounts}),
            "nodeSelector": {"type": "object", "additionalProperties": {"type": "string"}},
            "tolerations": {"type": "array", "items": {"type": "object"}},
            "priorityClassName": NAME,
            "terminationGracePeriodSeconds": POSITIVE,
            **others,
        }
    )


def image() -> dict[str, Any]:
    """Return the schema of an image; an empty tag is the version of the chart."""
    return closed({"repository": TEXT, "tag": {"type": "string"}})


def schema() -> dict[str, Any]:
    """Return the whole schema."""
    volume = closed({"size": QUANTITY, "storageClassName": NAME}, ["size"])
    services = {name: settings_of(kind, name) for name, kind in SETTINGS.items()}
    address = {"type": "string", "pattern": r"^[^,:\s]+:[0-9]+$"}
    network = {"type": "string", "pattern": r"^[0-9a-fA-F.:]+/[0-9]{1,3}$"}
    scaling = closed(
        {
            "enabled": YES_OR_NO,
            "minReplicas": POSITIVE,
            "maxReplicas": POSITIVE,
            "clientsPerGateway": POSITIVE,
            "cpuPercent": {"type": "integer", "minimum": 1, "maximum": 100},
        }
    )
    service_image = image()
    service_image["properties"]["pullPolicy"] = {"enum": ["Always", "IfNotPresent", "Never"]}
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "BatonMQ"} | closed(
        {
            "global": {
                "type": "object",
                "description": "Values of a chart that contains this one.",
            },
            "cluster": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,63}$"},
            "image": service_image,
            "imagePullSecrets": {"type": "array", "items": closed({"name": NAME}, ["name"])},
            "ha": YES_OR_NO,
            "machines": {"enum": ["preferred", "required"]},
            "security": closed(
                {
                    "mode": {"enum": ["insecure", "tls", "access"]},
                    "certManager": YES_OR_NO,
                    "dnsNames": {"type": "array", "items": DNS_NAME},
                    "admins": TEXTS | {"minItems": 1},
                }
            ),
            "etcd": pods(
                inside=YES_OR_NO,
                tls=YES_OR_NO,
                endpoints={"type": "array", "items": address},
                cidrs={"type": "array", "items": network},
                image=TEXT,
                volume=volume,
            ),
            "storage": pods(
                settings=services["storage"], volume=volume, secretEnv={"anyOf": [NAME, NO_TEXT]}
            ),
            "offsets": pods(settings=services["offsets"], volume=volume),
            "lockmgr": pods(settings=services["lockmgr"]),
            "nameserver": pods(settings=services["nameserver"]),
            "gateway": pods(
                enabled=YES_OR_NO,
                replicas=POSITIVE,
                autoscaling=scaling,
                settings=services["gateway"],
            ),
            "console": pods(enabled=YES_OR_NO, settings=settings_of(ConsoleSettings, "console")),
            "scaler": pods(
                enabled=YES_OR_NO,
                replicas=POSITIVE,
                namespace=NAME,
                settings=settings_of(ScalerSettings, "scaler"),
            ),
            "monitoring": closed({"enabled": YES_OR_NO, "namespace": NAME}),
            "spark": pods(
                enabled=YES_OR_NO,
                image=image(),
                settings=settings_of(JobSettings, "spark"),
                volume=volume,
            ),
        }
    )


def rendered() -> str:
    """Return the text of the schema."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    SCHEMA.write_text(rendered())
