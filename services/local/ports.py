"""Loopback ports that are chosen once and kept, and the lock of a data directory.

Ports come from below the range that the kernel uses for outgoing connections. From inside that
range, a client that keeps connecting to a port without a listener can get this very port as its own
local port, and then the server can't listen on it. From the choice of a port until its server
listens, the port is claimed in a folder that all clusters of the user share.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import SystemRandom

HOST = "127.0.0.1"
_FIRST_PORT = 10_000
_TRIES = 200
_CLAIM_S = 120
"""How long a claim is valid; a server listens sooner than this, or never."""
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


class ClusterDirInUse(Exception):
    """Another process uses the data directory."""


class PortInUse(Exception):
    """Another process listens on the port that the cluster has to have."""


class NoFreePort(Exception):
    """No free port was found."""


def is_free(port: int) -> bool:
    """Return whether a server could listen on the loopback port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def keep_ports(
    path: Path,
    names: Sequence[str],
    preferred: Mapping[str, int] | None = None,
    *,
    required: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Return one free port per name: required, else in the file, else preferred, else any.

    The file is rewritten with the chosen ports. A port in the file that another process uses by now
    is replaced, unless it is required.

    Raises:
        PortInUse: a required port is not free; the file is unchanged.
        NoFreePort: no port is free.
    """
    chosen = dict(required or {})
    for name, port in chosen.items():
        if not is_free(port):
            raise PortInUse(f"another process uses port {port} on {HOST}, wanted for the {name}")
    remembered = stored_ports(path)
    for name in names:
        if name in chosen:
            continue
        candidates = (remembered.get(name), (preferred or {}).get(name))
        taken = set(chosen.values()) | {remembered[n] for n in remembered if n != name}
        chosen[name] = next(
            (port for port in candidates if port and port not in chosen.values() and is_free(port)),
            0,
        ) or _any_port(taken)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    with os.fdopen(_open_own(draft, os.O_WRONLY | os.O_TRUNC), "w") as file:
        file.write(json.dumps(chosen, indent=2) + "\n")
    draft.replace(path)
    return chosen


def stored_ports(path: Path) -> dict[str, int]:
    """Return the ports in a file of `keep_ports`; empty if there is none, or if it is damaged."""
    try:
        stored = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(stored, dict):
        return {}
    return {k: v for k, v in stored.items() if isinstance(v, int) and 0 < v < 65_536}


def _any_port(taken: set[int]) -> int:
    random = SystemRandom()
    end = _ephemeral_first()
    for _ in range(_TRIES if end > _FIRST_PORT + _TRIES else 0):
        port = random.randrange(_FIRST_PORT, end)
        if port not in taken and is_free(port) and _claim(port):
            return port
    for _ in range(_TRIES):
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            port = int(probe.getsockname()[1])
        if port not in taken:
            return port
    raise NoFreePort(f"no free port on {HOST}")


def _claim(port: int) -> bool:
    """Claim the port; return False if another cluster has claimed it recently."""
    folder = claims_folder()
    with os.fdopen(_open_own(folder / "lock", os.O_WRONLY), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.utime(lock.fileno())
        now, claim = os.fstat(lock.fileno()).st_mtime, folder / str(port)
        with suppress(FileNotFoundError):
            if now - claim.lstat().st_mtime < _CLAIM_S:
                return False
        with os.fdopen(_open_own(claim, os.O_WRONLY), "w") as file:
            os.utime(file.fileno())
    return True


def claims_folder(base: Path | None = None) -> Path:
    """Return the folder of the claims, which only this user can write to; create it if needed.

    Args:
        base: Its parent; the user's cache folder by default.

    Raises:
        NoFreePort: another user could write to it.
    """
    folder = (base or Path.home() / ".cache" / "batonmq") / "ports"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise NoFreePort(f"{folder} is not a folder of this user; remove it")
    folder.chmod(0o700)
    return folder


def _open_own(path: Path, flags: int) -> int:
    """Open a file of this user, and create it if needed; a link is not followed.

    Raises:
        OSError: it is a link.
    """
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _ephemeral_first() -> int:
    try:
        return int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768


@contextmanager
def lock_data_dir(data_dir: Path) -> Iterator[None]:
    """Lock the directory for this process; the kernel releases the lock when the process ends.

    Raises:
        ClusterDirInUse: another process has the lock.
    """
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with os.fdopen(_open_own(data_dir / "lock", os.O_RDWR | os.O_APPEND), "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            raise ClusterDirInUse(f"{data_dir} is used by process {holder}") from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
