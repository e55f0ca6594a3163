"""The caller of a call: what its metadata say, and the names that it uses."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import grpc.aio

from apache.rocketmq.v2 import definition_pb2 as pb
from batonmq._core.names import check_group, check_user_topic
from batonmq._core.retries import group_of
from batonmq.errors import InvalidName
from batonmq_server.gateway.statuses import Refused

Context = grpc.aio.ServicerContext[Any, Any]
IDENTITY: ContextVar[str] = ContextVar("identity", default="")
"""Authenticated identity of the client of the present call; empty while access control is off."""
VERSION_CHARACTERS_MAX = 64
_CLIENT_ID_CHARACTERS_MAX = 255


@dataclass(frozen=True, slots=True)
class Caller:
    """A remote client.

    Attributes:
        namespace: Namespace of names that have none of their own; empty for none.
        language: Language that it names; `OTHER` for an unknown one.
        identity: Its identity; empty while access control is off.
        version: Version of its library; empty if it names none.
        peer: Address that it calls from, as gRPC writes it.
    """

    client_id: str
    namespace: str
    language: str
    identity: str = ""
    version: str = ""
    peer: str = ""

    @classmethod
    def of(cls, context: Context) -> Caller:
        """Return the caller of a call.

        Raises:
            Refused: The call has no client id.
        """
        metadata = {key: value for key, value in context.invocation_metadata() or ()}
        client_id = text_of(metadata.get("x-mq-client-id"))
        if not client_id or len(client_id) > _CLIENT_ID_CHARACTERS_MAX:
            raise Refused(
                pb.CLIENT_ID_REQUIRED,
                "the header x-mq-client-id is missing or longer than 255 characters; every call "
                "needs the id of its client",
            )
        language = text_of(metadata.get("x-mq-language")).upper()
        known = language in pb.Language.keys() or language == "HTTP"  # noqa: SIM118  not a dict
        return cls(
            client_id,
            text_of(metadata.get("x-mq-namespace")),
            language if known else "OTHER",
            IDENTITY.get(),
            text_of(metadata.get("x-mq-client-version"))[:VERSION_CHARACTERS_MAX],
            context.peer() or "",
        )

    def topic(self, resource: pb.Resource) -> str:
        """Return the name under which a topic is stored.

        Raises:
            Refused: The name is not valid.
        """
        name = self._stored(resource)
        try:
            check_user_topic(name)
        except InvalidName as error:
            raise Refused(pb.ILLEGAL_TOPIC, f"{error.message}. {error.remedy}") from error
        if group_of(resource.name) or group_of(name):
            raise Refused(
                pb.ILLEGAL_TOPIC,
                f"topic {name} belongs to a consumer group. Use a topic of your own",
            )
        return name

    def group(self, resource: pb.Resource) -> str:
        """Return the name under which a group is stored.

        Raises:
            Refused: The name is not valid.
        """
        name = self._stored(resource)
        try:
            return check_group(name)
        except InvalidName as error:
            raise Refused(pb.ILLEGAL_CONSUMER_GROUP, f"{error.message}. {error.remedy}") from error

    def _stored(self, resource: pb.Resource) -> str:
        namespace = resource.resource_namespace or self.namespace
        return f"{namespace}%{resource.name}" if namespace else resource.name


def text_of(value: str | bytes | None) -> str:
    """Return the value of a header; empty for none."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value or ""
