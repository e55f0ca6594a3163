"""Goal: `baton top` draws on a terminal, follows its size, and restores it at the end.

Method: a real cluster, and the command in a process of its own on a pseudo terminal.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.cli.baton import BATON, RunningCluster

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

HOME = b"\x1b[H"
"""The sequence with which a frame begins."""
LEAVES = b"\x1b[?1049l"
"""The sequence that leaves the alternate screen."""


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)


@dataclass
class Screen:
    """The terminal of a command.

    Attributes:
        shown: What the command has drawn since the last `resize`.
    """

    fd: int
    process: subprocess.Popen[bytes]
    shown: bytes = field(default=b"")

    def resize(self, lines: int, columns: int) -> None:
        size = struct.pack("HHHH", lines, columns, 0, 0)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, size)
        self.shown = b""

    def press(self, key: bytes) -> None:
        os.write(self.fd, key)

    def until(self, expected: bytes) -> None:
        """Wait until the command has drawn this."""
        while expected not in self.shown:
            assert select.select([self.fd], [], [], 30)[0], self.shown
            try:
                self.shown += os.read(self.fd, 65_536)
            except OSError as error:  # the process has ended
                raise AssertionError(self.shown) from error

    def until_gone(self, word: bytes) -> None:
        """Wait for a whole frame without this word."""
        frame = word
        while word in frame:
            self.shown = self.shown.rpartition(HOME)[2]  # the frame that is being drawn
            self.until(HOME)
            frame = self.shown.partition(HOME)[0]


@contextmanager
def screen(cluster: RunningCluster, *arguments: str) -> Iterator[Screen]:
    main, side = pty.openpty()
    command = [*BATON, "--nameserver", cluster.nameserver, *arguments]
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    with subprocess.Popen(
        command, stdin=side, stdout=side, stderr=side, start_new_session=True
    ) as process:
        os.close(side)
        try:
            yield Screen(main, process)
        finally:
            process.kill()
            os.close(main)


def test_top_follows_the_terminal_size_and_quits_on_q(cluster: RunningCluster) -> None:
    cluster("topic", "create", "drawn", "--queues", "1")
    with screen(cluster, "top") as terminal:
        terminal.until(b"CONFLICTS")
        terminal.until(b"4 nodes")
        settings = termios.tcgetattr(terminal.fd)
        assert not settings[3] & termios.ECHO, "keys are not shown"
        terminal.resize(30, 60)
        terminal.until(b"4 nodes")
        terminal.until(b"4 nodes")
        terminal.press(b"x")
        terminal.press(b"q")
        terminal.until(LEAVES)
        assert terminal.process.wait(20) == 0
        assert termios.tcgetattr(terminal.fd)[3] & termios.ECHO


def test_top_shows_no_topic_and_no_group_that_was_deleted(
    cluster: RunningCluster, lines: Path
) -> None:
    cluster("topic", "create", "old-topic", "--queues", "1")
    cluster("produce", "old-topic", "--file", str(lines))
    cluster("consume", "old-topic", "--group", "old-group")
    with screen(cluster, "top") as terminal:
        terminal.until(b"old-group")
        terminal.until(b"old-topic")
        assert cluster("group", "delete", "old-group", "--yes").code == 0
        assert cluster("topic", "delete", "old-topic", "--yes").code == 0
        terminal.until_gone(b"old-group")
        terminal.until_gone(b"old-topic")
        terminal.press(b"q")
        assert terminal.process.wait(20) == 0


def test_interrupted_top_restores_the_terminal(cluster: RunningCluster) -> None:
    with screen(cluster, "top") as terminal:
        terminal.until(b"TOPIC")
        terminal.process.terminate()
        terminal.until(LEAVES)
        assert terminal.process.wait(20) == 0


def test_top_without_a_nameserver_fails_before_it_changes_the_terminal(
    cluster: RunningCluster,
) -> None:
    with screen(cluster, "--nameserver", "127.0.0.1:1", "top") as terminal:
        terminal.until(b"UNREACHABLE")
        assert terminal.process.wait(20) == 1
        assert LEAVES not in terminal.shown
