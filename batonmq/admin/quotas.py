"""Administration of quotas: limits of traffic, connections and topics per identity."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass, fields

from baton.nameserver.v1 import quota_service_pb2 as pb
from baton.nameserver.v1 import quota_service_pb2_grpc as pb_grpc
from baton.nameserver.v1 import stored_quota_pb2
from batonmq.admin._pagination import iter_pages
from batonmq.admin.admin import Admin

DEFAULT_IDENTITY = "*"
"""Stands for all identities: its limits hold where an identity has none of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaLimits:
    """Limits of an identity; None for those of `DEFAULT_IDENTITY`. Services have none.

    Attributes:
        produce_bytes_per_s: Bytes per second of requests that write, at each storage node.
        produce_calls_per_s: Calls per second that write, at each storage node.
        consume_bytes_per_s: Bytes per second of answers with messages, at each storage node.
        consume_calls_per_s: Calls per second that read, at each storage node.
        in_flight: Write and read calls in progress at each storage node, with long polls.
        connections: Connections to each storage node with such calls within the last minute.
        topics: Topics that the identity has created and that exist.
        groups: Groups that the identity has created and that exist.
    """

    produce_bytes_per_s: int | None = None
    produce_calls_per_s: int | None = None
    consume_bytes_per_s: int | None = None
    consume_calls_per_s: int | None = None
    in_flight: int | None = None
    connections: int | None = None
    topics: int | None = None
    groups: int | None = None


@dataclass(frozen=True, slots=True)
class IdentityQuota:
    """The limits of one identity."""

    identity: str
    limits: QuotaLimits


class Quotas:
    """Reads and changes quotas. Failures raise classes of `batonmq.errors`.

    Args:
        admin: Client of the cluster; the caller closes it.
    """

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    async def set(self, identity: str, limits: QuotaLimits) -> None:
        """Set the limits of an identity, in place of those it had.

        Services follow the change normally within a second.

        Raises:
            InvalidArgument: The identity or a limit is not valid.
        """
        values = {one.name: getattr(limits, one.name) for one in fields(limits)}
        request = pb.SetQuotaRequest(identity=identity, quota=stored_quota_pb2.Quota(**values))
        await self._admin.ask(lambda limit_s: self._stub().SetQuota(request, timeout=limit_s))

    async def delete(self, identity: str) -> bool:
        """Delete the limits of an identity; return False if it had none."""
        request = pb.DeleteQuotaRequest(identity=identity)
        answer = await self._admin.ask(
            lambda limit_s: self._stub().DeleteQuota(request, timeout=limit_s)
        )
        return answer.deleted

    async def list(self) -> tuple[IdentityQuota, ...]:
        """Return all identities with limits, ascending."""

        def page(page_token: str) -> Awaitable[pb.ListQuotasResponse]:
            request = pb.ListQuotasRequest(page_token=page_token)
            return self._admin.ask(
                lambda limit_s: self._stub().ListQuotas(request, timeout=limit_s)
            )

        return tuple(
            [
                IdentityQuota(entry.identity, _from_pb(entry.quota))
                async for answer in iter_pages(page)
                for entry in answer.quotas
            ]
        )

    def _stub(self) -> pb_grpc.QuotaServiceAsyncStub:
        return self._admin.directory.quotas()


def _from_pb(quota: stored_quota_pb2.Quota) -> QuotaLimits:
    return QuotaLimits(**{one.name: value for one, value in quota.ListFields()})
