"""File descriptors of a process: its limit, and how connections and files share them."""

from __future__ import annotations

import logging
import os
import resource
from dataclasses import dataclass

log = logging.getLogger(__name__)

DESCRIPTORS_WANTED = 65_536
"""A process with a lower limit of open files warns at its start."""
DESCRIPTORS_USED_MAX = 1 << 20
"""The limit is not raised beyond this number, even if the system allows more."""
_RESERVED_MAX = 2_048
_METRICS_MAX, _HEALTH_MAX = 32, 256
_OPEN = "/proc/self/fd"


@dataclass(frozen=True, slots=True)
class DescriptorShares:
    """How many descriptors of a process each use may take.

    Attributes:
        clients: Connections to the port of the service.
        per_address: Those of `clients` that one address may have.
        health: Connections to the health port.
        metrics: Connections to the metrics port.
        reserved: All other uses: files, and connections to etcd and to other services.
    """

    clients: int
    per_address: int
    health: int
    metrics: int
    reserved: int


def share_descriptors(
    limit: int, connections_max: int = 0, connections_per_address_max: int = 0
) -> DescriptorShares:
    """Divide the descriptors of a process.

    Half of a small limit, and 2,048 of a large one, are reserved for files and for connections to
    other processes.

    Args:
        limit: Number of descriptors that the process may have.
        connections_max: Bound of client connections; 0 for all that are left.
        connections_per_address_max: Bound of those of one address; 0 for half of them.

    Raises:
        ValueError: the limit does not leave `connections_max` connections.
    """
    reserved = min(_RESERVED_MAX, limit // 2)
    metrics, health = min(_METRICS_MAX, limit // 16), min(_HEALTH_MAX, limit // 8)
    left = limit - reserved - metrics - health
    if connections_max > left:
        raise ValueError(
            f"connections_max is {connections_max}, but a limit of {limit} open files leaves "
            f"{left} connections: raise the limit (ulimit -n) to at least "
            f"{connections_max + _RESERVED_MAX + _METRICS_MAX + _HEALTH_MAX}"
        )
    clients = connections_max or left
    per_address = min(connections_per_address_max or max(1, clients // 2), clients)
    return DescriptorShares(clients, per_address, health, metrics, reserved)


def raise_limit() -> int:
    """Raise the limit of open files of this process as far as allowed; return the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = DESCRIPTORS_USED_MAX if hard == resource.RLIM_INFINITY else hard
    wanted = min(allowed, DESCRIPTORS_USED_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    limit = wanted if soft == resource.RLIM_INFINITY else min(soft, DESCRIPTORS_USED_MAX)
    if limit < DESCRIPTORS_WANTED:
        log.warning(
            "the limit of open files is low limit=%d wanted=%d: raise it (ulimit -Hn, "
            "LimitNOFILE= of systemd); it bounds the number of clients",
            limit,
            DESCRIPTORS_WANTED,
        )
    return limit


def descriptors_max() -> int:
    """Return the limit of open descriptors of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return DESCRIPTORS_USED_MAX if soft == resource.RLIM_INFINITY else soft


def open_descriptors() -> int:
    """Return the number of open descriptors of this process; 0 if the system does not tell."""
    try:
        # Since Linux 6.2 the size of this folder is the number of its entries; 0 before.
        return os.stat(_OPEN).st_size or len(os.listdir(_OPEN))  # noqa: PTH116, PTH208  often called
    except OSError:
        return 0
