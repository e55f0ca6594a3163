"""The official Java client of RocketMQ 5, which fills and drains topics of a gateway or a proxy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from bench.peers.downloads import PeerFailed, command, kept

SOURCES = Path(__file__).parent / "java"
_CALL_S = 900
_FAILURE = "last failure of a call"


class Drained(NamedTuple):
    """What one program did; `failure` is the last call that failed, empty if all were answered."""

    message_count: int
    seconds: float
    failure: str


class JavaClient:
    """The compiled program `Drain`.

    Args:
        folder: Its class, and the jars in `lib`.
    """

    def __init__(self, folder: Path, home: Path) -> None:
        self._folder, self._home = folder, home

    @classmethod
    async def compiled(cls, home: Path) -> JavaClient:
        """Return the client, downloaded and compiled; it writes its logs to `home`.

        Raises:
            PeerFailed: There is no JDK or Maven, or a download fails.
        """
        pom, source = SOURCES / "pom.xml", SOURCES / "Drain.java"

        async def build(folder: Path) -> None:
            await command(
                "mvn", "--batch-mode", "--quiet", "--file", str(pom),
                "dependency:copy-dependencies", f"-DoutputDirectory={folder / 'lib'}",
                remedy="Install Maven and a JDK of Java 17 or later.",
            )  # fmt: skip
            await command("javac", "-cp", f"{folder / 'lib'}/*", "-d", str(folder), str(source))

        return cls(await kept("java-client", source, build), home)

    async def fill(self, endpoints: str, topic: str, count: int) -> Drained:
        """Send messages of 100 bytes."""
        return await self._run("fill", endpoints, topic, "-", count)

    async def join(self, endpoints: str, topic: str, group: str) -> None:
        """Receive for a group from a topic without messages, so that the server knows the group."""
        await self._run("join", endpoints, topic, group, 1)

    async def drain(self, endpoints: str, topic: str, group: str, count: int) -> Drained:
        """Receive and acknowledge messages.

        Raises:
            PeerFailed: Some did not come.
        """
        done = await self._run("drain", endpoints, topic, group, count)
        if done.message_count < count:
            raise PeerFailed(
                f"{done.message_count} of {count} messages were received. {done.failure}".strip()
            )
        return done

    async def _run(self, work: str, endpoints: str, topic: str, group: str, count: int) -> Drained:
        text = await command(
            "java", f"-Duser.home={self._home}", "-cp", f"{self._folder / 'lib'}/*:{self._folder}",
            "Drain", work, endpoints, topic, group, str(count),
            env={"PATH": os.environ["PATH"]}, timeout_s=_CALL_S,
        )  # fmt: skip
        lines = text.splitlines()
        done, milliseconds = map(int, lines[-1].split())
        failure = next((line for line in lines if line.startswith(_FAILURE)), "")
        return Drained(done, milliseconds / 1_000, failure)
