"""The records that the nameserver stores in etcd, byte by byte.

Goal: a cluster that is upgraded reads every record of the version before, and that version reads
what it writes: no field of a record changes its number or its type.
Method: the bytes of one record of each kind with all fields set, fixed here. They were written by
the messages of the contract, before the records had messages of their own.
"""

from __future__ import annotations

import pytest
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from baton.common.v1 import error_pb2, queue_pb2
from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1.stored_gate_pb2 import StoredGate
from baton.nameserver.v1.stored_group_pb2 import StoredGroup
from baton.nameserver.v1.stored_node_pb2 import StoredNode
from baton.nameserver.v1.stored_placement_pb2 import StoredPlacement
from baton.nameserver.v1.stored_refused_client_pb2 import StoredRefusedClient
from baton.nameserver.v1.stored_topic_pb2 import StoredTopic
from batonmq_server.nameserver.group_proto import (
    group_from_stored,
    group_to_pb,
    group_to_stored,
    refused_to_pb,
)
from batonmq_server.nameserver.node_proto import node_from_bytes
from batonmq_server.nameserver.topic_proto import topic_from_bytes, topic_to_bytes, topic_to_pb

INCARNATION = queue_pb2.Incarnation(client_id="c1", incarnation_id=2**64 - 1)
SUBSCRIPTIONS = [pb.Subscription(topic="flights", expression="AA||DL")]
PAUSE = pb.Pause(by="op", reason="disk", since_unix_ms=8)

TOPIC = StoredTopic(
    name="flights",
    topic_id=7,
    spread=[
        pb.QueueSpread(
            broker="broker-a", queue_count=5, write_queue_count=3, room="north", opened_epoch=2
        ),
    ],
    create_unix_ms=1_700_000_000_000,
    permission=pb.TOPIC_PERMISSION_READ,
    inherited=True,
    message_type=pb.TOPIC_MESSAGE_TYPE_FIFO,
    retention_ms=604_800_000,
    retention_bytes=2**40,
    epoch=4,
    compaction=pb.Compaction(tombstone_retention_ms=5, min_lag_ms=6, dirty_percent=7),
)
GROUP = StoredGroup(
    name="g",
    generation=77,
    members=[
        pb.Member(
            incarnation=INCARNATION,
            host="h",
            join_unix_ms=5,
            differs=True,
            room="north",
            subscription_hash=2**63,
        )
    ],
    subscriptions=SUBSCRIPTIONS,
    subscription_generation=3,
    model=pb.MESSAGE_MODEL_BROADCASTING,
    consume_from=pb.CONSUME_FROM_FIRST,
    order=pb.MESSAGE_ORDER_QUEUE,
    policy=pb.SUBSCRIPTION_POLICY_STAGED_LATEST,
    ownership=pb.OWNERSHIP_OFF,
    strategy=pb.STRATEGY_MACHINE_ROOM,
    assignments=[
        pb.TopicAssignment(
            topic="flights",
            brokers=[pb.BrokerAssignment(broker="broker-a", member_numbers=[1, 0, 300])],
        )
    ],
    staged=pb.StagedSubscription(subscriptions=SUBSCRIPTIONS, draining=True, since_unix_ms=9),
    pause=PAUSE,
    beginnings=[
        pb.TopicBeginning(
            topic="flights",
            topic_id=7,
            spread=[pb.QueueSpread(broker="broker-a", queue_count=3)],
        )
    ],
)
GATE = StoredGate(
    subscription_generation=3,
    model=pb.MESSAGE_MODEL_BROADCASTING,
    ownership=pb.OWNERSHIP_OFF,
    bound=True,
    draining=True,
    pause=PAUSE,
)
PLACEMENT = StoredPlacement(offsets_set="offsets-2", move=4, from_set="offsets")
REFUSED_CLIENT = StoredRefusedClient(
    incarnation=INCARNATION,
    host="h",
    error=error_pb2.Error(reason=error_pb2.REASON_SUBSCRIPTION_CONFLICT, message="m"),
    since_unix_ms=6,
)
NODE = StoredNode(
    service=pb.SERVICE_KIND_OFFSETS,
    node_id="offsets-0",
    address="a:1",
    metrics_address="a:2",
    start_unix_ms=5,
    epoch=6,
    leader=True,
    room="north",
    replica_epoch=7,
    replica_version=8,
    replica_set="offsets",
    outside_address="b:1",
    contract=2,
    contract_min=1,
)
NOT_RETURNED = {"owner", "creator", "tls_address", "plain_address"}
"""Fields that calls do not return: quotas count the first two, and gateways read the others."""
RECORDS = {
    "topic": (
        TOPIC,
        "0a07666c696768747310071a170a0862726f6b65722d611005180322056e6f72746830022080d095ffbc3128"
        "023001408088b2a002488080808080205004c00202920306080510061807",
    ),
    "group": (
        GROUP,
        "0a0167104d1a260a0d0a02633111ffffffffffffffff120168180520012a056e6f7274683100000000000000"
        "8022110a07666c6967687473120641417c7c444c2803300238024001480350025805621b0a07666c69676874"
        "7312100a0862726f6b65722d6112040100ac026a170a110a07666c6967687473120641417c7c444c10011809"
        "720c0a026f7012046469736b18087a190a07666c696768747310071a0c0a0862726f6b65722d611003",
    ),
    "gate": (GATE, "08031002180220012801320c0a026f7012046469736b1808"),
    "node": (
        NODE,
        "080212096f6666736574732d301a03613a312203613a3228053006380142056e6f727468480750085a076f66"
        "66736574736203623a317802800101",
    ),
    "placement": (PLACEMENT, "0a096f6666736574732d3210041a076f666673657473"),
    "refused client": (REFUSED_CLIENT, "0a0d0a02633111ffffffffffffffff1201681a05081c12016d2006"),
}


@pytest.mark.parametrize(("record", "stored"), RECORDS.values(), ids=RECORDS)
def test_stored_bytes_of_the_version_before_are_read_and_written(
    record: Message, stored: str
) -> None:
    decoded = type(record).FromString(bytes.fromhex(stored))
    assert decoded == record
    assert not len(UnknownFieldSet(decoded)), "every field is known"
    assert record.SerializeToString(deterministic=True).hex() == stored


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (TOPIC, topic_to_pb(topic_from_bytes(TOPIC.SerializeToString()))),
        (GROUP, group_to_pb(GROUP)),
        (REFUSED_CLIENT, refused_to_pb(REFUSED_CLIENT)),
        (NODE, node_from_bytes(NODE.SerializeToString())),
    ],
    ids=["topic", "group", "refused client", "node"],
)
def test_calls_return_every_field_of_a_record(record: Message, message: Message) -> None:
    fields = {field.name: value for field, value in record.ListFields()}
    assert {field.name: value for field, value in message.ListFields()} == fields
    assert fields.keys() == {field.name for field in record.DESCRIPTOR.fields} - NOT_RETURNED


def test_core_keeps_every_field_of_a_record() -> None:
    assert topic_to_bytes(topic_from_bytes(TOPIC.SerializeToString())) == TOPIC.SerializeToString()
    assert group_to_stored(group_from_stored(GROUP)) == GROUP
    topic, group = StoredTopic(owner="shop"), StoredGroup(creator=1 << 31)
    topic.MergeFrom(TOPIC)
    group.MergeFrom(GROUP)
    assert topic_to_bytes(topic_from_bytes(topic.SerializeToString())) == topic.SerializeToString()
    assert group_to_stored(group_from_stored(group)) == group
