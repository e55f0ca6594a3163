"""Programs of the peers: pinned versions with checksums, kept in ~/.cache/batonmq-peers.

Jars come from Maven with a `pom.xml`, and are compared with `jars.sha256`. nats-server is
built with Go, which checks `go.sum`. Python libraries come from pip, which checks the hashes of
`requirements.lock`. What is in the cache is not downloaded again.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from batonmq._connection.grpc_environment import NAMES

CACHE = Path.home() / ".cache" / "batonmq-peers"
HERE = Path(__file__).parent
REPOSITORY = HERE.parent.parent
_DOWNLOAD_S = 900
_LINES_SHOWN = 3


class PeerFailed(Exception):
    """A peer can't be measured, or failed during a measurement."""


def checksums(text: str) -> dict[str, str]:
    """Return the SHA-256 by file name, of text in the form of `sha256sum`."""
    return {name: digest for digest, name in (line.split() for line in text.splitlines())}


def check(folder: Path, expected: Mapping[str, str]) -> None:
    """Compare the files of a folder with their checksums.

    Raises:
        PeerFailed: A file is missing, has another content, or is not expected.
    """
    present = {path.name: path for path in folder.iterdir()}
    for name in sorted(expected.keys() | present.keys()):
        if name not in present:
            raise PeerFailed(f"{name} was not downloaded")
        if name not in expected:
            raise PeerFailed(f"{name} was downloaded but has no checksum")
        digest = hashlib.sha256(present[name].read_bytes()).hexdigest()
        if digest != expected[name]:
            raise PeerFailed(
                f"{name} has the SHA-256 {digest}, expected {expected[name]}; "
                f"remove {folder} to download it again"
            )


async def jars(peer: str) -> Path:
    """Return the folder of the jars of a peer.

    Raises:
        PeerFailed: They can't be downloaded, or a checksum differs.
    """
    pom = HERE / peer / "pom.xml"

    async def download(folder: Path) -> None:
        await command(
            "mvn", "--batch-mode", "--quiet", "--file", str(pom),
            "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies",
            f"-DoutputDirectory={folder}", "-DincludeScope=runtime",
            remedy="Install Maven and a JDK of Java 17 or later.",
        )  # fmt: skip

    folder = await kept(peer, pom, download)
    expected = checksums((HERE / peer / "jars.sha256").read_text())
    await asyncio.to_thread(check, folder, expected)
    return folder


async def nats_server() -> Path:
    """Return the program nats-server.

    Raises:
        PeerFailed: It can't be built.
    """
    source = HERE / "nats"

    async def build(folder: Path) -> None:
        await command(
            "go", "-C", str(source), "build", "-trimpath", "-o", str(folder / "nats-server"),
            "github.com/nats-io/nats-server/v2",
            env={"CGO_ENABLED": "0"}, remedy="Install Go 1.26 or later.",
        )  # fmt: skip

    return await kept("nats", source / "go.sum", build) / "nats-server"


async def python_libraries() -> Path:
    """Return the folder of the peers' Python libraries, to be added to the path.

    Raises:
        PeerFailed: They can't be installed.
    """
    lock = HERE / "requirements.lock"

    async def install(folder: Path) -> None:
        await command(
            sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
            "--require-hashes", "--no-deps", "--target", str(folder), "-r", str(lock),
        )  # fmt: skip

    return await kept("python", lock, install)


async def kept(name: str, source: Path, make: Callable[[Path], Awaitable[None]]) -> Path:
    """Return a folder of the cache for the content of `source`; make it if it does not exist."""
    folder = _folder_for(name, source)
    if not folder.exists():
        draft = folder.with_suffix(".new")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        await make(draft)
        draft.rename(folder)
    return folder


def _folder_for(name: str, source: Path) -> Path:
    return CACHE / f"{name}-{hashlib.sha256(source.read_bytes()).hexdigest()[:12]}"


async def command(
    *arguments: str,
    env: Mapping[str, str] | None = None,
    remedy: str = "",
    timeout_s: float = _DOWNLOAD_S,
) -> str:
    """Run a program; return its output.

    Raises:
        PeerFailed: The program is not installed, fails, or takes too long.
    """
    program = shutil.which(arguments[0])
    if program is None:
        raise PeerFailed(f"{arguments[0]} is not installed. {remedy}".strip())
    process = await asyncio.create_subprocess_exec(
        program,
        *arguments[1:],
        env=environment(env or {}),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise PeerFailed(f"{arguments[0]} did not end within {timeout_s:g} s") from None
    text = output.decode(errors="replace")
    if process.returncode:
        raise PeerFailed(f"{arguments[0]} failed ({process.returncode}): {last_lines(text)}")
    return text


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of this process with other values.

    What our client library sets for gRPC is left out: clients of other brokers may use gRPC, too.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in NAMES}
    return {**inherited, **more}


def last_lines(text: str) -> str:
    """Return the last lines of an output, for a message."""
    lines: Sequence[str] = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-_LINES_SHOWN:]) or "no output"
