"""What the calls of remote clients require: the permissions of the topic and group that they name.

The names in a call depend on the namespace in its headers. So these rules are applied to a
`RemoteCall`, by the gateway itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from apache.rocketmq.v2 import definition_pb2 as pb
from batonmq_server.gateway.callers import Caller
from batonmq_server.runtime.access.permissions import (
    ANY_GRANT,
    OPERATE,
    Permission,
    administer_group,
    consume,
    join_group,
    produce,
    use_topic,
)
from batonmq_server.runtime.access.quotas import Traffic
from batonmq_server.runtime.access.rules import (
    AccessRules,
    requires,
    requires_by_request,
    rules_by_path,
)

SERVICE = "apache.rocketmq.v2.MessagingService"


class RemoteCall(NamedTuple):
    """A call of a remote client: its caller, with a namespace, and its request."""

    caller: Caller
    request: Any


def _use(call: RemoteCall) -> list[Permission]:
    return [use_topic(call.caller.topic(call.request.topic))]


def _send(call: RemoteCall) -> Iterator[Permission]:
    for message in call.request.messages:
        yield produce(call.caller.topic(message.topic))


def _produce(call: RemoteCall) -> list[Permission]:
    return [produce(call.caller.topic(call.request.topic))]


def _consume(call: RemoteCall) -> list[Permission]:
    """Of calls that name a topic and a group."""
    topic, group = call.request.topic, call.request.group
    return [consume(call.caller.topic(topic)), join_group(call.caller.group(group))]


def _consume_queue(call: RemoteCall) -> list[Permission]:
    """Of calls that name a queue and a group."""
    topic, group = call.request.message_queue.topic, call.request.group
    return [consume(call.caller.topic(topic)), join_group(call.caller.group(group))]


def _read_queue(call: RemoteCall) -> list[Permission]:
    return [consume(call.caller.topic(call.request.message_queue.topic))]


def _group_if_any(call: RemoteCall) -> list[Permission]:
    """Of calls of any client, which name a group if it is a consumer."""
    group = call.request.group
    return [join_group(call.caller.group(group))] if group.name else [ANY_GRANT]


def settings_permissions(caller: Caller, settings: pb.Settings) -> Iterable[Permission]:
    """Return the permissions that settings in a telemetry stream require.

    Raises:
        Refused: They name a topic or a group that is not valid.
    """
    kind = settings.WhichOneof("pub_sub")
    if kind == "subscription":
        wanted = settings.subscription
        yield join_group(caller.group(wanted.group))
        for entry in wanted.subscriptions:
            yield consume(caller.topic(entry.topic))
    elif kind == "publishing":
        for topic in settings.publishing.topics:
            yield produce(caller.topic(topic))


RULES: AccessRules = rules_by_path(
    SERVICE,
    {
        "QueryRoute": requires_by_request(_use),
        "Heartbeat": requires_by_request(_group_if_any),
        "SendMessage": requires_by_request(_send)._replace(traffic=Traffic.PRODUCE),
        "QueryAssignment": requires_by_request(_consume),
        "ReceiveMessage": requires_by_request(_consume_queue)._replace(traffic=Traffic.CONSUME),
        "AckMessage": requires_by_request(_consume),
        "ForwardMessageToDeadLetterQueue": requires_by_request(_consume),
        "PullMessage": requires_by_request(_consume_queue)._replace(traffic=Traffic.CONSUME),
        "UpdateOffset": requires_by_request(_consume_queue),
        "GetOffset": requires_by_request(_consume_queue),
        "QueryOffset": requires_by_request(_read_queue),
        "EndTransaction": requires_by_request(_produce),
        # The settings in the stream name topics and a group; see `settings_permissions`.
        "Telemetry": requires(ANY_GRANT),
        "NotifyClientTermination": requires_by_request(_group_if_any),
        "ChangeInvisibleDuration": requires_by_request(_consume),
        "RecallMessage": requires_by_request(_produce),
        "SyncLiteSubscription": requires_by_request(_consume),
    },
)
METHODS = tuple(path.rpartition("/")[2] for path in RULES)

OPERATORS_RULES: AccessRules = rules_by_path(
    "baton.gateway.v1.GatewayService",
    {
        "ListClients": requires_by_request(
            lambda request: [join_group(request.group) if request.group else OPERATE]
        ),
        "ListHeldMessages": requires_by_request(
            lambda request: [join_group(request.group)], ["nameserver"]
        ),
        # It runs a listener again, as a reset of progress would.
        "VerifyMessage": requires_by_request(
            lambda request: [administer_group(request.group), consume(request.queue.topic)]
        ),
        "GetStackTraces": requires_by_request(
            lambda request: [administer_group(request.group) if request.group else OPERATE]
        ),
    },
)
"""Of the calls of operators and nameservers: they depend on the request alone, so the edge applies
them, unlike `RULES`."""
