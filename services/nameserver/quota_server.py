"""The servicer of QuotaService: quotas of identities, stored in etcd."""

from __future__ import annotations

import logging
from typing import Any

import grpc.aio

from baton.nameserver.v1 import quota_service_pb2 as pb
from baton.nameserver.v1 import quota_service_pb2_grpc as pb_grpc
from baton.nameserver.v1.stored_quota_pb2 import Quota
from batonmq.errors import InvalidArgument
from batonmq_server.runtime.access.guard import Guard
from batonmq_server.runtime.access.permissions import SERVICE_PREFIX, check_identity
from batonmq_server.runtime.access.quotas import DEFAULT
from batonmq_server.runtime.access.stored_quotas import PREFIX, identity_of, quota_key
from batonmq_server.runtime.etcd.session import EtcdSession
from batonmq_server.runtime.paging import key_of_token, page_of

log = logging.getLogger(__name__)

LIMIT_MAX = 1 << 53
"""Largest limit: a number that every JSON reader keeps exactly."""

Context = grpc.aio.ServicerContext[Any, Any]


class QuotaServicer(pb_grpc.QuotaServiceServicer):
    """See the proto."""

    def __init__(self, etcd: EtcdSession, guard: Guard) -> None:
        self._etcd, self._guard = etcd, guard

    async def SetQuota(self, request: pb.SetQuotaRequest, context: Context) -> pb.SetQuotaResponse:
        """See the proto."""
        identity = _limited(request.identity)
        if not request.HasField("quota"):
            raise InvalidArgument("quota is required", facts={"field": "quota"})
        _check(request.quota)
        await self._etcd.put(quota_key(identity), request.quota.SerializeToString())
        by = self._guard.caller_identity(context)
        limits = " ".join(f"{one.name}={value}" for one, value in request.quota.ListFields())
        log.info("quota set identity=%s by=%s %s", identity, by, limits)
        return pb.SetQuotaResponse()

    async def DeleteQuota(
        self, request: pb.DeleteQuotaRequest, context: Context
    ) -> pb.DeleteQuotaResponse:
        """See the proto."""
        identity = _limited(request.identity)
        deleted = await self._etcd.delete(quota_key(identity))
        if deleted:
            by = self._guard.caller_identity(context)
            log.info("quota deleted identity=%s by=%s", identity, by)
        return pb.DeleteQuotaResponse(deleted=deleted)

    async def ListQuotas(
        self, request: pb.ListQuotasRequest, context: Context
    ) -> pb.ListQuotasResponse:
        """See the proto."""
        after = key_of_token(request.page_token)
        entries, _ = await self._etcd.get_prefix(PREFIX)
        quotas = {identity_of(one.key.removeprefix(PREFIX)): one.value for one in entries}
        page = page_of(
            (
                (identity, pb.IdentityQuota(identity=identity, quota=Quota.FromString(value)))
                for identity, value in sorted(quotas.items())
                if identity > after
            ),
            request.page_size,
        )
        return pb.ListQuotasResponse(quotas=page.entries, next_page_token=page.next_page_token)


def _limited(identity: str) -> str:
    """Return `identity` if it can have a quota.

    Raises:
        InvalidArgument: it is malformed, or a service.
    """
    if identity == DEFAULT:
        return identity
    if identity.startswith(SERVICE_PREFIX):
        raise InvalidArgument(
            f"{identity} is a service: services have no quota",
            remedy="Use the identity of one of your own programs.",
            facts={"field": "identity"},
        )
    return check_identity(identity)


def _check(quota: Quota) -> None:
    for one, value in quota.ListFields():
        if value > LIMIT_MAX or (value == 0 and one.name.endswith("_per_s")):
            raise InvalidArgument(
                f"{one.name} must be from 1 to {LIMIT_MAX}, got {value}",
                remedy="Revoke the role to stop an identity: baton access revoke IDENTITY.",
                facts={"field": one.name},
            )
