"""Lines of a file or of standard input, without stopping the event loop.

Standard input may be a terminal, a pipe or a file, and none of the event loop's ways to read
takes all three. A thread reads; it is a daemon with a file object of its own, so that a read
that never returns does not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator
from pathlib import Path

_READ_BYTES = 256 * 1024
_CHUNKS_MAX = 4
_STDIN = 0


async def read_lines(path: Path | None, bytes_max: int) -> AsyncGenerator[bytes, None]:
    """Lines without their line feed, the last one with or without; standard input if no path.

    Args:
        bytes_max: A line that is longer is the last one, as far as it was read.

    Raises:
        OSError: It can't be read.
    """
    reader = _Reader(path)
    rest = b""
    try:
        while chunk := await reader.next():
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield line
            if len(rest) > bytes_max:
                break
    finally:
        reader.close()
    if rest:
        yield rest


class _Reader:
    """Chunks from a thread that is at most `_CHUNKS_MAX` ahead."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._chunks: asyncio.Queue[bytes | OSError] = asyncio.Queue()
        self._room = threading.Semaphore(_CHUNKS_MAX)
        self._closed = False
        threading.Thread(target=self._read, name="lines", daemon=True).start()

    async def next(self) -> bytes:
        chunk = await self._chunks.get()
        self._room.release()
        if isinstance(chunk, OSError):
            raise chunk
        return chunk

    def close(self) -> None:
        self._closed = True
        self._room.release()

    def _read(self) -> None:
        own = self._path is not None
        try:
            with open(self._path or _STDIN, "rb", 0, closefd=own) as file:
                while self._put(file.read(_READ_BYTES)):
                    pass
        except OSError as error:
            self._put(error)

    def _put(self, chunk: bytes | OSError) -> bool:
        """Hand over a chunk; False if there is to be no other."""
        self._room.acquire()
        if not self._closed:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                self._loop.call_soon_threadsafe(self._chunks.put_nowait, chunk)
        return bool(chunk) and not self._closed
