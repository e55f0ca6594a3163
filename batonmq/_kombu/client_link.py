"""The program's side of its client process: starts it, calls it, and receives from it."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from itertools import count
from multiprocessing.spawn import get_executable
from typing import Any

from batonmq._kombu.frames import Frame, FrameDecoder, encode_frame
from batonmq._kombu.inbox import Delivery, Inbox
from batonmq._kombu.link_errors import error_of_text
from batonmq._kombu.link_options import LinkOptions
from batonmq.errors import Unreachable

READ_BYTES = 256 * 1024
EXIT_S = 10.0
"""How long a program that ends waits for its client process to release its queues."""
ANSWER_S = 60.0
"""How long a call waits for its answer beyond its own limit, which the client process keeps."""


class ClientLost(ConnectionError):
    """The client process has ended, or belongs to the process that this one was forked from."""


class ClientLink:
    """A connection of this process to a client process of its own. Threads may share it."""

    def __init__(self, options: LinkOptions) -> None:
        self.options = options
        self._keys = count(1)
        self._writing, self._state = threading.Lock(), threading.Lock()
        self._answers: dict[int, Future[Any]] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._lost: ClientLost | None = None
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [get_executable(), "-m", "batonmq._kombu.client_process", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._write(encode_frame({"op": "options"}, options.to_json().encode()))
        self._reader = threading.Thread(target=self._read, name="batonmq.kombu", daemon=True)
        self._reader.start()

    @property
    def alive(self) -> bool:
        """Whether calls are possible."""
        return self._lost is None

    @property
    def pid(self) -> int:
        """Process id of the client process."""
        return self._process.pid

    def next_key(self) -> int:
        """Return a number for a channel or a consumer that no other one of this link has."""
        return next(self._keys)

    def call(self, op: str, body: bytes = b"", **fields: Any) -> Any:
        """Have the client process do something, and return its result.

        Raises:
            ClientLost: The client process has ended.
            BatonError: What the client process raised.
        """
        answer: Future[Any] = Future()
        key = next(self._keys)
        with self._state:
            self._check()
            self._answers[key] = answer
        try:
            self._write(encode_frame({"op": op, "id": key, **fields}, body))
            return answer.result(self._limit_s())
        except TimeoutError:
            raise Unreachable(f"the client process did not answer {op} in time") from None
        finally:
            with self._state:
                self._answers.pop(key, None)

    def tell(self, op: str, **fields: Any) -> None:
        """Have the client process do something without an answer.

        Raises:
            ClientLost: The client process has ended.
        """
        self._check()
        self._write(encode_frame({"op": op, **fields}))

    def add_inbox(self, consumer: int, inbox: Inbox) -> None:
        """Put what arrives for a consumer into an inbox."""
        with self._state:
            self._inboxes[consumer] = inbox

    def remove_inbox(self, consumer: int) -> None:
        """Give back what arrives for a consumer from now on."""
        with self._state:
            self._inboxes.pop(consumer, None)

    def close(self) -> None:
        """End the client process, which releases its queues; kill it if that takes too long."""
        self._fail(ClientLost("the connection was closed"))
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(EXIT_S)
        self._socket.close()

    def forget(self) -> None:
        """Leave the client process to the process that this one was forked from."""
        self._writing, self._state = threading.Lock(), threading.Lock()
        self._lost = ClientLost("the connection belongs to the process that forked this one")
        self._process.returncode = 0  # it is no child of this process: nothing to wait for
        self._socket.close()

    def _limit_s(self) -> float:
        longest_ms = max(self.options.send_timeout_ms, self.options.connect_timeout_ms)
        return longest_ms / 1000 + ANSWER_S

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost

    def _write(self, data: bytes) -> None:
        try:
            with self._writing:
                self._socket.sendall(data)
        except OSError as error:
            raise ClientLost(f"the client process has ended: {error}") from error

    def _read(self) -> None:
        decoder, link = FrameDecoder(), self._socket
        reason = "the client process has ended"
        try:
            while data := link.recv(READ_BYTES):
                for frame in decoder.feed(data):
                    self._receive(frame)
        except OSError as error:
            reason += f": {error}"
        self._fail(ClientLost(reason))

    def _receive(self, frame: Frame) -> None:
        fields = frame.fields
        op = fields.get("op")
        if op == "message":
            key, tag = fields["consumer"], fields["tag"]
            with self._state:
                inbox = self._inboxes.get(key)
            delivery = Delivery(key, tag, fields["redelivered"], frame.body)
            if inbox is None or not inbox.put(delivery):
                with suppress(ClientLost):
                    self.tell("release", tag=tag)
        elif op == "lost":
            with self._state:
                inbox = self._inboxes.get(fields["consumer"])
            if inbox is not None:
                inbox.fail(error_of_text(fields["error"]))
        else:
            with self._state:
                answer = self._answers.get(fields["id"])
            if answer is not None and "error" in fields:
                answer.set_exception(error_of_text(fields["error"]))
            elif answer is not None:
                answer.set_result(fields.get("result"))

    def _fail(self, error: ClientLost) -> None:
        with self._state:
            self._lost = self._lost or error
            answers, inboxes = list(self._answers.values()), set(self._inboxes.values())
            self._answers.clear()
        for answer in answers:
            if not answer.done():
                answer.set_exception(error)
        for inbox in inboxes:
            inbox.fail(error)


class ClientLinks:
    """The links of this process, one for each set of options. A forked process starts with none.

    Args:
        make: Starts a client process.
    """

    def __init__(self, make: Callable[[LinkOptions], ClientLink]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._links: dict[LinkOptions, ClientLink] = {}

    def get(self, options: LinkOptions) -> ClientLink:
        """Return the link with these options; start a client process if there is none alive."""
        with self._lock:
            link = self._links.get(options)
            if link is None or not link.alive:
                if link is not None:
                    link.close()
                link = self._links[options] = self._make(options)
            return link

    def close_all(self) -> None:
        """End the client processes."""
        with self._lock:
            links, self._links = list(self._links.values()), {}
        for link in links:
            link.close()

    def forget_all(self) -> None:
        """Leave all links to the process that this one was forked from."""
        links, self._links = list(self._links.values()), {}
        self._lock = threading.Lock()
        for link in links:
            link.forget()


LINKS = ClientLinks(ClientLink)
"""The only object of this class in a process, as client processes belong to the process."""
atexit.register(LINKS.close_all)
os.register_at_fork(after_in_child=LINKS.forget_all)
