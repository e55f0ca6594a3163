"""Goal: the columns of delivered messages have the same content as the messages.

Method: a stored batch in which some records have only a body.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from batonmq._consumer.delivered_run import DeliveredRun
from batonmq._consumer.message import BatchColumns
from batonmq._consumer.stored_batch import StoredBatch
from batonmq._core.queues import QueueRef
from batonmq._core.records import Message, stamped_head
from tests.storage.batches import batch

MESSAGES = [
    Message(b"bare"),
    Message(b"", keys=("a", "b")),
    Message(b"tagged", tag="paid"),
    Message(b"", tag=""),
    Message(b"with properties", properties={"region": "eu"}),
    Message(bytes(70_000), keys=("c",), tag="paid", properties={"region": "us"}),
    Message(b"bare again"),
]


@pytest.mark.parametrize("indexes", [range(7), range(2, 5), range(6, 7), [0, 1, 4, 6], [5]])
@pytest.mark.parametrize("created", [False, True])
def test_bodies_are_those_of_the_messages(indexes: Sequence[int], created: bool) -> None:
    raw = batch(*MESSAGES)
    head = stamped_head(raw, position=0, first_offset=40, store_unix_ms=1, topic_id=1, epoch=1)
    stored = StoredBatch(head + raw[len(head) :])
    columns = BatchColumns(
        QueueRef("orders", "broker-a", 0), 1, 1, stored.header, stored.records, stored.begins,
        None, None,
    )  # fmt: skip
    run = DeliveredRun(columns, indexes)
    if created:
        run = DeliveredRun(columns, indexes, list(run.messages(0, len(run))))
    assert run.bodies() == [MESSAGES[index].body for index in indexes]
    assert [message.body for message in run.messages(0, len(run))] == run.bodies()
