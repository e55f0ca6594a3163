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

    who: str
    command: str
    error: str
    env: Mapping[str, str] = field(default_factory=dict)


REJECTED_CALLERS = (
    RejectedCaller("speaks no TLS", "baton topic list", "it uses TLS", {"BATON_TLS": "0"}),
    RejectedCaller(
        "has no certificate", "baton topic list", "it requires a client certificate",
        {"BATON_CERT_FILE": "", "BATON_KEY_FILE": ""},
    ),
    RejectedCaller(
        "has one of another authority", "baton topic list", "does not trust the authority",
        credentials_of(FOREIGN_SECRET),
    ),
    RejectedCaller(
        "is the demo, with a token that nobody made", "baton topic list", "UNAUTHENTICATED",
        {**credentials_of("tls-demo"), "BATON_TOKEN": "made-up"},
    ),
    RejectedCaller(
        "has a certificate and no grant", "echo foreign | baton produce traffic",
        "PERMISSION_DENIED", credentials_of("tls-nobody"),
    ),
    RejectedCaller(
        "is the demo, which is no admin of its group",
        "baton group reset-offsets drivers --to-earliest --reason x --execute", "PERMISSION_DENIED",
        credentials_of("tls-demo"),
    ),
    RejectedCaller(
        "is the demo, which is no admin of the cluster", "baton access list",
        "PERMISSION_DENIED", credentials_of("tls-demo"),
    ),
)  # fmt: skip


async def refuse(cluster: ContainerCluster) -> list[dict[str, object]]:
    """Run all commands; return the error of each and whether it was rejected as expected."""
    found: list[dict[str, object]] = []
    for one in REJECTED_CALLERS:
        result = await cluster.ask("sh", "-c", one.command, env=one.env)
        told = next(iter(result.error.splitlines()), "").removeprefix("error: ")
        refused = result.status == 1 and one.error in told
        found.append({"who": one.who, "command": one.command, "told": told, "refused": refused})
    result = await cluster.shake_hands(
        "etcd-0.etcd:2379", f"{SECRETS_FOLDER}/tls-demo", trusting=f"{SECRETS_FOLDER}/etcd-client"
    )
    refused = result.status != 0
    told = result.error.splitlines()[-1] if refused else result.out
    found.append(
        {
            "who": "is the demo, and goes to etcd",
            "command": "TLS to etcd-0.etcd:2379",
            "told": told,
            "refused": refused,
        }
    )
    return found
