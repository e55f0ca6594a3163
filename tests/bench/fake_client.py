"""A client process without a broker, for tests of the bench; the address says what fails."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from bench.peers.clients.steps import Client, Sender, run
from bench.peers.clients.task import STAMP, Task


class FakeSender(Sender):
    """A producer whose messages are stored at once."""

    bulk_messages = 10

    async def send_bulk(self, bodies: Sequence[bytes]) -> None:
        return None

    async def send(self, body: bytes) -> None:
        return None

    def post(self, body: bytes) -> None:
        return None

    async def flush(self) -> None:
        return None


class FakeClient(Client):
    """A library whose consumers receive bodies of their own."""

    async def create_topics(self, task: Task) -> None:
        return None

    def sender(self, task: Task) -> Sender:
        return FakeSender()

    async def receive(self, task: Task, handle: Callable[[Sequence[bytes]], bool]) -> None:
        while not handle([bytes(task.size)] * 10):
            pass

    async def receive_each(self, task: Task, handle: Callable[[bytes], bool]) -> None:
        while not handle(STAMP.pack(1.0).ljust(task.size)):
            pass


if __name__ == "__main__":
    asked = Task.decode(sys.argv[1])
    if asked.address == f"raise:{asked.kind}":
        raise RuntimeError(f"no {asked.kind} today")
    if asked.address == f"babble:{asked.kind}":
        print("hello", flush=True)
    run(FakeClient())
