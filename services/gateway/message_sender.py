"""Stores the messages of SendMessage calls; a repeated one gets the first receipt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from apache.rocketmq.v2 import definition_pb2 as pb
from apache.rocketmq.v2 import service_pb2
from batonmq._core.delays import deliver_time
from batonmq._producer.once_sender import OnceMessage, OnceSender, StoredOnce
from batonmq.errors import BatonError
from batonmq_server.gateway.callers import Caller
from batonmq_server.gateway.core.once_ids import SentMessage, once_id
from batonmq_server.gateway.core.receipt_handles import ReceiptHandle
from batonmq_server.gateway.gateway_parts import GatewayParts
from batonmq_server.gateway.message_proto import OutgoingMessage, user_properties
from batonmq_server.gateway.statuses import OK, status_of
from batonmq_server.gateway.transaction_checks import producer_group

RECALL = "recall"
"""Gateway that a recall handle names: any gateway knows it."""
Entry = service_pb2.SendResultEntry


class MessageSender:
    """Sends the messages of remote clients."""

    def __init__(self, once: OnceSender, parts: GatewayParts) -> None:
        self._once, self._parts = once, parts
        self._clock = parts.environment.clock

    async def send(
        self, caller: Caller, topic: str, messages: Sequence[OutgoingMessage], timeout_ms: int
    ) -> list[Entry]:
        """Store messages of one topic; return the outcome of each, in order.

        Messages of a message group are stored one after the other. After a failure the later ones
        of the group are not sent.

        Args:
            timeout_ms: No attempt begins later than this.
        """
        if len(messages) == 1:
            return [await self._send(caller, topic, messages[0], timeout_ms)]
        entries: dict[int, Entry] = {}

        async def send_in_order(indexes: Sequence[int]) -> None:
            failed: pb.Status | None = None
            for index in indexes:
                one = messages[index]
                if failed is not None:
                    entries[index] = Entry(status=failed, message_id=one.message_id)
                    continue
                entry = entries[index] = await self._send(caller, topic, one, timeout_ms)
                if entry.status.code != pb.OK:
                    failed = pb.Status(
                        code=entry.status.code,
                        message="not sent: an earlier message of the message group was not stored. "
                        f"{entry.status.message}",
                    )

        in_order: dict[str, list[int]] = {}
        for index, one in enumerate(messages):
            in_order.setdefault(one.message_group or f"\x01{index}", []).append(index)
        async with asyncio.TaskGroup() as tasks:
            for indexes in in_order.values():
                tasks.create_task(send_in_order(indexes))
        return [entries[index] for index in range(len(messages))]

    async def _send(
        self, caller: Caller, topic: str, one: OutgoingMessage, timeout_ms: int
    ) -> Entry:
        message = one.message
        sent = SentMessage(
            topic,
            one.message_id,
            one.message_group,
            message.body,
            message.tag,
            message.keys,
            user_properties(message.properties),
        )
        at_ms = one.deliver_at_unix_ms
        try:
            stored = await self._once.send(
                OnceMessage(
                    topic=topic,
                    message=message,
                    once=once_id(caller.identity, caller.client_id, sent),
                    ordering_key=one.message_group or None,
                    deliver_unix_ms=None
                    if at_ms is None
                    else deliver_time(self._clock.unix_ms(), deliver_at_unix_ms=at_ms),
                    transaction_group=producer_group(topic) if one.transactional else "",
                ),
                timeout_ms,
            )
        except BatonError as error:
            return Entry(status=status_of(error), message_id=one.message_id)
        return self._entry(one, stored)

    def _entry(self, one: OutgoingMessage, stored: StoredOnce) -> Entry:
        entry = Entry(status=OK, message_id=one.message_id)
        if stored.transaction_id:
            entry.transaction_id = stored.transaction_id
        elif stored.schedule_id:
            entry.recall_handle = self._recall_handle(stored, one.message_id)
        else:
            entry.offset = stored.offset
        return entry

    def _recall_handle(self, stored: StoredOnce, message_id: str) -> str:
        """Return a signed handle of a scheduled message; its group part names the message."""
        queue = stored.queue
        return self._parts.signer.write(
            ReceiptHandle(
                RECALL,
                f"{stored.schedule_id}/{message_id}",
                queue.topic,
                queue.broker,
                queue.queue_id,
                *(0, 0, 0, 0, stored.deliver_unix_ms),
            )
        )
