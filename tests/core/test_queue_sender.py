"""Goal: batches of a queue are sent in order, one at a time, with sequence numbers without gaps.

Two different batches that may both be stored never have the same sequence number.
Method: written scenarios, then a Hypothesis state machine against a model of a storage node, which
checks sequence numbers as `batonmq_server.storage.core.producers` does, while requests and
responses are lost.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batonmq._core.queue_sender import Batch, QueueSender
from batonmq._core.queues import QueueRef
from batonmq._core.records import (
    BatchBuilder,
    Header,
    Message,
    check_batch,
    decode_records,
    encode_record,
    read_header,
)
from batonmq.errors import BatonError
from batonmq_server.storage.core.producers import ProducerTable, StoreReceipt

QUEUE = QueueRef("orders", "broker-a", 3)
PRODUCER_ID = 77
BYTES_MAX, COUNT_MAX = 10_000, 4


def new_sender() -> QueueSender[str]:
    return QueueSender(QUEUE, PRODUCER_ID, BYTES_MAX, COUNT_MAX)


def submit(sender: QueueSender[str], body: bytes, monotonic_ms: int = 0) -> Batch[str]:
    """Submit a message as the producer does."""
    message = Message(body)
    record = encode_record(message)
    batch = sender.open_batch(len(record)) or sender.begin_batch(f"of {body!r}", monotonic_ms)
    batch.builder.add(message, record)
    return batch


def bodies(batch: bytes) -> list[bytes]:
    header = read_header(batch)
    return [record.body for record in decode_records(batch, header, range(header.count))]


def send(sender: QueueSender[str]) -> Header:
    return read_header(sender.take(1_000).encoded)


# ---- after a loss


def test_batches_after_a_lost_one_are_sent_again_in_a_new_epoch() -> None:
    sender = new_sender()
    for body in (b"lost", b"next"):
        submit(sender, body)
        first = send(sender)
        if body == b"lost":
            sender.stored()
    assert (first.producer_epoch, first.sequence) == (0, 1)
    sender.retry(new_epoch=True)
    sender.backing_off = False
    second = send(sender)
    assert (second.producer_epoch, second.sequence) == (1, 0)
    assert sender.in_flight is not None
    assert bodies(sender.in_flight.encoded) == [b"next"]


# ---- batches


def test_waiting_messages_share_a_batch() -> None:
    sender = new_sender()
    assert submit(sender, b"1") is submit(sender, b"2")
    batch = sender.take(1_234)
    header = check_batch(batch.encoded, stamped=False)
    assert bodies(batch.encoded) == [b"1", b"2"]
    assert (header.topic, header.queue_id, header.born_unix_ms) == ("orders", 3, 1_234)
    assert (header.producer_id, header.producer_epoch, header.sequence) == (PRODUCER_ID, 0, 0)


def test_add_returns_the_index_in_the_batch() -> None:
    sender = new_sender()
    batch = sender.begin_batch("", 0)
    message = Message(b"x")
    assert [batch.builder.add(message, encode_record(message)) for _ in range(3)] == [0, 1, 2]


def test_batch_with_the_most_messages_takes_no_more() -> None:
    sender = new_sender()
    batches = [submit(sender, b"x") for _ in range(COUNT_MAX + 1)]
    assert len({id(batch) for batch in batches}) == 2
    assert batches[-1] is not batches[0]


def test_batch_takes_no_message_beyond_its_bytes() -> None:
    sender = new_sender()
    first = submit(sender, bytes(BYTES_MAX // 2))
    assert submit(sender, bytes(BYTES_MAX // 2)) is not first


def test_message_larger_than_a_batch_is_sent_alone() -> None:
    sender = new_sender()
    large = submit(sender, bytes(2 * BYTES_MAX))
    assert submit(sender, b"small") is not large
    assert bodies(sender.take(0).encoded) == [bytes(2 * BYTES_MAX)]


def test_only_one_batch_is_in_flight() -> None:
    sender = new_sender()
    submit(sender, b"1")
    assert sender.ready
    send(sender)
    submit(sender, b"2")
    assert not sender.ready
    sender.stored()
    assert sender.ready


def test_batch_in_flight_takes_no_message() -> None:
    sender = new_sender()
    first = submit(sender, b"1")
    send(sender)
    assert submit(sender, b"2") is not first


def test_sequence_counts_stored_messages() -> None:
    sender = new_sender()
    sequences = []
    for count in (1, 3, 2):
        for _ in range(count):
            submit(sender, b"x")
        sequences.append(send(sender).sequence)
        sender.stored()
    assert sequences == [0, 1, 4]


# ---- outcomes


def test_retry_sends_the_same_bytes_before_all_others() -> None:
    sender = new_sender()
    submit(sender, b"1")
    first = sender.take(1_000).encoded
    sender.retry()
    submit(sender, b"2")
    assert not sender.ready, "the sender backs off"
    assert sender.failures == 1
    sender.backing_off = False
    assert sender.take(9_999).encoded == first
    sender.retry()
    assert sender.failures == 2
    sender.backing_off = False
    sender.take(0)
    sender.stored()
    assert sender.failures == 0
    assert bodies(sender.take(0).encoded) == [b"2"]


def header_after(outcome: Callable[[QueueSender[str]], Batch[str]]) -> tuple[int, int]:
    """Return epoch and sequence of the batch that follows a batch with this outcome."""
    sender = new_sender()
    batch = submit(sender, b"1")
    send(sender)
    submit(sender, b"2")
    assert outcome(sender) is batch
    header = send(sender)
    return header.producer_epoch, header.sequence


def test_next_batch_reuses_the_sequence_of_a_rejected_one() -> None:
    assert header_after(QueueSender.rejected) == (0, 0)


def test_batch_rejected_after_a_lost_response_keeps_its_sequence() -> None:
    sender = new_sender()
    submit(sender, b"1")
    send(sender)
    sender.retry()
    sender.backing_off = False
    send(sender)
    sender.rejected()
    submit(sender, b"2")
    header = send(sender)
    assert (header.producer_epoch, header.sequence) == (1, 0)


def test_batch_with_unknown_outcome_starts_a_new_epoch() -> None:
    assert header_after(QueueSender.unknown) == (1, 0)


def test_expire_removes_old_batches_that_were_never_sent() -> None:
    sender = new_sender()
    sent = submit(sender, bytes(BYTES_MAX), 10)
    late = submit(sender, bytes(BYTES_MAX), 20)
    young = submit(sender, bytes(BYTES_MAX), 21)
    sender.take(0)
    sender.retry()
    assert sender.expire(20) == [late]
    sender.backing_off = False
    assert sender.take(0) is sent, "the batch may be stored already"
    sender.stored()
    assert sender.take(0) is young


def test_drop_returns_all_batches() -> None:
    sender = new_sender()
    first = submit(sender, b"1")
    send(sender)
    second = submit(sender, b"2")
    assert sender.drop() == [first, second]
    assert not sender.batches


def test_batches_are_those_that_wait_and_the_one_in_flight() -> None:
    sender = new_sender()
    assert not sender.batches
    submit(sender, b"1")
    assert sender.batches
    send(sender)
    assert sender.batches
    sender.stored()
    assert not sender.batches


# ---- model


class LossyStorage(RuleBasedStateMachine):
    """One queue, a storage node that is a list, and a network that loses requests and answers."""

    def __init__(self) -> None:
        super().__init__()
        self.sender = new_sender()
        self.table = ProducerTable()
        self.log: list[bytes] = []
        self.count = 0
        self.confirmed: dict[bytes, int] = {}
        self.refused: set[bytes] = set()

    def store(self, encoded: bytes) -> StoreReceipt | BatonError:
        header = read_header(encoded)
        try:
            earlier = self.table.check(header, (1, 3))
        except BatonError as error:
            return error
        if earlier is not None:
            return earlier
        receipt = StoreReceipt(len(self.log), 0, 0, 0)
        self.table.record(header, (1, 3), receipt)
        self.log += bodies(encoded)
        return receipt

    def send_without_an_answer(self, arrives: bool) -> None:
        batch = self.sender.take(0)
        if arrives:
            assert isinstance(self.store(batch.encoded), StoreReceipt)

    @rule(count=st.integers(1, 6))
    def submit(self, count: int) -> None:
        for _ in range(count):
            submit(self.sender, b"%d" % self.count)
            self.count += 1

    @precondition(lambda self: self.sender.ready)
    @rule()
    def stored_and_answered(self) -> None:
        batch = self.sender.take(0)
        outcome = self.store(batch.encoded)
        assert isinstance(outcome, StoreReceipt), outcome
        self.sender.stored()
        for index, body in enumerate(bodies(batch.encoded)):
            self.confirmed[body] = outcome.first_offset + index

    @precondition(lambda self: self.sender.ready)
    @rule(arrives=st.booleans())
    def no_answer(self, arrives: bool) -> None:
        self.send_without_an_answer(arrives)
        self.sender.retry()
        self.sender.backing_off = False

    @precondition(lambda self: self.sender.ready)
    @rule(arrives=st.booleans())
    def no_answer_till_the_timeout(self, arrives: bool) -> None:
        self.send_without_an_answer(arrives)
        self.sender.unknown()

    @precondition(lambda self: self.sender.ready)
    @rule()
    def refused_for_good(self) -> None:
        self.refused |= set(bodies(self.sender.take(0).encoded)) - set(self.log)
        self.sender.rejected()

    @invariant()
    def every_receipt_is_true(self) -> None:
        for body, offset in self.confirmed.items():
            assert self.log[offset] == body

    @invariant()
    def nothing_is_stored_twice_or_out_of_order(self) -> None:
        numbers = [int(body) for body in self.log]
        assert numbers == sorted(set(numbers))

    @invariant()
    def nothing_refused_is_stored(self) -> None:
        assert not self.refused & set(self.log)


LossyStorage.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLossyStorage = LossyStorage.TestCase


def test_builder_counts_what_open_batch_compares() -> None:
    """`batch_bytes_max` bounds the encoded bytes without header and topic."""
    builder, message = BatchBuilder(), Message(b"x" * 100, tag="t", keys=("k",))
    record = encode_record(message)
    for _ in range(10):
        builder.add(message, record)
    encoded = builder.encode(topic="orders", queue_id=0)
    assert builder.bytes_count == len(encoded) - 96 - len("orders")
