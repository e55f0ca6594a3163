"""Who may make the calls of the nameserver. Lists have what the caller may use."""

from __future__ import annotations

from typing import Any

from batonmq_server.runtime.access.permissions import (
    ANYTHING,
    OPERATE,
    Need,
    administer,
    change,
    consume,
    create,
    join,
    use,
)
from batonmq_server.runtime.access.rules import SERVICES, Rule, Rules, needs, on, rules_of


def _topic(request: Any) -> list[Need]:
    return [use(request.topic)]


def _group(request: Any) -> list[Need]:
    return [join(request.group)]


def _heartbeat(request: Any) -> list[Need]:
    return [join(request.group), *(consume(one.topic) for one in request.subscriptions)]


RULES: Rules = {
    **rules_of(
        "baton.nameserver.v1.NameserverService",
        {
            "CreateTopic": on(lambda request: [create(request.topic)]),
            "UpdateTopic": on(lambda request: [change(request.topic)]),
            "DeleteTopic": on(lambda request: [change(request.topic)]),
            "ListTopics": needs(ANYTHING),
            "DescribeTopic": on(_topic),
            "QueryRoute": on(_topic),
            "WatchRoute": on(_topic),
            "DescribeCluster": needs(ANYTHING, services=SERVICES),
            "ElectReplica": needs(OPERATE),
            "Heartbeat": on(_heartbeat),
            "Leave": on(_group),
            "WatchGroup": on(_group),
            "ListGroups": needs(ANYTHING),
            "DescribeGroup": on(_group),
            "UpdateGroup": on(lambda request: [administer(request.group)]),
            "DeleteGroup": on(lambda request: [administer(request.group)]),
            "WhyStuck": on(_group),
            "LocateGroup": on(_group),
            "MoveGroup": needs(OPERATE),
        },
    ),
    **rules_of(
        "baton.nameserver.v1.AccessService",
        {
            "Grant": needs(OPERATE),
            "Revoke": needs(OPERATE),
            "ListAccess": needs(OPERATE),
            "Check": Rule(lambda request: [OPERATE] if request.identity else [], known=True),
            "CreateToken": needs(OPERATE),
            "RevokeToken": needs(OPERATE),
        },
    ),
}
