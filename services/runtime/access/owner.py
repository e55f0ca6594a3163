"""Owner numbers: services store and compare them in place of identities."""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256
from typing import Any

from google.protobuf.message import Message


@lru_cache(maxsize=4096)
def owner_of(identity: str) -> int:
    """Return the owner number of an identity: 32 bits of its SHA-256, not 0; 0 for none."""
    return int.from_bytes(sha256(identity.encode()).digest()[:4]) or 1 if identity else 0


def sign(request: object, identity: str) -> None:
    """Write the owner number of the caller into the request, over a number from the client."""
    if not isinstance(request, Message):
        return  # a stream of requests, as of reflection
    message: Any = request
    fields = message.DESCRIPTOR.fields_by_name
    if "caller" in fields:
        message.caller = owner_of(identity)
    if "incarnation" in fields and message.HasField("incarnation"):
        message.incarnation.owner = owner_of(identity)
