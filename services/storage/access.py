"""The permission that each call of storage needs.

GetMessage and CancelScheduled name a message, not a topic. Their servicers check the permission
themselves once they know the topic.
"""

from __future__ import annotations

from baton.storage.v1 import schedule_service_pb2 as schedule_pb
from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._common.rpc import error_to_pb
from batonmq._core.records import read_topic
from batonmq.errors import BadBatch
from batonmq_server.runtime.access import ANYTHING, OPERATE, Need, consume, produce, use
from batonmq_server.runtime.rules import Each, Rule, Rules, needs, of_queue, on, only, rules_of


def _write(batch: bytes) -> Need:
    try:
        return produce(read_topic(batch))
    except BadBatch:
        return ANYTHING  # the servicer rejects the batch and says why


RULES: Rules = {
    **rules_of(
        "baton.storage.v1.StorageService",
        {
            "Append": Rule(
                lambda _: (),
                each=Each(
                    "batches",
                    _write,
                    "outcomes",
                    lambda error: pb.AppendOutcome(error=error_to_pb(error)),
                ),
            ),
            "Pull": on(lambda request: of_queue(request.queue)),
            "QueryOffsets": on(
                lambda request: (use(queue.topic) for queue in request.queues), ["nameserver"]
            ),
            "Describe": needs(OPERATE),
        },
    ),
    **rules_of(
        "baton.storage.v1.QueryService",
        {
            "SearchOffset": on(lambda request: [consume(request.queue.topic)]),
            "Read": on(lambda request: [consume(request.queue.topic)], ["nameserver"]),
            "FindByKey": on(lambda request: [consume(request.topic)]),
            "GetMessage": needs(ANYTHING),
        },
    ),
    **rules_of(
        "baton.storage.v1.ScheduleService",
        {
            "Schedule": Rule(
                lambda _: (),
                each=Each(
                    "items",
                    lambda item: _write(item.batch),
                    "outcomes",
                    lambda error: schedule_pb.ScheduleOutcome(error=error_to_pb(error)),
                ),
            ),
            "CancelScheduled": needs(ANYTHING),
        },
    ),
    **rules_of(
        "baton.storage.v1.ReplicationService",
        {"Fetch": only("storage"), "DescribeReplicas": needs(OPERATE)},
    ),
}
