"""Adapter for transformers: handlers that return outputs."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any

from batonmq._consumer.handler_adapters import SingleMessageAdapter
from batonmq._consumer.handler_results import RetryLater, Suspend, failure_of
from batonmq._consumer.message import ReceivedMessage
from batonmq._core.ordering_key import with_ordering_key
from batonmq._core.output_lanes import PendingOutput
from batonmq._core.outputs import (
    DEAD_LETTER_NUMBER,
    OUTPUTS_MAX,
    Output,
    OutputRow,
    digest_of,
)
from batonmq._core.queues import QueueRef
from batonmq._core.records import (
    STORED_PROPERTIES_BYTES_MAX,
    Message,
    bare_record,
    encode_record,
)
from batonmq._core.requests import Reply
from batonmq._core.retries import HandlingFailure, properties_of, with_origin_key
from batonmq.errors import InvalidArgument, LimitExceeded

Made = bytes | Output
TransformResult = Made | Iterable[Made] | RetryLater | Suspend | None
TransformHandler = (
    Callable[[ReceivedMessage], Awaitable[TransformResult] | TransformResult]
    | Callable[[ReceivedMessage], AsyncIterator[Made]]
)
Encoded = list[PendingOutput[ReceivedMessage]]


class TransformAdapter(SingleMessageAdapter):
    """Calls a transformer, and keeps the outputs of each input until `take_outputs`.

    Args:
        topics: The output topics; an output without a topic goes to the only one.
    """

    def __init__(self, handler: TransformHandler, topics: Sequence[str]) -> None:
        super().__init__(_collecting(handler))
        self._topics = topics
        self._made: dict[tuple[QueueRef, int], Encoded] = {}

    def failures(
        self, result: object, messages: Sequence[ReceivedMessage]
    ) -> Sequence[HandlingFailure | None] | None:
        """See `HandlerAdapter`.

        Raises:
            InvalidArgument: The result is not an output, or names another topic.
            LimitExceeded: There are too many outputs, or one is too long.
        """
        message = messages[0]
        self._made.pop((message.queue, message.offset), None)
        if (failure := failure_of(result)) is not None:
            return [failure]
        if outputs := self.encode(result, message):
            self._made[message.queue, message.offset] = outputs
        return None

    def replies(
        self, result: object, messages: Sequence[ReceivedMessage]
    ) -> Sequence[tuple[ReceivedMessage, Reply]]:
        """See `HandlerAdapter`."""
        return ()

    def take_outputs(self, message: ReceivedMessage) -> Encoded:
        """Return the outputs that the last successful call made of a message."""
        return self._made.pop((message.queue, message.offset), [])

    def encode(self, result: object, message: ReceivedMessage) -> Encoded | None:
        """Return the outputs in the result of a handler call; None if it asks for a retry.

        Raises:
            InvalidArgument, LimitExceeded: See `failures`.
        """
        if result is None:
            return []
        if isinstance(result, Output):
            return [self._encode(result, 0, message)]
        if isinstance(result, (RetryLater, Suspend)):
            return None
        made: object = [result] if isinstance(result, bytes) else result
        if not isinstance(made, Iterable) or isinstance(made, (str, bytearray, memoryview)):
            raise _no_output(made)
        encoded: Encoded = []
        for number, one in enumerate(made):
            if number == OUTPUTS_MAX:
                raise LimitExceeded(
                    f"the handler of {message!r} made more than {OUTPUTS_MAX} outputs",
                    facts={"field": "outputs", "limit": OUTPUTS_MAX},
                )
            output = Output(one) if isinstance(one, bytes) else one
            if not isinstance(output, Output):
                raise _no_output(output)
            encoded.append(self._encode(output, number, message))
        return encoded

    def _encode(
        self, output: Output, number: int, message: ReceivedMessage
    ) -> PendingOutput[ReceivedMessage]:
        topic = output.topic
        if not topic and len(self._topics) == 1:
            topic = self._topics[0]
        if topic not in self._topics:
            raise InvalidArgument(
                f"an output is for topic {topic!r}; transform names {', '.join(self._topics)}",
                remedy="Name all output topics in the call of transform.",
                facts={"field": "topic"},
            )
        key = output.ordering_key
        if not (output.tag or output.keys or output.properties or key is not None):
            return _plain(output.body, topic, number, message)
        made = Message(output.body, output.tag, tuple(output.keys), output.properties)
        record = encode_record(with_ordering_key(made, key))
        row = OutputRow(message.offset, number, digest_of(topic, record))
        shown = made if made.tag or made.keys else None
        return PendingOutput(message, row, topic, key, shown, record)


def _plain(
    body: bytes, topic: str, number: int, message: ReceivedMessage
) -> PendingOutput[ReceivedMessage]:
    """Return an output with nothing but a body."""
    record = bare_record(body)
    row = OutputRow(message.offset, number, digest_of(topic, record))
    return PendingOutput(message, row, topic, None, None, record)


def dead_letter_of(
    message: ReceivedMessage, failure: HandlingFailure, topic: str, client_id: str
) -> PendingOutput[ReceivedMessage]:
    """Return the dead letter of an input, as an output of it."""
    added = properties_of(message.origin, message.attempts, failure, client_id)
    keys = with_origin_key(message.keys, message.origin)
    letter = Message(message.body, message.tag, keys, {**message.properties, **added})
    record = encode_record(letter, properties_bytes_max=STORED_PROPERTIES_BYTES_MAX)
    row = OutputRow(message.offset, DEAD_LETTER_NUMBER, digest_of(topic, record))
    return PendingOutput(message, row, topic, None, letter, record)


def _collecting(handler: Any) -> Any:
    """Return the handler; one that yields its outputs is replaced by one that returns them."""
    if inspect.isasyncgenfunction(handler):

        async def collect_async(message: ReceivedMessage) -> list[Made]:
            return [one async for one in handler(message)]

        return collect_async
    if inspect.isgeneratorfunction(handler):

        def collect(message: ReceivedMessage) -> list[Made]:
            return list(handler(message))

        return collect
    return handler


def _no_output(result: object) -> InvalidArgument:
    return InvalidArgument(
        f"a transformer returned {result!r:.100}",
        remedy="Return bytes, an Output, several of them, or None.",
        facts={"field": "outputs"},
    )
