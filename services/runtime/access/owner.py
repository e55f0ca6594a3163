"""Owner numbers: services store and compare them in place of identities."""

from __future__ import annotations

from functools import cache, lru_cache
from hashlib import sha256
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message


@lru_cache(maxsize=4096)
def owner_of(identity: str) -> int:
    """Return the owner number of an identity: 32 bits of its SHA-256, not 0; 0 for none."""
    return int.from_bytes(sha256(identity.encode()).digest()[:4]) or 1 if identity else 0


def sign(request: Message, identity: str) -> None:
    """Write the owner number of the caller into the request, over a number from the client.

    A request inside it, such as the `PullRequest` of each command of a `DeliverRequest`, is signed
    as well. Other inner messages are not: their numbers are those of other callers.
    """
    _write(request, _signed_fields(request.DESCRIPTOR), owner_of(identity))


class _SignedFields(NamedTuple):
    """The fields of a message type that `sign` writes.

    Attributes:
        caller: Whether it has the field `caller`.
        incarnation: Whether it has the field `incarnation`.
        inner: Name of each field with requests inside, whether it is repeated, and its fields.
    """

    caller: bool
    incarnation: bool
    inner: tuple[tuple[str, bool, _SignedFields], ...]


_NONE = _SignedFields(caller=False, incarnation=False, inner=())


@cache
def _signed_fields(kind: Descriptor) -> _SignedFields:
    return _find(kind, is_request=True, above=frozenset())


def _find(kind: Descriptor, *, is_request: bool, above: frozenset[str]) -> _SignedFields:
    """Return the signed fields of a message type.

    Args:
        above: Names of the message types that contain it.
    """
    if kind.full_name in above:
        return _NONE
    above |= {kind.full_name}
    inner = []
    for field in kind.fields:
        of = field.message_type
        if of is not None and not of.GetOptions().map_entry:
            found = _find(of, is_request=of.name.endswith("Request"), above=above)
            if found != _NONE:
                inner.append((field.name, field.is_repeated, found))
    names = kind.fields_by_name
    return _SignedFields(
        is_request and "caller" in names, is_request and "incarnation" in names, tuple(inner)
    )


def _write(message: Any, fields: _SignedFields, owner: int) -> None:
    if fields.caller:
        message.caller = owner
    if fields.incarnation and message.HasField("incarnation"):
        message.incarnation.owner = owner
    for name, repeated, inner in fields.inner:
        if repeated:
            for one in getattr(message, name):
                _write(one, inner, owner)
        elif message.HasField(name):
            _write(getattr(message, name), inner, owner)
