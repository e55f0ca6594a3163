"""Encodes the results of handler calls as outputs, those of many calls together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from batonmq._consumer.handler_results import RetryLater, Suspend
from batonmq._consumer.message import ReceivedMessage
from batonmq._core.ordering_key import with_ordering_key
from batonmq._core.output_lanes import PendingOutputs
from batonmq._core.outputs import (
    DEAD_LETTER_NUMBER,
    OUTPUTS_MAX,
    Output,
    digests_of,
    row_key,
)
from batonmq._core.records import (
    STORED_PROPERTIES_BYTES_MAX,
    Message,
    bare_record,
    checked_keys,
    encode_record,
)
from batonmq._core.retries import HandlingFailure, properties_of, with_origin_key
from batonmq.errors import InvalidArgument, LimitExceeded

Pending = PendingOutputs[Any]
_Encoded = tuple[str, str | None, bytes, Message | None]
"""Topic, ordering key, record, and tag and keys of an output."""


class OutputEncoder:
    """Collects the outputs of inputs in the order of their calls.

    Args:
        topics: The output topics; an output without a topic goes to the only one.
    """

    def __init__(self, topics: Sequence[str]) -> None:
        self._topics = topics
        self._only = topics[0] if len(topics) == 1 else ""
        self._all: list[Pending] = []
        self._open: dict[tuple[str, str | None], Pending] = {}
        self._plain: Pending | None = None

    def add(self, message: ReceivedMessage, result: object) -> bool:
        """Add the outputs in the result of a handler call; return False if it asks for a retry.

        Raises:
            InvalidArgument: The result is not an output, or names another topic. Nothing is added.
            LimitExceeded: There are too many outputs, or one is too long. Nothing is added.
        """
        if result is None:
            return True
        body = result
        if type(result) is Output:
            if (
                result.tag
                or result.keys
                or result.properties
                or result.topic
                or result.ordering_key is not None
            ):
                return self._add_all(message, result)
            body = result.body
        if type(body) is not bytes or not self._only:
            return self._add_all(message, result)
        record, plain = bare_record(body), self._plain
        if plain is None or plain.full:
            plain = self._plain = self._piece(self._only, None)
        plain.add(row_key(message.offset, 0), record)
        return True

    def end(self) -> Sequence[Pending]:
        """Return the outputs that were added; none is added any more."""
        for pending in self._all:
            pending.digests = digests_of(pending.topic, pending.records)
        return self._all

    def _add_all(self, message: ReceivedMessage, result: object) -> bool:
        if isinstance(result, (RetryLater, Suspend)):
            return False
        encoded = [self._encode(output) for output in _outputs_in(result, message)]
        for number, (topic, ordering_key, record, shown) in enumerate(encoded):
            pending = self._piece(topic, ordering_key)
            pending.add(row_key(message.offset, number), record, shown)
        return True

    def _piece(self, topic: str, ordering_key: str | None) -> Pending:
        pending = self._open.get((topic, ordering_key))
        if pending is None or pending.full:
            pending = self._open[topic, ordering_key] = PendingOutputs(None, topic, ordering_key)
            self._all.append(pending)
        return pending

    def _encode(self, output: Output) -> _Encoded:
        topic = output.topic or self._only
        if topic not in self._topics:
            raise InvalidArgument(
                f"an output is for topic {topic!r}; transform names {', '.join(self._topics)}",
                remedy="Name all output topics in the call of transform.",
                facts={"field": "topic"},
            )
        keys = checked_keys(output.keys)
        made = Message(output.body, output.tag, keys, output.properties)
        record = encode_record(with_ordering_key(made, output.ordering_key))
        return topic, output.ordering_key, record, made if made.tag or made.keys else None


def dead_letter_of(
    message: ReceivedMessage, failure: HandlingFailure, topic: str, client_id: str
) -> Pending:
    """Return the dead letter of an input, as an output of it."""
    added = properties_of(message.origin, message.attempts, failure, client_id)
    keys = with_origin_key(message.keys, message.origin)
    letter = Message(message.body, message.tag, keys, {**message.properties, **added})
    record = encode_record(letter, properties_bytes_max=STORED_PROPERTIES_BYTES_MAX)
    pending: Pending = PendingOutputs(None, topic)
    pending.add(row_key(message.offset, DEAD_LETTER_NUMBER), record, letter)
    pending.digests = digests_of(topic, pending.records)
    return pending


def _outputs_in(result: object, message: ReceivedMessage) -> Iterator[Output]:
    """Return the outputs in the result of a handler call, one by one."""
    made: object = [result] if isinstance(result, (bytes, Output)) else result
    if not isinstance(made, Iterable) or isinstance(made, (str, bytearray, memoryview)):
        raise _no_output(made)
    for number, one in enumerate(made):
        if number == OUTPUTS_MAX:
            raise LimitExceeded(
                f"the handler of {message!r} made more than {OUTPUTS_MAX} outputs",
                facts={"field": "outputs", "limit": OUTPUTS_MAX},
            )
        output = Output(one) if isinstance(one, bytes) else one
        if not isinstance(output, Output):
            raise _no_output(output)
        yield output


def _no_output(result: object) -> InvalidArgument:
    return InvalidArgument(
        f"a transformer returned {result!r:.100}",
        remedy="Return bytes, an Output, several of them, or None.",
        facts={"field": "outputs"},
    )
