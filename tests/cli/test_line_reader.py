"""Goal: lines are read completely and in order from files and pipes, and reading never blocks.

Method: real files and a real pipe as standard input.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from batonmq.cli.line_reader import read_lines


async def _read(path: Path | None, bytes_max: int = 100) -> list[bytes]:
    return [line async for line in read_lines(path, bytes_max)]


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"a", [b"a"]),
        (b"a\n", [b"a"]),
        (b"a\n\nb\r\n", [b"a", b"", b"b\r"]),
        (b"\n", [b""]),
        (b"\xff\x00\n", [b"\xff\x00"]),
    ],
)
async def test_lines_of_a_file(tmp_path: Path, content: bytes, lines: list[bytes]) -> None:
    (tmp_path / "f").write_bytes(content)
    assert await _read(tmp_path / "f") == lines


async def test_large_file_is_read_completely_and_in_order(tmp_path: Path) -> None:
    expected = [b"%d" % n * (n % 7) for n in range(200_000)]
    (tmp_path / "f").write_bytes(b"\n".join(expected) + b"\n")
    assert await _read(tmp_path / "f") == expected


async def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        await _read(tmp_path / "none")


async def test_endless_line_ends_the_input(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"a\n" + b"x" * 5_000_000)
    first, rest = await _read(tmp_path / "f")
    assert first == b"a"
    assert 100 < len(rest) < 5_000_000


@pytest.fixture
def stdin() -> Iterator[int]:
    """The writing end of a pipe that is standard input during the test."""
    reading, writing = os.pipe()
    saved = os.dup(0)
    os.dup2(reading, 0)
    os.close(reading)
    yield writing
    os.dup2(saved, 0)
    os.close(saved)
    os.close(writing)


async def test_line_of_standard_input_is_read_before_the_next_one_is_written(stdin: int) -> None:
    lines = read_lines(None, 100)
    os.write(stdin, b"one\ntw")
    assert await anext(lines) == b"one"
    os.write(stdin, b"o\n")
    assert await anext(lines) == b"two"
    await lines.aclose()


async def test_waiting_for_standard_input_can_be_cancelled(stdin: int) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await _read(None)
