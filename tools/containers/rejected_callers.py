"""Callers that must be rejected: their credentials, commands and expected errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tools.containers.container_cluster import ContainerCluster
from tools.containers.secrets import FOREIGN_SECRET

SECRETS_FOLDER = "/etc/baton"
"""Mount folder of the additional Secrets in the container of the operator."""


def credentials_of(secret: str) -> dict[str, str]:
    """Return the variables of a caller with this Secret."""
    folder = f"{SECRETS_FOLDER}/{secret}"
    return {"BATON_CERT_FILE": f"{folder}/tls.crt", "BATON_KEY_FILE": f"{folder}/tls.key"}


@dataclass(frozen=True, slots=True)
class RejectedCaller:
    """A caller that must be rejected.

    Attributes:
        error: Part of the expected error.
    """

    caller: str
    command: str
    error: str
    env: Mapping[str, str] = field(default_factory=dict)


REJECTED_CALLERS = (
    RejectedCaller("without TLS", "baton topic list", "it uses TLS", {"BATON_TLS": "0"}),
    RejectedCaller(
        "without a certificate", "baton topic list", "it requires a client certificate",
        {"BATON_CERT_FILE": "", "BATON_KEY_FILE": ""},
    ),
    RejectedCaller(
        "with a certificate of another authority", "baton topic list",
        "does not trust the authority", credentials_of(FOREIGN_SECRET),
    ),
    RejectedCaller(
        "the demo, with an unknown token", "baton topic list", "UNAUTHENTICATED",
        {**credentials_of("tls-demo"), "BATON_TOKEN": "made-up"},
    ),
    RejectedCaller(
        "with a certificate, without a grant", "echo foreign | baton produce traffic",
        "PERMISSION_DENIED", credentials_of("tls-nobody"),
    ),
    RejectedCaller(
        "the demo, not an admin of its group",
        "baton group reset-offsets drivers --to-earliest --reason x --execute", "PERMISSION_DENIED",
        credentials_of("tls-demo"),
    ),
    RejectedCaller(
        "the demo, not an admin of the cluster", "baton access list",
        "PERMISSION_DENIED", credentials_of("tls-demo"),
    ),
)  # fmt: skip


async def refuse(cluster: ContainerCluster) -> list[dict[str, object]]:
    """Run all commands; return the error of each and whether it was rejected as expected."""
    found: list[dict[str, object]] = []
    for one in REJECTED_CALLERS:
        result = await cluster.ask("sh", "-c", one.command, env=one.env)
        error = next(iter(result.error.splitlines()), "").removeprefix("error: ")
        rejected = result.status == 1 and one.error in error
        found.append(
            {"caller": one.caller, "command": one.command, "error": error, "rejected": rejected}
        )
    result = await cluster.shake_hands(
        "etcd-0.etcd:2379", f"{SECRETS_FOLDER}/tls-demo", trusting=f"{SECRETS_FOLDER}/etcd-client"
    )
    rejected = result.status != 0
    error = result.error.splitlines()[-1] if rejected else result.out
    found.append(
        {
            "caller": "the demo, calling etcd",
            "command": "TLS to etcd-0.etcd:2379",
            "error": error,
            "rejected": rejected,
        }
    )
    return found
