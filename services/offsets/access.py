"""Who may make the calls of offsets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from batonmq_server.runtime.access import OPERATE, Need, administer, consume, join
from batonmq_server.runtime.rules import Rules, needs, of_queue, of_queues, on, only, rules_of


def _reset(request: Any) -> Iterator[Need]:
    if request.undo_group:
        yield administer(request.undo_group)
    for item in request.items:
        yield administer(item.queue.group)
    if not request.undo_group and not request.items:
        yield OPERATE


def _queried(request: Any) -> Iterator[Need]:
    for queue in request.queues:
        yield from of_queue(queue)


RULES: Rules = {
    **rules_of(
        "baton.offsets.v1.OffsetsService",
        {
            "Announce": only("lockmgr"),
            "Fence": only("lockmgr"),
            "RecordDelivered": only("storage"),
            "Touch": only("storage"),
            "Commit": on(of_queues("items")),
            "Close": on(of_queues("items")),
            "Query": on(_queried, ["lockmgr", "nameserver"]),
            "QueryGroup": on(lambda request: [join(request.group)], ["nameserver"]),
            "DeleteTopic": only("nameserver"),
            "DeleteGroup": only("nameserver"),
            "Reset": on(_reset),
            "Clone": on(
                lambda request: [
                    administer(request.to_group),
                    join(request.from_group),
                    *([consume(request.topic)] if request.topic else []),
                ]
            ),
            "ListResets": on(lambda request: [join(request.group)]),
            "ListHolds": on(lambda request: of_queue(request.queue)),
            "ExportGroup": only("offsets"),
            "ForgetGroup": only("offsets"),
        },
    ),
    **rules_of(
        "baton.offsets.v1.ReplicationService",
        {
            "Fetch": only("offsets"),
            "ReadAll": only("offsets"),
            "Digest": only("offsets"),
            "DescribeReplicas": needs(OPERATE),
        },
    ),
}
