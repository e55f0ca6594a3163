"""Checks consumers: the queues that they regard as owned, and the handler calls that they start."""

from __future__ import annotations

from batonmq._consumer.assigned_queue import AssignedQueue
from batonmq._consumer.message import ReceivedMessage
from batonmq._core.queue_progress import Acks, QueueProgress
from batonmq._core.queues import GroupQueue, QueueRef
from batonmq._core.subscription import TagFilter
from batonmq_server.offsets.core.ranges import RangeSet
from tests.simulation.expected_state import ExpectedQueue, ExpectedState, HandlerStart, done


class ClientChecks:
    """Checks the grants that clients receive, and what clients do with messages."""

    def __init__(self, expected: ExpectedState) -> None:
        self._expected = expected
        self._running: dict[int, tuple[str, ReceivedMessage]] = {}

    def granted(self, client: str, incarnation_id: int, queue: QueueRef, token: int) -> None:
        """Check a grant when the client receives it (V11)."""
        key, expected = self._expected.key(queue), self._expected
        expected.trace.note(client, f"owns {key} token {token}")
        expected.counts["grants"] += 1
        persisted = expected.queues[key].persisted.get(token)
        if persisted is None or persisted[:2] != (client, incarnation_id):
            expected.fail("V11", f"{key}: {client} uses token {token}; etcd gave it to {persisted}")

    def watch_commits(self, client: str, queue: AssignedQueue) -> None:
        """Check what the client regards as committed from now on."""
        if "committed" in vars(queue):
            return
        real = queue.committed

        def committed(progress: QueueProgress, acks: Acks, sent_ms: int) -> None:
            self._committed(client, self._expected.key(queue.ref), progress, acks)
            real(progress, acks, sent_ms)

        setattr(queue, committed.__name__, committed)

    def _committed(self, client: str, key: GroupQueue, progress: QueueProgress, acks: Acks) -> None:
        """Check that acks are durable when the client learns that they are (V9)."""
        durable = self._expected.queues[key].durable
        if durable is not None and durable.reset_epoch > progress.reset_epoch:
            return
        acked = RangeSet.merged(acks.ranges)
        if acks.committed:
            acked = acked.union(RangeSet.of(0, acks.committed))
        if durable is None or acked.difference(done(durable)):
            self._expected.fail(
                "V9", f"{key}: {client} regards {acked} as committed, and it is not durable"
            )

    def ended(self, client: str, kind: str, queue: QueueRef, token: int) -> None:
        """Note that a client has stopped to use a token."""
        self._expected.trace.note(client, f"{kind} {queue} token {token}")
        self._expected.queues[self._expected.key(queue)].told[token] = None

    def deadline_passed(self, client: str, queue: QueueRef) -> None:
        """Note that a client has stopped by itself because its lease expired."""
        self._expected.counts["own deadline"] += 1
        self._expected.excuse(self._expected.key(queue), f"own deadline of {client}", client)

    def crashed(self, client: str) -> None:
        """Note that a client was killed."""
        for key in self._expected.queues:
            self._expected.excuse(key, "", client)
        self._running = {n: one for n, one in self._running.items() if one[0] != client}

    def started(self, client: str, tag_filter: TagFilter, message: ReceivedMessage) -> None:
        """Check the start of a handler call (V7, V8, V9, and V6 by its excuses).

        An owner continues until it gets the error of a reset or a forced release: the messages that
        it starts meanwhile must be flagged when they are redelivered; no other rule applies.

        Args:
            tag_filter: The subscription of the client.
        """
        expected, key, offset = self._expected, self._expected.key(message.queue), message.offset
        queue, token = expected.queues[key], message.token
        flag = " redelivered" if message.redelivered else ""
        expected.trace.note(client, f"starts {key}@{offset} token {token}{flag}")
        expected.counts["starts"] += 1
        text = f"{key}@{offset}: {client} starts it under token {token}"
        if token in queue.told:
            expected.fail("V3", f"{text}, and knows that it is over")
        if key.topic != expected.retries:
            self._check_wanted(text, tag_filter, message.tag)
        if token in queue.revoked:
            expected.counts["starts after a revocation"] += 1
            late = HandlerStart(client, expected.now_ms(), token, excused=True)
            queue.starts[offset].append(late)
            return
        self._check_repetition(text, client, queue, message)
        queue.starts[offset].append(HandlerStart(client, expected.now_ms(), token))
        self._check_token(text, key, queue, message)
        self._check_key_order(text, key, queue, message)
        served = expected.group.served
        if expected.group.bound and 0 < queue.generation_of.get(token, 0) < served:
            expected.fail("section 14", f"{text}; deliveries are of generation {served} already")

    def running(self, client: str, message: ReceivedMessage) -> None:
        """Check that no handler of the queue outlives a reset in this client (section 13).

        Check also that no other handler with the ordering key runs (K1), in any client, unless its
        client can't know yet that it has lost the queue.
        """
        self._check_alone(client, message)
        epochs = self._expected.queues[self._expected.key(message.queue)].epoch_of
        for other_client, other in self._running.values():
            same = other_client == client and other.queue == message.queue
            if same and epochs[other.token] is not epochs[message.token]:
                self._expected.fail(
                    "section 13",
                    f"{client} starts {message!r} after a reset, while a handler from before it "
                    f"runs: {other!r}",
                )
        self._running[id(message)] = client, message

    def ended_running(self, message: ReceivedMessage) -> None:
        """Note that a handler call returned, failed or was cancelled."""
        self._running.pop(id(message), None)  # none after the client was killed

    def finished(self, client: str, message: ReceivedMessage) -> None:
        """Note a successful handler call; it counts in the epoch of its token."""
        key, expected = self._expected.key(message.queue), self._expected
        expected.trace.note(client, f"handled {key}@{message.offset}")
        expected.queues[key].epoch_of[message.token].handled.add(message.offset)

    def failed(self, client: str, message: ReceivedMessage) -> None:
        """Note a failed handler call; the message is sent back before it is acked (V4)."""
        self._expected.trace.note(
            client, f"failed {self._expected.key(message.queue)}@{message.offset}"
        )
        self._expected.counts["failed"] += 1
        if self._expected.by_key:
            queue = self._expected.queues[self._expected.key(message.queue)]
            self._last_start(queue, client, message.offset).failed = True

    def _check_wanted(self, text: str, tag_filter: TagFilter, tag: str) -> None:
        """Section 14: a delivered message matches the subscription, unless the policy is WARN."""
        if self._expected.group.bound and not tag_filter.accepts(tag):
            self._expected.fail(
                "section 14", f"{text}; it has tag {tag}, and it wants {tag_filter}"
            )

    def _check_repetition(
        self, text: str, client: str, queue: ExpectedQueue, message: ReceivedMessage
    ) -> None:
        before = queue.starts[message.offset]
        if self._expected.by_key and message.attempts > 1:
            self._expected.counts["retried in place"] += 1
            if not self._last_start(queue, client, message.offset).failed:
                self._expected.fail("V6", f"{text}, attempt {message.attempts}, after {before}")
            before = [start for start in before if start.client != client]
            if unexcused := [start for start in before if not (start.excused or start.failed)]:
                self._expected.fail("V6", f"{text}, a retry, after {unexcused}")
            return
        if not before:
            self._expected.counts["first starts"] += 1
            # A message that was never delivered before is flagged only because of a bound, or after
            # a reset, which flags what it brings back.
            new = len(queue.judged[message.offset]) <= 1
            new = new and queue.epoch_of.get(message.token) is queue.epochs[0]
            self._expected.counts["flagged by a bound"] += message.redelivered and new
            return
        after_failures = all(start.failed for start in before)
        self._expected.counts["repeated after failures" if after_failures else "repeated"] += 1
        if not message.redelivered:
            self._expected.fail("V7", f"{text}, unflagged, after {before}")
        if unexcused := [start for start in before if not (start.excused or start.failed)]:
            self._expected.fail("V6", f"{text} after {unexcused}, and nothing has happened to that")

    def _last_start(self, queue: ExpectedQueue, client: str, offset: int) -> HandlerStart:
        return next(start for start in reversed(queue.starts[offset]) if start.client == client)

    def _check_alone(self, client: str, message: ReceivedMessage) -> None:
        expected, key = self._expected, self._expected.key(message.queue)
        queue = expected.queues[key]
        ordering_key = queue.keys.get(message.offset)
        if not expected.by_key or ordering_key is None:
            return
        expected.counts["starts with a key"] += 1
        for other_client, other in self._running.values():
            if other.queue != message.queue or queue.keys.get(other.offset) != ordering_key:
                continue
            if other_client == client or not (
                self._last_start(queue, other_client, other.offset).excused
            ):
                expected.fail(
                    "K1",
                    f"{client} starts {message!r} of key {ordering_key!r}, while {other_client} "
                    f"handles {other!r}",
                )

    def _check_key_order(
        self, text: str, key: GroupQueue, queue: ExpectedQueue, message: ReceivedMessage
    ) -> None:
        """K2: all earlier messages of the ordering key are handled, or need not be handled."""
        expected, offset = self._expected, message.offset
        ordering_key = queue.keys.get(offset)
        if not expected.by_key or ordering_key is None:
            return
        epoch = queue.epoch_of[message.token]
        reset_epoch = queue.durable.reset_epoch if queue.durable else 0
        missing = [
            earlier
            for earlier, other_key in queue.keys.items()
            if earlier < offset
            and other_key == ordering_key
            and earlier not in epoch.handled
            and not epoch.given.between(earlier, earlier + 1)
            and expected.wanted(key, earlier, queue.stored[earlier][1], reset_epoch)
        ]
        if missing:
            expected.fail("K2", f"{text}; {missing} of key {ordering_key!r} are not handled")

    def _check_token(
        self, text: str, key: GroupQueue, queue: ExpectedQueue, message: ReceivedMessage
    ) -> None:
        expected, durable, offset = self._expected, queue.durable, message.offset
        if durable is None or durable.token < message.token:
            expected.fail("V8", f"{text}; no such token is durable")
            return
        in_force = expected.in_force(key, durable)
        if in_force != message.token:
            expected.fail("V3", f"{text}; the token in force is {in_force}")
        if durable.token == message.token and durable.delivered_reserved <= offset:
            expected.fail("V8", f"{text}; durable is only D={durable.delivered_reserved}")
        if done(durable).between(offset, offset + 1):
            expected.fail("V9", f"{text}; it is acked already")
        current = expected.current(key)
        if current is not None and current.token == message.token:
            expected.check_covered(key, current, offset)
