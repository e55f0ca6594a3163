"""Permissions that the calls of the nameserver need.

List calls need no permission: they return the entries that the caller may use.
"""

from __future__ import annotations

from typing import Any

from batonmq_server.runtime.access.permissions import (
    ANY_GRANT,
    OPERATE,
    Permission,
    administer_group,
    change_topic,
    consume,
    create_topic,
    join_group,
    use_topic,
)
from batonmq_server.runtime.access.rules import (
    SERVICES,
    AccessRule,
    AccessRules,
    requires,
    requires_by_request,
    rules_by_path,
    services_only,
)


def _topic(request: Any) -> list[Permission]:
    return [use_topic(request.topic)]


def _group(request: Any) -> list[Permission]:
    return [join_group(request.group)]


def _heartbeat(request: Any) -> list[Permission]:
    return [join_group(request.group), *(consume(one.topic) for one in request.subscriptions)]


RULES: AccessRules = {
    **rules_by_path(
        "baton.nameserver.v1.NameserverService",
        {
            "CreateTopic": requires_by_request(lambda request: [create_topic(request.topic)]),
            "EnsureUnresolvedTopic": services_only("storage"),
            "UpdateTopic": requires_by_request(lambda request: [change_topic(request.topic)]),
            "DeleteTopic": requires_by_request(lambda request: [change_topic(request.topic)]),
            "ListTopics": requires(ANY_GRANT),
            "DescribeTopic": requires_by_request(_topic),
            "QueryRoute": requires_by_request(_topic),
            "WatchRoute": requires_by_request(_topic),
            "DescribeCluster": requires(ANY_GRANT, services=SERVICES),
            "ElectReplica": requires(OPERATE),
            "DrainNode": requires(OPERATE),
            "UndrainNode": requires(OPERATE),
            "MoveLeader": requires(OPERATE),
            "MoveQueues": requires(OPERATE),
            "QueryRetiring": requires_by_request(lambda request: [change_topic(request.topic)]),
            "RemoveBroker": requires(OPERATE),
            "Heartbeat": requires_by_request(_heartbeat),
            "Leave": requires_by_request(_group),
            "WatchGroup": requires_by_request(_group),
            "ListGroups": requires(ANY_GRANT),
            "DescribeGroup": requires_by_request(_group),
            "UpdateGroup": requires_by_request(lambda request: [administer_group(request.group)]),
            "DeleteGroup": requires_by_request(lambda request: [administer_group(request.group)]),
            "WhyStuck": requires_by_request(_group),
            "LocateGroup": requires_by_request(_group),
            "MoveGroup": requires(OPERATE),
        },
    ),
    **rules_by_path(
        "baton.nameserver.v1.QuotaService",
        {
            "SetQuota": requires(OPERATE),
            "DeleteQuota": requires(OPERATE),
            "ListQuotas": requires(OPERATE),
        },
    ),
    **rules_by_path(
        "baton.nameserver.v1.AccessService",
        {
            "Grant": requires(OPERATE),
            "Revoke": requires(OPERATE),
            "ListAccess": requires(OPERATE),
            "Check": AccessRule(lambda request: [OPERATE] if request.identity else [], known=True),
            "CreateToken": requires(OPERATE),
            "RevokeToken": requires(OPERATE),
            "CreateAccessKey": requires(OPERATE),
            "RotateAccessKey": requires(OPERATE),
            "RevokeAccessKey": requires(OPERATE),
            "Block": requires(OPERATE),
            "Unblock": requires(OPERATE),
            "ListBlocks": requires(OPERATE),
        },
    ),
}
