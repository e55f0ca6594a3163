"""The permission that each call of storage needs.

GetMessage, CancelScheduled and the calls about transactions name a message or a group, not a topic.
Their servicers check the permission themselves once they know the topic. So do the servicers of
Append and OutputService with the group of outputs. The servicer of Deliver
checks those of each delivery.
"""

from __future__ import annotations

from baton.storage.v1 import reply_service_pb2 as reply_pb
from baton.storage.v1 import schedule_service_pb2 as schedule_pb
from baton.storage.v1 import storage_service_pb2 as pb
from baton.storage.v1 import transaction_service_pb2 as transaction_pb
from batonmq._common.rpc import error_to_pb
from batonmq._core.records import read_topic
from batonmq.errors import BadBatch
from batonmq_server.runtime.access.permissions import (
    ANY_GRANT,
    OPERATE,
    Permission,
    change_topic,
    consume,
    produce,
    use_topic,
)
from batonmq_server.runtime.access.quotas import Traffic
from batonmq_server.runtime.access.rules import (
    AccessRule,
    AccessRules,
    PerItemRule,
    queue_permissions,
    requires,
    requires_by_request,
    rules_by_path,
    services_only,
)


def _write(batch: bytes) -> Permission:
    try:
        return produce(read_topic(batch))
    except BadBatch:
        return ANY_GRANT  # the servicer rejects the batch and says why


def pull_permissions(request: pb.PullRequest) -> tuple[Permission, Permission]:
    """Return the permissions to pull from a queue, or to have it delivered."""
    return queue_permissions(request.queue)


RULES: AccessRules = {
    **rules_by_path(
        "baton.storage.v1.StorageService",
        {
            "Append": AccessRule(
                lambda _: (),
                per_item=PerItemRule(
                    "batches",
                    _write,
                    "outcomes",
                    lambda error: pb.AppendOutcome(error=error_to_pb(error)),
                ),
                traffic=Traffic.PRODUCE,
            ),
            "Pull": requires_by_request(pull_permissions)._replace(traffic=Traffic.CONSUME),
            "Deliver": requires(ANY_GRANT),
            "QueryOffsets": requires_by_request(
                lambda request: (use_topic(queue.topic) for queue in request.queues),
                ["nameserver", "offsets"],
            ),
            "Describe": requires(OPERATE),
            "QueryHeld": requires(OPERATE, services=["nameserver"]),
            "PurgeTopic": requires_by_request(lambda request: [change_topic(request.topic)]),
        },
    ),
    **rules_by_path(
        "baton.storage.v1.QueryService",
        {
            "SearchOffset": requires_by_request(lambda request: [consume(request.queue.topic)]),
            "Read": requires_by_request(
                lambda request: [consume(request.queue.topic)], ["nameserver"]
            )._replace(traffic=Traffic.CONSUME),
            "FindByKey": requires_by_request(lambda request: [consume(request.topic)])._replace(
                traffic=Traffic.CONSUME
            ),
            "GetMessage": requires(ANY_GRANT)._replace(traffic=Traffic.CONSUME),
        },
    ),
    **rules_by_path(
        "baton.storage.v1.ScheduleService",
        {
            "Schedule": AccessRule(
                lambda _: (),
                per_item=PerItemRule(
                    "items",
                    lambda item: _write(item.batch),
                    "outcomes",
                    lambda error: schedule_pb.ScheduleOutcome(error=error_to_pb(error)),
                ),
                traffic=Traffic.PRODUCE,
            ),
            "CancelScheduled": requires(ANY_GRANT),
            "ListScheduled": requires(OPERATE),
        },
    ),
    **rules_by_path(
        "baton.storage.v1.TransactionService",
        {
            "Begin": AccessRule(
                lambda _: (),
                per_item=PerItemRule(
                    "items",
                    lambda item: _write(item.batch),
                    "outcomes",
                    lambda error: transaction_pb.BeginOutcome(error=error_to_pb(error)),
                ),
                traffic=Traffic.PRODUCE,
            ),
            "End": requires(ANY_GRANT),
            "WatchChecks": requires(ANY_GRANT),
            "ListTransactions": requires(ANY_GRANT),
        },
    ),
    **rules_by_path(
        "baton.storage.v1.OutputService",
        {"OpenOutputs": requires(ANY_GRANT), "ListOutputSources": requires(ANY_GRANT)},
    ),
    **rules_by_path(
        "baton.storage.v1.ReplyService",
        {
            "WatchReplies": requires(ANY_GRANT),
            "Reply": AccessRule(
                lambda _: (),
                per_item=PerItemRule(
                    "inboxes",
                    lambda entry: consume(entry.topic),
                    "outcomes",
                    lambda error: reply_pb.ReplyOutcome(error=error_to_pb(error)),
                ),
                traffic=Traffic.PRODUCE,
            ),
        },
    ),
    **rules_by_path(
        "baton.storage.v1.ReplicationService",
        {"Fetch": services_only("storage"), "DescribeReplicas": requires(OPERATE)},
    ),
}
