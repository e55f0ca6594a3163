"""A private network with an address for each process and cuts between them.

The run has a network namespace with a bridge, and a namespace for each process that is connected to
the bridge by a virtual cable. A cut replaces the link address of a neighbour by an unused one:
packets are lost without an error or a reset, as if a switch dropped them. Cuts have a direction.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import product

from batonmq_server.local.process_host import ProcessHost

HUB = "hub"
"""Name of the run's own process, which contains the producers."""
NAMESPACES = "/run/netns"
_BRIDGE, _UNUSED_ADDRESS = "baton0", "02:00:00:00:00:01"
Pair = tuple[str, str]
"""Sender and receiver."""


def launchers() -> Iterator[list[str]]:
    """Yield commands that start a program in a private network: for root, and for other users."""
    unshare = shutil.which("unshare") or "unshare"
    yield [unshare, "--net", "--mount"]
    yield [unshare, "--map-root-user", "--net", "--mount"]


def found_launcher() -> list[str]:
    """Return a launcher that works on this machine; empty without one."""
    tools = all(map(shutil.which, ("ip", "nsenter", "mount")))
    trial = "mount -t tmpfs none /run && ip link add trial type bridge && mkdir /run/netns && "
    trial += "ip netns add trial"
    for launcher in launchers() if tools else ():
        tried = subprocess.run([*launcher, "sh", "-c", trial], check=False, capture_output=True)
        if tried.returncode == 0:
            return launcher
    return []


class Network:
    """The bridge and the cables; requires a namespace of `found_launcher`.

    A pair that is cut twice must be healed twice.
    """

    def __init__(self) -> None:
        self._hosts = {HUB: "10.77.0.1"}
        self._cuts: Counter[Pair] = Counter()
        _run(["mount", "-t", "tmpfs", "none", "/run"])
        _run(["mkdir", NAMESPACES])
        _ip(
            "link set lo up",
            f"link add {_BRIDGE} type bridge",
            f"address add {self._hosts[HUB]}/16 dev {_BRIDGE}",
            f"link set {_BRIDGE} up",
        )

    def place(self, name: str) -> ProcessHost:
        """Return the host of the named process; the first call creates it."""
        if name not in self._hosts:
            self._add(name)
        nsenter = shutil.which("nsenter")
        assert nsenter is not None
        return ProcessHost(
            address=self._hosts[name], launcher=(nsenter, f"--net={NAMESPACES}/{name}")
        )

    def unplug(self, name: str) -> None:
        """Disconnect the cable of a process."""
        _ip(f"link set {_cable(self._hosts[name])} down")

    def plug(self, name: str) -> None:
        """Reconnect the cable of a process."""
        _ip(f"link set {_cable(self._hosts[name])} up")

    async def cut(self, pairs: Collection[Pair]) -> None:
        """Drop all packets from sender to receiver of each pair."""
        self._cuts.update(pairs)
        await self._set_neighbours(pairs, f"replace {{}} lladdr {_UNUSED_ADDRESS} nud permanent")

    async def heal(self, pairs: Collection[Pair]) -> None:
        """Undo a cut."""
        self._cuts.subtract(pairs)
        await self._set_neighbours([one for one in pairs if not self._cuts[one]], "delete {}")

    async def _set_neighbours(self, pairs: Iterable[Pair], command: str) -> None:
        commands: dict[str, list[str]] = defaultdict(list)
        for source, target in pairs:
            device = _BRIDGE if source == HUB else "eth0"
            neighbour = command.format(self._hosts[target])
            commands[source].append(f"neighbour {neighbour} dev {device}")
        for source, lines in commands.items():
            where = [] if source == HUB else ["-n", source]
            await asyncio.to_thread(_ip, *lines, where=where)

    def _add(self, name: str) -> None:
        number = len(self._hosts) + 1
        host = self._hosts[name] = f"10.77.{number // 250}.{number % 250 + 1}"
        _ip(
            f"netns add {name}",
            f"link add {_cable(host)} type veth peer name eth0 netns {name}",
            f"link set {_cable(host)} master {_BRIDGE} up",
        )
        _ip(
            "link set lo up",
            f"address add {host}/16 dev eth0",
            "link set eth0 up",
            where=["-n", name],
        )


def both_ways(some: Iterable[str], others: Iterable[str]) -> set[Pair]:
    """Return the pairs that cut the two groups from each other, in both directions."""
    there = {(a, b) for a, b in product(some, list(others)) if a != b}
    return there | {(b, a) for a, b in there}


def halves(names: Sequence[str]) -> set[Pair]:
    """Return the cuts between the first half and the second half."""
    middle = len(names) // 2
    return both_ways(names[:middle], names[middle:])


def bridge(names: Sequence[str]) -> set[Pair]:
    """Return the cuts between two halves; the first name reaches both."""
    return halves(names[1:])


def ring(names: Sequence[str]) -> set[Pair]:
    """Return cuts that leave each name a different majority: its neighbours in a ring."""
    count = len(names)
    reach = (count // 2 + 1) // 2
    return {
        (names[i], names[j])
        for i, j in product(range(count), repeat=2)
        if reach < (i - j) % count < count - reach
    }


def _cable(host: str) -> str:
    return "cable" + "-".join(host.split(".")[2:])


def _ip(*lines: str, where: Sequence[str] = ()) -> None:
    _run(["ip", *where, "-batch", "-"], "\n".join(lines) + "\n")


def _run(command: Sequence[str], text: str = "") -> None:
    done = subprocess.run(command, input=text, text=True, check=False, capture_output=True)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
