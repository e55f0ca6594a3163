"""The producers that have a telemetry stream open, by the topics that they publish. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

PUBLISHED_MAX = 1_000
"""Topics of one producer that count; more are ignored."""

Stream = TypeVar("Stream")


class LiveProducers(Generic[Stream]):
    """Names a producer of a topic, each in turn."""

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}
        self._published: dict[str, set[str]] = {}
        self._by_topic: dict[str, deque[str]] = {}

    @property
    def topics(self) -> Iterable[str]:
        """The topics that a live producer publishes."""
        return self._by_topic.keys()

    def open(self, client_id: str, stream: Stream) -> None:
        """Note a stream; it replaces an earlier one of the client."""
        self._streams[client_id] = stream

    def publish(self, client_id: str, topics: Iterable[str]) -> bool:
        """Note that a client publishes topics; return whether a topic is new.

        A client without a stream is ignored: it can't be asked.
        """
        if client_id not in self._streams:
            return False
        published, new = self._published.setdefault(client_id, set()), False
        for topic in topics:
            if topic in published or len(published) >= PUBLISHED_MAX:
                continue
            published.add(topic)
            new |= topic not in self._by_topic
            self._by_topic.setdefault(topic, deque()).append(client_id)
        return new

    def close(self, client_id: str, stream: Stream) -> None:
        """Forget a stream, and its client unless that has opened another one."""
        if self._streams.get(client_id) is not stream:
            return
        del self._streams[client_id]
        for topic in self._published.pop(client_id, ()):
            clients = self._by_topic[topic]
            clients.remove(client_id)
            if not clients:
                del self._by_topic[topic]

    def in_turn(self, topic: str) -> list[Stream]:
        """Return the streams of a topic's producers; the next one to use is the first."""
        clients = self._by_topic.get(topic)
        if not clients:
            return []
        streams = [self._streams[client_id] for client_id in clients]
        clients.rotate(-1)
        return streams
