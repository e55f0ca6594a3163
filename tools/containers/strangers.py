"""Those who are not let in: what they show, what they ask, and what they are told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tools.containers.scene import Scene
from tools.containers.secrets import STRANGER

PAPERS = "/etc/baton"
"""Where the asking container has Secrets besides its own, by their names."""


def showing(secret: str) -> dict[str, str]:
    """Variables of who has this Secret."""
    folder = f"{PAPERS}/{secret}"
    return {"BATON_CERT_FILE": f"{folder}/tls.crt", "BATON_KEY_FILE": f"{folder}/tls.key"}


@dataclass(frozen=True, slots=True)
class Stranger:
    """Somebody who is refused.

    Attributes:
        told: Stands in what he is told.
    """

    who: str
    command: str
    told: str
    env: Mapping[str, str] = field(default_factory=dict)


STRANGERS = (
    Stranger("speaks no TLS", "baton topic list", "it uses TLS", {"BATON_TLS": "0"}),
    Stranger(
        "has no certificate", "baton topic list", "it requires a client certificate",
        {"BATON_CERT_FILE": "", "BATON_KEY_FILE": ""},
    ),
    Stranger(
        "has one of another authority", "baton topic list", "does not trust the authority",
        showing(STRANGER),
    ),
    Stranger(
        "is the demo, with a token that nobody made", "baton topic list", "UNAUTHENTICATED",
        {**showing("tls-demo"), "BATON_TOKEN": "made-up"},
    ),
    Stranger(
        "has a certificate and no grant", "echo foreign | baton produce traffic",
        "PERMISSION_DENIED", showing("tls-nobody"),
    ),
    Stranger(
        "is the demo, which is no admin of its group",
        "baton group reset-offsets drivers --to-earliest --reason x --execute", "PERMISSION_DENIED",
        showing("tls-demo"),
    ),
    Stranger(
        "is the demo, which is no admin of the cluster", "baton access list",
        "PERMISSION_DENIED", showing("tls-demo"),
    ),
)  # fmt: skip


async def refuse(scene: Scene) -> list[dict[str, object]]:
    """Let all of them try; what each was told, and whether that is as it has to be."""
    found: list[dict[str, object]] = []
    for one in STRANGERS:
        said = await scene.ask("sh", "-c", one.command, env=one.env)
        told = next(iter(said.error.splitlines()), "").removeprefix("error: ")
        refused = said.status == 1 and one.told in told
        found.append({"who": one.who, "command": one.command, "told": told, "refused": refused})
    said = await scene.shake_hands(
        "etcd-0.etcd:2379", f"{PAPERS}/tls-demo", trusting=f"{PAPERS}/etcd-client"
    )
    refused = said.status != 0
    told = said.error.splitlines()[-1] if refused else said.out
    found.append(
        {
            "who": "is the demo, and goes to etcd",
            "command": "TLS to etcd-0.etcd:2379",
            "told": told,
            "refused": refused,
        }
    )
    return found
