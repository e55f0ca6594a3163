"""Quotas in etcd: `quotas/<identity>`, followed by every service."""

from __future__ import annotations

import logging
from dataclasses import fields
from urllib.parse import quote, unquote

from google.protobuf.message import DecodeError

from baton.nameserver.v1 import stored_quota_pb2 as pb
from batonmq_server.runtime.access.quotas import DEFAULT, Quota, QuotaLedger

log = logging.getLogger(__name__)

PREFIX = "quotas/"


def quota_key(identity: str) -> str:
    """Return the key of a quota, relative to the cluster."""
    return f"{PREFIX}{quote(identity, safe=DEFAULT)}"


def identity_of(key: str) -> str:
    """Return the identity of a key that is relative to the prefix."""
    return unquote(key)


def quota_from_pb(quota: pb.Quota) -> Quota:
    """Return the quota of a message; the inverse of `quota_to_pb`."""
    return Quota(**{one.name: value for one, value in quota.ListFields()})


def quota_to_pb(quota: Quota) -> pb.Quota:
    """Return the message of a quota, for etcd and for the wire."""
    return pb.Quota(**{one.name: getattr(quota, one.name) for one in fields(quota)})


def apply(ledger: QuotaLedger, key: str, value: bytes | None) -> None:
    """Update `ledger` from a key of etcd; None if it was deleted.

    An unreadable value leaves the identity with the quota it had.
    """
    try:
        quota = quota_from_pb(pb.Quota.FromString(value)) if value is not None else None
        ledger.set_quota(identity_of(key), quota)
    except DecodeError:
        log.error("etcd has an unreadable quota key=%s%.30s", PREFIX, key)
