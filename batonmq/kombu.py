"""A transport of Kombu, and with it Celery, for BatonMQ: `broker_url = "batonmq://host:9876"`.

import batonmq.kombu  # makes the URL scheme known
from celery import Celery

app = Celery("shop", broker="batonmq://127.0.0.1:9876")
app.conf.task_acks_late = True  # else Celery acknowledges a task before it runs
app.conf.task_reject_on_worker_lost = True

Needs the extra `celery`. Public are `Transport`, `Channel` and the transport options, which
`docs/reference/api/kombu.md` lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

from batonmq._common.clock import Clock
from batonmq._kombu.client_link import LINKS, ClientLink, ClientLost
from batonmq._kombu.inbox import Delivery, Inbox
from batonmq._kombu.link_options import DEFAULT_PORT, LinkOptions, options_of
from batonmq._kombu.queue_names import QueueNames, names_of
from batonmq._kombu.task_message import task_message
from batonmq.errors import (
    BatonError,
    InvalidArgument,
    NoBroker,
    NotEnoughReplicas,
    NotServing,
    Overloaded,
    Unreachable,
)

try:
    from amqp.protocol import queue_declare_ok_t
    from kombu.exceptions import ChannelError
    from kombu.transport import TRANSPORT_ALIASES, virtual
    from kombu.utils.json import dumps, loads
    from kombu.utils.uuid import uuid
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] not in ("kombu", "amqp"):
        raise
    raise ImportError(
        "batonmq.kombu needs the package kombu: pip install 'batonmq[celery]'"
    ) from error

__all__ = ["Channel", "Transport"]

NOT_DURABLE = (
    "queue {queue!r} is {kind}, but a queue of BatonMQ is a topic, which stays when its consumer "
    "goes. Events, `celery inspect`, `celery control` and the result backend rpc:// use such queues"
)
FANOUT = (
    "exchange {exchange!r} has the type {type!r}, but the transport routes in the sender, which "
    "knows only the queues that it has declared itself: a broadcast would not reach other workers"
)
REASON_CHARACTERS_MAX = 200
"""Why a body is no message, at most: errors may repeat the body."""
_TRANSIENT = (Unreachable, NoBroker, NotEnoughReplicas, NotServing, Overloaded)


class _QoS(virtual.QoS):  # type: ignore[misc]
    """The messages that a channel holds; each of them is in flight at BatonMQ."""

    def ack(self, delivery_tag: int) -> None:
        """Acknowledge a message; threads other than the consuming one may call it."""
        if delivery_tag in self._delivered and delivery_tag not in self._dirty:
            super().ack(delivery_tag)
            self.channel._tell("ack", tag=delivery_tag)

    def reject(self, delivery_tag: int, requeue: bool = False) -> None:
        """Have a message delivered again to any worker, or store it among the dead letters."""
        if delivery_tag in self._delivered and delivery_tag not in self._dirty:
            super().ack(delivery_tag)
            if requeue:
                self.channel._tell("requeue", tag=delivery_tag)
            else:
                self.channel._tell("reject", tag=delivery_tag, reason="rejected by the worker")

    def restore_unacked(self) -> None:
        """Refuse: a message that was not acknowledged is delivered again by BatonMQ itself.

        Raises:
            ChannelError: Always.
        """
        raise _refused(
            "basic_recover is not supported: reject single messages with requeue, or close the "
            "channel, and BatonMQ delivers again what it has not acknowledged",
            "basic_recover",
        )

    def restore_unacked_once(self, stderr: object = None) -> None:
        """Do nothing: a channel that closes gives up what it holds."""
        self._on_collect.cancel()


class Channel(virtual.Channel):  # type: ignore[misc]
    """A channel: a queue is a topic, and its workers are the members of one consumer group."""

    QoS = _QoS
    do_restore = False
    supports_fanout = False

    def __init__(self, connection: Transport, **kwargs: Any) -> None:
        super().__init__(connection, **kwargs)
        self._link = connection.link
        self._key = self._link.next_key()
        self._getters: dict[str, tuple[int, Inbox]] = {}
        self._by_tag: dict[str, int] = {}

    # ---- queues and exchanges

    def exchange_declare(
        self, exchange: str | None = None, type: str = "direct", **kwargs: Any
    ) -> None:
        """Declare an exchange: in this process, which routes what it sends.

        Raises:
            ChannelError: Its type is not direct or topic.
        """
        if type not in ("direct", "topic", None, ""):
            raise _refused(FANOUT.format(exchange=exchange, type=type), "exchange_declare")
        super().exchange_declare(exchange, type, **kwargs)

    def prepare_queue_arguments(self, arguments: Mapping[str, Any], **kwargs: Any) -> Any:
        """Return the arguments of a queue.

        Raises:
            ChannelError: One of them has no equal here.
        """
        given = {name: value for name, value in kwargs.items() if value is not None}
        given |= {
            name: value
            for name, value in (arguments or {}).items()
            if (name, value) != ("x-queue-type", "classic")
        }
        if given:
            raise _refused(
                f"queue arguments {', '.join(sorted(given))} are not supported: retention, size "
                "and number of queues are settings of the topic, see `baton topic update`",
                "queue_declare",
            )
        return arguments

    def queue_declare(self, queue: str | None = None, passive: bool = False, **kwargs: Any) -> Any:
        """Create the topic of a queue, unless it exists; with `passive` only look.

        Raises:
            ChannelError: The queue does not exist, or is to be exclusive or deleted by itself.
        """
        name = queue or f"amq.gen-{uuid()}"
        if passive:
            if not self._has_queue(name):
                raise ChannelError(
                    f"NOT_FOUND - no queue {name!r}", (50, 10), "Channel.queue_declare", "404"
                )
        else:
            self._new_queue(name, **kwargs)
        return queue_declare_ok_t(name, self._size(name), 0)

    def _new_queue(
        self, queue: str, auto_delete: bool = False, exclusive: bool = False, **kwargs: Any
    ) -> None:
        if auto_delete or exclusive:
            kind = "auto_delete" if auto_delete else "exclusive"
            raise _refused(NOT_DURABLE.format(queue=queue, kind=kind), "queue_declare")
        self._queue_call("declare", queue)

    def _has_queue(self, queue: str, **kwargs: Any) -> bool:
        return bool(self._queue_call("exists", queue))

    def _size(self, queue: str) -> int:
        return int(self._queue_call("size", queue))

    def _purge(self, queue: str) -> int:
        return int(self._queue_call("purge", queue))

    def queue_delete(
        self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any
    ) -> None:
        """Delete the topic and the group of a queue; consumers of this channel are cancelled.

        Raises:
            GroupInUse: Another worker consumes it. Nothing has changed.
        """
        if if_empty and self._size(queue):
            return
        for consumer_tag in [tag for tag, name in self._tag_to_queue.items() if name == queue]:
            self.basic_cancel(consumer_tag)
        self._stop_getting(queue)
        self._queue_call("delete", queue)
        for exchange in self.state.exchanges.values():
            exchange["table"] = [meta for meta in exchange["table"] if meta[2] != queue]
        self.state.queue_bindings_delete(queue)

    # ---- sending

    def encode_body(self, body: Any, encoding: str | None = None) -> tuple[Any, str | None]:
        """Return a body as it is stored: text as it is, so that people can read it."""
        if isinstance(body, str):
            return body, "utf-8"
        encoded: tuple[Any, str | None] = super().encode_body(body, encoding)
        return encoded

    def _put(self, queue: str, message: Any, **kwargs: Any) -> None:
        """Send a message; return when it is stored. One with an `eta` is delivered then."""
        sent = task_message(message, Clock().unix_ms())
        self._call(
            "send",
            dumps(message).encode(),
            topic=self._names(queue).topic,
            tag=sent.tag,
            keys=sent.keys,
            properties=sent.properties,
            at=sent.at_unix_ms,
        )

    # ---- receiving

    def basic_qos(
        self, prefetch_size: int = 0, prefetch_count: int = 0, apply_global: bool = False
    ) -> None:
        """Set how many messages the channel may hold; 0 for `unacked_max`."""
        super().basic_qos(prefetch_size, prefetch_count, apply_global)
        self._tell("limit", channel=self._key, count=prefetch_count)

    def basic_consume(
        self,
        queue: str,
        no_ack: bool,
        callback: Callable[[Any], Any],
        consumer_tag: str,
        **kwargs: Any,
    ) -> None:
        """Join the group of a queue; return when it has assigned its first queues."""
        key = self._join(queue, self.connection.inbox, by_get=False)
        self._by_tag[consumer_tag] = key
        self._tag_to_queue[consumer_tag] = queue
        self._active_queues.append(queue)
        self._consumers.add(consumer_tag)
        self.connection.consumers[key] = _Receiver(self, no_ack, callback)

    def basic_cancel(self, consumer_tag: str) -> None:
        """Receive no more of a queue; what is held may still be acknowledged."""
        key = self._by_tag.pop(consumer_tag, None)
        if key is None:
            return
        self._consumers.discard(consumer_tag)
        queue = self._tag_to_queue.pop(consumer_tag, None)
        if queue in self._active_queues:
            self._active_queues.remove(queue)
        self._leave(key, self.connection.inbox)

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Any:
        """Return the next message of a queue; None if none arrived within `get_timeout_ms`."""
        if queue not in self._getters:
            inbox = Inbox()
            self._getters[queue] = self._join(queue, inbox, by_get=True), inbox
        try:
            delivery = self._next_delivery(*self._getters[queue])
        except BatonError:  # its consumer has ended: a further call joins the group again
            self._stop_getting(queue)
            raise
        return None if delivery is None else self._message(delivery, no_ack=no_ack)

    def _next_delivery(self, key: int, inbox: Inbox) -> Delivery | None:
        self._call("get", consumer=key, credit=1)
        delivery = inbox.take(self._link.options.get_timeout_ms / 1000)
        if delivery is None:
            self._call("get", consumer=key, credit=0)
            delivery = inbox.take(0)
        return delivery

    def drain_events(self, timeout: float | None = None, callback: object = None) -> None:
        """Deliver the next message of the connection."""
        self.connection.drain_events(self.connection, timeout=timeout)

    def close(self) -> None:
        """Close the channel: what it holds is delivered again, to the next owner of its queue."""
        if not self.closed:
            for consumer_tag in list(self._by_tag):
                self.basic_cancel(consumer_tag)
            for queue in list(self._getters):
                self._stop_getting(queue)
            if self._link.alive:
                self._call("close", channel=self._key)
            super().close()

    def _join(self, queue: str, inbox: Inbox, *, by_get: bool) -> int:
        key = self._link.next_key()
        self._link.add_inbox(key, inbox)
        try:
            self._queue_call("consume", queue, channel=self._key, consumer=key, by_get=by_get)
        except BaseException:
            self._link.remove_inbox(key)
            raise
        return key

    def _leave(self, key: int, inbox: Inbox) -> None:
        self.connection.consumers.pop(key, None)
        self._link.remove_inbox(key)
        undelivered = inbox.remove(lambda one: one.consumer == key)
        if self._link.alive:
            for delivery in undelivered:
                self._tell("release", tag=delivery.tag)
            self._call("cancel", consumer=key)

    def _stop_getting(self, queue: str) -> None:
        if (getter := self._getters.pop(queue, None)) is not None:
            key, inbox = getter
            self._leave(key, inbox)
            inbox.close()

    def _message(self, delivery: Delivery, *, no_ack: bool) -> Any:
        """Return a delivery as a message of Kombu; None if it is none, and a dead letter now."""
        try:
            payload = loads(delivery.body.decode())
            payload["properties"]["delivery_tag"] = delivery.tag
            payload["properties"].setdefault("delivery_info", {})["redelivered"] = (
                delivery.redelivered
            )
            message = self.Message(payload, channel=self)
        except Exception as error:  # noqa: BLE001  else it ends each worker that receives the body
            text = f"{type(error).__name__}: {error}"[:REASON_CHARACTERS_MAX]
            self._tell("reject", tag=delivery.tag, reason=f"no message of Kombu: {text}")
            return None
        if no_ack:
            self._tell("ack", tag=delivery.tag)
        else:
            self.qos.append(message, delivery.tag)
        return message

    def _names(self, queue: str) -> QueueNames:
        return names_of(queue, self._link.options.topic_prefix)

    def _queue_call(self, op: str, queue: str, **fields: Any) -> Any:
        names = self._names(queue)
        return self._link.call(
            op, queue=names.queue, topic=names.topic, group=names.group, **fields
        )

    def _call(self, op: str, body: bytes = b"", **fields: Any) -> Any:
        return self._link.call(op, body, **fields)

    def _tell(self, op: str, **fields: Any) -> None:
        self._link.tell(op, **fields)


class _Receiver:
    """A consumer of a channel: where its messages go."""

    def __init__(self, channel: Channel, no_ack: bool, callback: Callable[[Any], Any]) -> None:
        self._channel, self._no_ack, self._callback = channel, no_ack, callback

    def receive(self, delivery: Delivery) -> None:
        """Pass a message to the program."""
        message = self._channel._message(delivery, no_ack=self._no_ack)
        if message is not None:
            self._callback(message)


class Transport(virtual.Transport):  # type: ignore[misc]
    """A transport that keeps its connections to the cluster in a process of its own.

    All connections of a process with the same options share that process.
    """

    Channel = Channel
    default_port = DEFAULT_PORT
    driver_type = "batonmq"
    driver_name = "batonmq"
    can_parse_url = False
    polling_interval = None

    implements = virtual.Transport.implements.extend(
        asynchronous=True, exchange_type=frozenset(("direct", "topic")), heartbeats=False
    )
    connection_errors = (*virtual.Transport.connection_errors, ClientLost, *_TRANSIENT)
    recoverable_connection_errors = connection_errors
    channel_errors = (*virtual.Transport.channel_errors, BatonError)
    recoverable_channel_errors: tuple[type[Exception], ...] = ()

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self.options = _options_of(client)
        self.consumers: dict[int, _Receiver] = {}

    def establish_connection(self) -> Any:
        """Start the client process, unless it runs, and check that a nameserver answers.

        Raises:
            Unreachable: No nameserver answered.
        """
        self.link: ClientLink = LINKS.get(self.options)
        self.link.call("open")
        self.inbox = Inbox()
        return super().establish_connection()

    def close_connection(self, connection: Any) -> None:
        """Close the channels; the client process continues for other connections."""
        super().close_connection(connection)
        self.inbox.close()

    def verify_connection(self, connection: Any) -> bool:
        """Return whether the client process runs."""
        return self.link.alive

    def drain_events(self, connection: Any, timeout: float | None = None) -> None:
        """Deliver one message; wait for it, without polling.

        Raises:
            TimeoutError: None arrived within `timeout` seconds.
            ConnectionError: The client process has ended.
        """
        delivery = self.inbox.take(timeout)
        if delivery is None:
            raise TimeoutError
        self._deliver_to_consumer(delivery)

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Have a hub call `on_readable` when messages wait."""
        loop.add_reader(self.inbox.fileno(), self.on_readable, connection, loop)

    def unregister_from_event_loop(self, connection: Any, loop: Any) -> None:
        """Undo `register_with_event_loop`."""
        loop.remove_reader(self.inbox.fileno())

    def on_readable(self, connection: Any, loop: Any) -> None:
        """Deliver one message; the loop calls again while more wait.

        A worker without a pool runs the task meanwhile, and acknowledges it when the loop
        continues.
        """
        if (delivery := self.inbox.take(0)) is not None:
            self._deliver_to_consumer(delivery)

    def driver_version(self) -> str:
        """Return the version of the client library."""
        return version("batonmq")

    def _deliver_to_consumer(self, delivery: Delivery) -> None:
        receiver = self.consumers.get(delivery.consumer)
        if receiver is not None:
            receiver.receive(delivery)
        elif self.link.alive:
            self.link.tell("release", tag=delivery.tag)

    @property
    def default_connection_params(self) -> dict[str, Any]:
        """Host and port if the URL has none."""
        return {"hostname": "localhost", "port": DEFAULT_PORT}


def _options_of(client: Any) -> LinkOptions:
    if client.ssl:
        raise InvalidArgument(
            "broker_use_ssl is not supported",
            remedy="Set ca_file, and cert_file and key_file, in broker_transport_options.",
            facts={"field": "ssl"},
        )
    if client.virtual_host not in (None, "", "/"):
        raise InvalidArgument(
            f"the URL has the virtual host {client.virtual_host!r}, but clusters have none",
            remedy="Set topic_prefix in broker_transport_options to keep applications apart.",
            facts={"field": "virtual_host"},
        )
    if client.userid:
        raise InvalidArgument(
            f"the URL has the user {client.userid!r}, but a token names its user itself",
            remedy="Write the token as password: batonmq://:TOKEN@host:9876",
            facts={"field": "userid"},
        )
    return options_of(
        f"{client.hostname or 'localhost'}:{client.port or DEFAULT_PORT}",
        client.transport_options,
        password=client.password or "",
        connect_timeout_s=client.connect_timeout or 0,
    )


def _refused(message: str, method: str) -> ChannelError:
    return ChannelError(f"NOT_IMPLEMENTED - {message}", (50, 10), f"Channel.{method}", "540")


TRANSPORT_ALIASES["batonmq"] = "batonmq.kombu:Transport"
