"""Config drift: settings with different values on nodes of one service. Pure.

Some settings differ by nature: names, addresses and files of a node. A secret is masked by its
node, so that two values of it can't be compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from batonmq.admin.node_state import NodeReport

OF_NODE = frozenset(
    {
        "node_id",
        "host",
        "port",
        "advertise_address",
        "outside_address",
        "health_port",
        "metrics_port",
        "tls_cert_file",
        "tls_key_file",
        "token_file",
        "etcd_cert_file",
        "etcd_key_file",
        "audit_file",
        "data_dir",
        "room",
        "tls_port",
        "tls_address",
        "plain_port",
        "plain_address",
    }
)
"""Settings that differ between nodes by nature."""
OF_REPLICA_SET = frozenset({"broker", "replica_set", "replicas", "min_in_sync"})
"""Settings that are compared within a replica set only."""
MASKED = "(masked)"


@dataclass(frozen=True, slots=True)
class ConfigDrift:
    """A setting with several values.

    Attributes:
        scope: Service, and with a slash the replica set within which the nodes must agree.
        values: The value of each node, by node id.
    """

    scope: str
    variable: str
    values: Mapping[str, str]


def config_drift(reports: Iterable[NodeReport]) -> tuple[ConfigDrift, ...]:
    """Return the settings that differ between nodes of one service, by service and variable.

    A setting that only some nodes have, because they are of another version, counts if the others
    have another value than its default.
    """
    by_scope: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    nodes: dict[str, set[str]] = defaultdict(set)
    defaults: dict[tuple[str, str], str] = {}
    for report in reports:
        service, node_id = report.node.service, report.node.node_id
        if not report.settings:
            continue
        of_set = f"{service}/{report.node.replica_set}"
        nodes[service].add(node_id)
        nodes[of_set].add(node_id)
        for one in report.settings:
            if one.name in OF_NODE or one.value == MASKED:
                continue
            scope = of_set if one.name in OF_REPLICA_SET else service
            by_scope[scope, one.variable][node_id] = one.value
            defaults[scope, one.variable] = one.default or ""
    found = []
    for (scope, variable), values in sorted(by_scope.items()):
        without = nodes[scope] - values.keys()
        known = {*values.values(), *([defaults[scope, variable]] if without else [])}
        if len(known) > 1:
            missing = dict.fromkeys(without, "(not known to this version)")
            found.append(ConfigDrift(scope, variable, dict(sorted((values | missing).items()))))
    return tuple(found)


def masked_settings(reports: Iterable[NodeReport]) -> tuple[str, ...]:
    """Return the variables with a secret, which are not compared."""
    return tuple(
        sorted({one.variable for r in reports for one in r.settings if one.value == MASKED})
    )
