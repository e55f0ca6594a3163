"""Lines of a file or of standard input, read without blocking the event loop.

Standard input may be a terminal, a pipe or a file, and no reader of the event loop supports all
three. A thread reads instead. It is a daemon thread with a file object of its own, so that a read
that never returns does not keep the process from exiting.
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
    """Yield lines without their line feeds; the last line may lack one.

    Args:
        path: The file; None for standard input.
        bytes_max: A longer line ends the input; the part of it that was read is yielded.

    Raises:
        OSError: the file can't be read.
    """
    reader = _ChunkReader(path)
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


class _ChunkReader:
    """Chunks read by a thread that is at most `_CHUNKS_MAX` chunks ahead."""

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
        """Pass a chunk to the event loop; return False if it was the last one."""
        self._room.acquire()
        if not self._closed:
            with contextlib.suppress(RuntimeError):  # the event loop was closed meanwhile
                self._loop.call_soon_threadsafe(self._chunks.put_nowait, chunk)
        return bool(chunk) and not self._closed
