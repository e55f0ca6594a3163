"""The id under which a message of a remote client is stored once, however often it is sent. Pure.

A client repeats a send with the same message id, perhaps at another gateway. Some clients set the
born time anew, so it does not count. The content does: a client that uses a message id again for
another message loses none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple


class SentMessage(NamedTuple):
    """What identifies a message of a client.

    Attributes:
        topic: As it is stored, with its namespace.
        properties: Those of the user.
    """

    topic: str
    message_id: str
    message_group: str
    body: bytes
    tag: str
    keys: Sequence[str]
    properties: Mapping[str, str]


def once_id(identity: str, client_id: str, sent: SentMessage) -> int:
    """Return the producer id of a message; equal at all gateways, for all its repetitions.

    Args:
        identity: Identity of the client; empty without access control.

    Returns:
        63 bits, not 0.
    """
    texts = [
        identity,
        client_id,
        sent.topic,
        sent.message_id,
        sent.message_group,
        sent.tag,
        str(len(sent.keys)),
        *sent.keys,
    ]
    for name in sorted(sent.properties):
        texts += name, sent.properties[name]
    digest = blake2b(sent.body, digest_size=8)
    for text in texts:
        raw = text.encode("utf-8", "surrogatepass")
        digest.update(b"%d:" % len(raw))
        digest.update(raw)
    digest.update(b"%d" % len(sent.body))
    return int.from_bytes(digest.digest()) >> 1 or 1
