"""The permissions that the calls of offsets require."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from batonmq_server.runtime.access.permissions import (
    OPERATE,
    Permission,
    administer_group,
    consume,
    join_group,
)
from batonmq_server.runtime.access.rules import (
    AccessRules,
    queue_permissions,
    queues_permissions,
    requires,
    requires_by_request,
    rules_by_path,
    services_only,
)


def _reset(request: Any) -> Iterator[Permission]:
    if request.undo_group:
        yield administer_group(request.undo_group)
    for item in request.items:
        yield administer_group(item.queue.group)
    if not request.undo_group and not request.items:
        yield OPERATE


def _query(request: Any) -> Iterator[Permission]:
    for queue in request.queues:
        yield from queue_permissions(queue)


RULES: AccessRules = {
    **rules_by_path(
        "baton.offsets.v1.OffsetsService",
        {
            "Announce": services_only("lockmgr"),
            "Fence": services_only("lockmgr"),
            "RecordDelivered": services_only("storage"),
            "Touch": services_only("storage"),
            "Commit": requires_by_request(queues_permissions("items")),
            "Close": requires_by_request(queues_permissions("items")),
            "Query": requires_by_request(_query, ["lockmgr", "nameserver"]),
            "QueryGroup": requires_by_request(
                lambda request: [join_group(request.group)], ["nameserver"]
            ),
            "DeleteTopic": services_only("nameserver"),
            "DeleteGroup": services_only("nameserver"),
            "Reset": requires_by_request(_reset),
            "Clone": requires_by_request(
                lambda request: [
                    administer_group(request.to_group),
                    join_group(request.from_group),
                    *([consume(request.topic)] if request.topic else []),
                ]
            ),
            "ListResets": requires_by_request(lambda request: [join_group(request.group)]),
            "ListHolds": requires_by_request(lambda request: queue_permissions(request.queue)),
            "ExportGroup": services_only("offsets"),
            "ForgetGroup": services_only("offsets"),
        },
    ),
    **rules_by_path(
        "baton.offsets.v1.ReplicationService",
        {
            "Fetch": services_only("offsets"),
            "ReadAll": services_only("offsets"),
            "Digest": services_only("offsets"),
            "DescribeReplicas": requires(OPERATE),
        },
    ),
}
